"""Diversity metrics against counts by hand."""

import math

import pytest

from evaluation.measures.diversity import distinct_n, repetition


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
