"""A suite of a user's own, which uses everything that a suite may use, and items for it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.evaluation.compare.conftest import heed_main, models

__all__ = ["heed_main", "models"]

SUITE = '''
import json
import pathlib

from evaluation.suites.suite import Continuation, Item, Measure, Request, Scored, Suite


def longest(rows):
    return max(len(row.answer) for row in rows)


MEASURES = (
    Measure("even", "Whether the answer has an even number of characters.", is_share=True),
    Measure("length", "Characters of the answer.", higher_is_better=False),
    Measure("longest", "Characters of the longest answer.", aggregate=longest),
    Measure("judged", "What a judge says."),
    Measure("beats", "Whether the answer is longer than the baseline's.", is_share=True),
)


def read(source):
    return [
        Item(row["id"], ({"role": "user", "content": row["question"]},), row["group"], row["cluster"], row)
        for row in map(json.loads, pathlib.Path(source).read_text().splitlines())
    ]


def foxes(model, items, tools):
    """Short questions, each asked in two turns, and what the answers are worth."""
    opening = [Request(item.messages, max_new_tokens=6, item_id=item.item_id) for item in items]
    first = model.answer(opening)
    others = tools.baseline(opening) if tools.baseline else ()
    asked = [
        (*item.messages, {"role": "assistant", "content": one.text}, {"role": "user", "content": "Go on."})
        for item, one in zip(items, first)
    ]
    second = model.answer([Request(messages, max_new_tokens=4, temperature=1.0) for messages in asked])
    judged = tools.judge.ask([item.messages for item in items], 5) if tools.judge else []
    rows = []
    for place, (item, one, two) in enumerate(zip(items, first, second)):
        failure = one.failure or two.failure
        text = f"{one.text} {two.text}"
        values = {} if failure else {"even": float(len(text) % 2 == 0), "length": float(len(text))}
        failures = dict.fromkeys(("even", "length", "longest"), failure) if failure else {}
        if judged:
            values["judged"] = float(len(judged[place].text))
        if tools.baseline:
            values["beats"] = float(len(one.text) > len(others[place].text))
        rows.append(Scored(item.item_id, values, text, failures))
    return rows


def likely(model, items, tools):
    """How likely a continuation is."""
    after = [Continuation(" yes", messages=item.messages) for item in items]
    plain = [Continuation(" jumps", text="The quick brown fox") for item in items]
    found = model.logprobs([*after, *plain])
    return [Scored(item.item_id, {"logprob": value}) for item, value in zip(items, found)]


def preferred(model, items, tools):
    """Whether a reward model prefers the longer answer."""
    turns = [[*item.messages, {"role": "assistant", "content": "A fox." * (n + 1)}] for n, item in enumerate(items)]
    found = model.rewards(turns)
    return [
        Scored(item.item_id, {"reward": one}) if isinstance(one, float)
        else Scored(item.item_id, {}, failures={"reward": one.failure})
        for item, one in zip(items, found)
    ]


def graded(model, items, tools):
    """What a judge that scores single responses says of the answers."""
    answers = model.answer([Request(item.messages, item_id=item.item_id) for item in items])
    grades = tools.scorer.score([item.messages for item in items], [answer.text for answer in answers])
    return [
        Scored(item.item_id, {}, answer.text, {"grade": grade.failure}) if grade.failure
        else Scored(item.item_id, {"grade": grade.score}, answer.text)
        for item, answer, grade in zip(items, answers, grades)
    ]


BOTH = frozenset({"judge", "baseline"})
SUITE = Suite("foxes", "Questions about foxes", "conversations", MEASURES, read, foxes, uses=BOTH)
LIKELY = Suite("likely", "Continuations", "logprobs", (Measure("logprob", "Nats."),), read, likely, uses=BOTH)
PREFERRED = Suite("preferred", "Rewards", "rewards", (Measure("reward", "The reward."),), read, preferred, uses=BOTH)
NEEDY = Suite("needy", "Foxes", "conversations", MEASURES, read, foxes, needs=frozenset({"judge"}))
SCORED = Suite("scored", "Foxes", "conversations", MEASURES, read, foxes, needs=frozenset({"grader"}))
GRADED = Suite(
    "graded", "Grades", "conversations", (Measure("grade", "The judge's."),), read, graded, needs=frozenset({"scorer"})
)
EMPTY = 5
'''
NUM_ITEMS = 6


@pytest.fixture
def place(tmp_path: Path, models: Path) -> Path:
    """A folder with a suite, its items, saved answers, a scorer, and the models."""
    (tmp_path / "suite.py").write_text(SUITE)
    items = [
        {"id": f"q{n}", "question": f"The fox {'x' * n}?", "group": "ab"[n % 2], "cluster": f"c{n // 2}"}
        for n in range(NUM_ITEMS)
    ]
    (tmp_path / "items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in items))
    (tmp_path / "scorers.py").write_text(
        "def length(prompts, responses):\n    return [len(text) for text in responses]\n"
    )
    (tmp_path / "models").symlink_to(models)
    return tmp_path


@pytest.fixture(scope="session")
def evaluate() -> Callable[..., list[str]]:
    """Returns the arguments of `heed evaluate` in a `place`."""

    def arguments(place: Path, *given: str, suite: str = "SUITE", out: str = "out") -> list[str]:
        fixed = ["--suite", f"{place / 'suite.py'}:{suite}", "--data", str(place / "items.jsonl")]
        return ["evaluate", *given, *fixed, "--out", str(place / out)]

    return arguments
