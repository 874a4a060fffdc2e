"""Records from which rows every number of the report is computed.

A source names a file and a filter of its rows as (column, operator, value) triples that must all hold.
`pandas.read_parquet` and `pyarrow.parquet.read_table` accept it unchanged as `filters`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from evaluation.compare.folder import MEASURES, SETTINGS, VERDICTS, ComparisonFolder
from evaluation.compare.report.answer import Styles
from evaluation.statistics.results import JudgeSummary, PairSummary, Summary
from evaluation.verdicts import Verdict
from stages.reports.text import count_of

Filter = tuple[str, str, str | tuple[str, ...]]

STANDING: Filter = ("failure", "==", "")
FAILED: Filter = ("failure", "!=", "")
ORDERED: Filter = ("first", "!=", "")


@dataclass(frozen=True)
class Source:
    """Where a field of report.json comes from. `num_rows` rows pass the filter; `how` says how the field is computed
    from them.

    For a JSON file, `field` is the place in it, and there are no rows.
    """

    file: str
    rows: tuple[Filter, ...]
    num_rows: int
    how: str
    field: str = ""


class Rows:
    """Counts rows of verdicts.parquet by filter."""

    def __init__(self, verdicts: Sequence[Verdict]) -> None:
        names = ("judge", "policy_a", "policy_b", "failure", "first", "category")
        self.columns = {name: np.array([getattr(row, name) for row in verdicts], dtype=object) for name in names}
        self.num_rows = len(verdicts)

    def source(self, how: str, *filters: Filter) -> Source:
        """Returns a source of these rows."""
        kept = np.ones(self.num_rows, dtype=bool)
        for column, operator, value in filters:
            values = value if isinstance(value, tuple) else (value,)
            found = np.any([self.columns[column] == one for one in values], axis=0)
            kept &= ~found if operator == "!=" else found
        return Source(VERDICTS, filters, int(kept.sum()), how)


def judge_filter(judge: str) -> Filter:
    """Returns the rows of one judge."""
    return ("judge", "==", judge)


def pair_filters(judge: str, policy_a: str, policy_b: str) -> tuple[Filter, ...]:
    """Returns the rows of one judge on two policies, whichever of them is called a."""
    both = (policy_a, policy_b)
    return (judge_filter(judge), ("policy_a", "in", both), ("policy_b", "in", both))


def sources_of(folder: ComparisonFolder, summary: Summary) -> dict[str, Source]:
    """Returns sources of report.json's fields by dotted path. A field without one has the source of its longest listed
    prefix.

    Positions in lists are numbers.
    """
    rows = Rows(folder.verdicts)
    sources = {
        "summary": rows.source("all statistics, by evaluation.statistics; the seed draws resamples and permutations"),
        "summary.num_prompts": rows.source("number of distinct prompt_id"),
        "settings": Source(SETTINGS, (), 0, "copied"),
        "measures": Source(MEASURES, (), 0, "copied"),
    }
    for place, judge in enumerate(summary.judges):
        sources |= _of_judge(rows, f"summary.judges.{place}", judge, folder.runs)
    for place, found in enumerate(summary.agreement):
        judges: Filter = ("judge", "in", (found.judge_a, found.judge_b))
        how = "pairs of verdicts, one of each judge, on the same two responses"
        sources[f"summary.agreement.{place}"] = rows.source(how, judges, STANDING)
    for place, failure in enumerate(summary.failures):
        filters = (*pair_filters(failure.judge, failure.policy_a, failure.policy_b), ("failure", "==", failure.failure))
        sources[f"summary.failures.{place}"] = rows.source("number of rows", *filters)
    return sources


def _of_judge(rows: Rows, path: str, judge: JudgeSummary, runs: Mapping[str, Sequence[str]]) -> dict[str, Source]:
    own = judge_filter(judge.judge)
    sources = {
        path: rows.source("all statistics of this judge", own),
        f"{path}.num_prompts": rows.source("number of distinct prompt_id", own, STANDING),
        f"{path}.num_labelers": rows.source("number of distinct labeler", own, STANDING),
        f"{path}.num_verdicts": rows.source("number of rows", own, STANDING),
        f"{path}.num_failed": rows.source("number of rows", own, FAILED),
        f"{path}.position_bias": rows.source("preference for first shown, strengths cancelled", own, STANDING, ORDERED),
        f"{path}.flips": rows.source(
            "rows of one labeler on the same two responses in both orders", own, STANDING, ORDERED
        ),
        f"{path}.labelers": rows.source("pairs of verdicts of two labelers on the same two responses", own, STANDING),
    }
    sources[f"{path}.pairs"] = rows.source("all statistics of pairs", own, STANDING)
    if judge.algorithms:
        named = tuple(name for own in runs.values() for name in own)
        between: tuple[Filter, ...] = (("policy_a", "in", named), ("policy_b", "in", named))
        how = "mean over prompts and pairs of runs of two algorithms; rows on two runs of one algorithm are unused"
        sources[f"{path}.algorithms"] = rows.source(how, own, *between, STANDING)
    for place, _ in enumerate(judge.ratings):
        sources[f"{path}.ratings.{place}"] = rows.source("ratings of all policies from all pairs", own, STANDING)
    for place, pair in enumerate(judge.pairs):
        sources |= _of_pair(rows, f"{path}.pairs.{place}", judge.judge, pair)
    return sources


def _of_pair(rows: Rows, path: str, judge: str, pair: PairSummary) -> dict[str, Source]:
    pair_rows = pair_filters(judge, pair.policy_a, pair.policy_b)
    standing = (*pair_rows, STANDING)
    sources = {
        path: rows.source("all statistics of this pair", *standing),
        f"{path}.win_rate": rows.source(f"mean over prompts of the mean preference for {pair.policy_a}", *standing),
        f"{path}.verdicts": rows.source("rows by preference above ½, at ½ and below", *standing),
        f"{path}.prompts": rows.source("prompts by mean preference above ½, at ½ and below", *standing),
        f"{path}.num_failed": rows.source("number of rows", *pair_rows, FAILED),
        f"{path}.position_bias": rows.source("preference for first shown, strengths cancelled", *standing, ORDERED),
        f"{path}.flips": rows.source(
            "rows of one labeler on the same two responses in both orders", *standing, ORDERED
        ),
    }
    for place, found in enumerate(pair.categories):
        how = f"mean over prompts of the mean preference for {pair.policy_a}"
        sources[f"{path}.categories.{place}"] = rows.source(how, *standing, ("category", "==", found.category))
    return sources


def source_text(source: Source, styles: Styles) -> str:
    """Formats a source as one line, which the page shows below the figure."""
    words = []
    for column, operator, value in source.rows:
        if column == "policy_b":  # the filter on policy_a already names both
            continue
        if column == "policy_a":
            words.append(" and ".join(styles[name].title for name in value))
        elif (column, operator, value) == STANDING:
            words.append("not failed")
        elif (column, operator, value) == FAILED:
            words.append("failed")
        elif (column, operator, value) == ORDERED:
            words.append("order known")
        else:
            words.append(f"{column} {value if isinstance(value, str) else ' or '.join(value)}")
    where = f"{source.file}: {', '.join(words)}" if words else source.file
    return f"{where} ({count_of(source.num_rows, 'row')})"
