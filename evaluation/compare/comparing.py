"""Compares policies: samples them, lets judges say which response is better, stores every row, and draws conclusions.

An interrupted comparison continues. A finished comparison is sent only to judges whose verdicts it lacks; people are
asked again each time, because they may have judged more since. `conclude` turns a comparison's folder into statistics,
measures and the report.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from evaluation.compare.folder import (
    ALGORITHMS,
    MEASURES,
    RESPONSES,
    TRAINING_DATA,
    VERDICTS,
    Settings,
    holding,
    prompts_of,
    read_comparison,
    read_settings,
    refuse_other_settings,
    versions,
    write_comparison,
    write_verdicts,
)
from evaluation.compare.judges import Judging, open_judges
from evaluation.compare.report.answer import level
from evaluation.compare.report.page import write_comparison_report
from evaluation.contamination import add_given, overlaps
from evaluation.inputs import can_show, clusters_of, named_runs, named_specs, read_compared_prompts
from evaluation.judges.external import read_verdict_file
from evaluation.judges.judge import MAX_PAIRS, Judge, ScoreJudge, pairs_of, refuse_too_many_failures
from evaluation.judges.people import PeopleJudge
from evaluation.measures.policies import Known, measure_policies
from evaluation.policies import (
    BEST_OF_N,
    LocalPolicy,
    RemotePolicy,
    ResponseSource,
    Sampling,
    SavedPolicy,
    is_saved,
)
from evaluation.statistics.significance import ALPHA
from evaluation.suites.suite import Item
from evaluation.verdicts import Response, Verdict, read_responses, read_verdicts, write_rows
from files.atomic import write_json
from files.hashes import file_hash
from files.records import as_json
from preferences.formats.parts import Report
from reward.endpoint import OnProgress
from training.data import DataConfig, Prompt

EXTERNAL = "external"  # the kind of policies and judges that a file of judgments names

Progress = Callable[[str], OnProgress]  # returns the progress callback of a named step


@dataclass(frozen=True)
class Compared:
    """The input of a comparison: specs of policies and judges, prompts, and how to sample and judge them."""

    policies: Sequence[str]
    prompts: DataConfig
    category: str
    cluster_by: str
    judges: Sequence[str]
    sampling: Sampling
    judging: Judging
    allow_empty: bool
    training_data: Sequence[str] = ()


@dataclass(frozen=True)
class Outcome:
    """The settings of a comparison after it ran, with counts of responses and failures, and whether it has verdicts.

    If `has_verdicts` is false, there is no folder yet: the only judges are people, none of them has judged, and the
    tasks are in their label store.
    """

    settings: Settings
    has_verdicts: bool


def compare(compared: Compared, folder: Path, progress: Progress, tell: Callable[[str], None]) -> Outcome:
    """Compare in `folder`, or resume there. If a model's context is too short, all policies get the same lower limit.

    Raises: ValueError for any invalid input, before anything is sampled; for a policy that does not answer every
    prompt; for a judge that fails too often; if `folder` holds another comparison.
    """
    if len(compared.policies) < 2:
        raise ValueError(f"{len(compared.policies)} policies; at least two to compare were expected")
    if not compared.judges:
        raise ValueError("--judge is missing; at least one judge was expected")
    prompts = read_compared_prompts(compared.prompts, compared.category, compared.cluster_by)
    policies = _fitted(open_policies(compared, prompts), compared.sampling, tell)
    judges = open_judges(compared.judges, compared.judging, prompts, len(policies))
    settings = _settings(compared, prompts, policies)
    max_failed_share = compared.judging.asking.max_failed_share
    with holding(folder) as aside:
        if folder.exists():
            refuse_other_settings(folder, read_settings(folder), settings)
            return judge_again(folder, judges, max_failed_share, progress)
        if not all(isinstance(policy, SavedPolicy) for policy in policies):
            num_clusters = len(set(clusters_of(prompts).values()))
            shows = can_show(len(prompts), compared.sampling.num_samples, num_clusters)
            tell(f"{compared.prompts.source}: {shows}")
        responses = _sample(policies, prompts, aside, progress)
        settings["responses"] = {name: counts_of(rows) for name, rows in responses.items()}
        verdicts: list[Verdict] = []
        for judge in judges:
            entry, judge_verdicts = judged(judge, prompts, responses, max_failed_share, progress)
            settings["judges"].append(entry)
            verdicts += judge_verdicts
        if verdicts:
            write_comparison(folder, settings, prompts, [row for rows in responses.values() for row in rows], verdicts)
    return Outcome(settings, bool(verdicts))


def judge_again(folder: Path, judges: Sequence[Judge], max_failed_share: float, progress: Progress) -> Outcome:
    """Send a finished comparison to judges, without sampling again.

    A judge's verdicts replace those of the same name in the folder. A judge that has not changed and never failed is
    not asked again, except people.

    Raises: ValueError for a judge that fails too often, and for a folder that holds no comparison.
    """
    settings = read_settings(folder)
    comparison = read_comparison(folder)
    by_judge: dict[str, list[Verdict]] = {entry["name"]: [] for entry in settings["judges"]}
    for verdict in comparison.verdicts:
        if verdict.judge in by_judge:  # otherwise a run ended after writing it and before naming its judge
            by_judge[verdict.judge].append(verdict)
    entries = {entry["name"]: entry for entry in settings["judges"]}
    judges_to_ask = [judge for judge in judges if _is_asked(judge, entries.get(judge.name, {}))]
    for judge in judges_to_ask:
        entries[judge.name], by_judge[judge.name] = judged(
            judge, comparison.prompts, comparison.by_policy, max_failed_share, progress
        )
    settings["judges"] = list(entries.values())
    if judges_to_ask:
        write_verdicts(folder, settings, [verdict for verdicts in by_judge.values() for verdict in verdicts])
    return Outcome(settings, has_verdicts=True)


def take_verdicts(
    spec: str, form: str, folder: Path, *, category: str, cluster_by: str, seed: int
) -> tuple[Outcome, Report]:
    """Write a comparison of external judgments, FILE or NAME=FILE. Returns its outcome and a report of unusual rows.

    Raises: as `read_verdict_file` does; ValueError if `folder` holds another comparison.
    """
    ((judge, source),) = named_specs([spec], "file")
    verdict_file = read_verdict_file(source, form, judge=judge, category=category, cluster_by=cluster_by)
    path = Path(source)
    settings: Settings = {
        "policies": [{"name": name, "kind": EXTERNAL} for name in verdict_file.policies],
        "prompts": {"num_prompts": len(verdict_file.prompts), "category": category}
        | settings_of_clusters(verdict_file.cluster_by),
        "seed": seed,
        "verdicts": {
            "source": source,
            "sha256": file_hash(path) if path.is_file() else "",
            "format": verdict_file.format,
            "warnings": verdict_file.report.counts(),
            "num_same_policy": verdict_file.num_same_policy,
            "num_unknown": verdict_file.num_unknown,
            "num_again": verdict_file.num_again,
        },
        "responses": {
            name: counts_of([row for row in verdict_file.responses if row.policy == name])
            for name in verdict_file.policies
        },
        "judges": [
            {"name": name, "kind": EXTERNAL} | _failed([row for row in verdict_file.verdicts if row.judge == name])
            for name in verdict_file.judges
        ],
        "versions": versions(),
    }
    with holding(folder):
        if folder.exists():
            refuse_other_settings(folder, read_settings(folder), settings)
            return Outcome(read_settings(folder), has_verdicts=True), verdict_file.report
        write_comparison(folder, settings, verdict_file.prompts, verdict_file.responses, verdict_file.verdicts)
    return Outcome(settings, has_verdicts=True), verdict_file.report


def open_policies(compared: Compared, prompts: Sequence[Prompt]) -> list[ResponseSource]:
    """Returns the policies of NAME=SPEC or SPEC. Raises: ValueError for an invalid one."""
    policies: list[ResponseSource] = []
    for name, spec in named_runs(compared.policies)[0]:
        if spec.startswith(("http://", "https://")):
            policies.append(RemotePolicy(name, prompts, compared.sampling, compared.judging.asking.asker(name, spec)))
        elif is_saved(spec):
            policies.append(SavedPolicy.open(name, spec, prompts, allow_empty=compared.allow_empty))
        else:
            policies.append(LocalPolicy.open(name, spec, prompts, compared.sampling))
    return policies


def _fitted(
    policies: Sequence[ResponseSource], sampling: Sampling, tell: Callable[[str], None]
) -> list[ResponseSource]:
    """Returns the policies, with `max_new_tokens` reduced if necessary, so that the longest prompt and its response fit
    into every model's context.
    """
    room = min((one.room_tokens for one in policies if isinstance(one, LocalPolicy)), default=sampling.max_new_tokens)
    if room >= sampling.max_new_tokens:
        return list(policies)
    tell(
        f"--max-new-tokens {sampling.max_new_tokens} is reduced to {room}: the longest prompt uses the rest of the"
        " context"
    )
    reduced = replace(sampling, max_new_tokens=room)
    return [replace(one, sampling=reduced) if isinstance(one, LocalPolicy | RemotePolicy) else one for one in policies]


def _settings(compared: Compared, prompts: Sequence[Prompt], policies: Sequence[ResponseSource]) -> Settings:
    data = compared.prompts
    path = Path(data.source)
    _, runs = named_runs(compared.policies)
    files_of: dict[str, list[str]] = {policy.name: [] for policy in policies}
    add_given(compared.training_data, files_of, runs)
    items = [Item(prompt.prompt_id, prompt.messages) for prompt in prompts]
    seen = {name: found["prompts"] for name, found in overlaps({"prompts": items}, files_of).items()}
    training = {name: {"files": dict(one.files), "prompt_ids": sorted(one.item_ids)} for name, one in seen.items()}
    return {
        "policies": [policy.describe() for policy in policies],
        **({ALGORITHMS: runs} if runs else {}),
        **({TRAINING_DATA: training} if training else {}),
        "prompts": {
            **data.model_dump(include={"source", "split", "subset", "max_rows"}),
            "category": compared.category,
            **settings_of_clusters(compared.cluster_by),
            "sha256": file_hash(path) if path.is_file() else "",
            "num_prompts": len(prompts),
        },
        "seed": compared.sampling.seed,
        "responses": {},
        "judges": [],
        "versions": versions(),
    }


def settings_of_clusters(field: str) -> dict[str, str]:
    """Returns the entry of compare.json that names the field to cluster by; empty without one, as before it existed."""
    return {"cluster_by": field} if field else {}


def _sample(
    policies: Sequence[ResponseSource], prompts: Sequence[Prompt], aside: Path, progress: Progress
) -> dict[str, list[Response]]:
    """Returns responses by policy. Those that were sampled before an interruption are read from `aside`."""
    responses: dict[str, list[Response]] = {}
    for policy in policies:
        path, responses_of_policy = _sampled_before(aside, policy, prompts)
        if not responses_of_policy:
            responses_of_policy = policy.respond(progress(f"sample {policy.name}"))
            write_rows(path, responses_of_policy)
        responses[policy.name] = responses_of_policy
    return responses


def _sampled_before(aside: Path, policy: ResponseSource, prompts: Sequence[Prompt]) -> tuple[Path, list[Response]]:
    """Returns the file for a policy's responses, and the responses that it already holds."""
    prompt_rows = [prompt.model_dump(exclude={"cluster"}) for prompt in prompts]
    depends = json.dumps([policy.describe(), prompt_rows], sort_keys=True)
    path = aside / f"{hashlib.sha256(depends.encode()).hexdigest()[:24]}.parquet"
    return path, read_responses(path) if path.is_file() else []


