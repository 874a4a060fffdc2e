"""What a suite is opened with: the suite itself, and what the user gave for scoring."""

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path

import evaluation.suites
from evaluation.evaluate.models import Answering, Asked, of_suite, open_model
from evaluation.inputs import named_specs
from evaluation.suites.suite import Asks, Item, Request, Suite, Tools
from files.importing import load_module
from reward.endpoint import Answer

_HOLDS_SUITE = re.compile(r"^SUITE\b", re.MULTILINE)
WANTED: Mapping[Asks, str] = {
    "conversations": "answers to conversations",
    "texts": "answers",
    "logprobs": "log-probabilities, which language models in this process give",
    "rewards": "rewards, which reward models give",
    "log": "a log",
}
TOOLS = {  # by field of `Tools`
    "judge": "--judge SPEC, a judge that is a language model",
    "scorer": "--judge SPEC, a judge that scores single responses, such as FILE.py:FUNCTION",
    "baseline": "--baseline SPEC, a baseline",
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
        own = getattr(load_module(place, "suite"), attribute or "SUITE", None)
        if not isinstance(own, Suite):
            raise ValueError(f"suite {name!r}: {place} holds no `evaluation.suites.suite.Suite` {attribute or 'SUITE'}")
        tools = {field.name for field in fields(Tools)}
        if unknown := (own.needs | own.uses) - tools:
            raise ValueError(f"suite {name!r}: needs or uses {sorted(unknown)}; some of {sorted(tools)} were expected")
        return own
    if name.replace("_", "-") not in suite_names():
        raise ValueError(f"--suite {name!r}: one of {', '.join(suite_names())}, or FILE.py:NAME, was expected")
    suite: Suite = importlib.import_module(f"evaluation.suites.{name.replace('-', '_')}").SUITE
    return suite


def open_baseline(spec: str, how: Answering) -> Asked | None:
    """Returns the model or file of --baseline; None for "". Raises: ValueError if it answers nothing."""
    if not spec:
        return None
    ((name, source),) = named_specs([spec], "baseline")
    opened = open_model(name, source, how)
    if "conversations" not in opened.can:
        raise ValueError(
            f"--baseline {spec} is {opened.kind}; a language model with a chat template, or a file of answers, was"
            " expected"
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


def refuse_tools(suites: Sequence[Suite], given: Mapping[str, str]) -> None:
    """Raise ValueError for a judge or baseline that no suite would use, and for a suite that lacks what it needs;
    `given` are the specs by field of `Tools`.
    """
    for name, spec in given.items():
        if spec and not any(name in suite.needs | suite.uses for suite in suites):
            option, _, what = TOOLS[name].partition(" SPEC, ")
            names = ", ".join(suite.name for suite in suites)
            raise ValueError(f"{option} {spec}: {names} uses no {what.removeprefix('a ')}")
    for suite in suites:
        has_scorer = "scorer" in suite.uses and given["scorer"]
        for name in sorted(suite.needs):
            if not given[name] and not (name == "judge" and has_scorer):
                raise ValueError(f"suite {suite.name!r} needs {TOOLS[name]}")


def refuse_unsuited(model: Asked, suite: Suite) -> None:
    """Raise ValueError naming model and suite if the model's kind cannot do what the suite asks."""
    if suite.asks not in model.can:
        raise ValueError(f"model {model.name!r} is {model.kind}; suite {suite.name!r} needs {WANTED[suite.asks]}")
