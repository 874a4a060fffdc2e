"""Evaluates models on suites: reads items, asks, scores, computes statistics, and writes the folder with its report.

Models are evaluated one after another, each on all suites, so that each is loaded once.
"""

import importlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import evaluation.suites
from evaluation.compare.folder import holding, versions
from evaluation.contamination import Overlap, add_given, overlaps, training_files
from evaluation.evaluate.folder import (
    REPORT,
    Contamination,
    EvaluationReport,
    ReportedMeasure,
    Settings,
    SuiteReport,
    data_json,
    is_evaluation,
    read_settings,
    write_evaluation,
)
from evaluation.evaluate.logs import LoggedModel, open_logs, suites_of
from evaluation.evaluate.models import (
    Answering,
    Asked,
    LocalModel,
    ModelJudge,
    RewardUnderTest,
    of_suite,
    open_judge,
    open_model,
    open_models,
)
from evaluation.evaluate.report import write_evaluation_report
from evaluation.evaluate.saved import SavedModel
from evaluation.evaluate.statistics import clean_values, suite_statistics
from evaluation.fail_if import Gate
from evaluation.inputs import named_specs
from evaluation.judges.judge import ScoreJudge
from evaluation.statistics.summary import Runs
from evaluation.suites.suite import Asks, Item, Model, Request, Scored, Suite, Tools, repeated
from files.atomic import atomic_folder, write_json
from files.hashes import derive_seed
from files.importing import load_module
from files.records import as_json
from files.rows import is_file_name
from reward.endpoint import Answer
from stages.lineage import path_hash
from stages.reports.text import clean_json

Rows = dict[str, Scored]  # by item id
UNCHANGING = ("models", "suites", "seed", "precision", "max_new_tokens", "max_items", "samples")


@dataclass(frozen=True)
class Evaluation:
    """The input of an evaluation: specs as `heed evaluate` takes them. Without suites, models are logs of other tools.
    `max_items` 0 means all. With a `gate`, logs must have the same tasks.
    """

    models: Sequence[str]
    suites: Sequence[str]
    data: Sequence[str]
    judge: str
    baseline: str
    training_data: Sequence[str]
    max_items: int
    how: Answering
    gate: Gate | None = None


@dataclass(frozen=True)
class _Prepared:
    """Everything that is read and checked before any model is asked. Mappings are by suite, `training` by model."""

    suites: Sequence[Suite]
    sources: Mapping[str, str]
    items: Mapping[str, Sequence[Item]]
    models: Sequence[Asked]
    runs: Runs
    judge: ModelJudge | ScoreJudge | None
    baseline: Asked | None
    ready: Mapping[str, Sequence[Model]]
    training: Mapping[str, tuple[list[str], list[str]]]


def evaluate(wanted: Evaluation, folder: Path) -> EvaluationReport:
    """Evaluate into `folder`, or again there, such as with another judge.

    Raises: ValueError for any invalid input, before any model is asked; for a model that cannot do what a suite asks;
    if too many requests fail or the budget is used up; if `folder` holds something else.
    """
    prepared = _prepare(wanted)
    settings = _settings(wanted, prepared)
    with holding(folder, doing="evaluating"):
        _refuse_another(folder, settings)
        overlap = overlaps(prepared.items, {model: files for model, (files, _) in prepared.training.items()})
        scored = _scored(prepared)
        if isinstance(prepared.judge, ModelJudge):
            prepared.judge.model.close()
        reports = tuple(
            _report(suite, prepared, scored[suite.name], overlap, wanted.how.seed) for suite in prepared.suites
        )
        report = EvaluationReport(tuple(model.name for model in prepared.models), reports, settings)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with atomic_folder(folder) as aside:
            write_evaluation(aside, settings, prepared.items, scored)
            write_json(aside / REPORT, clean_json(as_json(report)))
            write_evaluation_report(aside, folder.absolute().name)
    return report