def _is_asked(judge: Judge, known: Mapping[str, Any]) -> bool:
    """Returns whether to ask a judge: people always, others if `known`, the folder's entry with the judge's name, is
    missing, has failed verdicts or describes another judge. Raises: ValueError if external judgments have the name.
    """
    if known.get("kind") == EXTERNAL:
        raise ValueError(f"judge {judge.name!r} has the name of external judgments; NAME=SPEC gives it another")
    is_as_it_was = known.items() >= judge.describe().items() and not known["num_failed"]
    return isinstance(judge, PeopleJudge) or not is_as_it_was


def judged(
    judge: Judge,
    prompts: Sequence[Prompt],
    responses: Mapping[str, Sequence[Response]],
    max_failed_share: float,
    progress: Progress,
) -> tuple[dict[str, Any], list[Verdict]]:
    """Returns a judge's entry in the settings, and its verdicts. Raises: ValueError if too many of them failed.

    A judge that scores single responses compares every two samples; others compare the i-th of one policy with the i-th
    of the other.
    """
    pairs = pairs_of(prompts, responses, max_pairs=MAX_PAIRS if isinstance(judge, ScoreJudge) else 0)
    verdicts = judge.judge(pairs, progress(f"judge {judge.name}"))
    if isinstance(judge, PeopleJudge):  # a skipped task does not count as the judge's failure
        return judge.describe() | asdict(judge.put_tasks(pairs)) | _failed(verdicts), verdicts
    refuse_too_many_failures(verdicts, max_failed_share)
    return judge.describe() | _failed(verdicts), verdicts


