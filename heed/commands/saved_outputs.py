"""Labeling tasks from outputs that models have left in files: nothing is sampled."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from evaluation.inputs import asked_of, named_specs, read_compared_prompts
from evaluation.policies import SavedPolicy
from files.fields import any_text, names
from files.rows import Rows
from preferences.records import MAX_RESPONSES, MIN_RESPONSES, Message, Task
from training.data import DataConfig, read_rows

PREFIXES = ("response_", "output_", "completion_")


def tasks_of_files(specs: Sequence[str], prompts: str) -> tuple[list[Task], int]:
    """One task per prompt from files of outputs, NAME=FILE, each with one model's response to every prompt.

    A prompt's row may have a `warning`, which labelers see first.

    A text that several models wrote is one response. Its source names them all, and so do the task's details, under
    `policies`: one list of names per response, as `heed compare` writes them.

    Returns the tasks, and how many prompts are left out because all responses to them are the same.
    Raises: ValueError naming file and line of a malformed row, and prompts without a response.
    """
    asked = read_compared_prompts(DataConfig(source=prompts))
    warnings = [_warning(where, row) for where, row in read_rows(DataConfig(source=prompts))]
    policies = [SavedPolicy.open(name, spec, asked, allow_empty=True) for name, spec in named_specs(specs, "outputs")]
    texts = [{row.prompt_id: row.text for row in reversed(policy.responses)} for policy in policies]
    sources = [policy.name for policy in policies]
    found = [
        _task(prompt.messages, dict(zip(sources, (own[prompt.prompt_id] for own in texts), strict=True)), warning)
        for prompt, warning in zip(asked, warnings, strict=True)
    ]
    return _different(found)


def tasks_of_rows(rows: Rows) -> tuple[list[Task], int]:
    """One task per row that holds a prompt and the responses to it.

    The responses are `responses`, a list of texts or an object {model: text}, or fields such as `response_a` and
    `response_b`, or `output_1` and `output_2`. A row may have a `warning`. Returns and raises as `tasks_of_files`.
    """
    tasks = [_task(asked_of(where, row), _responses(where, row), _warning(where, row)) for where, row in rows]
    return _different(tasks)


def _responses(where: str, row: Mapping[str, Any]) -> dict[str, str]:
    """Texts by who wrote them; a field's name, or the number in a list, stands for a model without a name."""
    found = row.get("responses")
    if isinstance(found, list):
        found = {str(number): text for number, text in enumerate(found, 1)}
    if found is None:
        fields = [name for name in row if name.startswith(PREFIXES) and row[name] is not None]
        found = {name: row[name] for name in fields}
    if not isinstance(found, Mapping) or not MIN_RESPONSES <= len(found) <= MAX_RESPONSES:
        raise ValueError(
            f"{where}: {MIN_RESPONSES} to {MAX_RESPONSES} responses were expected, in 'responses' (a list, or an object"
            f" {{model: text}}) or in fields such as 'response_a' and 'response_b'; found {names(row)}"
        )
    return {name: any_text(where, found, name) for name in found}


def _warning(where: str, row: Mapping[str, Any]) -> str:
    return any_text(where, row, "warning") if row.get("warning") is not None else ""


def _task(messages: Sequence[Mapping[str, str]], responses: Mapping[str, str], warning: str) -> Task | None:
    """Returns the task, or None if all responses are the same.

    The same prompt and responses are the same task, so a command that is repeated adds nothing. The id is that of
    all responses, equal ones too: tasks stored before equal responses became one keep their ids.
    """
    names: dict[str, list[str]] = {}
    for source, text in responses.items():
        names.setdefault(text, []).append(source)
    if len(names) < MIN_RESPONSES:
        return None
    content = json.dumps([list(map(dict, messages)), list(responses.items())])
    details: dict[str, Any] = {"from": "saved outputs"}
    if len(names) < len(responses):  # otherwise as before, because a stored task with other details is refused
        details["policies"] = list(names.values())
    return Task(
        task_id=hashlib.sha256(content.encode("utf-8", "replace")).hexdigest()[:16],
        prompt=tuple(Message(turn["role"], turn["content"]) for turn in messages),
        responses=tuple(names),
        sources=tuple(", ".join(sources) for sources in names.values()),
        details=details,
        warning=warning,
    )


def as_stored(tasks: Sequence[Task], stored: Sequence[Task]) -> list[Task]:
    """Returns the tasks; one that the store holds with equal responses apart, as until November 2026, stays like that.

    Labelers may have judged it, and to `LabelStore.add_tasks` it would be another task with the same id.
    """
    apart = {task.task_id: task for task in stored if len(set(task.responses)) < len(task.responses)}
    return [
        replace(task, responses=old.responses, sources=old.sources, details=old.details)
        if (old := apart.get(task.task_id)) is not None
        else task
        for task in tasks
    ]


def _different(tasks: Sequence[Task | None]) -> tuple[list[Task], int]:
    kept = {task.task_id: task for task in tasks if task is not None}
    return list(kept.values()), len(tasks) - len(kept)
