"""Has a policy collapsed? Distinct n-grams, repetition, lengths, and how often a response ends by itself.

n-grams are of words: lower-cased text split at white space.
"""

from collections.abc import Iterator, Sequence


def distinct_n(texts: Sequence[str], n: int) -> float:
    """Distinct n-grams over all n-grams, across all texts: from 0 (everything repeats) to 1.

    Falls as the amount of text grows, so compare policies on the same number of samples of like length. NaN when no
    text has n words. distinct-1 and distinct-2 of Li et al. 2016, arXiv 1510.03055. Raises ValueError for n < 1.
    """
    return _share_distinct([gram for text in texts for gram in _ngrams(text, n)])


def repetition(text: str, n: int) -> float:
    """The share of a text's n-grams that repeat an earlier one: 0 is none; near 1, the text loops.

    NaN when the text has fewer than n words. seq-rep-n of Welleck et al. 2019, arXiv 1908.04319, here over words.
    """
    return 1 - _share_distinct(list(_ngrams(text, n)))


def eos_rate(finished: Sequence[bool]) -> float:
    """The share of responses that ended with the end-of-text token, not at the length limit. Raises ValueError
    for no responses."""
    if len(finished) == 0:
        raise ValueError("finished is empty; at least one response was expected")
    return sum(map(bool, finished)) / len(finished)


def mean_length(lengths_tokens: Sequence[int]) -> float:
    """The mean response length in tokens. Raises ValueError for no responses."""
    if len(lengths_tokens) == 0:
        raise ValueError("lengths_tokens is empty; at least one response was expected")
    return float(sum(lengths_tokens)) / len(lengths_tokens)


def _ngrams(text: str, n: int) -> Iterator[tuple[str, ...]]:
    if n < 1:
        raise ValueError(f"n is {n}; at least 1 was expected")
    words = text.lower().split()
    return zip(*(words[start:] for start in range(n)), strict=False)


def _share_distinct(grams: Sequence[tuple[str, ...]]) -> float:
    return len(set(grams)) / len(grams) if grams else float("nan")
