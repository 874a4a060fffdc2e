"""What a comparison's folder holds, read and checked for the report: every error names the file and the row.

Texts come from models and data: markup is the template's business (it escapes all), characters that no page can carry
are replaced where texts are shown.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evaluation.verdicts import Response, Verdict, read_responses, read_verdicts
from reading.fields import any_messages, any_text, list_field, text_field, whole_field
from reading.rows import read_source
from reports.run import plain

SETTINGS, PROMPTS, RESPONSES, VERDICTS, MEASURES = (
    "compare.json", "prompts.jsonl", "responses.parquet", "verdicts.parquet", "measures.json",
)  # fmt: skip


@dataclass(frozen=True)
class ComparedPrompt:
    """A prompt as conversation turns of (role, text)."""

    prompt_id: str
    messages: tuple[tuple[str, str], ...]
    category: str


@dataclass(frozen=True)
class ComparisonFolder:
    """A comparison as it was left. `policies` and `judges` are names in the order of compare.json.

    `settings` and `measures` are what compare.json and measures.json hold, numbers that are not finite as None;
    `measures` is empty where there is no such file. `files` maps every file that was read to its SHA-256.
    """

    name: str
    settings: Mapping[str, Any]
    policies: tuple[str, ...]
    judges: tuple[str, ...]
    seed: int
    prompts: Sequence[ComparedPrompt]
    responses: Sequence[Response]
    verdicts: Sequence[Verdict]
    measures: Mapping[str, Any]
    files: Mapping[str, str]


def is_comparison(folder: Path) -> bool:
    """Whether a folder is a comparison's, rather than a run's."""
    return (folder / SETTINGS).is_file()


def read_comparison(folder: Path) -> ComparisonFolder:
    """Read a comparison's folder.

    Errors: ValueError naming the file, and line or row, that is absent, malformed, or contradicts another.
    """
    settings = _object(folder / SETTINGS)
    policies = _names(folder / SETTINGS, settings, "policies")
    seed = whole_field(str(folder / SETTINGS), settings, "seed", 0, 2**63 - 1)
    prompts = _prompts(folder / PROMPTS)
    verdicts = read_verdicts(folder / VERDICTS)
    responses = read_responses(folder / RESPONSES)
    known = {prompt.prompt_id for prompt in prompts}
    _check_responses(folder / RESPONSES, responses, policies, known)
    _check_verdicts(folder / VERDICTS, verdicts, responses, policies, known)
    measures = _object(folder / MEASURES) if (folder / MEASURES).is_file() else {}
    read = [SETTINGS, PROMPTS, RESPONSES, VERDICTS] + ([MEASURES] if measures else [])
    return ComparisonFolder(
        name=folder.resolve().name,
        settings=settings,
        policies=policies,
        judges=_judges(folder / SETTINGS, settings, verdicts),
        seed=seed,
        prompts=prompts,
        responses=responses,
        verdicts=verdicts,
        measures=measures,
        files={file: hashlib.sha256((folder / file).read_bytes()).hexdigest() for file in read},
    )


def _object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"{path}: no such file; a comparison's folder has one")
    try:
        value = plain(json.loads(path.read_text(encoding="utf-8")))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: a JSON object was expected, not {type(value).__name__}")
    return value


def _names(path: Path, settings: Mapping[str, Any], field: str) -> tuple[str, ...]:
    """The names in a list of names, or of objects with a name each."""
    entries = list_field(str(path), settings, field)
    where = [f"{path}: {field}[{place}]" for place in range(len(entries))]
    names = [
        text_field(at, entry if isinstance(entry, dict) else {"name": entry}, "name")
        for at, entry in zip(where, entries, strict=True)
    ]
    if len(set(names)) < len(names):
        raise ValueError(f"{path}: field {field!r} names one of {', '.join(names)} twice")
    return tuple(names)


def _judges(path: Path, settings: Mapping[str, Any], verdicts: Sequence[Verdict]) -> tuple[str, ...]:
    """The judges whose verdicts there are, in the order of the settings, then by name."""
    listed = _names(path, settings, "judges") if "judges" in settings else ()
    found = {verdict.judge for verdict in verdicts}
    return (*(name for name in listed if name in found), *sorted(found - set(listed)))


def _prompts(path: Path) -> list[ComparedPrompt]:
    prompts, seen = [], set()
    for where, row in read_source(str(path)):
        prompt_id = text_field(where, row, "prompt_id")
        if prompt_id in seen:
            raise ValueError(f"{where}: prompt_id {prompt_id!r} is there twice")
        seen.add(prompt_id)
        turns = any_messages(where, row.get("messages"), "messages")
        messages = tuple((turn["role"], turn["content"]) for turn in turns)
        prompts.append(ComparedPrompt(prompt_id, messages, any_text(where, {"category": "", **row}, "category")))
    if not prompts:
        raise ValueError(f"{path}: no prompts")
    return prompts


def _check_responses(path: Path, rows: Sequence[Response], policies: Sequence[str], known: set[str]) -> None:
    seen: set[tuple[str, str, int]] = set()
    for number, row in enumerate(rows, 1):
        where = f"{path}: row {number}"
        _check_known(where, row.prompt_id, known, [row.policy], policies)
        key = (row.policy, row.prompt_id, row.index)
        if key in seen:
            raise ValueError(
                f"{where}: response {row.index} of {row.policy!r} to prompt {row.prompt_id!r} is there twice"
            )
        seen.add(key)


def _check_verdicts(
    path: Path, rows: Sequence[Verdict], responses: Sequence[Response], policies: Sequence[str], known: set[str]
) -> None:
    given = {(row.policy, row.prompt_id, row.index) for row in responses}
    for number, row in enumerate(rows, 1):
        where = f"{path}: row {number}"
        _check_known(where, row.prompt_id, known, [row.policy_a, row.policy_b], policies)
        for policy, index in ((row.policy_a, row.index_a), (row.policy_b, row.index_b)):
            if (policy, row.prompt_id, index) not in given:
                raise ValueError(
                    f"{where}: it is of response {index} of {policy!r} to prompt {row.prompt_id!r}, which {RESPONSES}"
                    " does not hold"
                )


def _check_known(where: str, prompt_id: str, known: set[str], named: Sequence[str], policies: Sequence[str]) -> None:
    if prompt_id not in known:
        raise ValueError(f"{where}: prompt {prompt_id!r} is not in {PROMPTS}")
    for name in named:
        if name not in policies:
            raise ValueError(f"{where}: policy {name!r} is not in {SETTINGS}; {', '.join(policies)} were expected")
