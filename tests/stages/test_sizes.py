"""Lengths of rows: all of a small source; of a large one the mean of a sample, and a safe longest row."""

from collections.abc import Iterable, Sequence

import numpy as np
import pytest

from stages.sizes import Lengths, Measured, Measures, RowSample
from training.tokens import FITS, SKIPPED, TRUNCATED

Row = tuple[int, int, int]  # bytes, tokens, tokens of the response


def lengths_of(rows: Iterable[Row], limit: int, most_tokens: int = 10**6, *, skips: bool = False) -> Lengths:
    sample = RowSample[Row](limit)
    for row in rows:
        sample.add(row, row[0])

    def encode(chosen: Sequence[Row]) -> Iterable[list[Measured]]:
        for _, tokens, response in chosen:
            fate = FITS if tokens <= most_tokens else SKIPPED if skips else TRUNCATED
            yield [(min(tokens, most_tokens), min(response, most_tokens), fate)]

    return sample.lengths(encode, most_tokens)


def test_a_small_source_is_measured_whole() -> None:
    found = lengths_of([(40, 10, 4), (80, 30, 3), (8, 5, 1)], limit=4)
    assert (found.num_rows, found.num_measured, found.spread) == (3, 3, (10, 30, 5))
    assert (found.mean, found.shortest, found.longest, found.longest_response) == (15.0, 5, 30, 4)
    assert found.response_share == 0.4
    assert found.line("p.jsonl", "prompts") == "p.jsonl: 3 prompts of 15 tokens on average, 30 at most"


def test_what_no_model_reads_does_not_count() -> None:
    found = lengths_of([(40, 10, 4), (80, 30, 25)], limit=4, most_tokens=20)
    assert (found.mean, found.longest, found.longest_response) == (15.0, 20, 20)
    assert found.line("p", "prompts") == (
        "p: 2 prompts of 15 tokens on average, 20 at most; 1 of 2 too long: 1 truncated"
    )


def test_a_skipped_row_counts_only_as_such() -> None:
    found = lengths_of([(40, 10, 4), (80, 30, 25)], limit=4, most_tokens=20, skips=True)
    assert (found.num_rows, found.mean, found.longest, found.spread) == (1, 10.0, 10, (10,))
    assert found.line("p", "prompts") == "p: 1 prompts of 10 tokens on average, 10 at most; 1 of 2 too long: 1 skipped"
    many = lengths_of([(40, 10 if index % 2 else 30, 4) for index in range(1000)], limit=10, most_tokens=20, skips=True)
    assert 490 <= many.num_rows <= 510 or many.num_rows == many.num_measured
    assert many.longest == 20, "rows that were not measured may be as long as is allowed"
    with pytest.raises(ValueError, match=r"^p: all 1 measured prompts are too long"):
        lengths_of([(80, 30, 25)], limit=4, most_tokens=20, skips=True).line("p", "prompts")


@pytest.mark.parametrize("seed", range(4))
def test_the_longest_of_a_sample_is_an_upper_bound(seed: int) -> None:
    """Texts of four to one byte per token, in no order, 12 tokens of a template each."""
    rng = np.random.default_rng(seed)
    sizes = np.exp(rng.normal(5, 1, 20_000)).astype(int) + 1
    tokens = 12 + np.ceil(sizes / rng.uniform(2, 4, len(sizes))).astype(int)
    found = lengths_of(((int(size), int(n), 1) for size, n in zip(sizes, tokens, strict=True)), limit=200)
    assert 400 <= found.num_measured <= 600
    assert tokens.max() <= found.longest <= 1.5 * tokens.max()
    assert found.mean == pytest.approx(tokens.mean(), rel=0.2)
    assert found.response_share == 1, "a row that was not measured may have a longer response"
    assert f"(estimated from {found.num_measured} of them, the longest texts included)" in found.line("a", "prompts")


def test_a_sample_that_misses_a_dense_row_is_still_an_upper_bound() -> None:
    """All rows have 400 bytes and 100 tokens, but every hundredth has 130; only some of these are measured."""
    rows = [(400, 130 if index % 100 == 99 else 100, 1) for index in range(10_000)]
    rows[5] = (400, 134, 1)
    found = lengths_of(rows, limit=20)
    assert found.longest >= 134


def test_values_are_made_once() -> None:
    made: list[int] = []
    measures = Measures()
    for _ in range(2):
        assert measures.get("a", lambda: made.append(1) or 7) == 7  # type: ignore[func-returns-value]
    assert made == [1]
