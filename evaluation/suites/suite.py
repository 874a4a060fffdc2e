"""The contract of an evaluation suite: its items, what a model is asked about them, and what the answers are worth.

A suite is one file. It reads its items, asks the model, and returns values per item. `evaluation.evaluate` does
everything else: it opens models, caches their answers, compares models with paired intervals, and writes the report.
The functions at the end read the rows of a suite's file, and name every malformed row.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from evaluation.judges.judge import ScoreJudge
from files.fields import kind_of, list_field, name_field, present
from files.rows import InvalidRows, is_file_name, read_source, valid_rows
from lm.tokenizer import Messages
from reward.endpoint import Answer

Row = Mapping[str, Any]
Found = TypeVar("Found")


@dataclass(frozen=True)
class Item:
    """One item of a suite. Its ids are unique within the suite.

    Items of one `cluster` are not independent, such as questions made from one template: intervals treat a cluster as
    one observation. "" means that the item is its own cluster. `group` is the part of the suite that it belongs to,
    such as a category; "" if the suite has no parts. `messages` is the conversation that a model is asked, which ends
    with a user's turn; later turns of a conversation, and what scoring needs, are in `data`: JSON, tuples and
    dataclasses.

    `own_texts` are what training data are searched for, if that is not the text of all user's turns in `messages`:
    without examples, and with later turns. `asked_id` is the id of the request that answers the item, if several items
    share an answer; "" means the item's own.
    """

    item_id: str
    messages: Messages
    group: str = ""
    cluster: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)
    own_texts: tuple[str, ...] = ()
    asked_id: str = ""


@dataclass(frozen=True)
class Scored:
    """What one model's answer to one item is worth: a value by name of measure, and other values that aggregates need.

    A measure that could not be computed has no value; `failures` then says why, by name of measure. It is counted, and
    never taken for 0. A measure that does not apply to the item is in neither of the two.
    """

    item_id: str
    values: Mapping[str, float]
    answer: str = ""
    failures: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Measure:
    """A number that a suite reports for a model. `description` is a sentence that says how it is defined and its unit.

    It is the mean of the items' values, or `aggregate` of the scored items if it is no mean (BLEU, for example).
    `reads` names the values that an aggregate reads: items without them are not its items. It must be a smooth function
    of the items, as its interval is the jackknife's; a median or a maximum has none that can be trusted. NaN means that
    it is unknown, for example because a part of the suite has no item.

    `is_share` says that it and all its values are from 0 to 1, such as 0 for wrong and 1 for right. It is then shown in
    percent, with an interval in this range.
    """

    name: str
    description: str
    higher_is_better: bool = True
    aggregate: Callable[[Sequence[Scored]], float] | None = None
    is_share: bool = False
    reads: tuple[str, ...] = ()


def failed(item: Item, failure: str, measures: Sequence[Measure], answer: str = "") -> Scored:
    """Returns an item without values, with the same reason for each of these measures."""
    return Scored(item.item_id, {}, answer, {measure.name: failure for measure in measures})


@dataclass(frozen=True)
class Request:
    """What a model is asked to write: the next turn of `messages`, or the continuation of `text` without any template.

    Exactly one of the two is set. Temperature 0 is greedy. Generation ends before the first of `stop`. Equal requests
    of one call are different samples if the temperature is above 0. Saved answers are found by `item_id`, or without
    one by the item's messages, which `messages` then begins with. The request for the n-th turn of a conversation has
    n - 1 answers more than the item's messages.
    """

    messages: Messages = ()
    text: str = ""
    max_new_tokens: int = 512
    temperature: float = 0.0
    stop: tuple[str, ...] = ()
    item_id: str = ""


@dataclass(frozen=True)
class Continuation:
    """A text whose probability is asked for, after a conversation or after a plain text."""

    continuation: str
    messages: Messages = ()
    text: str = ""


# What a suite asks of a model: answers to conversations; answers to conversations, or the continuation of texts from
# models without a chat template; log-probabilities; rewards; nothing, as the values are in a log.
Asks = Literal["conversations", "texts", "logprobs", "rewards", "log"]


class Model(Protocol):
    """A model under evaluation. Methods raise ValueError, naming the model, if its kind cannot do what is asked."""

    @property
    def name(self) -> str: ...

    @property
    def has_chat_template(self) -> bool:
        """Whether it can be asked conversations. A model without a template only continues plain text."""

    def answer(self, requests: Sequence[Request]) -> list[Answer]:
        """Returns one answer per request. A failed one has a reason in `failure` instead of a text."""

    def logprobs(self, continuations: Sequence[Continuation]) -> list[float]:
        """Returns log p(continuation | what comes before it), nats, summed over its tokens."""

    def rewards(self, conversations: Sequence[Messages]) -> list[Answer | float]:
        """Returns a reward model's score of each conversation's last turn, or the failed answer if there is none."""


class Unable:
    """Refuses all that a model can be asked. A kind of model overrides the methods for what it can do."""

    name: str

    @property
    def kind(self) -> str:
        """What the model is, for messages, such as "a file of answers"."""
        return "a model"

    def answer(self, requests: Sequence[Request]) -> list[Answer]:
        raise self._refused(f"{len(requests):,} answers")

    def logprobs(self, continuations: Sequence[Continuation]) -> list[float]:
        raise self._refused(f"{len(continuations):,} log-probabilities")

    def rewards(self, conversations: Sequence[Messages]) -> list[Answer | float]:
        raise self._refused(f"{len(conversations):,} rewards")

    def _refused(self, request: str) -> ValueError:
        return ValueError(f"model {self.name!r} is {self.kind}, and was asked for {request}")


class Judge(Protocol):
    """A language model that judges answers: it is sent whole prompts, and its replies are cached."""

    @property
    def name(self) -> str: ...

    def ask(self, prompts: Sequence[Messages], max_tokens: int) -> list[Answer]: ...


@dataclass(frozen=True)
class Tools:
    """What the user gave for scoring: a judge, which is a language model or a scorer, and a baseline.

    `scorer.score(conversations, responses)` returns a score, or a failure, per response. `baseline` returns the
    baseline's answers to the requests that the model got, one per request.
    """

    judge: Judge | None = None
    baseline: Callable[[Sequence[Request]], list[Answer]] | None = None
    scorer: ScoreJudge | None = None


@dataclass(frozen=True)
class Suite:
    """A suite. Its module is `evaluation/suites/NAME.py` and holds it as `SUITE`; a user's is `FILE.py:NAME`.

    `title` is its name for readers, with its paper, and `measures` is what it reports, the most important one first.

    `read` returns the items of a file, a folder or a hub id, and raises ValueError naming file, line and field. `score`
    asks a model about all items, and returns their values in the same order.

    `source` is where items come from if the user names no other file or folder: a hub id, or "" if there is none.
    `files` says which file to get instead: address, licence and size.
    `needs` names the fields of `Tools` without which it measures nothing, and `uses` those that it can do without;
    others are refused. A suite that needs a judge and uses a scorer gets one of the two. Models that cannot do what it
    `asks` are refused before any model is asked. `together` adds values that need all models' rows.
    """

    name: str
    title: str
    asks: Asks
    measures: Sequence[Measure]
    read: Callable[[str], list[Item]]
    score: Callable[[Model, Sequence[Item], Tools], list[Scored]]
    source: str = ""
    files: str = ""
    needs: frozenset[str] = frozenset()
    uses: frozenset[str] = frozenset()
    together: Callable[[Mapping[str, Sequence[Scored]]], Mapping[str, Sequence[Scored]]] = lambda scored: scored


# ---- several samples of each item ----
#
# Their mean is the item's value, and pass@k says how often one of k is right. An item stays one observation, however
# many samples it has, so more samples never pass for more items.


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


# ---- reading a suite's file ----


def read_by_id(
    source: str, read: Callable[[str, Row], tuple[str, Found]], *, split: str = "train", subset: str = ""
) -> dict[str, Found]:
    """Returns the rows by id, where `read(where, row)` returns one's id and what it holds.

    `split` and `subset` select from a hub id.

    Raises: ValueError naming file, line and field of malformed rows, and both lines of a repeated id.
    """
    seen: dict[str, str] = {}

    def checked(where: str, row: Row) -> tuple[str, Found]:
        own_id, value = read(where, row)
        first = seen.setdefault(own_id, where)
        if first != where:
            raise ValueError(f"{where}: the id {own_id!r} is already used in {first}")
        return own_id, value

    invalid = InvalidRows(source, hint="")
    is_hub = not is_file_name(source) and not Path(source).exists()
    rows = read_source(source, split=split, subset=subset if is_hub else "", invalid=invalid)
    by_id = dict(one for _, one in valid_rows(rows, checked, invalid))
    if not by_id:
        raise ValueError(f"{source}: no rows; at least one was expected")
    return by_id


def read_items(source: str, read: Callable[[str, Row], Item], *, split: str = "train", subset: str = "") -> list[Item]:
    """Returns `read(where, row)` of all rows. Raises: ValueError as `read_by_id` does."""

    def with_id(where: str, row: Row) -> tuple[str, Item]:
        item = read(where, row)
        return item.item_id, item

    return list(read_by_id(source, with_id, split=split, subset=subset).values())


def id_field(where: str, row: Row, field: str) -> str:
    """Returns an id, which may be a text or a whole number, as text."""
    present(where, row, field)
    name = name_field(where, row, field)
    if not name:
        raise ValueError(f"{where}: field {field!r} is empty; an id was expected")
    return name


def texts_field(where: str, row: Row, field: str) -> list[str]:
    """Returns a list of texts, which may be empty ones."""
    texts = list_field(where, row, field)
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise ValueError(f"{where}: field '{field}[{index}]' is {kind_of(text)}; a string was expected")
    return texts
