"""The report of a comparison: report.json with every number, and report.html for reading.

Both depend only on the comparison's folder, so the same folder gives the same report, byte for byte.

Prompts are shown with their responses next to each other and the judges' verdicts: at most MAX_PROMPTS prompts and
MAX_CHARACTERS of their texts, taken at even intervals in the order of prompts.jsonl. The page says how many prompts it
shows, and of how many; the others are in the comparison's files.
"""

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from evaluation.compare.folder import VERDICTS, ComparisonFolder, read_comparison
from evaluation.compare.report.answer import answer_of, answer_of_run, is_beyond_kl, kl_limit, warnings_of
from evaluation.compare.report.measures import Styles, hacking_section, measure_tables
from evaluation.compare.report.quality import quality_section
from evaluation.compare.report.sections import Sections, every_pair, meta_of
from evaluation.compare.results import results_of
from evaluation.contamination import too_few_clean
from evaluation.inputs import clusters_of
from evaluation.judges.people import are_people
from evaluation.policies import TRAINED, policy_styles
from evaluation.statistics.corrected import corrected_win_rates
from evaluation.statistics.results import SAME, Conclusion, JudgeSummary, PairSummary, Summary, Withheld
from evaluation.statistics.summary import summarise, unseen
from evaluation.verdicts import Response, Verdict
from files.records import as_json
from stages.reports.page import Page
from stages.reports.page import render as render_page
from stages.reports.parts import (
    TEXT_CHARACTERS,
    Cell,
    Chip,
    Details,
    Note,
    Outcome,
    Row,
    Samples,
    Section,
    ShownPrompt,
    ShownResponse,
    ShownVerdict,
    Table,
    evenly,
    folded,
)
from stages.reports.report import write_pages
from stages.reports.text import clean_json, number, percent, points
from training.data import Prompt

MAX_PROMPTS = 1_000
MAX_CHARACTERS = 6_000_000
MAX_LISTED = 4  # verdicts of one labeler on the same two policies; more are summarised
NUM_OPEN = 2


def write_comparison_report(folder: Path) -> dict[str, Any]:
    """Write report.json and report.html into a comparison's folder. Returns the contents of report.json.

    Raises: ValueError if a file in the folder is absent, malformed, or contradicts another; the message names it and
    the row.
    """
    page, report = render(read_comparison(folder))
    write_pages(folder, page, report)
    return report


def render(
    comparison: ComparisonFolder, *, max_prompts: int = MAX_PROMPTS, max_characters: int = MAX_CHARACTERS
) -> tuple[str, dict[str, Any]]:
    """Returns the page, and the contents of report.json. The limits are on the prompts and characters of the sample
    browser.
    """
    kl_ends = kl_ends_of(comparison)
    summary = within_kl(as_shown(summary_of(comparison), comparison.judges), kl_ends)
    styles = policy_styles(comparison.about)
    results = results_of(comparison, summary) if any(one.kind == TRAINED for one in comparison.about) else None
    samples = samples_of(comparison, styles, max_prompts=max_prompts, max_characters=max_characters)
    entries = comparison.settings.get("judges", [])
    people = [entry["name"] for entry in entries if are_people(entry)]
    clean = unseen(comparison.verdicts, comparison.seen)
    corrected = corrected_win_rates(summary, clean, people, clusters_of(comparison.prompts))
    quality, texts = quality_section(entries, corrected)
    page = Page(
        kicker="Heed comparison",
        title=comparison.name,
        meta=meta_of(summary),
        answer=answer_of_run(results) if results else answer_of(summary, styles, kl_ends),
        picture=every_pair(summary, styles),
        sections=(
            *Sections(summary, styles).all(),
            *quality,
            *([hacking_section(results.hacking, results.names)] if results and results.hacking else []),
            *_measures(comparison, styles),
            Section("samples", "Samples side by side", (_about_samples(samples), samples)),
            _origins(comparison),
        ),
        skip_to=("samples", "the samples"),
        styles=tuple(styles.values()),
        warnings=warnings_of(comparison, summary, styles),
    )
    judges = {"corrected": as_json(corrected), "judge_quality": texts}
    return render_page(page), clean_json(_report(comparison, page, samples, as_json(summary)) | judges)


