"""The sections of a comparison's page: each judge, agreement and failures.

`Sections` builds the sections; the functions below it make the rows of forest plots and the table of tests.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from evaluation.compare.folder import VERDICTS
from evaluation.compare.report.answer import (
    by_rating,
    is_taken_back,
    level,
    level_of,
    points_up,
    prompts_in_words,
    rank_range,
)
from evaluation.compare.report.measures import Styles
from evaluation.statistics.results import (
    Agreement,
    AlgorithmPair,
    CategoryWinRate,
    Counts,
    JudgeSummary,
    PairSummary,
    Ratings,
    Summary,
    WinRate,
)
from evaluation.statistics.summary import NO_ORDER
from stages.reports.parts import (
    Cell,
    Columns,
    Details,
    Dot,
    Facts,
    Forest,
    ForestRow,
    Note,
    Part,
    Row,
    SampleFilter,
    Section,
    Stack,
    Table,
    axis,
    share_dot,
    share_row,
)
from stages.reports.text import UNKNOWN, PolicyStyle, count_of, number, p_value, percent, share_ends

MAX_OPEN_CATEGORIES = 3
PAIR_COLUMNS = ("Pair", "Wins", "Ties", "Losses", "Win rate", "p", "Detectable", "Failed")
UNBOUNDED = {
    "": "",
    "above": "it lost nothing",
    "below": "it won nothing",
    "both": "no chain of wins connects it to the others",
}


class Sections:
    """Builds sections from the statistics of verdicts."""

    def __init__(self, summary: Summary, styles: Styles) -> None:
        self.summary, self.styles = summary, styles
        self.over = "prompts" if summary.num_clusters == summary.num_prompts else "clusters of prompts"

    def all(self) -> tuple[Section, ...]:
        """Returns the judges' sections in order, then agreement and failures if there are any."""
        judges = [self._judge(place, judge) for place, judge in enumerate(self.summary.judges)]
        return (*judges, *self._agreement(), *self._failures())

    def _judge(self, place: int, judge: JudgeSummary) -> Section:
        facts = (
            ("Prompts", number(judge.num_prompts)),
            *((("Clusters of prompts", number(self.summary.num_clusters)),) if self.over != "prompts" else ()),
            ("Verdicts", number(judge.num_verdicts)),
            ("Failed", number(judge.num_failed)),
            ("Labelers", number(judge.num_labelers)),
        )
        wins = self._shares(
            f"wins-{place}", "Win rates", f"The first policy over the second, ties counting half; intervals over"
            f" {self.over}. Below: prompts won, tied and lost.", ("Pair", "Win rate"),
            [win_row(pair, self.styles) for pair in judge.pairs], judge.judge,
        )  # fmt: skip
        tests = (
            tests_table(judge, place, self.summary.policies, self.styles)
            if judge.pairs
            else Note("No pair has a successful verdict.", "absent")
        )
        parts: list[Part] = [Facts(facts, in_a_row=True), *self._algorithms(place, judge), wins, tests]
        parts += [self._ratings(place, judge.judge, judge.ratings)] if judge.ratings else []
        parts += [self._lengths(place, judge), *self._order(place, judge), *self._categories(place, judge)]
        return Section(f"judge-{place}", f"By {judge.judge}", tuple(parts))

    def _shares(
        self,
        name: str,
        title: str,
        caption: str,
        heads: tuple[str, str],
        rows: Sequence[ForestRow],
        judge: str,
        *columns: str,
    ) -> Forest:
        return Forest(name, title, caption, *heads, columns, tuple(rows), _rows_from(judge))

    def _algorithms(self, place: int, judge: JudgeSummary) -> list[Forest]:
        """Returns the win rates of algorithms with several runs; empty if there are none."""
        if not judge.algorithms:
            return []
        caption = (
            "How often a run of the first algorithm is preferred to a run of the second, over all pairs of runs. These"
            " intervals are over seeds and prompts, so they are about the algorithms. All other figures of this page"
            " are about single runs, that is, these weights. Difference: of the runs' mean scores, if the judge gives"
            " scores."
        )
        name, title, heads = f"algorithms-{place}", "Algorithms, over seeds", ("Algorithms", "Win rate")
        rows = [algorithm_row(pair) for pair in judge.algorithms]
        return [self._shares(name, title, caption, heads, rows, judge.judge, "Runs", "p", "Difference")]

    def _ratings(self, place: int, judge: str, ratings: Ratings) -> Forest | Note:
        if not ratings.policies:
            return Note(f"No Bradley–Terry ratings: {ratings.reason}.", "absent")
        rows, ticks, zero = rating_rows(ratings, self.styles)
        anchor = f"from {self.styles[ratings.anchor].title}" if ratings.anchor else "from the policies' mean"
        caption = (
            f"Log-odds {anchor}, higher is better; 95% intervals over {self.over}. Ranks are those that all intervals"
            " together allow."
        )
        if ratings.shrunk:
            caption += " Fitted with a prior."
        name, title, columns = f"ratings-{place}", "Ratings, Bradley–Terry", ("Rank",)
        return Forest(
            name, title, caption, "Policy", "Rating", columns, rows, _rows_from(judge), ticks=ticks, mark=zero
        )

    def _order(self, place: int, judge: JudgeSummary) -> list[Forest]:
        """Returns position bias, and flips among responses judged in both orders; empty for a judge that scores each
        response separately, because it sees no order.
        """
        bias, flips = judge.position_bias, judge.flips
        if bias.reason == NO_ORDER:
            return []
        first, share = ("The response shown first is preferred",), (bias.mean, bias.low, bias.high)
        rows = [share_row(first, share, (number(bias.num_verdicts),), note=bias.reason)]
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
        return [self._shares(f"order-{place}", "The order shown", caption, heads, rows, judge.judge, "Verdicts")]

    def _lengths(self, place: int, judge: JudgeSummary) -> Part:
        reasons = {pair.length_controlled.reason for pair in judge.pairs}
        if len(reasons) == 1 and "" not in reasons:
            return Note(f"No win rate at equal length: {reasons.pop()}.", "absent")
        rows = [length_row(pair, self.styles) for pair in judge.pairs if not math.isnan(pair.win_rate.mean)]
        caption = (
            "The plain win rate and, as a hollow marker, the fitted one at equal length, whose interval includes the"
            " error of the fit."
        )
        heads = ("Pair", "Win rate")
        return self._shares(f"lengths-{place}", "Length", caption, heads, rows, judge.judge, "At equal length")

    def _categories(self, place: int, judge: JudgeSummary) -> list[Details]:
        forests = []
        for number_of, pair in enumerate(judge.pairs):
            if len(pair.categories) > 1:
                a, b = self.styles[pair.policy_a].title, self.styles[pair.policy_b].title
                forests.append(
                    self._shares(
                        f"categories-{place}-{number_of}", f"{a} over {b}, by category",
                        "p-values and intervals are corrected for the number of categories (Holm).",
                        ("Category", "Win rate"),
                        [category_row(category) for category in pair.categories],
                        judge.judge, "p", "Prompts",
                    )
                )  # fmt: skip
        is_open = len(forests) <= MAX_OPEN_CATEGORIES
        return [Details("By category", (Columns(tuple(forests)),), is_open)] if forests else []

    def _agreement(self) -> list[Section]:
        """Returns the agreement between judges, and between the labelers of each judge that has several."""
        agreements: list[tuple[str, Agreement]] = [
            (f"{entry.judge_a} and {entry.judge_b}", entry) for entry in self.summary.agreement
        ]
        agreements += [
            (f"labelers of {judge.judge}", judge.labelers) for judge in self.summary.judges if judge.num_labelers > 1
        ]
        if not agreements:
            return []
        rows = [agreement_row(head, agreement) for head, agreement in agreements]
        caption = (
            "The share of pairs of verdicts on the same two responses, neither a tie, that prefer the same one."
            " Krippendorff's α also counts ties, and corrects for chance agreement."
        )
        heads = ("Between", "Share")
        forest = self._shares("agreement", "Agreement", caption, heads, rows, "", "α (95%)", "Pairs")
        return [Section("agreement-title", "How far judges and labelers agree", (forest,))]

    def _failures(self) -> list[Section]:
        """Returns failed verdicts by judge, pair and reason."""
        rows = []
        for failure in self.summary.failures:
            pair = f"{self.styles[failure.policy_a].title} and {self.styles[failure.policy_b].title}"
            cells = (Cell(pair), Cell(failure.failure), Cell(number(failure.num_verdicts)))
            rows.append(Row((failure.judge,), cells))
        if not rows:
            return []
        columns = ("Judge", "Policies", "Reason", "Verdicts")
        caption, title = "They are left out of every other figure.", "Failed verdicts by judge, pair and reason"
        return [Section("failures-title", "Failed verdicts", (Table(caption, columns, tuple(rows), title=title),))]


