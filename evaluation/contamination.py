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

from evaluation.suites.suite import Item
from files.rows import is_file_name, read_source
from stages.lineage import LINEAGE
from stages.reports.run_folder import parse_object

NUM_WORDS = 13
FEWEST_WORDS = 8
MOST_ITEMS = 10  # an n-gram of more items belongs to their common instruction, and shows nothing
FEWEST_CLEAN = 20  # items outside the training data, for a verdict
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
        self._places: dict[int, dict[tuple[str, ...], set[tuple[str, str]]]] = defaultdict(dict)  # by number of words
        for gram, places in grams.items():
            if len(places) <= MOST_ITEMS:
                self._places[len(gram)][gram] = places
        self._known = {word for grams_of_size in self._places.values() for gram in grams_of_size for word in gram}

    def find(self, text: str) -> set[tuple[str, str]]:
        """Returns the places of items that share words with a text."""
        words = words_of(text)
        items = set(self._whole.get(tuple(words), ())) if len(words) < FEWEST_WORDS else set()
        num_known = 0  # words in a row that an n-gram has, which few texts have many of
        for end, word in enumerate(words, start=1):
            num_known = num_known + 1 if word in self._known else 0
            if num_known >= FEWEST_WORDS:
                for size, places in self._places.items():
                    if num_known >= size:
                        items |= places.get(tuple(words[end - size : end]), frozenset())
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


def add_given(given: Sequence[str], files_of: Mapping[str, list[str]], runs: Mapping[str, Sequence[str]]) -> None:
    """Add the files of `--training-data [MODEL=]FILE` to those of one model, of all runs of an algorithm, or of all.

    Raises: ValueError if there is no such file.
    """
    for value in given:
        name, separator, path = value.partition("=")
        trained = [model for model in runs.get(name, [name]) if model in files_of] if separator else []
        path = path if trained else value
        if not Path(path).exists():
            raise ValueError(f"--training-data {value!r}: no such file; [MODEL=]FILE was expected")
        for model in trained or files_of:
            files_of[model].append(path)


def too_few_clean(num_clean: int, num: int, noun: str) -> str:
    """Says why there is no verdict on the items outside the training data; "" if there are enough, or no others."""
    if num_clean == num or num_clean >= FEWEST_CLEAN:
        return ""
    return f"only {num_clean} of {num} {noun}s are outside the training data, and at least {FEWEST_CLEAN} were expected"


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
