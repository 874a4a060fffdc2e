"""What a suite is opened with: the suite itself, and what the user gave for scoring."""

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import evaluation.suites
from evaluation.compare.judges import Asking, open_scorer
from evaluation.evaluate.models import Answering, Asked, Published, of_suite, open_model
from evaluation.inputs import named_specs
from evaluation.judges.judge import BATCH, ScoreJudge
from evaluation.suites.suite import Asks, Item, Request, Suite
from files.importing import load_module
from lm.tokenizer import Messages
from reward.endpoint import Answer
from reward.external import Scored

_HOLDS_SUITE = re.compile(r"^SUITE\b", re.MULTILINE)
SUITE_FIELDS = ("name", "title", "source", "needs", "uses", "asks", "measures", "read", "score", "published")
WANTED: Mapping[Asks, str] = {
    "conversations": "answers to conversations",
    "texts": "answers",
    "logprobs": "log-probabilities, which language models in this process give",
    "rewards": "rewards, which reward models give",
}


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
        suite_value: Any = getattr(load_module(place, "suite"), attribute or "SUITE", None)
        missing = [wanted for wanted in SUITE_FIELDS if not hasattr(suite_value, wanted)]
        if missing:
            raise ValueError(
                f"suite {name!r}: {place} holds no suite {attribute or 'SUITE'!r}: no {', '.join(missing)}"
            )
        opened: Suite = suite_value
        return opened
    if name.replace("_", "-") not in suite_names():
        raise ValueError(f"--suite {name!r}: one of {', '.join(suite_names())}, or FILE.py:NAME, was expected")
    suite: Suite = importlib.import_module(f"evaluation.suites.{name.replace('-', '_')}").SUITE
    return suite


@dataclass(frozen=True)
class TextScorer:
    """Scores answers by a function, an endpoint or a reward model (`evaluation.suites.suite.Scorer`)."""

    judge: ScoreJudge

    def score(self, conversations: Sequence[Messages], answers: Sequence[str]) -> list[float | str]:
        scored: list[Scored] = []
        for start in range(0, len(answers), BATCH):
            part = slice(start, start + BATCH)
            scored += self.judge.score(conversations[part], answers[part])
        return [one.failure or one.score for one in scored]


def open_scorers(specs: Sequence[str], suites: Sequence[Suite], asking: Asking) -> dict[str, TextScorer]:
    """Returns the scorers of MEASURE=SPEC. Raises: ValueError for a measure that takes none, or an invalid spec."""
    known = list(dict.fromkeys(m.name for suite in suites for m in suite.measures if m.has_scorer))
    scorers: dict[str, TextScorer] = {}
    if specs and not known:
        raise ValueError(f"--scorer {specs[0]!r}: {', '.join(suite.name for suite in suites)} takes no scorer")
    for named_spec in specs:
        measure, separator, spec = named_spec.partition("=")
        if not separator or not spec:
            raise ValueError(
                f"--scorer {named_spec!r}: MEASURE=SPEC was expected, such as toxicity=classifier.py:score"
            )
        if measure not in known or measure in scorers:
            raise ValueError(f"--scorer {named_spec!r}: one of the measures {', '.join(known)} was expected, each once")
        scorers[measure] = TextScorer(open_scorer(measure, spec, asking))
    return scorers


def open_baseline(spec: str, how: Answering) -> Asked | None:
    """Returns the model or file of --baseline; None for "". Raises: ValueError if it answers nothing."""
    if not spec:
        return None
    ((name, source),) = named_specs([spec], "baseline")
    opened = open_model(name, source, how)
    if isinstance(opened, Published) or "conversations" not in opened.can:
        kind = "published values" if isinstance(opened, Published) else opened.kind
        raise ValueError(
            f"--baseline {spec} is {kind}; a language model with a chat template, or a file of answers, was expected"
        )
    return opened


def asks_baseline(opened: Asked, suite: str, items: Sequence[Item]) -> Callable[[Sequence[Request]], list[Answer]]:
    """Returns `Tools.baseline`. Weights are released after each call; the next one finds the cached answers."""

    def ask(requests: Sequence[Request]) -> list[Answer]:
        answers = of_suite(opened, suite, items).answer(requests)
        opened.close()
        return answers

    return ask


def by_suite(specs: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """Returns the paths of [SUITE=]PATH by suite. Raises: ValueError for a suite that is not evaluated, or repeated."""
    values: dict[str, str] = {}
    for value in specs:
        name, separator, path = value.partition("=")
        if not separator or name not in names:
            if len(names) > 1 or (separator and not Path(value).exists()):
                raise ValueError(f"--data {value!r}: SUITE=PATH was expected, with a suite of {', '.join(names)}")
            name, path = names[0], value
        if name in values:
            raise ValueError(f"--data {value!r}: {name} already reads {values[name]}")
        values[name] = path
    return values


def refuse_unused_tools(suites: Sequence[Suite], tools: Mapping[str, str]) -> None:
    """Raise ValueError for a judge or baseline that no suite would use; `tools` are the specs by field of `Tools`."""
    for name, spec in tools.items():
        if spec and not any(name in suite.needs | suite.uses for suite in suites):
            raise ValueError(f"--{name} {spec}: {', '.join(suite.name for suite in suites)} uses no {name}")


def refuse_missing_tools(suite: Suite, tools: Mapping[str, Any]) -> None:
    """Raise ValueError naming the option without which a suite measures nothing; `tools` is by field of `Tools`."""
    options = {"judge": "--judge SPEC", "scorers": "--scorer MEASURE=SPEC", "baseline": "--baseline SPEC"}
    for name in sorted(suite.needs):
        if not tools[name]:
            raise ValueError(f"suite {suite.name!r} needs {options[name]}")


def refuse_unsuited(model: Asked, suite: Suite) -> None:
    """Raise ValueError naming model and suite if the model's kind cannot do what the suite asks."""
    if suite.asks not in model.can:
        raise ValueError(f"model {model.name!r} is {model.kind}; suite {suite.name!r} needs {WANTED[suite.asks]}")
