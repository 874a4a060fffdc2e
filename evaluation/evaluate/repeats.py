"""Several samples of each item: their mean is the item's value, and pass@k says how often one of k is right.

An item stays one observation, however many samples it has, so more samples never pass for more items.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from evaluation.suites.suite import Item, Measure, Model, Scored, Suite, Tools


def pass_at(k: int, num_samples: int, num_right: int) -> float:
    """Returns the unbiased estimate of the probability that at least one of k samples is right (Chen et al. 2021,
    arXiv 2107.03374, section 2.1): 1 - C(n - c, k) / C(n, k), for c of n samples right.

    Raises: ValueError for k outside 1 to n, or c outside 0 to n.
    """
    if not 1 <= k <= num_samples or not 0 <= num_right <= num_samples:
        raise ValueError(f"pass@{k} of {num_samples} samples with {num_right} right; 1 <= k <= n >= c >= 0 is needed")
    return 1 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def with_pass_at(measures: Sequence[Measure], num_samples: int) -> list[tuple[Measure, str, int]]:
    """Returns the pass@k of the first share that is a mean and better if higher, for k = 2, 4, 8, ... and all samples:
    the new measure, the name of the share, and k. A sample is right if its value is 1.
    """
    of = next((m for m in measures if m.is_share and m.aggregate is None and m.higher_is_better), None)
    sizes = sorted({2**power for power in range(1, num_samples.bit_length())} | {num_samples}) if of else []
    return [
        (
            Measure(
                f"{of.name}_pass@{k}",
                f"Probability that {of.name} is 1 for at least one of {k} samples.",
                is_share=True,
            ),
            of.name,
            k,
        )
        for k in sizes
        if of and 1 < k <= num_samples
    ]


def averaged(item_id: str, samples: Sequence[Scored], passes: Sequence[tuple[Measure, str, int]]) -> Scored:
    """Returns one item's value: the mean over its samples, with pass@k. A measure fails if it does on any sample."""
    failures = {name: why for row in samples for name, why in row.failures.items()}
    names = dict.fromkeys(name for row in samples for name in row.values if name not in failures)
    found = {name: [row.values[name] for row in samples if name in row.values] for name in names}
    values = {name: math.fsum(numbers) / len(numbers) for name, numbers in found.items()}
    for measure, name, k in passes:
        if name in failures:
            failures[measure.name] = failures[name]
        elif k <= len(found.get(name, ())):
            values[measure.name] = pass_at(k, len(found[name]), found[name].count(1.0))
    return Scored(item_id, values, "\n\n----\n\n".join(row.answer for row in samples), failures)


def repeated(suite: Suite, num_samples: int) -> Suite:
    """Returns the suite with `num_samples` samples of each item. Raises: ValueError if it asks for no answers."""
    if num_samples < 2:
        return suite
    if suite.asks not in ("conversations", "texts"):
        raise ValueError(f"--samples {num_samples}: suite {suite.name!r} samples no answers; 1 was expected")
    passes = with_pass_at(suite.measures, num_samples)

    def score(model: Model, items: Sequence[Item], tools: Tools) -> list[Scored]:
        copies = [_copy(item, number) for number in range(num_samples) for item in items]
        rows = suite.score(model, copies, tools)
        return [averaged(item.item_id, rows[place :: len(items)], passes) for place, item in enumerate(items)]

    return replace(suite, measures=(*suite.measures, *(measure for measure, _, _ in passes)), score=score)


def _copy(item: Item, number: int) -> Item:
    asked_id = f"{item.asked_id}#{number}" if item.asked_id else ""
    return replace(item, item_id=f"{item.item_id}#{number}", asked_id=asked_id)
