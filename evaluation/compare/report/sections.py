"""The sections of a comparison's page: each judge, agreement and failures. Every figure names its rows."""

import math
from collections.abc import Mapping, Sequence

from evaluation.compare.report.answer import Styles
from evaluation.compare.report.forests import agreement_row, category_row, length_row, rating_rows, win_row
from evaluation.compare.report.pairs import tests_table
from evaluation.compare.report.sources import Source, source_text
from evaluation.statistics.results import Agreement, JudgeSummary, Ratings, Summary
from stages.reports.parts import (
    Cell,
    Columns,
    Details,
    Facts,
    Forest,
    ForestRow,
    Note,
    Part,
    Row,
    Section,
    Table,
    share_row,
)
from stages.reports.text import count_of, number

MODELS = {"bradley_terry": "Bradley–Terry", "davidson": "Davidson"}
MAX_OPEN_CATEGORIES = 3


class Sections:
    """Builds sections from the statistics of verdicts."""

    def __init__(self, summary: Summary, styles: Styles, sources: Mapping[str, Source]) -> None:
        self.summary, self.styles, self.sources = summary, styles, sources

    def all(self) -> tuple[Section, ...]:
        """Returns the judges' sections in order, then agreement and failures if there are any."""
        judges = [self._judge(place, judge) for place, judge in enumerate(self.summary.judges)]
        return (*judges, *self._agreement(), *self._failures())

    def _rows_of(self, field: str) -> str:
        """Describes, in one line, the rows from which a field of report.json is computed."""
        return source_text(self.sources[field], self.styles)

    def _judge(self, place: int, judge: JudgeSummary) -> Section:
        path = f"summary.judges.{place}"
        facts = (
            ("Prompts", number(judge.num_prompts)),
            ("Verdicts", number(judge.num_verdicts)),
            ("Failed", number(judge.num_failed)),
            ("Labelers", number(judge.num_labelers)),
        )
        wins = self._shares(
            f"wins-{place}", "Win rates", "The first policy over the second, ties counting half; 95% intervals over"
            " prompts. Below: prompts won, tied and lost.", ("Pair", "Win rate"),
            [win_row(pair, self.styles) for pair in judge.pairs], f"{path}.pairs",
        )  # fmt: skip
        tests = (
            tests_table(judge, place, self.summary.policies, self.styles)
            if judge.pairs
            else Note("No pair has a successful verdict.", "absent")
        )
        ratings = [self._ratings(f"{path}.ratings.{number_of}", found) for number_of, found in enumerate(judge.ratings)]
        shown = tuple(found for found in ratings if isinstance(found, Forest))
        parts: list[Part] = [Facts(facts, in_a_row=True), wins, tests]
        parts += [Columns(shown)] if shown else []
        parts += [found for found in ratings if isinstance(found, Note)]
        parts += [self._lengths(place, judge), *self._order(place, judge), *self._categories(place, judge)]
        return Section(f"judge-{place}", f"By {judge.judge}", tuple(parts))

    def _shares(
        self,
        name: str,
        title: str,
        caption: str,
        heads: tuple[str, str],
        rows: Sequence[ForestRow],
        path: str,
        *columns: str,
    ) -> Forest:
        return Forest(name, title, caption, *heads, columns, tuple(rows), self._rows_of(path))

    def _ratings(self, path: str, ratings: Ratings) -> Forest | Note:
        model = MODELS[ratings.model]
        if not ratings.policies:
            return Note(f"No {model} ratings: {ratings.reason}.", "absent")
        rows, ticks, zero = rating_rows(ratings, self.styles)
        anchor = f"from {self.styles[ratings.anchor].title}" if ratings.anchor else "from the policies' mean"
        caption = (
            f"Log-odds {anchor}, higher is better; 95% intervals over prompts. Ranks are those that all intervals"
            " together allow."
        )
        if not math.isnan(ratings.tie):
            caption += f" Davidson's log ν, the tendency to tie, is {number(float(ratings.tie))}."
        if ratings.shrunk:
            caption += f" Fitted with a prior: {ratings.reason}." if ratings.reason else " Fitted with a prior."
        name, rows_from = path.replace(".", "-"), self._rows_of(path)
        return Forest(
            name, f"Ratings, {model}", caption, "Policy", "Rating", ("Rank",), rows, rows_from, ticks=ticks, mark=zero
        )

    def _order(self, place: int, judge: JudgeSummary) -> list[Forest]:
        """Position bias, and flips among responses judged in both orders. A judge that scores each response
        separately sees no order."""
        path = f"summary.judges.{place}.position_bias"
        num_rows = self.sources[path].num_rows
        if not num_rows:
            return []
        bias, flips = judge.position_bias, judge.flips
        num = num_rows if math.isnan(bias.mean) else bias.num_verdicts
        first, share = ("The response shown first is preferred",), (bias.mean, bias.low, bias.high)
        rows = [share_row(first, share, (number(num),), note=bias.reason)]
        if flips.changed.num_pairs:
            rows += [
                share_row((text,), (share.mean, share.low, share.high), (number(share.num_pairs),))
                for text, share in (
                    ("The verdict changes with the order", flips.changed),
                    ("The winner changes with the order", flips.reversed),
                )
            ]
        caption = (
            "Without position bias, the response shown first is preferred half of the time. A careful judge changes no"
            " verdict when the order is swapped."
        )
        heads = ("Of verdicts", "Share")
        return [self._shares(f"order-{place}", "The order shown", caption, heads, rows, path, "Verdicts")]

    def _lengths(self, place: int, judge: JudgeSummary) -> Part:
        reasons = {pair.length_controlled.reason for pair in judge.pairs}
        if len(reasons) == 1 and "" not in reasons:
            return Note(f"No win rate at equal length: {reasons.pop()}.", "absent")
        rows = [length_row(pair, self.styles) for pair in judge.pairs if not math.isnan(pair.win_rate.mean)]
        caption = (
            "The plain win rate and, as a hollow marker, the fitted one at equal length, whose interval includes the"
            " error of the fit."
        )
        path, heads = f"summary.judges.{place}.pairs", ("Pair", "Win rate")
        return self._shares(f"lengths-{place}", "Length", caption, heads, rows, path, "At equal length")

    def _categories(self, place: int, judge: JudgeSummary) -> list[Details]:
        shown = []
        for number_of, pair in enumerate(judge.pairs):
            if len(pair.categories) > 1:
                a, b = self.styles[pair.policy_a].title, self.styles[pair.policy_b].title
                shown.append(
                    self._shares(
                        f"categories-{place}-{number_of}", f"{a} over {b}, by category",
                        "p-values and intervals are corrected for the number of categories (Holm).",
                        ("Category", "Win rate"),
                        [category_row(found) for found in pair.categories],
                        f"summary.judges.{place}.pairs.{number_of}", "p", "Prompts",
                    )
                )  # fmt: skip
        is_open = len(shown) <= MAX_OPEN_CATEGORIES
        return [Details("By category", (Columns(tuple(shown)),), is_open)] if shown else []

    def _agreement(self) -> list[Section]:
        """The agreement between judges, and between the labelers of each judge that has several."""
        found: list[tuple[str, Agreement]] = [
            (f"{entry.judge_a} and {entry.judge_b}", entry) for entry in self.summary.agreement
        ]
        found += [
            (f"labelers of {judge.judge}", judge.labelers) for judge in self.summary.judges if judge.num_labelers > 1
        ]
        if not found:
            return []
        rows = [agreement_row(head, own) for head, own in found]
        caption = (
            "Of pairs of verdicts on the same two responses, neither a tie, the share that prefers the same one."
            " Krippendorff's α counts ties too, and takes off what chance gives."
        )
        heads = ("Between", "Share")
        forest = self._shares("agreement", "Agreement", caption, heads, rows, "summary", "α (95%)", "Pairs")
        return [Section("agreement-title", "How far judges and labelers agree", (forest,))]

    def _failures(self) -> list[Section]:
        """Failed verdicts by judge, pair and reason."""
        rows = []
        for place, failure in enumerate(self.summary.failures):
            pair = f"{self.styles[failure.policy_a].title} and {self.styles[failure.policy_b].title}"
            num = Cell(number(failure.num_verdicts), tooltip=self._rows_of(f"summary.failures.{place}"))
            rows.append(Row((failure.judge,), (Cell(pair), Cell(failure.failure), num)))
        if not rows:
            return []
        columns = ("Judge", "Policies", "Reason", "Verdicts")
        caption, title = "They are left out of every other figure.", "Failed verdicts by judge, pair and reason"
        return [Section("failures-title", "Failed verdicts", (Table(caption, columns, tuple(rows), title=title),))]


def meta_of(summary: Summary) -> tuple[str, ...]:
    """The line below the title."""
    verdicts = sum(judge.num_verdicts for judge in summary.judges)
    return (
        count_of(len(summary.policies), "policy"),
        count_of(summary.num_prompts, "prompt"),
        count_of(verdicts, "verdict"),
        count_of(len(summary.judges), "judge"),
        f"seed {summary.seed}",
    )