def kl_ends_of(comparison: ComparisonFolder) -> dict[str, float]:
    """Returns the upper ends of the policies' KL from the reference, nats: of those sampled above temperature 0, where
    log-ratios are those of the policy that was sampled.
    """
    sampled = [one["name"] for one in comparison.settings["policies"] if one.get("sampling", {}).get("temperature")]
    measured = comparison.measures.get("policies", {})
    ends = {name: measured.get(name, {}).get("kl_nats", {}).get("high") for name in sampled}
    return {name: high for name, high in ends.items() if high is not None}


def within_kl(summary: Summary, kl_ends: Mapping[str, float]) -> Summary:
    """Returns the summary without a verdict on pairs whose win rate is further from 50% than their KL allows."""

    def gated(pair: PairSummary) -> PairSummary:
        if not (pair.different and is_beyond_kl(pair, kl_ends)):
            return pair
        reason = (
            f"a win rate of {percent(pair.win_rate.mean)} is further from 50% than the"
            f" {points(kl_limit(pair, kl_ends))} points that their KL allows (Pinsker's inequality, with the upper end"
            " of the KL's interval), so chance is part of it"
        )
        return replace(pair, different=False, conclusion=Conclusion("none", reason=reason))

    judges = (replace(judge, pairs=tuple(map(gated, judge.pairs))) for judge in summary.judges)
    return replace(summary, judges=tuple(judges))


def summary_of(comparison: ComparisonFolder) -> Summary:
    """Computes all statistics of the folder's verdicts. Raises: ValueError for verdicts that contradict each other."""
    try:
        clusters = clusters_of(comparison.prompts)
        return summarise(
            comparison.verdicts,
            comparison.policies,
            clusters,
            comparison.runs,
            withheld=_withheld(comparison),
            seen=comparison.seen,
            seed=comparison.seed,
        )
    except ValueError as error:
        raise ValueError(f"{VERDICTS}: {error}") from None


def _withheld(comparison: ComparisonFolder) -> list[Withheld]:
    """Returns the pairs of policies with the same responses, or with too few prompts outside their training data."""
    withheld, num = [], len(comparison.prompts)
    texts = {
        name: {(row.prompt_id, row.index): row.text for row in rows} for name, rows in comparison.by_policy.items()
    }
    for a, b in combinations(comparison.policies, 2):
        seen = {*comparison.seen.get(a, ()), *comparison.seen.get(b, ())}
        reason = too_few_clean(num - len(seen), num, "prompt")
        if texts[a] == texts[b] and any(texts[a].values()):
            reason = f"{SAME} responses, so they are one policy"
        if reason:
            withheld.append(Withheld(a, b, Conclusion("none", reason=reason)))
    return withheld


def _measures(comparison: ComparisonFolder, styles: Styles) -> list[Section]:
    tables = measure_tables(comparison.measures, styles)
    return [Section("measures", "Measures", tuple(tables))] if tables else []


def _about_samples(samples: Samples) -> Note:
    held = (
        f"This page holds {number(len(samples.prompts))} of {number(samples.num_prompts)} prompts, evenly spread over"
        " all; the files hold the rest."
        if samples.is_cut
        else f"All {number(samples.num_prompts)} prompts, with every response and every verdict."
    )
    return Note(f"{held} Each prompt is shown with the result of each judge's verdicts.")


def _origins(comparison: ComparisonFolder) -> Section:
    about = Note(
        "Every figure is computed from rows of this folder's files, named below it. report.json holds all of them in"
        " full precision."
    )
    settings = [Row((path,), (Cell(value),)) for path, value in flat(comparison.settings)]
    files = [Row((file,), (Cell(sha256, is_code=True),)) for file, sha256 in comparison.files.items()]
    tables = (
        Details("Settings", (Table("compare.json, as resolved.", (), tuple(settings), title="Settings"),)),
        Details("Files", (Table("What was read, by SHA-256.", (), tuple(files), title="Files"),)),
    )
    return Section("made", "How it was made, and where the numbers come from", (about, *tables))


