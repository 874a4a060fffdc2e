"""Per-item logs of other tools as inputs of an evaluation: no model is asked, and every value is the log's.

    lm-evaluation-harness   a folder with samples_TASK_TIME.jsonl (`--log_samples`) of one model, and results_TIME.json
    inspect_ai              LOG.eval, which its own package reads, or the same log as LOG.json
    OpenAI evals            events as JSONL: {"sample_id", "type": "match", "data": {"correct": true}}

A task that all logs have becomes a suite, and tasks of one group of the harness become one suite together.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from evaluation.inputs import named_runs
from evaluation.suites.suite import (
    Asks,
    Item,
    Measure,
    Model,
    Scored,
    Suite,
    Tools,
    Unable,
    averaged,
    id_field,
    with_pass_at,
)
from files.fields import object_field, objects_field, present, shown, text_field
from files.hashes import json_hash
from files.rows import read_source
from lm.tokenizer import Messages
from stages.lineage import path_hash
from stages.reports.run_folder import parse_object

# Fields of a document, or of a sample's metadata, that items made from one text or template share.
CLUSTER_FIELDS = ("cluster", "passage_id", "passage", "context", "article", "template_id", "group_id")
LOWER_IS_BETTER = frozenset({"perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte", "brier_score", "ter"})
_SAMPLES = re.compile(r"samples_(?P<task>.+)_(?P<time>\d{4}-\d\d-\d\dT[\d.-]+)\.jsonl")
_LETTERS = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0}  # inspect_ai: correct, partly, incorrect, no answer


@dataclass(frozen=True)
class Sample:
    """One sample of one item in a log. `digest` is that of what was asked, "" if the log has none."""

    where: str
    messages: Messages
    answer: str
    values: Mapping[str, float]
    failures: Mapping[str, str] = field(default_factory=dict)
    failure: str = ""  # of all measures
    cluster: str = ""
    group: str = ""
    digest: str = ""


@dataclass
class LoggedModel(Unable):
    """One model's log, as a model under evaluation. `samples` are by suite and item id. `source` says where the items
    are from, unless that is the log, and `folder` holds the model if its answers were written here.
    """

    name: str
    spec: str
    tool: str
    samples: Mapping[str, Mapping[str, list[Sample]]]
    lower_is_better: frozenset[str]
    source: str = ""
    folder: Path | None = None
    can: frozenset[Asks] = field(default=frozenset({"log"}), init=False)
    has_chat_template: bool = field(default=False, init=False)

    @property
    def kind(self) -> str:
        return f"a log of {self.tool}"

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "kind": self.kind, "spec": self.spec, "sha256": path_hash(self.spec)}

    def close(self) -> None:
        """Hold nothing."""


def open_logs(specs: Sequence[str]) -> tuple[list[LoggedModel], Mapping[str, Sequence[str]]]:
    """Returns the logs of NAME=PATH or PATH, in order, and by algorithm the names of its runs.

    Raises: ValueError naming file, line and field of what is no log.
    """
    named, runs = named_runs(specs, "model")
    return [_open(name, spec) for name, spec in named], runs


def _open(name: str, spec: str) -> LoggedModel:
    path = Path(spec)
    if not path.exists():
        raise ValueError(f"model {name!r}: {spec}: no such file or folder")
    if path.is_dir() and any(path.rglob("samples_*.jsonl")):
        return LoggedModel(name, spec, "lm-evaluation-harness", *read_harness(name, path))
    if path.is_file() and path.suffix in (".eval", ".json"):
        return LoggedModel(name, spec, "inspect_ai", _inspect(path), frozenset())
    if path.is_file() and _SAMPLES.fullmatch(path.name):
        raise ValueError(f"model {name!r}: {spec}: one file of lm-evaluation-harness; its folder was expected")
    if path.is_file() and path.suffix == ".jsonl":
        return LoggedModel(name, spec, "OpenAI evals", _events(path), frozenset())
    raise ValueError(
        f"model {name!r}: {spec}: no log; without --suite, a folder with lm-evaluation-harness' samples_*.jsonl, an"
        " inspect_ai log (.eval, .json) or a .jsonl of OpenAI evals was expected"
    )


def suites_of(logs: Sequence[LoggedModel], tell: Callable[[str], None], *, every_task: bool = False) -> list[Suite]:
    """Returns the tasks that all logs have, as suites, and says which others are left out.

    Raises: ValueError if there is none, or with `every_task` if a log lacks one; and if logs hold different items under
        the same id.
    """
    every = list(dict.fromkeys(task for log in logs for task in log.samples))
    common = [task for task in every if all(task in log.samples for log in logs)]
    if not common:
        listed = "; ".join(f"{log.name} has {', '.join(log.samples)}" for log in logs)
        raise ValueError(f"the logs have no task in common: {listed}")
    lacking = {task: [log.name for log in logs if task not in log.samples] for task in every if task not in common}
    if lacking:
        listed = "; ".join(
            f"{task}, which {' and '.join(names)} lack{'s' * (len(names) == 1)}" for task, names in lacking.items()
        )
        if every_task:
            raise ValueError(f"--fail-if: the logs differ in their tasks: {listed}; the same tasks were expected")
        tell(f"left out: {listed}")
    return [_suite(task, logs, tell) for task in common]


def _suite(task: str, logs: Sequence[LoggedModel], tell: Callable[[str], None]) -> Suite:
    samples = [(item_id, one) for log in logs for item_id, several in log.samples[task].items() for one in several]
    first: dict[str, Sample] = {}
    for item_id, sample in samples:
        known = first.setdefault(item_id, sample)
        if known.digest != sample.digest:
            raise ValueError(
                f"{sample.where}: item {item_id!r} of {task} asks something else than in {known.where}; logs of"
                " the same items were expected"
            )
    if others := {item_id for item_id, sample in samples if sample.messages != first[item_id].messages}:
        tell(
            f"{task}: the prompts of {len(others):,} of {len(first):,} items differ between the logs: other few-shot"
            " examples or chat templates are part of what is compared"
        )
    measures = [_measure(name, samples, logs) for name in dict.fromkeys(n for _, s in samples for n in s.values)]
    if not measures:
        raise ValueError(f"{samples[0][1].where}: task {task} has no metric that is a number per item")
    num_samples = max(len(several) for log in logs for several in log.samples[task].values())
    passes = with_pass_at(measures, num_samples)
    measures += [measure for measure, _, _ in passes]
    items = [Item(item_id, s.messages, s.group, s.cluster) for item_id, s in first.items()]
    of_group: dict[str, set[str]] = {}
    for _, sample in samples:
        of_group.setdefault(sample.group, set()).update(sample.values)

    def score(model: Model, items: Sequence[Item], _tools: Tools) -> list[Scored]:
        assert isinstance(model, LoggedModel)
        found = model.samples[task]
        every = [measure.name for measure in measures[: len(measures) - len(passes)]]
        rows = {
            item_id: [_scored(item_id, one, every, of_group[one.group]) for one in several]
            for item_id, several in found.items()
        }
        missing = dict.fromkeys(every, "the log has no such item")
        return [
            averaged(item.item_id, rows.get(item.item_id) or [Scored(item.item_id, {}, "", missing)], passes)
            for item in items
        ]

    source = ", ".join(dict.fromkeys(log.source or log.spec for log in logs))
    return Suite(task, f"{task}, from logs of {logs[0].tool}", "log", measures, lambda _source: items, score, source)


def _measure(name: str, samples: Sequence[tuple[str, Sample]], logs: Sequence[LoggedModel]) -> Measure:
    """A metric whose values are all 0 or 1, or lie between them and reach both, is a share."""
    values = {sample.values[name] for _, sample in samples if name in sample.values}
    is_share = values <= {0.0, 1.0} or ({0.0, 1.0} <= values and all(0 <= value <= 1 for value in values))
    lower = any(name in log.lower_is_better for log in logs) or name.partition(",")[0] in LOWER_IS_BETTER
    return Measure(name, f"The log's {name}, mean over items.", higher_is_better=not lower, is_share=is_share)


def _scored(item_id: str, sample: Sample, measures: Sequence[str], expected: Set[str]) -> Scored:
    """`expected` are the measures that other samples of its group have numbers for."""
    if sample.failure:
        return Scored(item_id, {}, sample.answer, dict.fromkeys(measures, sample.failure))
    missing = expected - sample.values.keys()
    failures = {name: sample.failures.get(name, f"{sample.where}: no number for {name}") for name in missing}
    return Scored(item_id, sample.values, sample.answer, failures)


def _number(value: Any) -> float | None:
    if isinstance(value, str):
        return _LETTERS.get(value)
    return float(value) if isinstance(value, bool | int | float) and math.isfinite(value) else None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _messages(value: Any) -> Messages:
    """Returns a conversation, or a text as a user's turn; what is no text as JSON."""
    if not (isinstance(value, list) and value and all(isinstance(turn, dict) for turn in value)):
        return ({"role": "user", "content": _text(value)},)
    return tuple({"role": str(turn.get("role", "user")), "content": _text(turn.get("content", ""))} for turn in value)


