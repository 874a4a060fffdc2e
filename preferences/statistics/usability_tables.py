"""The results of a usability study as tables, for the command line and the leads' page."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from preferences.statistics.estimates import Interval
from preferences.statistics.usability import (
    MAX_NEEDED,
    Difference,
    Estimate,
    Measure,
    MeasureReport,
    UsabilityReport,
)

UNKNOWN = "-"


@dataclass(frozen=True)
class ResultTable:
    """A table of texts. The first column names the rows."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def usability_tables(report: UsabilityReport) -> list[ResultTable]:
    """Returns the tables of a report: by form, differences, effect of order, scales of load, preferences, orders."""
    named = tuple(report.conditions)
    differences = tuple(
        _difference_row(one.measure, difference)
        for one in report.measures
        for difference in one.differences
        if difference.found.num_labelers
    )
    orders = tuple(
        (
            one.measure.title,
            _spread(one.measure, one.order, is_factor=one.measure.is_ratio),
            str(one.order.num_labelers),
        )
        for one in report.measures
        if one.order.num_labelers
    )
    said = (*report.preferred, report.num_without_preference)
    preferred = tuple((name, str(num)) for name, num in zip((*named, "no preference"), said, strict=True))
    finished = tuple((" → ".join(order), str(num)) for order, num in report.finished)
    found = [
        ResultTable("By form (95% intervals over labelers)", ("", *named, "labelers"), _by_form(report.measures)),
        ResultTable("Differences", ("", "difference (95%)", "labelers", "labelers needed"), differences),
        ResultTable("What each later place in the order adds", ("", "95%", "labelers"), orders),
        ResultTable("Scales of load", ("", *named, "labelers"), _by_form(report.scales)),
        ResultTable("Preferred", ("form", "labelers"), preferred if any(said) else ()),
        ResultTable("Finished orders", ("order", "labelers"), finished),
    ]
    return [table for table in found if table.rows]


def _by_form(reports: Sequence[MeasureReport]) -> tuple[tuple[str, ...], ...]:
    rows = []
    for one in reports:
        nums = [estimate.num_labelers for estimate in one.by_condition]
        if any(nums):
            how_many = str(nums[0]) if len(set(nums)) == 1 else ", ".join(map(str, nums))
            shown = (_spread(one.measure, estimate) for estimate in one.by_condition)
            rows.append((one.measure.title, *shown, how_many))
    return tuple(rows)


def _difference_row(measure: Measure, difference: Difference) -> tuple[str, ...]:
    sign = "/" if measure.is_ratio else "-"
    name = f"{measure.title}: {difference.second} {sign} {difference.first}"
    around = f"×{difference.half_width:g}" if measure.is_ratio else f"±{difference.half_width:g}"
    if not difference.num_needed:
        needed = UNKNOWN
    elif difference.num_needed >= MAX_NEEDED:
        needed = f"{MAX_NEEDED:,} or more for {around}"
    else:
        needed = f"{difference.num_needed:,} for {around}"
    shown = _spread(measure, difference.found, is_factor=measure.is_ratio)
    return name, shown, str(difference.found.num_labelers), needed


def _spread(measure: Measure, estimate: Estimate, *, is_factor: bool = False) -> str:
    digits = 2 if is_factor else measure.digits
    own: Interval = estimate.interval
    if math.isnan(own.mean):
        return UNKNOWN
    mean = f"{own.mean:z.{digits}f}"
    if estimate.reason:
        return f"{mean} ({estimate.reason})"
    return f"{mean} ({own.low:z.{digits}f} to {own.high:z.{digits}f})"


def conclusions(report: UsabilityReport) -> list[str]:
    """Returns a sentence for each difference whose interval excludes "no difference", or one if none does."""
    found = [
        _sentence(one.measure, difference)
        for one in report.measures
        for difference in one.differences
        if _is_clear(one.measure, difference.found)
    ]
    return found or ["No difference between the forms was found."]


def _is_clear(measure: Measure, estimate: Estimate) -> bool:
    alike = 1.0 if measure.is_ratio else 0.0
    return not estimate.reason and not estimate.interval.low <= alike <= estimate.interval.high


def _sentence(measure: Measure, difference: Difference) -> str:
    mean, what = difference.found.interval.mean, measure.title.split(" (")[0]
    if measure.is_ratio:
        return f"{what}: {difference.second} takes {mean:.2f} times as long as {difference.first}."
    side = "above" if mean > 0 else "below"
    return f"{what}: {difference.second} is {abs(mean):.{measure.digits}f} {side} {difference.first}."
