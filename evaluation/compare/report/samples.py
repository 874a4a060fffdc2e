"""The sample browser of a comparison: prompts with their responses next to each other and the judges' verdicts.

A report holds at most MAX_PROMPTS prompts and MAX_CHARACTERS of their texts, taken at even intervals in the order of
prompts.jsonl. It says how many prompts it shows, and of how many; the others are in the comparison's files.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from evaluation.compare.folder import ComparisonFolder
from evaluation.compare.report.answer import Styles
from evaluation.verdicts import Response, Verdict
from stages.reports.parts import (
    TEXT_CHARACTERS,
    Chip,
    Outcome,
    Samples,
    ShownPrompt,
    ShownResponse,
    ShownVerdict,
    anchor_of,
    evenly,
    folded,
    folded_turns,
    start_of,
    turns_of,
)
from stages.reports.text import number, percent
from training.data import Prompt

MAX_PROMPTS = 1_000
MAX_CHARACTERS = 6_000_000
MAX_LISTED = 4  # verdicts of one labeler on the same two policies; more are summarised
NUM_OPEN = 2


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
    shown = tuple(
        builder.prompt(prompt, responses[prompt.prompt_id], verdicts[prompt.prompt_id], is_open=number_of < NUM_OPEN)
        for number_of, prompt in enumerate(chosen)
    )
    pairs = {tuple(sorted((builder.place[v.policy_a], builder.place[v.policy_b]))) for v in folder.verdicts}
    return Samples(
        prompts=shown,
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
        messages = turns_of(prompt.messages)
        scores = _scores(verdicts)
        by_policy = [
            sorted((row for row in responses if row.policy == name), key=lambda row: row.index)
            for name in self.folder.policies
        ]
        chips, outcomes = self._outcomes(verdicts)
        return ShownPrompt(
            anchor=anchor_of(prompt.prompt_id),
            prompt_id=prompt.prompt_id,
            category=prompt.kind,
            start=start_of(messages),
            messages=folded_turns(messages),
            responses=tuple(
                (
                    self.styles[name],
                    tuple(
                        ShownResponse(r.index, folded(r.text), _about(r, scores, self.folder.names.scorer)) for r in own
                    ),
                )
                for name, own in zip(self.folder.policies, by_policy, strict=True)
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
        shown = []
        for (a, b, _, _), rows in sorted(groups.items()):
            if len(rows) > MAX_LISTED:
                shown.append(self._counted(self.folder.policies[a], self.folder.policies[b], rows))
            else:
                rows = sorted(rows, key=lambda row: (row.index_a, row.index_b, row.first))
                shown += [self._verdict(row) for row in rows]
        return shown

    def _counted(self, first: str, second: str, rows: Sequence[Verdict]) -> ShownVerdict:
        found = _Counted.of(first, rows)
        one, other = self.styles[first], self.styles[second]
        kind, winner = found.outcome
        ties = f", {number(found.num_ties)} ties" if found.num_ties else ""
        failed = f", {number(found.num_failed)} failed" if found.num_failed else ""
        detail = (
            f"{one.title} and {other.title}: {number(found.num_first)} to {number(found.num_second)}{ties}{failed}, of"
            f" {number(len(rows))} pairs of responses"
        )
        style = None if winner is None else (one if winner == 0 else other)
        return ShownVerdict(rows[0].judge, rows[0].labeler, kind, style, detail)

    def _verdict(self, row: Verdict) -> ShownVerdict:
        a, b = self.styles[row.policy_a], self.styles[row.policy_b]
        found = _Counted.of(row.policy_a, [row])
        share, (kind, place) = row.preference_a, found.outcome
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
            found = _Counted.of(self.folder.policies[a], rows)
            kind, winner = found.outcome
            if found.num_failed:
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
    found: dict[tuple[str, int], dict[str, float]] = defaultdict(dict)
    for row in verdicts:
        if not (math.isnan(row.score_a) or math.isnan(row.score_b)):
            found[row.policy_a, row.index_a][row.judge] = row.score_a
            found[row.policy_b, row.index_b][row.judge] = row.score_b
    return {key: list(scores.items()) for key, scores in found.items()}


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
    return any(len(found) > 1 for found in preferred.values())