def _failed(verdicts: Sequence[Verdict]) -> dict[str, int]:
    return {"num_verdicts": len(verdicts), "num_failed": sum(bool(verdict.failure) for verdict in verdicts)}


def counts_of(responses: Sequence[Response]) -> dict[str, int]:
    """Counts a policy's responses, and those that are empty or cut off."""
    return {
        "num_responses": len(responses),
        "num_empty": sum(not response.text.strip() for response in responses),
        "num_unfinished": sum(response.finished is False for response in responses),
    }


def conclude(folder: Path) -> dict[str, Any]:
    """Compute a comparison's statistics, measures and report from its folder alone. No other function computes them.

    Returns the contents of report.json.
    """
    settings = read_settings(folder)
    responses, verdicts = read_responses(folder / RESPONSES), read_verdicts(folder / VERDICTS)
    path = folder / MEASURES
    # Keep measures that other commands wrote.
    measures = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if _share_prompts(responses):
        known = Known(
            best_of={policy["name"]: policy["n"] for policy in settings["policies"] if policy.get("kind") == BEST_OF_N},
            pass_marks={judge["name"]: judge["pass_mark"] for judge in settings["judges"] if "pass_mark" in judge},
        )
        policy_measures = measure_policies(
            responses, verdicts, clusters_of(prompts_of(folder)), seed=settings["seed"], known=known
        )
        write_json(path, measures | {"policies": as_json(policy_measures)})
    return write_comparison_report(folder)


