"""The config of a job's compare stage, and the folder of a comparison: writing it and reading it.

The same settings give the same bytes.

    compare.json        resolved settings: policies, prompts, judges and their outcomes, versions
    prompts.jsonl       prompt_id, messages, category, and cluster if prompts have one
    responses.parquet   evaluation.verdicts.Response
    verdicts.parquet    evaluation.verdicts.Verdict, of every judge
    measures.json       measures of each policy (evaluation/compare/results.py)

While a comparison is running, its responses are in `FOLDER.sampling/`, one file per policy, named by a hash of what
they depend on, so that an interrupted comparison samples no policy again.
"""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

from pydantic import Field

from evaluation.inputs import samples_per_prompt
from evaluation.policies import Policy
from evaluation.verdicts import Response, Verdict, read_responses, read_verdicts, write_rows
from files.atomic import atomic_folder, lock, write_json, write_text
from files.fields import any_messages, any_text, list_field, text_field, whole_field
from files.hashes import file_hash
from files.records import record_of
from files.rows import read_source
from stages.lineage import code_version
from stages.reports.run_folder import parse_object
from stages.reports.text import DEFAULT_NAMES, clean_json
from training.config import Config
from training.data import DataConfig, OnOverlong, Prompt, overlong_field


class CompareConfig(Config):
    """Judges each policy's responses to the same prompts by what training never used: the world's gold judge, a reward
    model, a function, or people, for whom the stage waits. The reward used in training may judge too, on prompts
    that it has not seen.
    """

    prompts: DataConfig = Field(description="Prompts that all policies answer.")
    cluster_by: str = Field(
        default="",
        description="Field of the prompts' rows that says which prompts depend on each other, such as the template they"
        " were made from; intervals and tests are then over these clusters. Empty = the prompts are independent.",
    )
    scored_by: tuple[str, ...] = Field(
        default=(),
        description="Names in `ppo.reward.sources` of the rewards that score responses to these prompts, as in"
        " ppo.prompts; empty = all of them. A row's own `scored_by` takes precedence.",
    )
    judge_from: str = Field(
        default="", description="Model directory or hub id of a reward model that judges; empty = the world's judge."
    )
    judge_function: str = Field(
        default="",
        pattern=r"^(|[^:]+:[^:]+)$",
        description='Python function that judges, "MODULE:FUNCTION" or "FILE.py:FUNCTION"; higher is better.',
    )
    judge_people: str = Field(
        default="",
        description="Label store whose labelers judge: a file, or a PostgreSQL URL without a password.",
    )
    judge_reward: bool = Field(
        default=False,
        description="Whether the job's own reward judges, its reward model or PPO's function. It cannot show that the"
        " reward was gamed; any other judge can.",
    )
    num_labelers: int = Field(default=1, ge=1, description="Labelers per task of `judge_people`.")
    judged_share: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Share of the tasks of `judge_people` that must have all their judgments; labelers skip some.",
    )
    on_overlong: OnOverlong = overlong_field()
    num_samples: int = Field(
        default=0,
        ge=0,
        description="Responses per prompt and policy; 0 = as many as make 200 responses of a policy, from 1 to 8, but 1"
        " if people judge.",
    )
    best_of: int = Field(default=16, ge=2, description="Samples per prompt of the SFT policy, for best-of-n.")
    max_new_tokens: int = Field(ge=1, description="Length limit of a response, in tokens.")
    temperature: float = Field(default=1.0, ge=0, description="Sampling temperature; 0 = greedy.")

    def sized(self, num_prompts: int) -> Self:
        """Returns the config with the responses per prompt and policy that this many prompts take."""
        if self.num_samples:
            return self
        is_one = self.judge_people or not self.temperature  # greedy responses to a prompt are all alike
        return self.model_copy(update={"num_samples": 1 if is_one else samples_per_prompt(num_prompts)})


SETTINGS, PROMPTS, MEASURES = "compare.json", "prompts.jsonl", "measures.json"
RESPONSES, VERDICTS = "responses.parquet", "verdicts.parquet"
ALGORITHMS = "algorithms"  # in the settings: by algorithm, the policies that are its training runs
TRAINING_DATA = "training_data"  # the setting with each policy's files and the prompts that overlap with them
PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "scipy")

Settings = dict[str, Any]


def versions() -> dict[str, str]:
    """Returns the versions of the code that computed the numbers."""
    return {"heed": code_version(), **{name: version(name) for name in PACKAGES}}