def _report(comparison: ComparisonFolder, page: Page, samples: Samples, summary: dict[str, Any]) -> dict[str, Any]:
    return {
        "comparison": comparison.name,
        "answer": as_json(page.answer),
        "warnings": list(page.warnings),
        "summary": summary,
        "measures": dict(comparison.measures),
        "samples": {
            "num_shown": len(samples.prompts),
            "num_prompts": samples.num_prompts,
            "prompt_ids": [prompt.prompt_id for prompt in samples.prompts],
        },
        "settings": dict(comparison.settings),
        "files": dict(comparison.files),
    }


def flat(value: Any, path: str = "") -> list[tuple[str, str]]:
    """Returns settings as (dotted path, text), one entry per line."""
    if isinstance(value, dict | list) and value:
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        return [line for key, entry in entries for line in flat(entry, f"{path}.{key}" if path else str(key))]
    return [(path, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))]


def as_shown(summary: Summary, judges: Sequence[str]) -> Summary:
    """Returns the same summary with judges in this order, and every pair oriented so that policy_a is preferred more
    often."""
    ordered = sorted(summary.judges, key=lambda judge: judges.index(judge.judge))
    return replace(summary, judges=tuple(_ahead_first(judge) for judge in ordered))


def _ahead_first(judge: JudgeSummary) -> JudgeSummary:
    return replace(
        judge,
        pairs=tuple(pair.ahead_first for pair in judge.pairs),
        algorithms=tuple(pair.ahead_first for pair in judge.algorithms),
    )


def samples_of(
    folder: ComparisonFolder, styles: Styles, *, max_prompts: int = MAX_PROMPTS, max_characters: int = MAX_CHARACTERS
) -> Samples:
    """Builds the sample browser's contents from the folder alone."""
    responses, verdicts = defaultdict(list), defaultdict(list)
    for response in folder.responses:
        responses[response.prompt_id].append(response)
    for verdict in folder.verdicts:
        verdicts[verdict.prompt_id].append(verdict)
    builder = _Builder(folder, styles)
    sizes = [_characters(prompt, responses[prompt.prompt_id]) for prompt in folder.prompts]
    chosen = [folder.prompts[index] for index in evenly(sizes, max_prompts, max_characters)]
    shown_prompts = tuple(
        builder.prompt(prompt, responses[prompt.prompt_id], verdicts[prompt.prompt_id], is_open=number_of < NUM_OPEN)
        for number_of, prompt in enumerate(chosen)
    )
    pairs = {tuple(sorted((builder.place[v.policy_a], builder.place[v.policy_b]))) for v in folder.verdicts}
    return Samples(
        prompts=shown_prompts,
        num_prompts=len(folder.prompts),
        policies=tuple(styles[name] for name in folder.policies),
        pairs=tuple(sorted((first, second) for first, second in pairs)),
        judges=folder.judges,
        categories=tuple(builder.categories),
    )


def _characters(prompt: Prompt, responses: Sequence[Response]) -> int:
    texts = [turn["content"] for turn in prompt.messages] + [response.text for response in responses]
    return sum(min(len(text), TEXT_CHARACTERS) for text in texts)