def every_pair(summary: Summary, styles: Styles) -> tuple[Table, ...]:
    """Returns the first judge's win rates of three policies and more, the highest-rated first; empty for two."""
    judges = [judge for judge in summary.judges if judge.num_verdicts]
    if len(summary.policies) < 3 or not judges:
        return ()
    ratings = judges[0].ratings
    names = [rating.policy for rating in by_rating(ratings)] if ratings and ratings.policies else summary.policies
    pairs = {f"{one.policy_a}/{one.policy_b}": one for pair in judges[0].pairs for one in (pair, pair.turned)}
    return (win_table(pairs, [styles[name] for name in names]),)


def win_table(pairs: Mapping[str, PairSummary], styles: Sequence[PolicyStyle]) -> Table:
    """Returns the win rate of every policy against every other, in this order. `pairs` holds both orders, by "a/b"."""
    shown = [pairs[f"{a.name}/{b.name}"] for a in styles for b in styles if f"{a.name}/{b.name}" in pairs]
    is_mixed = any(map(is_taken_back, shown))
    rows = tuple(Row((a,), tuple(_win_cell(pairs, a.name, b.name) for b in styles)) for a in styles)
    widened = " Where the correction removes a difference, the interval is widened to the level in brackets."
    caption = (
        "How often the policy of the row is preferred to the policy of the column, with 95% intervals. Framed:"
        f" a difference is shown (p < .05, corrected for all pairs by Holm's method).{widened if is_mixed else ''}"
    )
    return Table(caption, ("Row over column", *styles), rows, "by-policy matrix", "Win rates")