@contextmanager
def holding(folder: Path, doing: str = "comparing") -> Iterator[Path]:
    """Lock a folder against other commands. Yields the folder for unfinished work, which is removed once `folder`
    exists.
    """
    aside = folder.with_name(f"{folder.name}.sampling")
    aside.mkdir(parents=True, exist_ok=True)
    with lock(aside, doing=doing, other="--out"):
        try:
            yield aside
        finally:
            if folder.exists():
                shutil.rmtree(aside)


def write_comparison(
    folder: Path,
    settings: Settings,
    prompts: Sequence[Prompt],
    responses: Sequence[Response],
    verdicts: Sequence[Verdict],
) -> None:
    """Write a new folder atomically. Raises: ValueError if it already exists."""
    if folder.exists():
        raise ValueError(f"{folder}: already exists; a new folder was expected (--out)")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with atomic_folder(folder) as aside:
        write_files(aside, settings, prompts, responses, verdicts)


def write_files(
    folder: Path,
    settings: Settings,
    prompts: Sequence[Prompt],
    responses: Sequence[Response],
    verdicts: Sequence[Verdict],
) -> None:
    """Write a comparison's files into an existing folder, compare.json last."""
    write_rows(folder / RESPONSES, responses)
    lines = [json.dumps(_prompt_row(prompt), ensure_ascii=False) + "\n" for prompt in prompts]
    write_text(folder / PROMPTS, "".join(lines))
    write_verdicts(folder, settings, verdicts)


def write_verdicts(folder: Path, settings: Settings, verdicts: Sequence[Verdict]) -> None:
    """Write a folder's verdicts and then its settings, so that every judge named there has all its verdicts."""
    write_rows(folder / VERDICTS, verdicts)
    write_json(folder / SETTINGS, settings)


def _prompt_row(prompt: Prompt) -> dict[str, Any]:
    row = {"prompt_id": prompt.prompt_id, "messages": list(prompt.messages), "category": prompt.kind}
    return row | ({"cluster": prompt.cluster} if prompt.cluster else {})


@dataclass(frozen=True)
class ComparisonFolder:
    """A finished comparison, read and checked. `policies` and `judges` are names in the order of compare.json.

    `settings` and `measures` are the contents of compare.json and measures.json, with None for numbers that are not
    finite; `measures` is empty if there is no such file. `files` maps every file that was read to its SHA-256.
    """

    name: str
    settings: Settings
    policies: tuple[str, ...]
    judges: tuple[str, ...]
    seed: int
    prompts: Sequence[Prompt]
    responses: Sequence[Response]
    verdicts: Sequence[Verdict]
    measures: Mapping[str, Any]
    files: Mapping[str, str]

    @property
    def about(self) -> tuple[Policy, ...]:
        """What is known about each policy."""
        return tuple(record_of(entry, Policy, f"{SETTINGS}: policies") for entry in self.settings["policies"])

    @property
    def scorer(self) -> str:
        """What the page calls what gave the responses' proxy scores."""
        return str(self.settings.get("scorer", DEFAULT_NAMES.scorer))

    @property
    def runs(self) -> dict[str, list[str]]:
        """Returns, by algorithm, the policies that are its training runs; empty unless a name has several."""
        runs: dict[str, list[str]] = self.settings.get(ALGORITHMS, {})
        return runs

    @property
    def seen(self) -> dict[str, list[str]]:
        """Returns the prompts that overlap with the training data of each policy whose data was searched."""
        return {name: entry["prompt_ids"] for name, entry in self.settings.get(TRAINING_DATA, {}).items()}

    @property
    def by_policy(self) -> dict[str, list[Response]]:
        """Returns the responses of each policy."""
        return {name: [row for row in self.responses if row.policy == name] for name in self.policies}


def is_comparison(folder: Path) -> bool:
    """Returns whether a folder holds a comparison, rather than a run."""
    return (folder / SETTINGS).is_file()


def read_settings(folder: Path) -> Settings:
    """Read compare.json. Raises: ValueError for a folder that holds no comparison."""
    path = folder / SETTINGS
    if not path.is_file():
        raise ValueError(f"{path}: no such file; the folder of a finished comparison was expected")
    try:
        settings: Settings = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    return settings


def read_comparison(folder: Path) -> ComparisonFolder:
    """Read and check a comparison's folder.

    Raises:
        ValueError: a file is absent, malformed, or contradicts another; the message names it, and the line or row.
    """
    settings = clean_json(read_settings(folder))
    policies = _names(folder / SETTINGS, settings, "policies")
    seed = whole_field(str(folder / SETTINGS), settings, "seed", 0, 2**63 - 1)
    prompts = prompts_of(folder)
    verdicts = read_verdicts(folder / VERDICTS)
    responses = read_responses(folder / RESPONSES)
    known = {prompt.prompt_id for prompt in prompts}
    _check_responses(folder / RESPONSES, responses, policies, known)
    _check_verdicts(folder / VERDICTS, verdicts, responses, policies, known)
    path = folder / MEASURES
    measures = parse_object(path.read_text(encoding="utf-8", errors="replace"), str(path)) if path.is_file() else {}
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
        files={file: file_hash(folder / file) for file in read},
    )


