"""The reviews world's text: reading its sources, and deciding which sentence goes where.

Every choice hashes a seed with the text's words. So it depends neither on a file's order nor on a generator's state,
and two texts that differ only in case or punctuation always land on the same side.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from files.rows import is_file_name, read_source

SENTIMENTS = ("positive", "negative")
SHINGLE_WORDS = 8  # the least words of a sentence that no stage may see, so that a match in a text is no coincidence

# Some snippets are Windows-1252 that was read as Latin-1, which turned the quotes and dashes into control characters.
_CONTROLS = {
    code: bytes([code]).decode("cp1252", errors="replace").translate(str.maketrans("‘’“”–—", "''\"\"--"))
    for code in range(0x80, 0xA0)
}
_ARTICLES = frozenset({"a", "an", "the"})

_SENTENCE_END = re.compile(r"\n|(?<=[.!?])\s+(?=[A-Z\"'])")

T = TypeVar("T")


@dataclass(frozen=True)
class LabeledText:
    """A sentence or a review, and whether people called it positive."""

    text: str
    positive: bool

    @property
    def sentiment(self) -> str:
        return SENTIMENTS[0] if self.positive else SENTIMENTS[1]


@dataclass(frozen=True)
class SentenceSplit:
    """The human-labeled sentences: for fitting the labelers, for fitting the judge, and those that no stage sees."""

    labeler: tuple[LabeledText, ...]
    judge: tuple[LabeledText, ...]
    unseen: tuple[LabeledText, ...]


def words_of(text: str) -> tuple[str, ...]:
    """Returns lower-case runs of letters and digits, without articles. Two texts with equal words count as the same."""
    return tuple(word for word in re.findall(r"[^\W_]+", text.lower()) if word not in _ARTICLES)


def draw(*parts: object) -> int:
    """Returns a number in [0, 2^64) from a hash of `parts`: this module's only source of randomness."""
    # JSON quotes and separates the parts, so that ("a", "bc") and ("ab", "c") differ.
    digest = hashlib.sha256(json.dumps([str(part) for part in parts]).encode()).digest()
    return int.from_bytes(digest[:8], "big")


def shuffled(items: Iterable[T], key: Callable[[T], str], *seed: object) -> list[T]:
    """Returns `items` in an order that depends only on `seed` and each item's key."""
    return sorted(items, key=lambda item: (draw(*seed, key(item)), key(item)))


def require_source(source: Path | None, field: str) -> None:
    """Raise ValueError if `source`, the value of the config field `field`, looks like a file but does not exist."""
    if source is not None and is_file_name(str(source)) and not source.is_file():
        raise ValueError(f"{field} = {str(source)!r}: no such file (looked for {source.absolute()})")


def read_labeled(source: Path, field: str) -> list[LabeledText]:
    """Reads texts with labels. `field` is the config field that names the source.

    Raises: ValueError naming the field, the source and the row.
    """
    return [LabeledText(_text_of(row, where), _is_positive(row, where)) for where, row in _read_rows(source, field)]


def _is_positive(row: dict[str, Any], where: str) -> bool:
    """Reads `label`, as on the hub, or `sentiment`."""
    if "label" in row:
        if row["label"] not in (0, 1):
            raise ValueError(f"{where}: label is {row['label']!r}; expected 1 (positive) or 0 (negative)")
        return bool(row["label"])
    sentiment = row.get("sentiment")
    if sentiment not in SENTIMENTS:
        raise ValueError(f"{where}: sentiment is {sentiment!r}; expected 'positive' or 'negative'")
    return bool(sentiment == SENTIMENTS[0])


def read_texts(source: Path, field: str) -> list[str]:
    """Reads the field `text`. `field` is the config field that names the source."""
    return [_text_of(row, where) for where, row in _read_rows(source, field)]


def _read_rows(source: Path, field: str) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        for where, row in read_source(str(source)):
            yield f"{field}: {where}", row
    except ValueError as error:
        raise ValueError(f"{field}: {error}") from error


def _text_of(row: dict[str, Any], where: str) -> str:
    text = row.get("text")
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{where}: text is {text!r:.60}; expected a string that is not empty")
    return text.replace("<br />", "\n").translate(_CONTROLS)  # IMDb's reviews are pieces of web pages


