"""How well a policy still models language: bits per byte of texts, few-shot examples, and the alignment tax.

Bits per byte compare across vocabularies. Each text is read on its own, after the token that begins texts (EOS, if a
vocabulary has no other), as in pretraining. A text longer than the model's context is read in adjacent windows: every
token is predicted once, the first token of a window from the last of the window before, and the last window starts
early enough to be full.

Few-shot (in-context) learning: a model sees k solved examples as plain text and solves the next one (arXiv
2005.14165). No weight changes. An example is its prompt, a space and its completion; an empty line separates examples.

The alignment tax (Ouyang et al. 2022, arXiv 2203.02155) is how much of both a policy lost during alignment. Policies
are measured on the same documents and examples, and intervals are on differences, so what is hard for all policies
cancels.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from evaluation.measures.kl import Policy
from files.fields import text_field
from files.hashes import derive_seed
from lm.generation import generate
from lm.model import LanguageModel
from lm.sampling import Choice
from lm.sequence_logprobs import sequence_logprobs
from lm.source import load_for_inference
from lm.tokenizer import Tokenizer
from lm.weights import ModelFolder
from preferences.statistics.estimates import LEVEL, Floats, Interval
from preferences.statistics.intervals import bootstrap_ratio, share_interval
from training.data import DataConfig, read_rows

NUM_RESAMPLES = 10_000

Window = tuple[list[int], list[int]]  # (given, predicted)


def windows(tokens: Sequence[int], start_id: int, max_position_embeddings: int) -> Iterator[Window]:
    """Yields the text's tokens in order, in windows that fill the context; the last starts early enough to be full."""
    with_start = [start_id, *tokens]
    for begin in range(1, len(with_start), max_position_embeddings - 1):
        end = min(begin + max_position_embeddings - 1, len(with_start))
        yield with_start[max(0, end - max_position_embeddings) : begin], with_start[begin:end]


def text_logprobs(model: LanguageModel, tokenizer: Tokenizer, texts: Sequence[str]) -> list[float]:
    """Returns log p of each text, nats; 0 for an empty one."""
    encoded = tokenizer.encode_plain(texts)
    pieces = [
        (text, window)
        for text, tokens in enumerate(encoded)
        for window in windows(tokens, tokenizer.start_id, model.config.max_position_embeddings)
    ]
    pieces.sort(key=lambda piece: len(piece[1][1]))  # sorting by length minimises padding
    totals = [0.0] * len(texts)
    if pieces:
        queries, answers = [context for _, (context, _) in pieces], [predicted for _, (_, predicted) in pieces]
        logprobs = sequence_logprobs(model, queries, answers, 1.0)
        for (text, _), logprob in zip(pieces, logprobs, strict=True):
            totals[text] += logprob
    return totals


def bits_and_bytes(model: LanguageModel, tokenizer: Tokenizer, texts: Sequence[str]) -> tuple[Floats, Floats]:
    """Returns each text's bits under the model, and its bytes. Raises: ValueError for an empty text."""
    for number, text in enumerate(texts):
        if not text:
            raise ValueError(f"text {number} is empty; bits per byte need at least one byte")
    bits = -np.array(text_logprobs(model, tokenizer, texts)) / math.log(2)
    return bits, np.array([len(text.encode()) for text in texts], dtype=np.float64)


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
    chosen: list[int] = generator.choice(others, size=num_shots, replace=False).tolist() if num_shots else []
    solved = [f"{examples[other].prompt} {examples[other].completion}\n\n" for other in chosen]
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
    nats = _ratio(np.array(rows.nats), lengths, seed)
    return FewShot(num_shots, len(examples), share_interval(np.array(rows.right)), nats)


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
    longest = max(len(answer) for answer in answers) + 1  # one more for the end of the line
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
    generated = generate(
        model,
        queries,
        max_new_tokens=max_new_tokens,
        end_ids=tokenizer.end_ids,
        choice=Choice(temperature=0),
        seeds=[0] * len(queries),
        stop=tokenizer.stop_at(["\n"]),
    )
    return [tokenizer.decode(response).split("\n")[0].strip() for response in generated.responses]


@dataclass(frozen=True)
class Change:
    """One policy's metric, and its difference from `before`'s, both with 95% intervals over documents or examples."""

    value: Interval
    above_before: Interval


@dataclass(frozen=True)
class Task:
    """Few-shot examples from one file, with `num_shots` solved ones before each."""

    name: str
    examples: Sequence[Example]
    num_shots: int


@dataclass(frozen=True)
class TaskTax:
    """By policy: the share of exact answers (higher is better) and bits per byte of the right completions (lower is
    better)."""

    task: str
    num_shots: int
    num_examples: int
    exact_match: Mapping[str, Change]
    bits_per_byte: Mapping[str, Change]


@dataclass(frozen=True)
class Tax:
    """`before` names the policy that all are compared with; its own change is 0. Bits per byte: lower is better."""

    before: str
    num_documents: int
    num_bytes: int
    bits_per_byte: Mapping[str, Change]
    tasks: tuple[TaskTax, ...]


def measure_tax(policies: Mapping[str, Path], texts: Sequence[str], tasks: Sequence[Task], *, seed: int) -> Tax:
    """Compares policies with the first one; each is loaded once per task. Without texts there are no bits per byte.

    Raises: ValueError for fewer than two policies, nothing to measure on, an empty text, and as `few_shot_rows` does.
    """
    if len(policies) < 2 or not (texts or tasks):
        raise ValueError(
            f"{len(policies)} policies, {len(texts)} texts, {len(tasks)} tasks; two policies and something to measure"
            " on were expected"
        )
    before = next(iter(policies))
    bits: dict[str, Floats] = {}
    num_bytes = np.array([len(text.encode()) for text in texts], dtype=np.float64)
    for name, folder in policies.items() if texts else ():
        policy = Policy.load(folder)
        bits[name], _ = bits_and_bytes(policy.model, policy.tokenizer, texts)
    return Tax(
        before=before,
        num_documents=len(texts),
        num_bytes=int(num_bytes.sum()),
        bits_per_byte=_changes(bits, num_bytes, before, seed),
        tasks=tuple(_task_tax(policies, task, before, seed) for task in tasks),
    )


def _task_tax(policies: Mapping[str, Path], task: Task, before: str, seed: int) -> TaskTax:
    rows = {name: few_shot_rows(folder, task.examples, task.num_shots, seed=seed) for name, folder in policies.items()}
    num_bytes = np.array([len(f" {example.completion}".encode()) for example in task.examples], dtype=np.float64)
    ones = np.ones(len(task.examples))
    return TaskTax(
        task=task.name,
        num_shots=task.num_shots,
        num_examples=len(task.examples),
        exact_match=_changes({name: np.array(row.right) for name, row in rows.items()}, ones, before, seed),
        bits_per_byte=_changes(
            {name: np.array(row.nats) / math.log(2) for name, row in rows.items()}, num_bytes, before, seed
        ),
    )


def _changes(sums: Mapping[str, Floats], counts: Floats, before: str, seed: int) -> dict[str, Change]:
    """Returns each policy's total over the count, and its paired difference from `before`, document by document."""
    return {
        name: Change(_ratio(values, counts, seed), _ratio(values - sums[before], counts, seed))
        for name, values in sums.items()
    }


def _ratio(sums: Floats, counts: Floats, seed: int) -> Interval:
    return Interval(*bootstrap_ratio(sums, counts, seed=seed, num_resamples=NUM_RESAMPLES, level=LEVEL))
