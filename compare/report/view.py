"""What the page of a comparison shows of each judge, in plain text and numbers; the template escapes it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from compare.report.pairs import PairRow, pair_rows
from compare.report.sources import Source, source_text
from compare.report.tracks import (
    SHARE_TICKS,
    Row,
    Tracks,
    agreement_rows,
    category_rows,
    length_rows,
    rating_rows,
    share_dot,
    win_rows,
)
from compare.report.words import of, span
from evaluation.statistics.results import Agreement, Failures, JudgeSummary, Ratings, Summary
from reports.text import Policy, number, percent

MODELS = {"bradley_terry": "Bradley–Terry", "davidson": "Davidson"}


@dataclass(frozen=True)
class JudgeView:
    """One judge's section."""

    name: str
    anchor: str
    facts: tuple[tuple[str, str], ...]
    wins: Tracks
    pairs: tuple[PairRow, ...]
    ratings: tuple[Tracks, ...]
    absent: tuple[str, ...]  # what cannot be shown, and why
    details: tuple[Tracks, ...]
    categories: tuple[Tracks, ...]


class View:
    """Builds what the template needs; every figure says which rows it is of."""

    def __init__(self, summary: Summary, looks: dict[str, Policy], sources: Mapping[str, Source]) -> None:
        self.summary, self.looks, self.sources = summary, looks, sources

    def rows_of(self, field: str) -> str:
        """The rows that a field of report.json is computed from, in a line."""
        return source_text(self.sources[field], self.looks)

    def judges(self) -> list[JudgeView]:
        """Judges that have a verdict, in order."""
        return [self._judge(place, judge) for place, judge in enumerate(self.summary.judges)]

    def _judge(self, place: int, judge: JudgeSummary) -> JudgeView:
        path = f"summary.judges.{place}"
        ratings = [self._ratings(f"{path}.ratings.{number_of}", found) for number_of, found in enumerate(judge.ratings)]
        lengths = self._lengths(place, judge)
        return JudgeView(
            name=judge.judge,
            anchor=f"judge-{place}",
            facts=(
                ("Prompts", number(judge.num_prompts)),
                ("Verdicts", number(judge.num_verdicts)),
                ("Failed", number(judge.num_failed)),
                ("Labelers", number(judge.num_labelers)),
            ),
            wins=self._shares(
                f"wins-{place}", "Win rates", "The first policy over the second, ties counting half; 95% intervals over"
                " prompts. Below: prompts won, tied and lost.", "Pair", "Win rate", win_rows(judge.pairs, self.looks),
                f"{path}.pairs",
            ),
            pairs=pair_rows(judge, place, self.summary.policies, self.looks),
            ratings=tuple(found for found in ratings if isinstance(found, Tracks)),
            absent=tuple(found for found in (*ratings, lengths) if isinstance(found, str)),
            details=tuple(found for found in (lengths, self._order(place, judge)) if isinstance(found, Tracks)),
            categories=tuple(self._categories(place, judge)),
        )  # fmt: skip

    def _shares(
        self,
        name: str,
        title: str,
        caption: str,
        corner: str,
        value: str,
        rows: tuple[Row, ...],
        path: str,
        *columns: str,
    ) -> Tracks:
        return Tracks(name, title, caption, corner, value, columns, rows, SHARE_TICKS, 0.5, self.rows_of(path))

    def _ratings(self, path: str, ratings: Ratings) -> Tracks | str:
        model = MODELS[ratings.model]
        if not ratings.policies:
            return f"No {model} ratings: {ratings.reason}."
        rows, ticks, zero = rating_rows(ratings, self.looks)
        anchor = f"from {self.looks[ratings.anchor].title}" if ratings.anchor else "from the policies' mean"
        caption = f"Log-odds {anchor}, higher is better; 95% intervals over prompts. Ranks are those left open at once."
        if not math.isnan(ratings.tie):
            caption += f" Davidson's log ν, how readily it ties, is {number(float(ratings.tie))}."
        if ratings.shrunk:
            caption += f" Fitted with a prior: {ratings.reason}." if ratings.reason else " Fitted with a prior."
        return Tracks(
            path.replace(".", "-"), f"Ratings, {model}", caption, "Policy", "Rating", ("Rank",), rows, ticks, zero,
            self.rows_of(path),
        )  # fmt: skip

    def _order(self, place: int, judge: JudgeSummary) -> Tracks | None:
        """Position bias and, of what was judged in both orders, flips; None where no verdict has an order: whoever
        scores each response alone sees none."""
        source = self.sources[f"summary.judges.{place}.position_bias"]
        if not source.num_rows:
            return None
        bias, flips = judge.position_bias, judge.flips
        first = "The response shown first is preferred"
        rows = [
            Row((first,), (), "–", "unknown", (number(source.num_rows),), note=bias.reason)
            if math.isnan(bias.mean)
            else _share_row(first, bias.mean, bias.low, bias.high, bias.num_verdicts)
        ]
        if flips.changed.num_pairs:
            rows += [
                _share_row(text, share.mean, share.low, share.high, share.num_pairs)
                for text, share in (
                    ("The verdict changes with the order", flips.changed),
                    ("The winner changes with the order", flips.reversed),
                )
            ]
        return self._shares(
            f"order-{place}", "The order shown", "Without position bias the response shown first is preferred half of"
            " the time; a judge that reads with care changes no verdict when the order is turned.", "Of verdicts",
            "Share", tuple(rows), f"summary.judges.{place}.position_bias", "Verdicts",
        )  # fmt: skip

    def _lengths(self, place: int, judge: JudgeSummary) -> Tracks | str:
        reasons = {pair.length_controlled.reason for pair in judge.pairs}
        if len(reasons) == 1 and "" not in reasons:
            return f"No win rate at equal length: {reasons.pop()}."
        return self._shares(
            f"lengths-{place}", "Length", "The win rate as judged beside, hollow, the one that a fit gives for"
            " responses of equal length; its interval holds the fit's error.", "Pair", "Win rate",
            length_rows(judge.pairs, self.looks),
            f"summary.judges.{place}.pairs", "At equal length",
        )  # fmt: skip

    def _categories(self, place: int, judge: JudgeSummary) -> list[Tracks]:
        shown = []
        for number_of, pair in enumerate(judge.pairs):
            if len(pair.categories) > 1:
                a, b = self.looks[pair.policy_a].title, self.looks[pair.policy_b].title
                shown.append(
                    self._shares(
                        f"categories-{place}-{number_of}",
                        f"{a} over {b}, by category",
                        "p-values are corrected for the number of categories (Holm).",
                        "Category",
                        "Win rate",
                        category_rows(pair),
                        f"summary.judges.{place}.pairs.{number_of}",
                        "Holm",
                        "Prompts",
                    )
                )
        return shown

    def agreement(self) -> Tracks | None:
        """How far judges agree, and the labelers of each judge that has several."""
        found: list[tuple[str, Agreement]] = [
            (f"{entry.judge_a} and {entry.judge_b}", entry) for entry in self.summary.agreement
        ]
        found += [
            (f"labelers of {judge.judge}", judge.labelers) for judge in self.summary.judges if judge.num_labelers > 1
        ]
        if not found:
            return None
        return self._shares(
            "agreement", "Agreement", "Of pairs of verdicts on the same two responses, neither a tie, the share that"
            " prefers the same one. Krippendorff's α counts ties too, and takes off what chance gives.",
            "Between", "Share",
            agreement_rows(found), "summary", "α (95%)", "Pairs",
        )  # fmt: skip

    def failures(self) -> list[tuple[Failures, str, str]]:
        """Failed verdicts by judge, pair and reason, each with its pair in words and the rows."""
        return [
            (
                failure,
                f"{self.looks[failure.policy_a].title} and {self.looks[failure.policy_b].title}",
                self.rows_of(f"summary.failures.{place}"),
            )
            for place, failure in enumerate(self.summary.failures)
        ]


def _share_row(text: str, mean: float, low: float, high: float, num: int) -> Row:
    return Row((text,), (share_dot(mean, low, high),), percent(mean), span(low, high), (number(num),))


def meta_of(summary: Summary) -> Sequence[str]:
    """The line below the title."""
    verdicts = sum(judge.num_verdicts for judge in summary.judges)
    return (
        of(len(summary.policies), "policy").replace("policys", "policies"),
        of(summary.num_prompts, "prompt"),
        of(verdicts, "verdict"),
        of(len(summary.judges), "judge"),
        f"seed {summary.seed}",
    )
