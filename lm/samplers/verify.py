"""The test that a sampling engine must pass: it follows the policy through updates of the weights.

    from lm.samplers.verify import verify_sampler
    assert all(check.passed for check in verify_sampler(MyEngine, Path("model")))

Three rollouts, before, between and after two updates of the weights, must have the policy's log-probs of the sampled
tokens, and tokens that are drawn from the policy. If the log-probs are those of a known fault, the check names it.

`heed verify-sampler` runs `python -m lm.samplers.verify ENGINE MODEL PRECISION TEAM_SIZE DRAWS PIPE` with an engine's
own Python, if it has one. Engines may print anything and may end the process, so checks have a separate pipe (a file
descriptor), one JSON line each, and a last line says how many there were. With a TEAM_SIZE above 1, so many processes
run the same test together, each with a share of the weights; RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT
identify them. Each sees one GPU at most, so LOCAL_RANK is 0.

Shape letters: B responses, T tokens, V vocabulary, C tokens of all responses.
"""

import json
import math
import os
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache, partial
from itertools import combinations, cycle, islice, product
from pathlib import Path

import torch
from torch import Tensor

from files.hashes import derive_seed
from files.importing import load_function
from lm.chat_template import CHAT_TEMPLATES
from lm.config import ModelConfig, Precision
from lm.generation import Batch, Generated
from lm.model import LanguageModel
from lm.samplers.draws import ALARM, NO_EVIDENCE, Draws, Evidence, evidence
from lm.samplers.engine import Agreement, LoadEngine, SamplingEngine, SentWeights, chunks, held_tensors, max_difference
from lm.samplers.faults import OLD_ROUTERS, faults, judge_routes, power_row
from lm.samplers.heed_engine import DTYPES
from lm.sampling import token_logprobs
from lm.source import load_for_inference, on_meta
from lm.tokenizer import Messages, Tokenizer
from lm.transfer import pad_right
from lm.weights import ModelFolder, read_config

NUM_PROMPTS = 32
MAX_NEW_TOKENS = 24
PROMPT_TOKENS = 80  # at most, so that a prompt fills some blocks of a prefix cache
TEMPERATURE = 0.7
NUM_VERSIONS = 3  # weights as loaded, and after one and two updates
# Standard deviation of an update, relative to the tensor's root mean square: of embedding and head, and, divided by
# √layers, of a layer's tensors. Changes of independent layers add up as rounding errors do (`max_difference`); 20% of
# every tensor destroys SmolLM2-135M with its 30 layers, whose log-probs then differ by .15 nats through rounding alone.
UPDATE, UPDATE_OF_LAYERS = 0.2, 0.35
AT_ONCE = 8  # responses per pass
WORDS = (
    "the of and to in is that it was for on are as with they at be this have from or one had by word but not what all",
    "were we when your can said there use an each which she do how their if will up other about out many then them",
)

BLOCKS = (1, 16, 32, 64, 128)  # tokens in a block of a prefix cache
MAX_EXCHANGES = 48  # pairs of layers that are tried, neighbours first

OLD_WEIGHTS = "weights that are one update old"
LOADED_WEIGHTS = "the weights it was loaded with: no update, or no adapter, has reached it"
OLD_HEAD = "an output head that is older than the other weights"
STALE_CACHE = "keys and values of prompts that older weights computed: a stale prefix cache"
NO_TEMPERATURE = "a temperature of 1 instead of the one asked for"
OTHER_TEMPLATE = "another chat template"
OTHER_TOKENIZER = "another tokenizer: its ids are shifted"

Tokens = Sequence[Sequence[int]]

VLLM = "vllm"
TIMEOUT_SECONDS = 600.0  # that ranks of a team wait for each other
MISTAKE, DONE = "mistake", "done"  # keys of the last line: the user's mistake, or the number of checks
NOT_DRAWS = "tokens that are not draws from the policy"
DRAWS = 512  # responses for the test of draws
LAST_TOKENS = 4  # single tokens per response, drawn where a response may end
END_CONTEXTS = 32  # texts after which they are drawn
SEARCH_STEPS, SEARCH_WIDTH = 8, 32  # of the search for them: tokens that a text gets, and how many are tried for each
POWER_TOKENS = 1024  # whose contexts state the power of the test
UNEXPLAINED = "another policy, for no reason that this test knows"