def _win_cell(pairs: Mapping[str, PairSummary], first: str, second: str) -> Cell:
    pair = pairs.get(f"{first}/{second}")
    if pair is None or not math.isfinite(pair.win_rate.mean):
        return Cell("" if first == second else UNKNOWN)
    rate = pair.win_rate
    ends = share_ends(rate.low, rate.high) + (f" ({level_of(pair)})" if is_taken_back(pair) else "")
    return Cell(percent(rate.mean), ends, tint=2 * rate.mean - 1, is_clear=pair.different)


def _rows_from(judge: str) -> str:
    """Describes the rows that a figure is computed from."""
    return f"From {VERDICTS}: {f'judge {judge}, ' if judge else ''}without failed verdicts."


def meta_of(summary: Summary) -> tuple[str, ...]:
    """Returns the items of the line below the title."""
    verdicts = sum(judge.num_verdicts for judge in summary.judges)
    return (
        count_of(len(summary.policies), "policy"),
        prompts_in_words(summary.num_prompts, summary.num_clusters),
        count_of(verdicts, "verdict"),
        count_of(len(summary.judges), "judge"),
        f"seed {summary.seed}",
    )


def stack_of(counts: Counts, ahead: str, behind: str, title: str) -> Stack | None:
    """Returns wins, ties and losses of `ahead`; None if there are none."""
    total = counts.wins + counts.ties + counts.losses
    if not total:
        return None
    parts = (
        ("won", f"{ahead} wins", counts.wins),
        ("tied", "ties", counts.ties),
        ("lost", f"{behind} wins", counts.losses),
    )
    return Stack(title, tuple((kind, whose, num / total, num) for kind, whose, num in parts))


