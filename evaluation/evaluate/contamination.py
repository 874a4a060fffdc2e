"""Which items of a suite a model may have seen in training: word n-grams that its training data share with them.

As in appendix C of the GPT-3 paper (Brown et al. 2020, arXiv 2005.14165), words are compared without case and
punctuation, and an item overlaps if it shares 13 words in a row with the training data. Items of fewer words count by
their whole text; below 8 words, the paper's shortest, only if a text of the training data has no other words.

Training data are streamed. In memory are only the items' n-grams and one row's words.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from evaluation.suites.suite import Item
from files.rows import is_file_name, read_source
from preferences.statistics.estimates import Ints
from stages.lineage import LINEAGE
from stages.reports.run_folder import parse_object

NUM_WORDS = 13
FEWEST_WORDS = 8
MOST_ITEMS = 10  # an n-gram of more items belongs to their common instruction, and shows nothing
_WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)*")


def words_of(text: str) -> list[str]:
    """Returns the words of a text in lower case, without punctuation."""
    return _WORD.findall(text.lower())


@dataclass(frozen=True)
class Overlap:
    """The items that share words with a model's training data. `files` are the data, with the number of rows read."""

    item_ids: frozenset[str]
    files: Mapping[str, int]


class OverlapSearch:
    """Finds the items of several suites in streamed texts. A place is a suite's name and an item's id."""

    def __init__(self, items: Mapping[tuple[str, str], Item]) -> None:
        grams: dict[tuple[str, ...], set[tuple[str, str]]] = defaultdict(set)
        self._whole: dict[tuple[str, ...], set[tuple[str, str]]] = defaultdict(set)
        for place, item in items.items():
            user_texts = [message["content"] for message in item.messages if message["role"] == "user"]
            for text in item.own_texts or user_texts:
                words = words_of(text)
                if len(words) < FEWEST_WORDS:
                    self._whole[tuple(words)].add(place)
                else:
                    size = min(NUM_WORDS, len(words))
                    for start in range(len(words) - size + 1):
                        grams[tuple(words[start : start + size])].add(place)
        self._whole.pop((), None)
        kept = {gram: places for gram, places in grams.items() if len(places) <= MOST_ITEMS}
        # A word's number; 0 is every word that no n-gram has, so that most of a training text is ruled out at once.
        self._number = {word: place for place, word in enumerate(dict.fromkeys(w for gram in kept for w in gram), 1)}
        self._factor = np.random.default_rng(0).integers(1, 2**63, size=NUM_WORDS, dtype=np.uint64) | np.uint64(1)
        self._places: dict[int, dict[int, set[tuple[str, str]]]] = defaultdict(dict)  # by size, then by hash
        for gram, places in kept.items():
            hashed = self._hashes(np.array([self._number[word] for word in gram], dtype=np.int64), len(gram))
            self._places[len(gram)].setdefault(int(hashed[0]), set()).update(places)
        self._known = {size: np.array(sorted(hashes), dtype=np.uint64) for size, hashes in self._places.items()}

    def _hashes(self, numbers: Ints, size: int) -> Any:
        """Returns a 64-bit hash of every `size` numbers in a row."""
        windows = np.lib.stride_tricks.sliding_window_view(numbers.astype(np.uint64), size)
        mixed = windows * windows * self._factor[:size] + windows * self._factor[:size][::-1]  # modulo 2^64
        return mixed.sum(axis=1, dtype=np.uint64)

    def find(self, text: str) -> set[tuple[str, str]]:
        """Returns the places of items that share words with a text."""
        words = words_of(text)
        items = set(self._whole.get(tuple(words), ())) if len(words) < FEWEST_WORDS else set()
        numbers = np.fromiter((self._number.get(word, 0) for word in words), dtype=np.int64, count=len(words))
        if not numbers.any():
            return items
        num_unknown = np.concatenate([[0], np.cumsum(numbers == 0)])
        for size, known in self._known.items():
            if len(words) >= size:
                is_known = num_unknown[size:] == num_unknown[:-size]  # no word of the window is 0
                if is_known.any():
                    hashes = self._hashes(numbers, size)[is_known]
                    nearest = known[np.minimum(np.searchsorted(known, hashes), len(known) - 1)]
                    for hashed in hashes[nearest == hashes].tolist():
                        items |= self._places[size][hashed]
        return items


def overlaps(
    items: Mapping[str, Sequence[Item]], sources: Mapping[str, Sequence[str]]
) -> dict[str, dict[str, Overlap]]:
    """Returns the overlap by model and suite; `sources` are each model's training data. Each is read once.

    Raises: ValueError for data that cannot be read, naming file and line.
    """
    places = {(suite, item.item_id): item for suite, suite_items in items.items() for item in suite_items}
    search = OverlapSearch(places)
    overlapping: dict[str, set[tuple[str, str]]] = {}
    num_rows: Counter[str] = Counter()
    for source in dict.fromkeys(source for model_sources in sources.values() for source in model_sources):
        overlapping[source] = set()
        for _, row in read_source(source):
            num_rows[source] += 1
            for text in texts_of(row):
                overlapping[source] |= search.find(text)
    return {
        model: {
            suite: Overlap(
                frozenset(
                    item_id
                    for source in model_sources
                    for in_suite, item_id in overlapping[source]
                    if in_suite == suite
                ),
                {source: num_rows[source] for source in model_sources},
            )
            for suite in items
        }
        for model, model_sources in sources.items()
        if model_sources
    }


def texts_of(value: Any) -> Iterator[str]:
    """Yields every text of a row, also those in its lists and objects, whatever its fields are called."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from texts_of(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from texts_of(inner)


def training_files(model: Path) -> tuple[list[str], list[str]]:
    """Returns the data that a model of a run was trained on, and that of its parents, from their lineage.

    The second list names data that are recorded but are no longer files, or hold no rows of text (a label
    store, the .gguf file that training began with).
    """
    paths: dict[str, bool] = {}
    waiting, seen = [model.absolute().parent], set[Path]()
    while waiting:
        stage = waiting.pop()
        if stage in seen or not (stage / LINEAGE).is_file():
            continue
        seen.add(stage)
        lineage = parse_object((stage / LINEAGE).read_text(encoding="utf-8"), str(stage / LINEAGE))
        for source in lineage.get("data", {}):
            prefix, colon, name = source.partition(":")
            if colon and (stage.parent / prefix).is_dir() and prefix != "world":
                continue  # what another stage made from its own data
            path = stage.parent / "world" / "data" / f"{name}.jsonl" if prefix == "world" and colon else Path(source)
            paths[str(path)] = path.is_file() and is_file_name(str(path))
        waiting += [stage.parent / parent for parent in lineage.get("parents", {})]
    return [path for path, is_here in paths.items() if is_here], [
        path for path, is_here in paths.items() if not is_here
    ]