def _prepare(wanted: Evaluation) -> _Prepared:
    logs = _logs(wanted)
    opened = (
        suites_of(logs[0], wanted.how.tell, every_task=wanted.gate is not None)
        if logs
        else [open_suite(name) for name in wanted.suites]
    )
    suites = [repeated(suite, wanted.how.num_samples) for suite in opened]
    names = [suite.name for suite in suites]
    if len(set(names)) < len(names):
        raise ValueError(f"--suite: {', '.join(names)} given; each suite once was expected")
    if wanted.gate is not None:
        for suite in suites:
            wanted.gate.check(suite.name, "measure", {measure.name: measure.is_share for measure in suite.measures})
    data = {} if logs else by_suite(wanted.data, names)
    sources = {suite.name: data.get(suite.name, suite.source) for suite in suites}
    items = {suite.name: _read(suite, sources[suite.name], wanted.max_items) for suite in suites}
    models, runs = logs or open_models(wanted.models, wanted.how)
    judge = open_judge(wanted.judge, wanted.how)
    baseline = open_baseline(wanted.baseline, replace(wanted.how, num_samples=1))
    field_of_judge = "scorer" if isinstance(judge, ScoreJudge) else "judge"
    refuse_tools(suites, {"judge": "", "scorer": "", "baseline": wanted.baseline, field_of_judge: wanted.judge})
    max_failed_share = wanted.how.asking.max_failed_share
    return _Prepared(
        suites=suites,
        sources=sources,
        items=items,
        models=models,
        runs=runs,
        judge=judge,
        baseline=baseline,
        ready={suite.name: _ready(models, suite, items[suite.name], max_failed_share) for suite in suites},
        training=_training_data(wanted.training_data, models, runs),
    )


def _logs(wanted: Evaluation) -> tuple[list[LoggedModel], Runs] | None:
    """Returns models as logs: those of other tools, or those of the harness' tasks, which run now. None for suites."""
    if wanted.data and not wanted.suites:
        raise ValueError(f"--data {wanted.data[0]}: logs have their items; no --data, or --suite NAME, was expected")
    if not wanted.suites:
        return open_logs(wanted.models)
    harness = [name for name in wanted.suites if name.startswith("harness:")]
    if not harness:
        return None
    if len(harness) < len(wanted.suites) or wanted.judge or wanted.baseline or wanted.how.num_samples > 1:
        raise ValueError(f"--suite {harness[0]}: no other suites, --judge, --baseline or --samples were expected")
    if find_spec("lm_eval") is None:
        raise ValueError(f"--suite {harness[0]}: lm_eval is not installed; run pip install '.[harness]'")
    from evaluation.harness import HarnessTask, open_tasks  # it imports the extra

    data = by_suite(wanted.data, harness)
    tasks = [HarnessTask.of(name, data.get(name, "")) for name in harness]
    return open_tasks(wanted.models, tasks, wanted.max_items, wanted.how)


def _settings(wanted: Evaluation, prepared: _Prepared) -> Settings:
    """Returns what the evaluation depends on, as JSON, and says which rows of saved answers it does not use."""
    unused: dict[str, dict[str, int]] = {}
    for suite, models in prepared.ready.items():
        for model in models:
            if isinstance(model, SavedModel) and model.unused:
                unused.setdefault(suite, {})[model.name] = len(model.unused)
                wanted.how.tell(
                    f"{model.name}: {len(model.unused):,} rows of the file answer none of the"
                    f" {len(prepared.items[suite]):,} items of {suite} and are unused, the first in {model.unused[0]}"
                )
    return {
        "models": [model.describe() for model in prepared.models],
        "algorithms": {name: list(names) for name, names in prepared.runs.items()},
        "suites": [
            _described(suite, prepared.sources[suite.name], prepared.items[suite.name]) for suite in prepared.suites
        ],
        "seed": wanted.how.seed,
        "precision": wanted.how.precision,
        "max_new_tokens": wanted.how.max_new_tokens,
        "max_items": wanted.max_items,
        "samples": wanted.how.num_samples,
        "judge": prepared.judge.describe() if prepared.judge else None,
        "baseline": prepared.baseline.describe() if prepared.baseline else None,
        "training_data": {model: files for model, (files, _) in prepared.training.items()},
        "unused_rows": unused,
        "versions": versions(),
    }