def _cluster(fields: Any) -> str:
    """Returns the first cluster field that is not empty, long ones as a hash."""
    found = (fields[name] for name in CLUSTER_FIELDS if fields.get(name)) if isinstance(fields, dict) else ()
    text = _text(next(iter(found), ""))
    return text if len(text) <= 64 else json_hash(text)


# ---- lm-evaluation-harness ----


def read_harness(name: str, folder: Path) -> tuple[dict[str, dict[str, list[Sample]]], frozenset[str]]:
    """Reads the newest log of each task."""
    newest: dict[str, tuple[str, Path]] = {}
    files = sorted(folder.rglob("samples_*.jsonl"))
    if len(folders := {file.parent for file in files}) > 1:
        listed = ", ".join(map(str, sorted(folders)))
        raise ValueError(f"model {name!r}: {folder}: logs in {listed}; the folder of one model was expected")
    for file in files:
        match = _SAMPLES.fullmatch(file.name)
        if match is None:
            raise ValueError(f"{file}: samples_TASK_TIME.jsonl was expected as the name of a log")
        newest[match["task"]] = max(newest.get(match["task"], ("", file)), (match["time"], file))
    samples: dict[str, dict[str, list[Sample]]] = {}
    lower: set[str] = set()
    for task, (time, file) in newest.items():
        results_file = file.parent / f"results_{time}.json"
        results = (
            parse_object(results_file.read_text(encoding="utf-8"), str(results_file)) if results_file.is_file() else {}
        )
        root = _root(task, results.get("group_subtasks") or {})
        of_task = _harness_rows(file, "" if root == task else task)
        samples.setdefault(root, {}).update({item_id: [sample] for item_id, sample in of_task.items()})
        directions = (results.get("higher_is_better") or {}).get(task) or {}
        measured = {measure for sample in of_task.values() for measure in sample.values}
        lower |= {measure for measure in measured if directions.get(measure.partition(",")[0]) is False}
    return samples, frozenset(lower)