def _names(path: Path, settings: Mapping[str, Any], field: str) -> tuple[str, ...]:
    """Returns the names in a list of names, or of objects with a name each."""
    entries = list_field(str(path), settings, field)
    where = [f"{path}: {field}[{place}]" for place in range(len(entries))]
    names = [
        text_field(at, entry if isinstance(entry, dict) else {"name": entry}, "name")
        for at, entry in zip(where, entries, strict=True)
    ]
    if len(set(names)) < len(names):
        raise ValueError(f"{path}: field {field!r} is {', '.join(names)}; distinct names were expected")
    return tuple(names)


def _judges(path: Path, settings: Mapping[str, Any], verdicts: Sequence[Verdict]) -> tuple[str, ...]:
    """Returns the judges that have verdicts, in the order of the settings, then by name."""
    listed = _names(path, settings, "judges") if "judges" in settings else ()
    judges = {verdict.judge for verdict in verdicts}
    return (*(name for name in listed if name in judges), *sorted(judges - set(listed)))


def prompts_of(folder: Path) -> list[Prompt]:
    """Read a comparison's prompts. Raises: ValueError naming file, line and field."""
    path = folder / PROMPTS
    prompts, seen = [], set()
    for where, row in read_source(str(path)):
        prompt_id = text_field(where, row, "prompt_id")
        if prompt_id in seen:
            raise ValueError(f"{where}: prompt_id {prompt_id!r} occurs twice")
        seen.add(prompt_id)
        messages = tuple(any_messages(where, row.get("messages"), "messages", takes_tools=True))
        category = any_text(where, {"category": "", **row}, "category")
        cluster = any_text(where, {"cluster": "", **row}, "cluster")
        prompts.append(Prompt(prompt_id=prompt_id, messages=messages, kind=category, cluster=cluster))
    if not prompts:
        raise ValueError(f"{path}: no prompts")
    return prompts


def refuse_other_settings(folder: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raises: ValueError naming what differs between a finished comparison's settings and those asked for."""
    for name in ("policies", ALGORITHMS, "prompts", "seed", "verdicts", TRAINING_DATA):
        asked = json.loads(json.dumps(wanted.get(name)))
        if found.get(name) != asked:
            there, now = _leaves(found.get(name), name), _leaves(asked, name)
            where = next(leaf for leaf in (*there, *now) if there.get(leaf, "absent") != now.get(leaf, "absent"))
            raise ValueError(
                f"{folder}: holds a comparison with other settings: {where}: {there.get(where, 'absent')} there,"
                f" {now.get(where, 'absent')} now; give another --out, or remove the folder"
            )


def _leaves(value: Any, name: str) -> dict[str, str]:
    """Returns the values within a JSON value by name, in which dots go into objects and lists."""
    if not isinstance(value, dict | list) or not value:
        return {name: json.dumps(value)}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    parts = [(one.get("name", key) if isinstance(one, dict) else key, one) for key, one in items]
    return {leaf: text for key, one in parts for leaf, text in _leaves(one, f"{name}.{key}").items()}


def _check_responses(path: Path, rows: Sequence[Response], policies: Sequence[str], known: set[str]) -> None:
    seen: set[tuple[str, str, int]] = set()
    for number, row in enumerate(rows, 1):
        where = f"{path}: row {number}"
        _check_known(where, row.prompt_id, known, [row.policy], policies)
        key = (row.policy, row.prompt_id, row.index)
        if key in seen:
            raise ValueError(
                f"{where}: response {row.index} of {row.policy!r} to prompt {row.prompt_id!r} occurs twice"
            )
        seen.add(key)


def _check_verdicts(
    path: Path, rows: Sequence[Verdict], responses: Sequence[Response], policies: Sequence[str], known: set[str]
) -> None:
    responded = {(row.policy, row.prompt_id, row.index) for row in responses}
    for number, row in enumerate(rows, 1):
        where = f"{path}: row {number}"
        _check_known(where, row.prompt_id, known, [row.policy_a, row.policy_b], policies)
        for policy, index in ((row.policy_a, row.index_a), (row.policy_b, row.index_b)):
            if (policy, row.prompt_id, index) not in responded:
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