class _Builder:
    """Builds the entries of the sample browser for one comparison."""

    def __init__(self, folder: ComparisonFolder, styles: Styles) -> None:
        self.folder, self.styles = folder, styles
        self.place = {name: number_of for number_of, name in enumerate(folder.policies)}
        self.categories = sorted({prompt.kind for prompt in folder.prompts})

    def prompt(
        self, prompt: Prompt, responses: Sequence[Response], verdicts: Sequence[Verdict], *, is_open: bool
    ) -> ShownPrompt:
        scores = _scores(verdicts)
        by_policy = [
            sorted((row for row in responses if row.policy == name), key=lambda row: row.index)
            for name in self.folder.policies
        ]
        chips, outcomes = self._outcomes(verdicts)
        return ShownPrompt(
            prompt_id=prompt.prompt_id,
            category=prompt.kind,
            messages=prompt.messages,
            responses=tuple(
                (
                    self.styles[name],
                    tuple(ShownResponse(r.index, folded(r.text), _about(r, scores, self.folder.scorer)) for r in rows),
                )
                for name, rows in zip(self.folder.policies, by_policy, strict=True)
            ),
            is_open=is_open,
            verdicts=tuple(self._verdicts(verdicts)),
            chips=chips,
            category_place=self.categories.index(prompt.kind),
            outcomes=outcomes,
            disagree=verdicts_disagree(verdicts),
        )

    def _verdicts(self, verdicts: Sequence[Verdict]) -> list[ShownVerdict]:
        """Describes each verdict; if a labeler has many on the same two policies, summarises them."""
        groups: dict[tuple[int, int, int, str], list[Verdict]] = defaultdict(list)
        for row in verdicts:
            a, b = sorted((self.place[row.policy_a], self.place[row.policy_b]))
            groups[a, b, self.folder.judges.index(row.judge), row.labeler].append(row)
        shown_verdicts = []
        for (a, b, _, _), rows in sorted(groups.items()):
            if len(rows) > MAX_LISTED:
                shown_verdicts.append(self._counted(self.folder.policies[a], self.folder.policies[b], rows))
            else:
                rows = sorted(rows, key=lambda row: (row.index_a, row.index_b, row.first))
                shown_verdicts += [self._verdict(row) for row in rows]
        return shown_verdicts

    def _counted(self, first: str, second: str, rows: Sequence[Verdict]) -> ShownVerdict:
        counts = _Counted.of(first, rows)
        one, other = self.styles[first], self.styles[second]
        kind, winner = counts.outcome
        ties = f", {number(counts.num_ties)} ties" if counts.num_ties else ""
        failed = f", {number(counts.num_failed)} failed" if counts.num_failed else ""
        detail = (
            f"{one.title} and {other.title}: {number(counts.num_first)} to {number(counts.num_second)}{ties}{failed},"
            f" of {number(len(rows))} pairs of responses"
        )
        style = None if winner is None else (one if winner == 0 else other)
        return ShownVerdict(rows[0].judge, rows[0].labeler, kind, style, detail)

    def _verdict(self, row: Verdict) -> ShownVerdict:
        a, b = self.styles[row.policy_a], self.styles[row.policy_b]
        counts = _Counted.of(row.policy_a, [row])
        share, (kind, place) = row.preference_a, counts.outcome
        parts = [f"{a.title} and {b.title}"] if len(self.styles) > 2 else []
        parts += [f"responses {row.index_a + 1} and {row.index_b + 1}"] if row.index_a or row.index_b else []
        parts += [f"{(a if row.first == 'a' else b).title} shown first"] if row.first else []
        parts += [row.failure] if row.failure else []
        parts += [f"{percent(max(share, 1 - share))} sure"] if not row.failure and share not in (0, 0.5, 1) else []
        if not (math.isnan(row.score_a) or math.isnan(row.score_b)):
            parts.append(f"scores {number(float(row.score_a))} and {number(float(row.score_b))}")
        winner = None if place is None else (a, b)[place]
        return ShownVerdict(row.judge, row.labeler, kind, winner, "; ".join(parts))

    def _outcomes(self, verdicts: Sequence[Verdict]) -> tuple[tuple[Chip, ...], str]:
        """Returns chips and filter words: each judge's result on each pair, by the mean of its verdicts."""
        by_pair: dict[tuple[int, int, int], list[Verdict]] = defaultdict(list)
        for row in verdicts:
            a, b = sorted((self.place[row.policy_a], self.place[row.policy_b]))
            by_pair[self.folder.judges.index(row.judge), a, b].append(row)
        words: list[str] = []
        won: dict[int, list[int | None]] = defaultdict(list)
        for (judge, a, b), rows in by_pair.items():
            counts = _Counted.of(self.folder.policies[a], rows)
            kind, winner = counts.outcome
            if counts.num_failed:
                words.append(f"{a}-{b}:{judge}:failed")
                won[judge] += []
            if kind != "failed":
                place = None if winner is None else (a, b)[winner]
                won[judge].append(place)
                words.append(f"{a}-{b}:{judge}:{'tie' if place is None else place}")
        return tuple(self._chip(judge, won[judge]) for judge in sorted(won)), " ".join(sorted(set(words)))

    def _chip(self, judge: int, winners: Sequence[int | None]) -> Chip:
        """Returns the winner of most pairs; a tie if no policy has more than the next."""
        name = self.folder.judges[judge]
        if not winners:
            return Chip(name, "failed", None)
        counts = sorted(((winners.count(place), place) for place in set(winners) if place is not None), reverse=True)
        if not counts or (len(counts) > 1 and counts[0][0] == counts[1][0]):
            return Chip(name, "tied", None)
        return Chip(name, "won", self.styles[self.folder.policies[counts[0][1]]])