def _root(task: str, subtasks: Mapping[str, Sequence[str]]) -> str:
    """Returns the outermost group that a task belongs to, or the task itself."""
    parent = next((group for group, tasks in subtasks.items() if task in tasks and group != task), None)
    return _root(parent, subtasks) if parent else task


def _harness_rows(file: Path, group: str) -> dict[str, Sample]:
    """Reads one task's rows. A metric of a filter other than "none" is called METRIC,FILTER, as in the results."""
    found: dict[str, Sample] = {}
    seen: dict[tuple[str, str], str] = {}
    for where, row in read_source(str(file)):
        doc_id, kept_by = id_field(where, row, "doc_id"), str(row.get("filter", "none"))
        before = seen.setdefault((doc_id, kept_by), where)
        if before != where:
            raise ValueError(f"{where}: doc_id {doc_id} with filter {kept_by!r} is already in {before}")
        suffix = "" if kept_by == "none" else f",{kept_by}"
        metrics = row.get("metrics") or [key for key in row if key != "doc_id"]
        numbers = {name: float(row[name]) for name in metrics if isinstance(row.get(name), bool | int | float)}
        values = {f"{name}{suffix}": value for name, value in numbers.items() if math.isfinite(value)}
        failures = {
            f"{name}{suffix}": f"{where}: {name} is {shown(row.get(name))}; a number was expected"
            for name in row.get("metrics") or ()
            if f"{name}{suffix}" not in values
        }
        item_id = f"{group}/{doc_id}" if group else doc_id
        if item_id in found:
            values, failures = {**found[item_id].values, **values}, {**found[item_id].failures, **failures}
        found[item_id] = Sample(
            where, _harness_prompt(row), _harness_answer(row), values, failures, cluster=_cluster(row.get("doc")),
            group=group, digest=str(row.get("doc_hash", "")),
        )  # fmt: skip
    if not found:
        raise ValueError(f"{file}: no rows; at least one was expected")
    return found


def _harness_prompt(row: Mapping[str, Any]) -> Messages:
    """Returns the first request's context; one that a chat template has not rendered yet is a list in JSON."""
    arguments: Any = row.get("arguments")
    first = arguments.get("gen_args_0", "") if isinstance(arguments, dict) else arguments
    first = first.get("arg_0", "") if isinstance(first, dict) else first
    while isinstance(first, list) and first and not isinstance(first[0], dict):
        first = first[0]
    if isinstance(first, str) and first.startswith('[{"role"'):
        first = json.loads(first)
    return _messages(first or "")