def _read(suite: Suite, source: str, max_items: int) -> list[Item]:
    """Returns a suite's items, or `max_items` evenly spread over all."""
    wanted = f"--data {suite.name}=PATH reads {suite.files or 'the items from a file or folder'}"
    if not source:
        raise ValueError(f"suite {suite.name!r}: its items are not on the hub; {wanted}")
    try:
        items = suite.read(source)
    except ValueError as error:
        if is_file_name(source) or Path(source).exists():
            raise
        raise ValueError(f"{error}; {wanted}") from None
    seen: set[str] = set()
    for item in items:
        if item.item_id in seen:
            raise ValueError(f"suite {suite.name!r}: {source}: item {item.item_id!r} occurs twice")
        seen.add(item.item_id)
        data_json(suite.name, item)  # refused now, not after the models were asked
    if not items:
        raise ValueError(f"suite {suite.name!r}: {source}: no items; at least one was expected")
    if not max_items or max_items >= len(items):
        return items
    return [items[place * len(items) // max_items] for place in range(max_items)]


def _described(suite: Suite, source: str, items: Sequence[Item]) -> dict[str, Any]:
    path = Path(source)
    sha256 = path_hash(source) if path.exists() else ""
    return {"name": suite.name, "title": suite.title, "source": source, "sha256": sha256, "num_items": len(items)}


def _refuse_another(folder: Path, settings: Settings) -> None:
    """Raise ValueError if a folder holds something else than this evaluation, which a new one would replace."""
    if not folder.exists():
        return
    if not is_evaluation(folder):
        raise ValueError(f"{folder}: exists and holds no evaluation; a new folder was expected (--out)")
    existing = read_settings(folder)
    for name in UNCHANGING:
        now = json.loads(json.dumps(settings[name]))
        if existing.get(name) != now:
            raise ValueError(
                f"{folder}: holds an evaluation whose {name} differ: {json.dumps(existing.get(name))}; now"
                f" {json.dumps(now)}. Give another --out, or remove the folder; cached answers are used again"
            )


def _ready(models: Sequence[Asked], suite: Suite, items: Sequence[Item], max_failed_share: float) -> list[Model]:
    """Returns the models as the suite asks them. Raises: ValueError for one that it cannot ask, and for a file that
    lacks too many answers.
    """
    for opened in models:
        refuse_unsuited(opened, suite)
    ready = [of_suite(opened, suite.name, items) for opened in models]
    for model in ready:
        if isinstance(model, SavedModel) and len(model.turns) < (1 - max_failed_share) * len(model.asked.by_id):
            raise ValueError(
                f"model {model.name!r}: the file answers {len(model.turns):,} of {len(model.asked.by_id):,} items of"
                f" {suite.name}; at least {1 - max_failed_share:.0%} were expected (--max-failed-share"
                f" {max_failed_share:g})"
            )
    return ready


def _scored(prepared: _Prepared) -> dict[str, dict[str, Rows]]:
    """Returns what every model's answers are worth, by suite, model and item id."""
    scored: dict[str, dict[str, Rows]] = {suite.name: {} for suite in prepared.suites}
    for place, opened in enumerate(prepared.models):
        for suite in prepared.suites:
            items, model = prepared.items[suite.name], prepared.ready[suite.name][place]
            ask_baseline = asks_baseline(prepared.baseline, suite.name, items) if prepared.baseline else None
            judge = prepared.judge
            tools = Tools(None, ask_baseline, judge) if isinstance(judge, ScoreJudge) else Tools(judge, ask_baseline)
            scored[suite.name][model.name] = _in_order(suite, model.name, items, suite.score(model, items, tools))
        opened.close()
    for suite in prepared.suites:
        both = suite.together({model: list(rows.values()) for model, rows in scored[suite.name].items()})
        scored[suite.name] = {model: {row.item_id: row for row in rows} for model, rows in both.items()}
    return scored


def _in_order(suite: Suite, model: str, items: Sequence[Item], scored: Sequence[Scored]) -> Rows:
    expected, returned = [item.item_id for item in items], [row.item_id for row in scored]
    if returned != expected:
        raise ValueError(
            f"suite {suite.name!r}: `score` returned {len(returned)} rows; one per item, in order, was expected"
        )
    _refuse_invalid(suite, model, scored)
    return dict(zip(expected, scored, strict=True))


def _refuse_invalid(suite: Suite, model: str, scored: Sequence[Scored]) -> None:
    """Raise ValueError naming suite, model, item and measure of a value that no statistic can take."""
    means = {measure.name: measure for measure in suite.measures if measure.aggregate is None}
    for row in scored:
        where = f"suite {suite.name!r}: model {model!r}: item {row.item_id!r}"
        both = row.values.keys() & row.failures.keys() & means.keys()
        if both:
            raise ValueError(f"{where}: {sorted(both)[0]} has a value and a failure")
        for name, value in row.values.items():
            if not math.isfinite(value):
                raise ValueError(f"{where}: {name} is {value}; a finite number, or a failure, was expected")
            if name in means and means[name].is_share and not 0 <= value <= 1:
                raise ValueError(f"{where}: {name} is {value:g}; it is a share, so a number from 0 to 1 was expected")


def _training_data(given: Sequence[str], models: Sequence[Asked], runs: Runs) -> dict[str, tuple[list[str], list[str]]]:
    """Returns the training data of every model that has any: files to read, and data that cannot be read. A model in a
    run's folder brings the data of its lineage.
    """
    files_of: dict[str, tuple[list[str], list[str]]] = {model.name: ([], []) for model in models}
    for model in models:
        if isinstance(model, LocalModel | LoggedModel) and model.folder:
            files_of[model.name] = training_files(model.folder)
        elif isinstance(model, RewardUnderTest) and model.scorer.kind == "reward model":
            files_of[model.name] = training_files(Path(model.scorer.spec.partition("#")[0]))
    add_given(given, {name: files for name, (files, _) in files_of.items()}, runs)
    return {name: data for name, data in files_of.items() if any(data)}


def _report(
    suite: Suite,
    prepared: _Prepared,
    rows: Mapping[str, Rows],
    overlap: Mapping[str, Mapping[str, Overlap]],
    seed: int,
) -> SuiteReport:
    items, own_seed = prepared.items[suite.name], derive_seed(seed, "evaluate", suite.name)
    return SuiteReport(
        suite=suite.name,
        title=suite.title,
        source=prepared.sources[suite.name],
        measures=tuple(ReportedMeasure(m.name, m.description, m.higher_is_better) for m in suite.measures),
        statistics=suite_statistics(
            suite.name,
            suite.measures,
            items,
            rows,
            prepared.runs,
            seen={model: overlap_of_model[suite.name].item_ids for model, overlap_of_model in overlap.items()},
            seed=own_seed,
        ),
        contamination=tuple(
            _contamination(
                suite, items, model, overlaps_of_model[suite.name], prepared.training[model][1], rows[model], own_seed
            )
            for model, overlaps_of_model in overlap.items()
        ),
    )


def _contamination(
    suite: Suite, items: Sequence[Item], model: str, overlap: Overlap, unread: Sequence[str], rows: Rows, seed: int
) -> Contamination:
    clean = [item for item in items if item.item_id not in overlap.item_ids]
    return Contamination(
        model=model,
        files=overlap.files,
        unread=tuple(unread),
        num_items=len(items),
        item_ids=tuple(item.item_id for item in items if item.item_id in overlap.item_ids),
        clean=tuple(clean_values(suite.measures, clean, rows, model=model, seed=seed)),
    )


# ---- what a suite is opened with ----


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
