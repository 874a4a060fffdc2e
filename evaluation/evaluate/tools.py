"""What a suite is opened with: the suite itself, and what the user gave for scoring."""

import importlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import evaluation.suites
from evaluation.compare.judges import Asking, open_scorer
from evaluation.endpoint import Answer
from evaluation.evaluate.models import Answering, LocalModel, Opened, Published, RewardUnderTest, of_suite, open_model
from evaluation.inputs import named_specs
from evaluation.judges.scorers import BATCH, ScoreJudge
from evaluation.suites.suite import Item, Request, Scorer, Suite
from files.importing import load_module
from lm.tokenizer import Messages
from reward.external import Scored

_HOLDS_SUITE = re.compile(r"^SUITE\b", re.MULTILINE)
SUITE_FIELDS = ("name", "title", "source", "needs", "measures", "read", "score", "published")


def suite_names() -> list[str]:
    """Returns the names of Heed's own suites: the modules of `evaluation.suites` that hold one."""
    modules = Path(evaluation.suites.__file__).parent.glob("*.py")
    return sorted(
        path.stem.replace("_", "-") for path in modules if _HOLDS_SUITE.search(path.read_text(encoding="utf-8"))
    )


def open_suite(name: str) -> Suite:
    """Returns a suite by its name, or that of FILE.py:NAME. Raises: ValueError listing the names there are."""
    if ".py" in name or ":" in name:
        place, _, attribute = name.partition(":")
        found: Any = getattr(load_module(place, "suite"), attribute or "SUITE", None)
        missing = [wanted for wanted in SUITE_FIELDS if not hasattr(found, wanted)]
        if missing:
            raise ValueError(
                f"suite {name!r}: {place} holds no suite {attribute or 'SUITE'!r}: no {', '.join(missing)}"
            )
        opened: Suite = found
        return opened
    if name.replace("_", "-") not in suite_names():
        raise ValueError(f"--suite {name!r}: one of {', '.join(suite_names())}, or FILE.py:NAME, was expected")
    suite: Suite = importlib.import_module(f"evaluation.suites.{name.replace('-', '_')}").SUITE
    return suite


@dataclass(frozen=True)
class TextScorer:
    """Scores answers by a function, an endpoint or a reward model (`evaluation.suites.suite.Scorer`)."""

    judge: ScoreJudge

    def score(self, asked: Sequence[Messages], answers: Sequence[str]) -> list[float | str]:
        found: list[Scored] = []
        for start in range(0, len(answers), BATCH):
            part = slice(start, start + BATCH)
            found += self.judge.score(asked[part], answers[part])
        return [one.failure or one.score for one in found]


def open_scorers(specs: Sequence[str], suites: Sequence[Suite], asking: Asking) -> dict[str, Scorer]:
    """Returns the scorers of MEASURE=SPEC. Raises: ValueError for a measure that no suite has, or an invalid spec."""
    known = list(dict.fromkeys(measure.name for suite in suites for measure in suite.measures))
    found: dict[str, Scorer] = {}
    for given in specs:
        measure, separator, spec = given.partition("=")
        if not separator or not spec:
            raise ValueError(f"--scorer {given!r}: MEASURE=SPEC was expected, such as toxicity=classifier.py:score")
        if measure not in known or measure in found:
            raise ValueError(f"--scorer {given!r}: one of the measures {', '.join(known)} was expected, each once")
        found[measure] = TextScorer(open_scorer(measure, spec, asking))
    return found


def open_baseline(spec: str, how: Answering) -> Opened | None:
    """Returns the model or file of --baseline; None for "". Raises: ValueError if it answers nothing."""
    if not spec:
        return None
    ((name, source),) = named_specs([spec], "baseline")
    opened = open_model(name, source, how)
    if isinstance(opened, Published | RewardUnderTest):
        raise ValueError(f"--baseline {spec}: a language model or a file of answers was expected")
    return opened


@dataclass(frozen=True)
class Baseline(Mapping[str, Answer]):
    """The baseline's answers by item id. They are asked for when a suite first reads one."""

    opened: Opened
    suite: str
    of_items: Sequence[Item]

    @cached_property
    def _answers(self) -> dict[str, Answer]:
        assert not isinstance(self.opened, Published | RewardUnderTest), self.opened
        requests = [Request(item.messages, item_id=item.item_id) for item in self.of_items]
        answers = of_suite(self.opened, self.suite, self.of_items).answer(requests)
        if isinstance(self.opened, LocalModel):
            self.opened.close()
        return {item.item_id: answer for item, answer in zip(self.of_items, answers, strict=True)}

    def __getitem__(self, item_id: str) -> Answer:
        return self._answers[item_id]

    def __iter__(self) -> Iterator[str]:
        return (item.item_id for item in self.of_items)

    def __len__(self) -> int:
        return len(self.of_items)


def by_suite(given: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """Returns the paths of [SUITE=]PATH by suite. Raises: ValueError for a suite that is not evaluated, or repeated."""
    found: dict[str, str] = {}
    for value in given:
        name, separator, path = value.partition("=")
        if not separator or name not in names:
            if len(names) > 1 or (separator and not Path(value).exists()):
                raise ValueError(f"--data {value!r}: SUITE=PATH was expected, with a suite of {', '.join(names)}")
            name, path = names[0], value
        if name in found:
            raise ValueError(f"--data {value!r}: {name} already reads {found[name]}")
        found[name] = path
    return found


def refuse_missing_tools(suite: Suite, given: Mapping[str, Any]) -> None:
    """Raise ValueError naming the option without which a suite measures nothing; `given` is by field of `Tools`."""
    options = {"judge": "--judge SPEC", "scorers": "--scorer MEASURE=SPEC", "baseline": "--baseline SPEC"}
    for name in sorted(suite.needs):
        if not given[name]:
            raise ValueError(f"suite {suite.name!r} needs {options[name]}")
