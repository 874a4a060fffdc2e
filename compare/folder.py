"""The folder of a comparison: every file whole or absent, the same bytes for the same settings.

    compare.json        settings as resolved: policies, prompts, judges and what came of them, versions
    prompts.jsonl       prompt_id, messages, category
    responses.parquet   evaluation.verdicts.Response
    verdicts.parquet    evaluation.verdicts.Verdict, of every judge
    measures.json       measures of each policy (compare/results.py)

While a comparison is under way its responses lie in `FOLDER.sampling/`, one file a policy by what it depends on, so
that an interrupted one samples no policy again.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from evaluation.policies.policy import Policy
from evaluation.verdicts import Response, Verdict, read_responses, read_verdicts, write_rows
from files.atomic import atomic_folder, write_json
from files.lock import lock
from reading.fields import any_messages, any_text, text_field
from reading.rows import read_source
from stages.lineage import code_version
from training.data import Prompt

SETTINGS, PROMPTS, MEASURES = "compare.json", "prompts.jsonl", "measures.json"
RESPONSES, VERDICTS = "responses.parquet", "verdicts.parquet"
PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "scipy")

Settings = dict[str, Any]


def versions() -> dict[str, str]:
    """What computed the numbers."""
    return {"heed": code_version(), **{name: version(name) for name in PACKAGES}}


@contextmanager
def holding(folder: Path) -> Iterator[Path]:
    """Keep other comparisons out of a folder; gives that of what is under way, which goes once `folder` is there."""
    aside = folder.with_name(f"{folder.name}.sampling")
    aside.mkdir(parents=True, exist_ok=True)
    with lock(aside, doing="comparing", other="--out"):
        try:
            yield aside
        finally:
            if folder.exists():
                shutil.rmtree(aside)


def sampled_before(aside: Path, policy: Policy, prompts: Sequence[Prompt]) -> tuple[Path, list[Response]]:
    """The file for a policy's responses, and what it holds already."""
    asked = [prompt.model_dump() for prompt in prompts]
    depends = json.dumps([policy.describe(), asked], sort_keys=True)
    path = aside / f"{hashlib.sha256(depends.encode()).hexdigest()[:24]}.parquet"
    return path, read_responses(path) if path.is_file() else []


def write_comparison(
    folder: Path,
    settings: Settings,
    prompts: Sequence[Prompt],
    responses: Sequence[Response],
    verdicts: Sequence[Verdict],
) -> None:
    """A new folder, whole or absent. Errors: ValueError where it is there already."""
    if folder.exists():
        raise ValueError(f"{folder}: is there already; a new folder was expected (--out)")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with atomic_folder(folder) as aside:
        write_rows(aside / RESPONSES, responses)
        with (aside / PROMPTS).open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(json.dumps(_prompt_row(prompt), ensure_ascii=False) + "\n" for prompt in prompts)
        write_verdicts(aside, settings, verdicts)


def write_verdicts(folder: Path, settings: Settings, verdicts: Sequence[Verdict]) -> None:
    """Settings and verdicts of a folder, the settings last: a judge that they name has all its verdicts there."""
    write_rows(folder / VERDICTS, verdicts)
    write_json(folder / SETTINGS, settings)


def _prompt_row(prompt: Prompt) -> dict[str, Any]:
    return {"prompt_id": prompt.prompt_id, "messages": list(prompt.messages), "category": prompt.kind}


def _prompt(where: str, row: Mapping[str, Any]) -> Prompt:
    messages = any_messages(where, row.get("messages"), "messages")
    prompt_id, category = text_field(where, row, "prompt_id"), any_text(where, row, "category")
    return Prompt(prompt_id=prompt_id, messages=tuple(messages), kind=category)


def read_settings(folder: Path) -> Settings:
    """Errors: ValueError for a folder that holds no comparison."""
    path = folder / SETTINGS
    if not path.is_file():
        raise ValueError(f"{path}: no such file; the folder of a finished comparison was expected")
    try:
        settings: Settings = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    return settings


def read_judged(folder: Path) -> tuple[list[Prompt], dict[str, list[Response]], list[Verdict]]:
    """Prompts, responses by policy in the order of the settings, and verdicts of a comparison's folder."""
    prompts = [_prompt(where, row) for where, row in read_source(str(folder / PROMPTS))]
    responses: dict[str, list[Response]] = {policy["name"]: [] for policy in read_settings(folder)["policies"]}
    for response in read_responses(folder / RESPONSES):
        responses[response.policy].append(response)
    return prompts, responses, read_verdicts(folder / VERDICTS)


def refuse_other_settings(folder: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Errors: ValueError naming what differs between a finished comparison's settings and those asked for."""
    for name in ("policies", "prompts", "seed", "verdicts"):
        if found.get(name) != json.loads(json.dumps(wanted.get(name))):
            raise ValueError(
                f"{folder}: holds a comparison whose {name} differ: {json.dumps(found.get(name))}; now"
                f" {json.dumps(wanted.get(name))}. Give another --out, or remove the folder"
            )
