"""What may be wrong with a sampler, each as the log-probs that it would then report of the tokens it sampled."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import combinations, product

from torch import Tensor

from lm.chat_template import CHAT_TEMPLATES
from lm.generation import Generated
from lm.model import LanguageModel
from lm.samplers.agreement import Agreement
from lm.samplers.trial import (
    TEMPERATURE,
    Trial,
    truth,
    truth_with_stale_prefixes,
    weights_of,
    with_exchanged,
    with_weights,
)

Tokens = Sequence[Sequence[int]]

BLOCKS = (1, 16, 32, 64, 128)  # tokens in a block of a prefix cache
MAX_EXCHANGES = 48  # pairs of layers that are tried, neighbours first

OLD_WEIGHTS = "weights that are one update old"
LOADED_WEIGHTS = "the weights it was loaded with: no update, or no adapter, has reached it"
OLD_HEAD = "an output head that is older than the other weights"
STALE_CACHE = "keys and values of prompts that older weights computed: a stale prefix cache"
NO_TEMPERATURE = "a temperature of 1 instead of the one asked for"
OTHER_TEMPLATE = "another chat template"
OTHER_TOKENIZER = "another tokenizer: its ids are shifted"


def layers_exchanged(first: int, second: int) -> str:
    return f"layers {first} and {second} exchanged"


@dataclass(frozen=True)
class Explanation:
    name: str
    logprobs: Callable[[], Tensor]  # [C] nats, of the sampled tokens, response after response


def explanations(trial: Trial, found: Generated, version: int) -> Iterator[Explanation]:
    """Yield every explanation for a rollout that was sampled after `version` updates; each is computed when asked."""
    prompts, responses, policy = trial.prompts, found.responses, trial.policy(version)

    def told(name: str, policy: LanguageModel = policy, temperature: float = TEMPERATURE) -> Explanation:
        return Explanation(name, lambda: truth(policy, prompts, responses, temperature).logprobs_C)

    def of_others(name: str, prompts: Tokens, responses: Tokens) -> Explanation:
        return Explanation(name, lambda: truth(policy, prompts, responses, TEMPERATURE).logprobs_C)

    def stale(before: LanguageModel, block: int) -> Explanation:
        found = partial(truth_with_stale_prefixes, policy, before, prompts, responses, TEMPERATURE, block)
        return Explanation(STALE_CACHE, lambda: found().logprobs_C)

    older, weights = [*reversed(range(version))], weights_of(policy)
    for age, number in enumerate(older, start=1):
        yield told(OLD_WEIGHTS if age == 1 and number else LOADED_WEIGHTS, trial.policy(number))
    yield told(NO_TEMPERATURE, temperature=1.0)
    for number in older:
        head = {"head.weight": weights_of(trial.policy(number))["head.weight"]}
        yield told(OLD_HEAD, with_weights(policy, {**weights, **head}))
    for first, second in _pairs(policy.config.num_hidden_layers):
        yield told(layers_exchanged(first, second), with_weights(policy, with_exchanged(weights, first, second)))
    for name, others in (other_templates(trial) | _without_ends(trial)).items():
        yield of_others(name, others, responses)
    for shift in (1, -1):
        yield of_others(
            OTHER_TOKENIZER, *(shifted(rows, shift, policy.config.vocab_size) for rows in (prompts, responses))
        )
    for number, block in product(older, BLOCKS):
        yield stale(trial.policy(number), block)


def explain(trial: Trial, found: Generated, reported_C: Tensor, version: int) -> str:
    """The name of the explanation that gives the reported log-probs up to rounding; "" where none does."""
    lengths = [*map(len, found.responses)]
    for explanation in explanations(trial, found, version):
        if Agreement.of(explanation.logprobs() - reported_C, lengths).holds(trial.max_difference):
            return explanation.name
    return ""


def shifted(rows: Tokens, shift: int, vocab_size: int) -> list[list[int]]:
    """Token ids as a vocabulary has them with so many more tokens at its beginning."""
    return [[(token + shift) % vocab_size for token in row] for row in rows]


def other_templates(trial: Trial) -> dict[str, list[list[int]]]:
    """The prompts as Heed's other templates write them, where they differ, by name."""
    found = dict[str, list[list[int]]]()
    for name, template in CHAT_TEMPLATES.items():
        with suppress(ValueError):  # a template may need a token that this vocabulary lacks
            tokenizer = trial.tokenizer.with_template(template)
            prompts = [tokenizer.encode_prompt(messages) for messages in trial.conversations]
            if prompts != trial.prompts and all(prompts):
                found[f'{OTHER_TEMPLATE}: "{name}"'] = prompts
    return found


def _without_ends(trial: Trial) -> dict[str, list[list[int]]]:
    tokenizer = trial.tokenizer
    texts = [tokenizer.render(messages, add_generation_prompt=False) for messages in trial.conversations]
    prompts = [tokenizer.encode_rendered(text) for text in texts]
    return {f"{OTHER_TEMPLATE}: without what begins a response": prompts} if prompts != trial.prompts else {}


def _pairs(num_layers: int) -> list[tuple[int, int]]:
    pairs = sorted(combinations(range(num_layers), 2), key=lambda pair: (pair[1] - pair[0], pair))
    return pairs[:MAX_EXCHANGES]
