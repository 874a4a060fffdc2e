"""Diversity against loops and by hand: copies count as identical, and amounts of text are made equal."""

import json
import math
from itertools import combinations

import numpy as np
import pytest

from evaluation.measures.policies import (
    distinct_at,
    distinct_n,
    identical_share,
    measure_diversity,
    measure_policies,
    repetition,
)
from evaluation.verdicts import Response
from files.records import as_json

WORDS = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l"]


def test_identical_share_counts_pairs() -> None:
    texts = ["a", "a ", "b", "a", "c", "b"]
    pairs = [one.strip() == other.strip() for one, other in combinations(texts, 2)]
    assert identical_share(texts) == pytest.approx(np.mean(pairs))
    assert math.isnan(identical_share(["a"]))


def test_distinctness_is_of_equal_amounts_of_text() -> None:
    generator = np.random.default_rng(1)
    few, many = ([" ".join(generator.choice(WORDS, size=10)) for _ in range(num_texts)] for num_texts in (20, 200))
    assert distinct_n(many, 2) < 0.7 * distinct_n(few, 2)  # the same distribution, but more text
    assert distinct_at(many, 2, 200, seed=0) == pytest.approx(distinct_n(few, 2), abs=0.05)
    # With all words, the order makes no difference.
    assert distinct_at(few, 2, 200, seed=0) == pytest.approx(distinct_n(few, 2))
    assert distinct_at(["a b c d"], 1, 3, seed=0) == 1.0


def rows_of(policy: str, texts: list[list[str]], **changes: object) -> list[Response]:
    return [
        Response(policy, f"p{p}", i, text, **changes)  # type: ignore[arg-type]
        for p, samples in enumerate(texts)
        for i, text in enumerate(samples)
    ]


def test_a_collapsed_policy_is_seen() -> None:
    generator = np.random.default_rng(2)
    free = [[" ".join(generator.choice(WORDS, size=12)) for _ in range(4)] for _ in range(30)]
    loops = [["a b a b a b a b a b a b"] * 4 for _ in range(30)]
    by_prompt = [[free[p][0]] * 4 for p in range(30)]  # one answer per prompt, a different one for each
    found = measure_diversity(
        {"free": rows_of("free", free), "loops": rows_of("loops", loops), "fixed": rows_of("fixed", by_prompt)}, seed=0
    )
    assert found["free"].within.identical.mean == 0
    assert found["loops"].within.identical.mean == found["loops"].across.identical == 1
    assert found["fixed"].within.identical.mean == 1
    assert found["fixed"].across.identical == 0
    assert found["fixed"].across.distinct_2 == found["free"].across.distinct_2 > 5 * found["loops"].across.distinct_2
    assert found["loops"].repetition.mean == pytest.approx(7 / 9)  # 9 4-grams, 2 of them distinct from all earlier ones
    assert found["free"].words.quantiles == (12,) * 7
    assert found["free"].tokens is None
    assert math.isnan(found["free"].finished.mean)


def test_policies_are_measured_on_as_many_samples_and_words() -> None:
    rows = rows_of("long", [["a b c d e f", "g h i"]] * 3) + rows_of("short", [["a b"]] * 3)
    found = measure_policies(rows, seed=0)
    assert [found[name].diversity.across.num_words for name in ("long", "short")] == [6, 6]
    assert found["long"].diversity.within.num_samples == 1
    assert math.isnan(found["long"].diversity.within.identical.mean)
    assert found["long"].diversity.words.mean.mean == 4.5
    assert math.isnan(found["short"].kl_nats.mean)
    json.dumps(as_json(found), allow_nan=False)


def test_kl_lengths_and_endings_of_responses() -> None:
    ratios = [0.5, -0.1, 2.0, 1.0]
    rows = [
        Response("a", f"p{i // 2}", i % 2, "x y", num_tokens=3 + i, finished=i != 1, log_ratio=ratio)
        for i, ratio in enumerate(ratios)
    ]
    found = measure_policies(rows, seed=0)["a"]
    assert found.kl_nats.mean == pytest.approx(0.85)
    # Student's t with 1 degree of freedom, over two prompts' means.
    half = 12.7062 * abs((0.5 - 0.1) / 2 - (2.0 + 1.0) / 2) / 2
    assert found.kl_nats.high == pytest.approx(0.85 + half, rel=1e-4)
    assert found.diversity.finished.mean == 0.75
    assert found.diversity.tokens is not None
    assert found.diversity.tokens.quantiles[0] == 3
    assert found.diversity.tokens.quantiles[-1] == 6


def test_refusals() -> None:
    with pytest.raises(ValueError, match="prompt 'p0' has two responses with index 0"):
        measure_policies(rows_of("a", [["x"]]) * 2, seed=0)
    with pytest.raises(ValueError, match="no responses to measure"):
        measure_policies([], seed=0)
    with pytest.raises(ValueError, match="policies a, b share no prompt"):
        measure_policies([Response("a", "p", 0, "x"), Response("b", "q", 0, "x")], seed=0)
    with pytest.raises(ValueError, match="policy 'b' has no responses"):
        measure_diversity({"a": rows_of("a", [["x"]]), "b": []}, seed=0)


def test_distinct_n_by_hand():
    texts = ["the cat sat", "The cat  ran"]  # words: the cat sat the cat ran
    assert distinct_n(texts, 1) == 4 / 6
    assert distinct_n(texts, 2) == 3 / 4  # the-cat twice, cat-sat, cat-ran; no n-gram spans two texts
    assert distinct_n(texts, 3) == 1.0


def test_distinct_n_without_ngrams_is_unknown():
    assert math.isnan(distinct_n(["word", ""], 2))


def test_repetition_by_hand():
    assert repetition("a b a b a b", 2) == pytest.approx(1 - 2 / 5)  # ab ba ab ba ab
    assert repetition("a b c d", 2) == 0.0
    assert math.isnan(repetition("a", 2))


def test_ngrams_refuse_n_below_one():
    with pytest.raises(ValueError, match="n is 0"):
        distinct_n(["a b"], 0)