def _with_ends(rate: WinRate) -> tuple[float, float, float]:
    return rate.mean, rate.low, rate.high


def win_row(pair: PairSummary, styles: Styles) -> ForestRow:
    """Returns a row with the win rate of a pair's first policy, and its prompts won, tied and lost."""
    a, b = styles[pair.policy_a], styles[pair.policy_b]
    stack = stack_of(pair.prompts, a.title, b.title, "Prompts")
    return share_row((a, b), _with_ends(pair.win_rate), stack=stack, unknown="no verdict stands", level=level_of(pair))


def algorithm_row(pair: AlgorithmPair) -> ForestRow:
    """Returns a row with the win rate of a pair's first algorithm."""
    gain = pair.score_difference
    ends = "" if math.isnan(gain.low) else f" ({number(gain.low)} to {number(gain.high)})"
    difference = UNKNOWN if math.isnan(gain.mean) else f"{number(gain.mean)}{ends}"
    runs = f"{number(pair.num_runs_a)}, {number(pair.num_runs_b)}"
    note = f"{count_of(pair.num_prompts_missing, 'prompt')} left out" if pair.num_prompts_missing else ""
    rate = pair.win_rate
    cells = (runs, p_value(pair.holm_p), difference)
    return share_row(
        (f"{pair.algorithm_a} over {pair.algorithm_b}",),
        (rate.mean, rate.low, rate.high),
        cells,
        note=note,
        level=level_of(pair),
    )


def category_row(category: CategoryWinRate) -> ForestRow:
    """Returns a row with the win rate of a pair's first policy in one category."""
    cells = (p_value(category.holm_p), number(category.win_rate.num_prompts))
    widened = level(category.p, category.holm_p)
    return share_row((category.category or "(no category)",), _with_ends(category.win_rate), cells, level=widened)


def length_row(pair: PairSummary, styles: Styles) -> ForestRow:
    """Returns a row with a pair's plain win rate and, as a hollow mark, the one at equal length."""
    fitted, heads = pair.length_controlled, (styles[pair.policy_a], styles[pair.policy_b])
    if math.isnan(fitted.mean):
        return share_row(heads, _with_ends(pair.win_rate), (UNKNOWN,), note=fitted.reason, level=level_of(pair))
    note = "fitted with a prior: these verdicts alone have no finite fit" if fitted.shrunk else ""
    text = f"{percent(fitted.mean)} ({share_ends(fitted.low, fitted.high)})"
    row = share_row(heads, _with_ends(pair.win_rate), (text,), note=note, level=level_of(pair))
    return replace(row, dots=(*row.dots, share_dot(fitted.mean, fitted.low, fitted.high, "hollow")))


def agreement_row(head: str, agreement: Agreement) -> ForestRow:
    """Returns a row with the agreement of two judges, or of one judge's labelers."""
    share, alpha = agreement.share, agreement.alpha
    ends = "" if math.isnan(alpha.low) else f" ({number(float(alpha.low))} to {number(float(alpha.high))})"
    cells = (number(float(alpha.value)) + ends, number(share.num_pairs))
    return share_row((head,), (share.mean, share.low, share.high), cells, note=alpha.reason, unknown="")