def _share_prompts(responses: Sequence[Response]) -> bool:
    """Returns whether all policies answer at least one common prompt, which only external judgments can lack."""
    by_policy: dict[str, set[str]] = {}
    for response in responses:
        by_policy.setdefault(response.policy, set()).add(response.prompt_id)
    return bool(set.intersection(*by_policy.values()))


def results_table(report: Mapping[str, Any]) -> Table:
    """Returns a table with a row per judge and pair of algorithms or policies: the first one's win rate with its
    interval, and whether a difference is shown. The numbers are the report's own.
    """
    table = Table(box=None, pad_edge=False)
    for column in ("judge", "policies", "win rate", "p (Holm)", "prompts", "difference"):
        table.add_column(column, no_wrap=column not in ("judge", "policies", "difference"))
    for judge in report["summary"]["judges"]:
        for pair in judge["algorithms"]:
            runs = f"{pair['num_runs_a']} and {pair['num_runs_b']} runs"
            names = f"{pair['algorithm_a']} against {pair['algorithm_b']}, {runs}"
            kind, reason = pair["conclusion"]["kind"], pair["conclusion"]["reason"]
            shown = "shown" if pair["holm_p"] < ALPHA else "not shown"
            shown = f"cannot tell: {reason}" if kind == "none" else shown
            rate = _rate(pair["win_rate"], pair["p"], pair["holm_p"])
            table.add_row(judge["judge"], names, rate, f"{pair['holm_p']:.3g}", f"{pair['num_prompts']:,}", shown)
        for pair in judge["pairs"]:
            failed = f"; {pair['num_failed']} verdicts failed" if pair["num_failed"] else ""
            kind, reason = pair["conclusion"]["kind"], pair["conclusion"]["reason"]
            none = f"cannot tell: {reason}" if kind == "none" else "not shown"
            shown = ("shown" if pair["different"] else none) + failed
            names, rate = f"{pair['policy_a']} against {pair['policy_b']}", pair["win_rate"]
            p, holm_p = pair["significance"]["p"], pair["significance"]["holm_p"]
            table.add_row(
                judge["judge"], names, _rate(rate, p, holm_p), f"{holm_p:.3g}", f"{rate['num_prompts']:,}", shown
            )
    return table


def _rate(rate: Mapping[str, Any], p: float, holm_p: float) -> str:
    widened = f", {level(p, holm_p)} interval" if p < ALPHA <= holm_p else ""
    return f"{_percent(rate['mean'])} ({_percent(rate['low'])} to {_percent(rate['high'])}{widened})"


def _percent(value: float | None) -> str:
    """Formats a share in percent; None is unknown."""
    return "?" if value is None else f"{value:.1%}"
