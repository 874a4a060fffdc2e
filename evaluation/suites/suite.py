"""The contract of an evaluation suite: its items, what a model is asked about them, and what the answers are worth.

A suite is one file. It reads its items, asks the model, and returns values per item. `evaluation.evaluate` does
everything else: it opens models, caches their answers, compares models with paired intervals, and writes the report.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from evaluation.endpoint import Answer
from lm.tokenizer import Messages


@dataclass(frozen=True)
class Item:
    """One item of a suite. Its ids are unique within the suite.

    Items of one `cluster` are not independent, such as questions made from one template: intervals treat a cluster as
    one observation. "" means that the item is its own cluster. `group` is the part of the suite that it belongs to,
    such as a category; "" if the suite has no parts. `messages` is the conversation that a model is asked, which ends
    with a user's turn; later turns of a conversation, and what scoring needs, are in `data`.
    """

    item_id: str
    messages: Messages
    group: str = ""
    cluster: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)


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
    `is_share` says that it and all its values are from 0 to 1. It is then shown in percent, with an interval in this
    range; values of 0 and 1 only are taken for shares without it.
    """

    name: str
    description: str
    higher_is_better: bool = True
    aggregate: Callable[[Sequence[Scored]], float] | None = None
    is_share: bool = False


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
# models without a chat template; log-probabilities; rewards.
Asks = Literal["conversations", "texts", "logprobs", "rewards"]


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

    def _refused(self, asked: str) -> ValueError:
        return ValueError(f"model {self.name!r} is {self.kind}, and was asked for {asked}")


class Judge(Protocol):
    """A language model that judges answers: it is sent whole prompts, and its replies are cached."""

    @property
    def name(self) -> str: ...

    def ask(self, prompts: Sequence[Messages], max_tokens: int) -> list[Answer]: ...


class Scorer(Protocol):
    """Scores answers by a classifier, a reward model, a function or an endpoint, such as one for toxicity."""

    def score(self, asked: Sequence[Messages], answers: Sequence[str]) -> list[float | str]:
        """Returns a number per answer, or the reason why there is none."""


@dataclass(frozen=True)
class Tools:
    """What the user gave for scoring: a judge, scorers by name of measure, and a baseline.

    `baseline` returns the baseline's answers to the requests that the model got, one per request.
    """

    judge: Judge | None = None
    scorers: Mapping[str, Scorer] = field(default_factory=dict)
    baseline: Callable[[Sequence[Request]], list[Answer]] | None = None


class Suite(Protocol):
    """A suite. Its module is `evaluation/suites/NAME.py` and holds it as `SUITE`; a user's is `FILE.py:NAME`.

    `source` is where items come from if the user names no other file or folder: a hub id, or "" if there is none.
    `needs` names the fields of `Tools` without which it measures nothing. Models that cannot do what it `asks` are
    refused before any model is asked.
    """

    @property
    def name(self) -> str: ...

    @property
    def title(self) -> str:
        """The suite's name for readers, with its paper."""

    @property
    def source(self) -> str: ...

    @property
    def needs(self) -> frozenset[str]: ...

    @property
    def asks(self) -> Asks: ...

    @property
    def measures(self) -> Sequence[Measure]:
        """What it reports, the most important measure first."""

    def read(self, source: str) -> list[Item]:
        """Reads the items from a file, a folder or a hub id. Raises: ValueError naming file, line and field."""

    def score(self, model: Model, items: Sequence[Item], tools: Tools) -> list[Scored]:
        """Asks the model about all items, and returns their values in the same order."""

    def published(self, source: str) -> Mapping[str, Sequence[Scored]]:
        """Returns values that others published with the items, by the name of their model; empty if there are none.

        The user evaluates them as models `published:NAME`, and `published:all`.
        """