def rating_rows(
    ratings: Ratings, styles: Styles
) -> tuple[tuple[ForestRow, ...], tuple[tuple[float, str], ...], float | None]:
    """Returns a row per policy, best first; the axis's ticks; and the position of 0."""
    ordered = by_rating(ratings)
    ends = [value for r in ordered for value in (r.value, r.low, r.high) if math.isfinite(value)]
    low, high, ticks = axis(min(ends), max(ends))

    def place(value: float) -> float:
        return (min(max(value, low), high) - low) / (high - low)

    rows = []
    for rating in ordered:
        is_known = not (math.isnan(rating.low) or math.isnan(rating.high))
        interval = f"{rating_text(rating.low)} to {rating_text(rating.high)}" if is_known else "unknown"
        dot = Dot(
            place(rating.value),
            place(rating.low) if is_known else None,
            place(rating.high) if is_known else None,
            open_low=rating.low == -math.inf,
            open_high=rating.high == math.inf,
        )
        rows.append(
            ForestRow(
                (styles[rating.policy],),
                (dot,),
                rating_text(rating.value),
                "by definition" if rating.policy == ratings.anchor else interval,
                (rank_range(rating).removeprefix("rank "),),
                note=UNBOUNDED[rating.unbounded],
            )
        )
    zero = (0 - low) / (high - low) if low <= 0 <= high else None
    return tuple(rows), tuple((place(tick), rating_text(tick, 1)) for tick in ticks), zero


def rating_text(value: float, digits: int = 2) -> str:
    """Formats a rating in log-odds, which may be infinite."""
    if math.isinf(value):
        return "∞" if value > 0 else "\u2212∞"
    return number(float(value), digits) if abs(value) >= 0.5 * 10**-digits else number(0.0, digits)


def tests_table(judge: JudgeSummary, place: int, policies: Sequence[str], styles: Styles) -> Table:
    """Returns a table with a row per pair and its test; the numbers of prompts filter the samples."""
    rows = tuple(_tests_row(pair, place, policies, styles) for pair in judge.pairs)
    holm = f" p-values are corrected for {count_of(len(rows), 'pair')} (Holm)." if len(rows) > 1 else ""
    caption = (
        'Prompts won, tied and lost, and the test of "preferred equally often"; click a number to see its prompts. A'
        " difference is shown if p is below .05, which is when the interval excludes 50%: both come from the same test."
        f"{holm} Detectable: the distance from 50% that 4 of 5 such studies would have shown, in points, after the"
        " correction."
    )
    return Table(caption, PAIR_COLUMNS, rows, "tests", f"Test of each pair by {judge.judge}")


def _tests_row(pair: PairSummary, judge: int, policies: Sequence[str], styles: Styles) -> Row:
    a, b = policies.index(pair.policy_a), policies.index(pair.policy_b)
    key, rate, significance = f"{min(a, b)}-{max(a, b)}", pair.win_rate, pair.significance
    counts = (
        ("wins", pair.prompts.wins, str(a)),
        ("ties", pair.prompts.ties, "tie"),
        ("losses", pair.prompts.losses, str(b)),
    )
    links = [
        Cell(number(num), filter=SampleFilter(key, judge, verdict, f"{number(num)} {name}: show the prompts"))
        for name, num, verdict in counts
    ]
    over = rate.over_labelers
    other_labelers = "" if math.isnan(over.low) else f"; with other labelers {share_ends(over.low, over.high)}"
    widened = f" ({level_of(pair)})" if is_taken_back(pair) else ""
    detectable = "none" if math.isnan(pair.power.detectable) else f"±{points_up(pair.power.detectable)}"
    missing = f"{number(pair.num_prompts_missing)} missing" if pair.num_prompts_missing else ""
    numbers = (
        Cell(percent(rate.mean), share_ends(rate.low, rate.high) + widened + other_labelers),
        Cell(
            _p(significance.holm_p),
            "different" if pair.different else "cannot tell" if pair.conclusion.kind == "none" else "not shown",
        ),
        Cell("" if pair.different else detectable, _needed(pair)),
        Cell(number(pair.num_failed), missing),
    )
    return Row((styles[pair.policy_a], styles[pair.policy_b]), (*links, *numbers), is_strong=pair.different)


def _p(p: float) -> str:
    return p_value(p).removeprefix("p ").removeprefix("= ")


def _needed(pair: PairSummary) -> str:
    """Returns the number of prompts that would show the observed difference, if it was not shown."""
    needed = pair.power.num_prompts_needed
    return "" if pair.conclusion.kind != "undecided" or needed is None else f"needs {number(needed)} prompts"