def _harness_answer(row: Mapping[str, Any]) -> str:
    """Returns the model's whole text, from which filters extract what is scored."""
    only: Any = row.get("resps") or row.get("filtered_resps") or ""
    while isinstance(only, list) and len(only) == 1:
        only = only[0]
    return _text(only)


# ---- inspect_ai ----


def _inspect(path: Path) -> dict[str, dict[str, list[Sample]]]:
    log = _inspect_log(path) if path.suffix == ".eval" else parse_object(path.read_text(encoding="utf-8"), str(path))
    found: dict[str, list[Sample]] = {}
    for number, row in enumerate(objects_field(str(path), log, "samples"), 1):
        where = f"{path}: sample {number}"
        found.setdefault(id_field(where, row, "id"), []).append(_inspect_sample(where, row))
    if not found:
        raise ValueError(f"{path}: field 'samples' is empty; a log with at least one sample was expected")
    return {text_field(f"{path}: eval", object_field(str(path), log, "eval"), "task"): found}


def _inspect_log(path: Path) -> Any:
    if find_spec("inspect_ai") is None:
        raise ValueError(
            f"{path}: inspect_ai is not installed, which reads this format; run pip install 'heed-rlhf[inspect]', or"
            " `inspect log convert --to json`"
        )
    from inspect_ai.log import read_eval_log

    return read_eval_log(str(path)).model_dump(mode="json")


def _inspect_sample(where: str, row: Mapping[str, Any]) -> Sample:
    values: dict[str, float] = {}
    failures: dict[str, str] = {}
    for scorer, score in (object_field(where, row, "scores") if row.get("scores") else {}).items():
        value = score.get("value") if isinstance(score, dict) else score
        for key, part in value.items() if isinstance(value, dict) else [("", value)]:
            measure, number = f"{scorer}/{key}" if key else scorer, _number(part)
            if number is None:
                failures[measure] = f"the log's value is {shown(part)}; a number, or one of C, P, I, N, was expected"
            else:
                values[measure] = number
    error = row.get("error")
    failure = "" if values or failures else "the log has no score"
    if error:
        failure = f"the log has an error: {error.get('message') if isinstance(error, dict) else error}"
    output = object_field(where, row, "output") if row.get("output") else {}
    asked, answer = _messages(row.get("input", "")), str(output.get("completion", ""))
    digest = json_hash([dict(message) for message in asked], row.get("target"))
    cluster = _cluster(row.get("metadata"))
    return Sample(where, asked, answer, values, failures, failure, cluster, digest=digest)


# ---- OpenAI evals ----


def _events(path: Path) -> dict[str, dict[str, list[Sample]]]:
    """A sample may have several events, such as a match and its metrics. One that says again what an earlier one has
    said begins the item's next sample.
    """
    task, asked, written = "openai-evals", dict[str, Messages](), dict[str, Any]()
    found, said = dict[str, list[Sample]](), dict[str, set[str]]()  # the measures of each item's last sample
    for where, row in read_source(str(path)):
        kind = row.get("type")
        if isinstance(row.get("spec"), dict):
            task = str(row["spec"].get("eval_name", task))
        elif kind in ("match", "metrics", "sampling"):
            sample_id, data = id_field(where, row, "sample_id"), object_field(where, row, "data")
            if kind == "sampling":
                asked[sample_id], written[sample_id] = _messages(data.get("prompt", "")), data.get("sampled")
                continue
            wanted = {"correct": present(where, data, "correct")} if kind == "match" else data
            values = {name: number for name, value in wanted.items() if (number := _number(value)) is not None}
            only = written.get(sample_id) or data.get("sampled", data.get("picked", ""))
            answer = _text(only[0] if isinstance(only, list) and len(only) == 1 else only)
            samples, names = found.setdefault(sample_id, []), said.setdefault(sample_id, set())
            if samples and names.isdisjoint(wanted):
                one = samples[-1]
                samples[-1] = replace(one, answer=one.answer or answer, values={**one.values, **values})
            else:
                names.clear()
                samples.append(Sample(where, asked.get(sample_id, _messages("")), answer, values))
            names.update(wanted)
    if not found:
        raise ValueError(f"{path}: no event of type 'match' or 'metrics'; a log of OpenAI evals was expected")
    return {task: found}