@dataclass(frozen=True)
class Trial:
    """The inputs of a test. `folder` is a model directory; everything random is drawn from `seed`."""

    folder: Path
    precision: Precision
    seed: int = 0

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.load(self.folder)

    @property
    def max_difference(self) -> float:
        """How far rounding may take an engine's log-probs from the true ones, in nats per token."""
        return max_difference(self.precision, self.shape.num_hidden_layers)

    @cached_property
    def conversations(self) -> list[Messages]:
        """Questions made of common words, of different lengths."""
        draw, room = random.Random(self.seed), self.shape.max_position_embeddings - MAX_NEW_TOKENS - 1
        found, common = list[Messages](), " ".join(WORDS).split()
        while len(found) < NUM_PROMPTS:
            longest = min(PROMPT_TOKENS, room)
            words = draw.choices(common, k=draw.randint(longest // 4, longest))
            while words and len(self.tokenizer.encode_prompt(_asked(words))) > longest:
                words.pop()
            if not words:
                raise ValueError(
                    f"{self.folder}: max_position_embeddings is {room + MAX_NEW_TOKENS + 1}; room for a prompt and"
                    f" {MAX_NEW_TOKENS} tokens was expected"
                )
            found.append(_asked(words))
        return found

    @cached_property
    def prompts(self) -> list[list[int]]:
        return self.tokenizer.encode_prompts(self.conversations)

    @cached_property
    def seeds(self) -> list[int]:
        return self.draw_seeds("rollout", NUM_PROMPTS)

    def draw_seeds(self, purpose: str, count: int) -> list[int]:
        """Draws seeds of responses. Trials with different seeds, even neighbouring ones, share none of them."""
        draw = random.Random(derive_seed(self.seed, purpose))
        return [draw.getrandbits(62) for _ in range(count)]

    @cached_property
    def shape(self) -> ModelConfig:
        return read_config(self.folder, "language")[0]

    def policy(self, version: int) -> LanguageModel:
        """Returns the true policy after `version` updates, in compute precision."""
        return _policy(self.folder, self.precision, self.seed, version)

    def sent(self, version: int) -> Iterator[SentWeights]:
        """Yields the policy's weights as a learner sends them."""
        return map(SentWeights.of, chunks(held_tensors(self.policy(version)).items()))

    def sample(self, sampler: SamplingEngine) -> Generated:
        return sampler.sample(self.prompts, self.seeds, max_new_tokens=MAX_NEW_TOKENS, temperature=TEMPERATURE)

    @cached_property
    def device(self) -> torch.device:
        return self.policy(0).head.weight.device


@lru_cache(maxsize=NUM_VERSIONS)
def _policy(folder: Path, precision: Precision, seed: int, version: int) -> LanguageModel:
    with torch.inference_mode(False), torch.no_grad():
        policy = load_for_inference(ModelFolder(folder, LanguageModel), DTYPES[precision])
        of_layers = UPDATE_OF_LAYERS / math.sqrt(policy.config.num_hidden_layers)
        for number, (name, tensor) in enumerate(held_tensors(policy).items()):
            size = of_layers if name.startswith("decoder.blocks.") else UPDATE
            for update in range(version):
                generator = torch.Generator().manual_seed((seed * NUM_VERSIONS + update) * 100_003 + number)
                noise = torch.randn(tensor.shape, generator=generator).to(tensor.device)
                tensor += (size * tensor.float().square().mean().sqrt() * noise).to(tensor.dtype)
    return policy


@torch.inference_mode()
def truth(policy: LanguageModel, prompts: Tokens, responses: Tokens, temperature: float) -> Tensor:
    """Returns the policy's log-probs of the sampled tokens, response after response, [C] nats. They are computed in
    full passes over prompts and responses, without a cache.
    """
    found = list[Tensor]()
    for first in range(0, len(prompts), AT_ONCE):
        part = slice(first, first + AT_ONCE)
        found.append(token_logprobs(*_logits_of(policy, prompts[part], responses[part]), temperature))
    return torch.cat(found).cpu()


def _logits_of(policy: LanguageModel, prompts: Tokens, responses: Tokens) -> tuple[Tensor, Tensor]:
    """Returns the logits [C, V] that predict the tokens [C] of the responses. Equal texts are read once."""
    device = policy.head.weight.device
    texts = [(*prompt, *response[:-1]) for prompt, response in zip(prompts, responses, strict=True)]
    places = {text: place for place, text in enumerate(dict.fromkeys(texts))}
    logits_BTV = policy(pad_right(list(places), device)[0])
    logits = [
        logits_BTV[places[text], len(prompt) - 1 : len(text)] for text, prompt in zip(texts, prompts, strict=True)
    ]
    return torch.cat(logits), torch.tensor([token for response in responses for token in response], device=device)


@dataclass(frozen=True)
class DrawTest:
    """Responses that a sampler says it drew from `policy`, to bet on, and how many of them a pass reads."""

    policy: LanguageModel
    end_ids: Sequence[int]
    prompts: Tokens
    generated: Generated
    at_once: int = AT_ONCE

    @torch.inference_mode()
    def tokens(self, every: int = 1) -> Iterator[tuple[Tensor, Draws]]:
        """Yields logits [C, V] and the tokens drawn from them, pass by pass, or those of every n-th pass."""
        responses = self.generated.responses
        for first in range(0, len(self.prompts), self.at_once * every):
            rows = range(first, min(first + self.at_once, len(self.prompts)))
            part = slice(first, rows.stop)
            logits_CV, tokens_C = _logits_of(self.policy, self.prompts[part], responses[part])
            reported = [nats for row in rows for nats in self.generated.logprobs[row]]
            true_C = token_logprobs(logits_CV, tokens_C, TEMPERATURE)
            weights_C = (true_C - torch.tensor(reported, device=tokens_C.device)).exp()
            yield logits_CV, Draws.of(self.prompts, responses, rows, tokens_C, weights_C)

    def evidence(self) -> Evidence:
        found = (evidence(logits_CV, draws, TEMPERATURE, self.end_ids) for logits_CV, draws in self.tokens())
        return sum(found, NO_EVIDENCE)

    @torch.inference_mode()
    def end_contexts(self) -> list[tuple[int, ...]]:
        """Returns texts after which it is least certain whether an end token follows: there a wrong probability of an
        end shows in the fewest draws. They are prompts with the beginning of their response, and further tokens if a
        search finds some that make an end less certain.
        """
        rows = islice(zip(self.prompts, self.generated.responses, strict=True), DRAWS)
        texts = [(*prompt, *response[:n]) for prompt, response in rows for n in range(len(response))]
        passes = islice(self.tokens(), DRAWS // AT_ONCE)
        doubts = [doubt for logits_CV, _ in passes for doubt in self._doubts(logits_CV)]
        found, draw = dict(zip(texts, doubts, strict=True)), random.Random(0)
        others = sorted({*range(self.policy.config.vocab_size)} - {*self.end_ids})
        for _ in range(SEARCH_STEPS):
            found = dict(sorted(found.items(), key=lambda item: -item[1])[:END_CONTEXTS])
            room = self.policy.config.max_position_embeddings - 1
            texts = [text for text in found for _ in range(SEARCH_WIDTH) if len(text) < room]
            if texts:
                tokens = draw.choices(others, k=len(texts))
                batch = Batch.start(self.policy, range(len(texts)), texts, 1)
                batch.feed(torch.tensor(tokens, device=batch.columns_B.device))
                longer = [(*text, token) for text, token in zip(texts, tokens, strict=True)]
                found |= zip(longer, self._doubts(batch.logits_BV), strict=True)
        return sorted(found, key=lambda text: -found[text])[:END_CONTEXTS]

    def _doubts(self, logits_CV: Tensor) -> list[float]:
        """Returns the variance of whether an end token is drawn, after each text."""
        chance_C = (logits_CV.float() / TEMPERATURE).softmax(dim=1)[:, list(self.end_ids)].sum(dim=1)
        return (chance_C * (1 - chance_C)).tolist()

    def expected(self) -> dict[str, Evidence]:
        """Returns the evidence to expect of each fault, from some of the passes and scaled to all."""
        planted = faults(self.end_ids, self.policy.config.vocab_size)
        found, num_read, num_tokens = dict.fromkeys(planted, NO_EVIDENCE), 0, sum(map(len, self.generated.responses))
        for logits_CV, draws in self.tokens(every=math.ceil(num_tokens / POWER_TOKENS)):
            num_read += len(draws.tokens_C)
            for name, fault in planted.items():
                found[name] += evidence(logits_CV, draws, TEMPERATURE, self.end_ids, fault=fault)
        return {name: gained * (num_tokens / num_read) for name, gained in found.items()}


@torch.inference_mode()
def truth_with_stale_prefixes(
    policy: LanguageModel,
    before: LanguageModel,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    temperature: float,
    block_tokens: int,
) -> Tensor:
    """Like `truth`, but the keys and values of each prompt's full blocks are those of the weights `before`. All but the
    last token of a prompt may be in blocks.
    """
    stale = [(len(prompt) - 1) // block_tokens * block_tokens for prompt in prompts]
    if not any(stale):
        return truth(policy, prompts, responses, temperature)
    first = [max(1, length) for length in stale]  # what the cache holds when the policy begins
    asked = list(zip(prompts, responses, first, strict=True))
    ahead = [[*prompt[n:], *response[:-1]] for prompt, response, n in asked]
    num_steps, device = max(map(len, ahead)), policy.head.weight.device
    batch = Batch.start(before, range(len(prompts)), [prompt[:n] for prompt, _, n in asked], num_steps)
    batch.model = policy
    logits = [batch.logits_BV]
    for place in range(num_steps):  # rows that have ended continue with any token
        batch.feed(torch.tensor([row[min(place, len(row) - 1)] for row in ahead], device=device))
        logits.append(batch.logits_BV)
    parts = list[Tensor]()
    for row, (prompt, response, n) in enumerate(asked):
        if not stale[row]:
            parts.append(truth(policy, [prompt], [response], temperature))
            continue
        begins = len(prompt) - n
        logits_CV = torch.stack([found[row] for found in logits[begins : begins + len(response)]])
        parts.append(token_logprobs(logits_CV, torch.tensor(response, device=device), temperature).cpu())
    return torch.cat(parts)


def weights_of(policy: LanguageModel) -> dict[str, Tensor]:
    """Returns the weights by name, without copying, including the output head even if it is tied."""
    return {**held_tensors(policy), "head.weight": policy.head.weight.detach()}


def with_weights(policy: LanguageModel, weights: Mapping[str, Tensor]) -> LanguageModel:
    """Returns a model of this shape with these weights, which are not copied; its head and embedding may differ."""
    config = policy.config.model_copy(update={"tie_word_embeddings": False})
    found = on_meta(lambda: LanguageModel(config)).eval()
    found.requires_grad_(False).load_state_dict(dict(weights), assign=True)
    return found


def with_exchanged(weights: Mapping[str, Tensor], first: int, second: int) -> dict[str, Tensor]:
    """Returns the weights with two layers exchanged."""
    places = {f"decoder.blocks.{a}.": f"decoder.blocks.{b}." for a, b in ((first, second), (second, first))}

    def source(name: str) -> str:
        place = next((place for place in places if name.startswith(place)), "")
        return places[place] + name.removeprefix(place) if place else name

    return {name: weights[source(name)] for name in weights}


def _asked(words: Sequence[str]) -> Messages:
    return [{"role": "user", "content": " ".join(words)}]


def explanations(trial: Trial, generated: Generated, version: int) -> Iterator[tuple[str, Tensor]]:
    """Yields what may be wrong with a rollout that was sampled after `version` updates, and the log-probs [C] nats that
    its tokens would then have.
    """
    prompts, responses, policy = trial.prompts, generated.responses, trial.policy(version)
    rollout = prompts, responses, TEMPERATURE
    older, weights = [*reversed(range(version))], weights_of(policy)
    for age, number in enumerate(older, start=1):
        yield OLD_WEIGHTS if age == 1 and number else LOADED_WEIGHTS, truth(trial.policy(number), *rollout)
    yield NO_TEMPERATURE, truth(policy, prompts, responses, 1.0)
    for number in older:
        head = {"head.weight": weights_of(trial.policy(number))["head.weight"]}
        yield OLD_HEAD, truth(with_weights(policy, {**weights, **head}), *rollout)
    for name, model in _with_old_routers(trial, version).items():
        yield name, truth(model, *rollout)
    for first, second in _pairs(policy.config):
        exchanged = with_weights(policy, with_exchanged(weights, first, second))
        yield layers_exchanged(first, second), truth(exchanged, *rollout)
    for name, others in (other_templates(trial) | _without_ends(trial)).items():
        yield name, truth(policy, others, responses, TEMPERATURE)
    for shift in (1, -1):
        ids = [shifted(rows, shift, policy.config.vocab_size) for rows in (prompts, responses)]
        yield OTHER_TOKENIZER, truth(policy, ids[0], ids[1], TEMPERATURE)
    for number, block in product(older, BLOCKS):
        yield STALE_CACHE, truth_with_stale_prefixes(policy, trial.policy(number), *rollout, block)


def explain(trial: Trial, generated: Generated, reported_C: Tensor, version: int) -> str:
    """Returns what explains the reported log-probs up to rounding; "" if nothing does."""
    lengths = [*map(len, generated.responses)]
    for name, logprobs_C in explanations(trial, generated, version):
        if Agreement.of(logprobs_C - reported_C, lengths).holds(trial.max_difference):
            return name
    return ""


def layers_exchanged(first: int, second: int) -> str:
    return f"layers {first} and {second} exchanged"


def shifted(rows: Tokens, shift: int, vocab_size: int) -> list[list[int]]:
    """Returns the ids of these tokens in a vocabulary with `shift` more tokens at its beginning."""
    return [[(token + shift) % vocab_size for token in row] for row in rows]


def other_templates(trial: Trial) -> dict[str, list[list[int]]]:
    """Returns the prompts as Heed's other templates write them, by name, if they differ."""
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


def _pairs(config: ModelConfig) -> list[tuple[int, int]]:
    pairs = sorted(combinations(range(config.num_hidden_layers), 2), key=lambda pair: (pair[1] - pair[0], pair))
    return [(a, b) for a, b in pairs if config.has_experts(a) == config.has_experts(b)][:MAX_EXCHANGES]


@dataclass(frozen=True)
class Check:
    """One thing that was tested. `found` says what was measured, or which fault was named."""

    name: str
    passed: bool
    found: str


def verify_sampler(
    load: LoadEngine, folder: Path, *, precision: Precision = "fp32", num_draws: int = DRAWS
) -> Iterator[Check]:
    """Yields the checks of the sampler that `load(folder, precision)` makes of a model directory, as they finish. They
    end with the first rollout of a wrong form. `num_draws` responses are tested for being draws from the policy.

    Raises: ValueError for a directory without a language model, or whose context is too short.
    """
    trial = Trial(folder, precision)
    sampler = load(folder, precision)
    try:
        yield from _checks(sampler, trial, num_draws)
    finally:
        sampler.close()


def _checks(sampler: SamplingEngine, trial: Trial, num_draws: int) -> Iterator[Check]:
    rollouts = list[Generated]()
    for version in range(NUM_VERSIONS):
        name = "the model as loaded" if not version else f"after update {version}"
        if version:
            sampler.receive(trial.sent(version))
        rollouts.append(trial.sample(sampler))
        form = _form(f"form of responses, {name}", rollouts[-1], trial)
        yield form
        if not form.passed:
            return
        fault, measured = judge(trial, rollouts[-1], version)
        yield Check(f"policy, {name}", not fault, fault or measured)
        if trial.shape.num_experts:
            fault, measured = judge_recorded_routes(trial, rollouts[-1], version)
            yield Check(f"routes, {name}", not fault, fault or measured)
    yield from _draws(more_draws(sampler, trial, num_draws), num_draws)
    sampler.sleep()
    sampler.wake()
    sampler.receive(trial.sent(0))
    again = trial.sample(sampler)
    same = again.responses == rollouts[0].responses
    found = "the same tokens" if same else "other tokens"
    yield Check("the same seeds again, after sleeping, with the first weights", same, found)


def more_draws(sampler: SamplingEngine, trial: Trial, num_draws: int = DRAWS) -> tuple[DrawTest, DrawTest]:
    """Returns the tests of draws from the last policy: of `num_draws` responses, because some faults are small, and of
    `LAST_TOKENS` times as many single tokens where a response may end, because ends can be rare.
    """
    policy, end_ids = trial.policy(NUM_VERSIONS - 1), trial.tokenizer.end_ids

    def drawn(purpose: str, prompts: Tokens, num_tokens: int) -> DrawTest:
        seeds = trial.draw_seeds(purpose, len(prompts))
        found = sampler.sample(prompts, seeds, max_new_tokens=num_tokens, temperature=TEMPERATURE)
        return DrawTest(policy, end_ids, prompts, found, AT_ONCE * MAX_NEW_TOKENS // num_tokens)

    usual = drawn("draws", list(islice(cycle(trial.prompts), num_draws)), MAX_NEW_TOKENS)
    contexts, num_last = usual.end_contexts(), LAST_TOKENS * num_draws
    return usual, drawn("ends", [contexts[row * len(contexts) // num_last] for row in range(num_last)], 1)


def _draws(tests: tuple[DrawTest, DrawTest], num_draws: int) -> Iterator[Check]:
    usual, last = tests
    found = usual.evidence() + last.evidence()
    measured = f"the evidence against it is {found.nats:+.1f} nats; above {ALARM:.1f} is an alarm"
    yield Check("draws from the policy", not found.is_alarm, _biased(found) or measured)
    of_last = last.expected()
    rows = [power_row(name, gained + of_last[name], num_draws) for name, gained in usual.expected().items()]
    yield Check(f"nats of evidence that {num_draws:,} draws have of each fault", True, "\n  ".join(["", *rows]))


def _biased(evidence: Evidence) -> str:
    """Returns what is wrong with draws; "" if nothing is."""
    return f"{NOT_DRAWS} ({evidence.nats:.1f} nats of evidence): {evidence}" if evidence.is_alarm else ""


def judge(trial: Trial, generated: Generated, version: int) -> tuple[str, str]:
    """Returns what is wrong with a rollout after `version` updates ("" if nothing is), and what was measured."""
    policy = trial.policy(version)
    true_C = truth(policy, trial.prompts, generated.responses, TEMPERATURE)
    reported_C = torch.tensor([nats for row in generated.logprobs for nats in row])
    agreement = Agreement.of(true_C - reported_C, [*map(len, generated.responses)])
    measured = f"log-probs differ by {agreement.difference:.1e} nats on average, mean ratio {agreement.ratio:.4f}"
    if not agreement.holds(trial.max_difference):
        return f"{explain(trial, generated, reported_C, version) or UNEXPLAINED} ({measured})", measured
    return _biased(DrawTest(policy, trial.tokenizer.end_ids, trial.prompts, generated).evidence()), measured


def judge_recorded_routes(trial: Trial, generated: Generated, version: int) -> tuple[str, str]:
    """Returns what is wrong with a rollout's routes ("" if nothing is), and what was measured."""
    if not generated.routes:
        return "", "it records none, so PPO samples without router replay"
    older = _with_old_routers(trial, version) | ({OLD_WEIGHTS: trial.policy(version - 1)} if version else {})
    texts = [[*prompt, *response[:-1]] for prompt, response in zip(trial.prompts, generated.responses, strict=True)]
    return judge_routes(trial.policy(version), older, texts, generated.routes, trial.precision)


def _with_old_routers(trial: Trial, version: int) -> dict[str, LanguageModel]:
    """Returns a mixture with the routers of before the last update, by the name of that fault."""
    if not (version and trial.shape.num_experts):
        return {}
    old = {name: tensor for name, tensor in weights_of(trial.policy(version - 1)).items() if ".router." in name}
    return {OLD_ROUTERS: with_weights(trial.policy(version), {**weights_of(trial.policy(version)), **old})}


def _form(name: str, generated: Generated, trial: Trial) -> Check:
    """Check lengths, end tokens, and that each token has a log-prob."""
    end_ids, wrong = trial.tokenizer.end_ids, list[str]()
    if len(generated.responses) != len(trial.prompts):
        return Check(name, False, f"{len(generated.responses)} responses to {len(trial.prompts)} prompts")
    for row, (response, finished, logprobs) in enumerate(
        zip(generated.responses, generated.finished, generated.logprobs, strict=True)
    ):
        if not 1 <= len(response) <= MAX_NEW_TOKENS:
            wrong.append(f"response {row} has {len(response)} tokens")
        elif any(token in end_ids for token in response[:-1]):
            wrong.append(f"response {row} continues after an end token")
        elif finished != (response[-1] in end_ids):
            wrong.append(f"response {row} is said to be {'finished' if finished else 'cut off'}")
        elif not finished and len(response) < MAX_NEW_TOKENS:
            wrong.append(f"response {row} stops after {len(response)} tokens without an end token")
        elif len(logprobs) != len(response):
            wrong.append(f"response {row} has {len(logprobs)} log-probs for {len(response)} tokens")
    tokens = sum(map(len, generated.responses))
    return Check(name, not wrong, wrong[0] if wrong else f"{len(generated.responses)} responses, {tokens} tokens")


def loader_of(engine: str, team_size: int) -> LoadEngine:
    """Returns the loader of an engine: "heed", "vllm", or a function, "FILE.py:FUNCTION" or "MODULE:FUNCTION".

    Raises: ValueError for anything else, and for a team whose ranks would share the weights of a function's engine.
    """
    if engine == "heed":
        from lm.samplers.heed_engine import HeedSampler
        from lm.tensor_parallel import Rendezvous, Team

        if team_size == 1:
            return HeedSampler.load
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return partial(HeedSampler.load, team=Team.join(Rendezvous(host, port, team_size, TIMEOUT_SECONDS)))
    if engine == VLLM:
        from lm.samplers.vllm_engine import VLLMSampler

        return partial(VLLMSampler, tensor_parallel_size=team_size)
    if team_size > 1:
        raise ValueError(
            f"--tensor-parallel-size is {team_size}; 1 was expected for an engine other than heed and vllm"
        )
    if ":" not in engine:
        raise ValueError(f'engine {engine!r}: "heed", "vllm", "FILE.py:FUNCTION" or "MODULE:FUNCTION" was expected')
    return load_function(engine, "sampler")


def main(engine: str, model: str, precision: Precision, team_size: str, num_draws: str, pipe: str) -> int:
    with os.fdopen(int(pipe), "w") as checks:

        def write(line: object) -> None:
            print(json.dumps(line), file=checks, flush=True)

        num_checks = 0
        try:
            load = loader_of(engine, int(team_size))
            for check in verify_sampler(load, Path(model), precision=precision, num_draws=int(num_draws)):
                write(asdict(check))
                num_checks += 1
        except ValueError as error:
            write({MISTAKE: str(error)})
            return 2
        write({DONE: num_checks})
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))  # type: ignore[arg-type]