@dataclass(frozen=True)
class _Counted:
    """Summarises verdicts on the same two policies from the first one's side."""

    mean: float  # NaN if all failed
    num_first: int
    num_second: int
    num_ties: int
    num_failed: int

    @classmethod
    def of(cls, first: str, rows: Sequence[Verdict]) -> "_Counted":
        shares = [r.preference_a if r.policy_a == first else 1 - r.preference_a for r in rows if not r.failure]
        mean = math.fsum(shares) / len(shares) if shares else math.nan
        ahead, behind = sum(share > 0.5 for share in shares), sum(share < 0.5 for share in shares)
        return cls(mean, ahead, behind, len(shares) - ahead - behind, len(rows) - len(shares))

    @property
    def outcome(self) -> tuple[Outcome, int | None]:
        """Returns won, tied or failed, and whether the first (0) or the second (1) won."""
        if math.isnan(self.mean):
            return "failed", None
        return ("tied", None) if abs(self.mean - 0.5) < 1e-9 else ("won", int(self.mean < 0.5))


Scores = dict[tuple[str, int], list[tuple[str, float]]]


def _scores(verdicts: Sequence[Verdict]) -> Scores:
    """Returns the scores by judges that score single responses: (judge, score) by policy and sample."""
    scores_of: dict[tuple[str, int], dict[str, float]] = defaultdict(dict)
    for row in verdicts:
        if not (math.isnan(row.score_a) or math.isnan(row.score_b)):
            scores_of[row.policy_a, row.index_a][row.judge] = row.score_a
            scores_of[row.policy_b, row.index_b][row.judge] = row.score_b
    return {key: list(scores.items()) for key, scores in scores_of.items()}


def _about(row: Response, scores: Scores, scorer: str) -> str:
    parts = [f"{judge} {number(float(score))}" for judge, score in scores.get((row.policy, row.index), [])]
    parts += [f"{scorer} {number(float(row.proxy_score))}"] if not math.isnan(row.proxy_score) else []
    parts += [] if row.num_tokens is None else [f"{number(row.num_tokens)} tokens"]
    parts += ["cut off at the length limit"] if row.finished is False else []
    parts += [f"log ratio {number(float(row.log_ratio), 1)} nats"] if not math.isnan(row.log_ratio) else []
    return ", ".join(parts)


def verdicts_disagree(verdicts: Sequence[Verdict]) -> bool:
    """Returns whether two verdicts on the same two responses prefer different ones, across judges, labelers or
    orders."""
    preferred: dict[tuple[tuple[str, int], ...], set[tuple[str, int]]] = defaultdict(set)
    for row in verdicts:
        if not row.failure and row.preference_a != 0.5:
            a, b = (row.policy_a, row.index_a), (row.policy_b, row.index_b)
            preferred[tuple(sorted((a, b)))].add(a if row.preference_a > 0.5 else b)
    return any(len(policies) > 1 for policies in preferred.values())
