"""The alignment tax (Ouyang et al. 2022, arXiv 2203.02155): what a policy lost as a language model during alignment.

It compares held-out bits per byte and few-shot tasks before and after. Policies are measured on the same documents and
examples, so intervals are on differences: what is hard for all policies cancels.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from evaluation.few_shot import Example, few_shot_rows
from evaluation.measures.drawing import Policy
from evaluation.measures.text import bits_and_bytes
from preferences.statistics.estimates import LEVEL, Floats, Interval
from preferences.statistics.intervals import bootstrap_ratio

NUM_RESAMPLES = 10_000


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