def split_sentences(
    sentences: Sequence[LabeledText], num_unseen_per_label: int, length_words: tuple[int, int], seed: int
) -> SentenceSplit:
    """Splits into two halves and a slice that no stage sees. Equal texts (see `words_of`) are on the same side.

    The unseen slice has `num_unseen_per_label` positive and equally many negative sentences with a length within
    `length_words` (both ends included). Texts that people labeled both ways are dropped.
    """
    by_words: dict[tuple[str, ...], LabeledText] = {}
    labels: dict[tuple[str, ...], set[bool]] = {}
    for sentence in sorted(sentences, key=lambda sentence: sentence.text):
        words = words_of(sentence.text)
        by_words.setdefault(words, sentence)
        labels.setdefault(words, set()).add(sentence.positive)
    unique = [by_words[words] for words, given in labels.items() if len(given) == 1 and words]
    ordered = shuffled(unique, _key, "split", seed)
    unseen: list[LabeledText] = []
    for positive in (True, False):
        fit = [s for s in ordered if s.positive == positive and _can_be_unseen(s.text, length_words)]
        if len(fit) < num_unseen_per_label:
            raise ValueError(
                f"num_human_pairs is {num_unseen_per_label}; the source `sentences` has only {len(fit)} "
                f"{SENTIMENTS[not positive]} ones of {length_words[0]} to {length_words[1]} words"
            )
        unseen += fit[:num_unseen_per_label]
    hidden = {sentence.text for sentence in unseen}
    rest = [sentence for sentence in ordered if sentence.text not in hidden]
    halves: tuple[list[LabeledText], list[LabeledText]] = ([], [])
    for sentence in rest:
        halves[draw("half", seed, _key(sentence)) % 2].append(sentence)
    return SentenceSplit(tuple(halves[0]), tuple(halves[1]), tuple(unseen))


def _key(sentence: LabeledText) -> str:
    return " ".join(words_of(sentence.text))


def _can_be_unseen(text: str, length_words: tuple[int, int]) -> bool:
    return _has_length(text, length_words) and len(words_of(text)) >= SHINGLE_WORDS


def _has_length(text: str, length_words: tuple[int, int]) -> bool:
    return length_words[0] <= len(text.split()) <= length_words[1]


class Finder:
    """Finds whether a text contains one of the given sentences, ignoring case, punctuation and line breaks."""

    def __init__(self, sentences: Iterable[str]) -> None:
        self._by_shingle: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
        for sentence in sentences:
            words = words_of(sentence)
            if len(words) < SHINGLE_WORDS:
                raise ValueError(
                    f"sentence {sentence!r} has {len(words)} words; at least {SHINGLE_WORDS} were expected"
                )
            self._by_shingle.setdefault(words[:SHINGLE_WORDS], []).append(words)

    def occurs_in(self, text: str) -> bool:
        """Whether any of the sentences is in `text`, as a run of the same words."""
        words = words_of(text)
        return any(
            words[start : start + len(sentence)] == sentence
            for start in range(len(words) - SHINGLE_WORDS + 1)
            for sentence in self._by_shingle.get(words[start : start + SHINGLE_WORDS], ())
        )


def sentences_of(reviews: Iterable[LabeledText], length_words: tuple[int, int]) -> list[LabeledText]:
    """Returns the reviews' sentences that are worth continuing, with the review's label.

    A sentence ends with its line, or before a capital letter. It keeps those with a length within `length_words` that
    start with a letter and end like a sentence. One that occurs twice is a reviewer's boilerplate and is dropped.
    """
    found: dict[tuple[str, ...], LabeledText] = {}
    times: Counter[tuple[str, ...]] = Counter()
    for review in reviews:
        for line in _SENTENCE_END.split(review.text):
            text = " ".join(line.split())
            words = words_of(text)
            times[words] += 1
            if _has_length(text, length_words) and text[0].isalpha() and text[-1] in ".!?":
                found[words] = LabeledText(text, review.positive)
    return [sentence for words, sentence in found.items() if times[words] == 1]


def cut(sentence: str, num_words: int) -> tuple[str, str]:
    """Splits a sentence into its first `num_words` words and the rest, without a space at the seam.

    Raises: ValueError if no word is left for the rest.
    """
    words = sentence.split()
    if not 1 <= num_words < len(words):
        raise ValueError(f"num_words is {num_words}; expected 1 to {len(words) - 1} for {sentence!r}")
    return " ".join(words[:num_words]), " ".join(words[num_words:])
