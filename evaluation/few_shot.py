"""In-context learning: a model sees k solved examples as plain text and solves the next one (arXiv 2005.14165).

No weight changes. An example is its prompt, a space and its completion; an empty line separates examples.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from evaluation.statistics.means import NUM_RESAMPLES
from files.fields import text_field
from lm.generation import generate
from lm.model import LanguageModel
from lm.sampling import Choice
from lm.sequence_logprobs import sequence_logprobs
from lm.source import load_for_inference
from lm.tokenizer import Tokenizer
from lm.weights import ModelFolder
from preferences.statistics.bootstrap import bootstrap_ratio
from preferences.statistics.estimates import LEVEL, Interval
from preferences.statistics.score import share_interval
from training.data import DataConfig, read_rows
from training.seeds import derive_seed


@dataclass(frozen=True)
class Example:
    """A task and its solution. `where` names file and line."""

    where: str
    prompt: str
    completion: str


@dataclass(frozen=True)
class FewShot:
    """Results with 95% intervals over examples.

    `exact_match` is the share of examples whose greedy answer, up to the end of its line, equals the completion; `nats`
    is -log p of the right completion, in nats per token.
    """

    num_shots: int
    num_examples: int
    exact_match: Interval
    nats: Interval


def read_examples(data: DataConfig) -> list[Example]:
    """Reads rows of {"prompt", "completion"}.

    Raises: ValueError naming file, line and field, also for a completion of more than one line.
    """
    examples = []
    for where, row in read_rows(data):
        completion = text_field(where, row, "completion").strip()
        if "\n" in completion:
            raise ValueError(f"{where}: field 'completion' has several lines; one was expected")
        examples.append(Example(where, text_field(where, row, "prompt").strip(), completion))
    return examples


def few_shot_context(examples: Sequence[Example], index: int, num_shots: int, seed: int) -> str:
    """Returns `num_shots` other examples, drawn for this one, followed by example `index` without its completion."""
    others = [other for other in range(len(examples)) if other != index]
    generator = np.random.default_rng(derive_seed(seed, "few-shot", index))
    shown: list[int] = generator.choice(others, size=num_shots, replace=False).tolist() if num_shots else []
    solved = [f"{examples[other].prompt} {examples[other].completion}\n\n" for other in shown]
    return "".join(solved) + examples[index].prompt


@dataclass(frozen=True)
class FewShotRows:
    """Per example: 1 if the greedy answer equals the completion, otherwise 0; the completion's -log p in nats; its
    number of tokens.
    """

    right: list[float]
    nats: list[float]
    num_tokens: list[int]


def evaluate_few_shot(folder: Path, examples: Sequence[Example], num_shots: int, *, seed: int) -> FewShot:
    """Evaluates every example after `num_shots` others. Raises: as `few_shot_rows` does."""
    rows = few_shot_rows(folder, examples, num_shots, seed=seed)
    lengths = np.array(rows.num_tokens, dtype=np.float64)
    nats = bootstrap_ratio(np.array(rows.nats), lengths, seed=seed, num_resamples=NUM_RESAMPLES, level=LEVEL)
    return FewShot(num_shots, len(examples), share_interval(np.array(rows.right)), Interval(*nats))


def few_shot_rows(folder: Path, examples: Sequence[Example], num_shots: int, *, seed: int) -> FewShotRows:
    """Evaluates every example after `num_shots` others, which are the same for every model.

    Raises: ValueError if there are too few examples, or naming the example that does not fit the model's context.
    """
    if len(examples) <= num_shots:
        raise ValueError(
            f"{num_shots} shots need at least {num_shots + 1} examples, since each is solved after {num_shots} others;"
            f" {len(examples)} were given"
        )
    model, tokenizer = load_for_inference(ModelFolder(folder, LanguageModel)), Tokenizer.load(folder)
    contexts = [few_shot_context(examples, index, num_shots, seed) for index in range(len(examples))]
    queries = tokenizer.encode_plain(contexts)
    answers = tokenizer.encode_plain([f" {example.completion}" for example in examples])
    longest = max(len(answer) for answer in answers) + 1  # and the end of the line
    for example, query in zip(examples, queries, strict=True):
        if len(query) + longest > model.config.max_position_embeddings:
            raise ValueError(
                f"{example.where}: {num_shots} examples and the prompt have {len(query)} tokens; the model's context of"
                f" {model.config.max_position_embeddings} leaves {model.config.max_position_embeddings - longest}"
            )
    texts = _greedy_lines(model, tokenizer, queries, longest)
    right = [float(text == example.completion) for text, example in zip(texts, examples, strict=True)]
    logprobs = sequence_logprobs(model, queries, answers, 1.0)
    return FewShotRows(right, [-logprob for logprob in logprobs], [len(answer) for answer in answers])


def _greedy_lines(
    model: LanguageModel, tokenizer: Tokenizer, queries: Sequence[Sequence[int]], max_new_tokens: int
) -> list[str]:
    found = generate(
        model,
        queries,
        max_new_tokens=max_new_tokens,
        end_ids=tokenizer.end_ids,
        choice=Choice(temperature=0),
        seeds=[0] * len(queries),
        stop=tokenizer.stop_at(["\n"]),
    )
    return [tokenizer.decode(response).split("\n")[0].strip() for response in found.responses]
