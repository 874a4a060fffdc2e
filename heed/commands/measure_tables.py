"""Formats measures as tables and text for a terminal."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.table import Table

from evaluation.measures.checkpoints import OverOptimisation
from evaluation.measures.curves import AtEqual, Point
from evaluation.measures.kl import KL
from evaluation.measures.language_modelling import Change, Tax
from evaluation.measures.overoptimisation import Overoptimised
from evaluation.measures.reward_model import RewardMeasures
from preferences.statistics.estimates import Interval, Share
from stages.reports.text import count_of

if TYPE_CHECKING:  # the harness is an extra
    from evaluation.harness import TaskResult


def number(value: float, digits: int = 3) -> str:
    return "-" if math.isnan(value) else f"{value:z.{digits}f}"  # z: a rounded zero has no minus


def spread(found: Interval | Share, digits: int = 3) -> str:
    """Formats a number with its interval: "0.731 (0.701 to 0.760)", "0.731 (no interval)", or "-" if it is unknown."""
    if math.isnan(found.mean):
        return "-"
    if math.isnan(found.low) or math.isnan(found.high):
        return f"{number(found.mean, digits)} (no interval)"
    return f"{number(found.mean, digits)} ({number(found.low, digits)} to {number(found.high, digits)})"


def table(*columns: str, rows: Sequence[Sequence[str]], title: str = "") -> Table:
    made = Table(*columns, title=title or None, title_justify="left", box=None, pad_edge=False)
    for row in rows:
        made.add_row(*row)
    return made


def kl_table(found: KL) -> Table:
    rows = [
        ["full", spread(found.full), "sums over the vocabulary; report this one"],
        ["k1", spread(found.k1), "the log-ratio, as PPO penalises it"],
        ["k3", spread(found.k3), "a check: if it is far from the others, trust none"],
    ]
    title = f"KL to the reference, {found.num_responses:,} responses to {found.num_prompts:,} prompts"
    return table("estimator", "nats per response (95%)", "", rows=rows, title=title)


def reward_tables(found: RewardMeasures) -> list[RenderableType]:
    calibration = found.calibration
    error, num_pairs = calibration.error, calibration.accuracy.num_pairs
    rows = [
        ["accuracy", spread(calibration.accuracy), f"{num_pairs:,} pairs, {found.num_tasks:,} tasks"],
        ["two labelers agree", spread(found.agreement), _who_agrees(found)],
        ["accuracy ceiling", spread(found.ceiling), "best possible, knowing how many labelers prefer each response"],
        ["overconfidence", spread(calibration.overconfidence), "mean confidence minus accuracy"],
        ["ECE", number(error.found), f"{number(error.if_calibrated)} if calibrated; p = {number(error.p_value)}"],
        ["log-loss", spread(calibration.log_loss), "nats per pair"],
        ["best scale", spread(calibration.scale), "factor on the scores; below 1 the model is overconfident"],
    ]
    tables: list[RenderableType] = [table("", "95%", "", rows=rows)]
    bins = [
        [
            f"{number(margin.low, 2)} to {number(margin.high, 2)}",
            number(margin.confidence),
            spread(margin.accuracy),
            f"{margin.accuracy.num_pairs:,}",
        ]
        for margin in calibration.bins
    ]
    tables.append(table("score difference", "confidence", "accuracy (95%)", "pairs", rows=bins, title="by margin"))
    if len(found.by_category) > 1:
        shares = [[name or "-", spread(share), f"{share.num_pairs:,}"] for name, share in found.by_category.items()]
        tables.append(table("category", "accuracy (95%)", "pairs", rows=shares, title="by category"))
    if found.rewardbench is not None:
        sections = [[name, spread(section)] for name, section in found.rewardbench.sections.items()]
        sections.append(["score", spread(found.rewardbench.score)])
        missing = f"; without {', '.join(found.rewardbench.missing)}" if found.rewardbench.missing else ""
        tables.append(table("section", "accuracy (95%)", rows=sections, title=f"RewardBench{missing}"))
    left_out = [f"{found.num_tied_pairs:,} pairs that a labeler tied"] if found.num_tied_pairs else []
    if found.num_too_long:
        left_out.append(f"{found.num_too_long:,} tasks too long for the model, first {found.too_long!r}")
    left_out += [f"{count:,} x {kind}" for kind, count in found.warnings.items()]
    return [*tables, f"left out or unusual: {'; '.join(left_out)}"] if left_out else tables


def _who_agrees(found: RewardMeasures) -> str:
    who = count_of(found.num_labelers, "labeler")
    return f"{who}; no pair was ordered by two of them" if math.isnan(found.agreement.mean) else who


def over_optimisation_tables(found: OverOptimisation) -> list[RenderableType]:
    shown: list[RenderableType] = [
        table(
            "policy", "√KL", "KL, nats (95%)", "gold gain (95%)", "proxy gain (95%)",
            rows=[_point(point) for point in (*found.rl_points, *found.best_of_n_points)],
            title=f"{found.num_prompts:,} prompts; the KL of best-of-n is an upper bound",
        )
    ]  # fmt: skip
    for name, fit in (("PPO", found.rl), ("best-of-n", found.best_of_n)):
        if fit is None:
            shown.append(f"{name}: fewer than three policies at distinct distances, so nothing is fitted")
        else:
            shown += [_fit_table(name, fit), fit.advice]
    for axis, rows in (("KL, nats", found.at_equal_kl), ("proxy gain", found.at_equal_proxy)):
        if rows:
            title = f"PPO minus best-of-n at equal {axis.split(',')[0]}"
            shown.append(table(axis, "PPO", "best-of-n", "lead (95%)", rows=[_at(row) for row in rows], title=title))
        else:
            shown.append(f"PPO and best-of-n share no range of {axis.split(',')[0]}")
    if found.num_dropped:
        shown.append(f"{found.num_dropped:,} prompts left out because scores failed: {found.first_failure}")
    return shown


def _point(point: Point) -> list[str]:
    return [point.name, number(point.d, 2), spread(point.kl_nats), spread(point.gold), spread(point.proxy)]


def _at(row: AtEqual) -> list[str]:
    return [number(row.place), number(row.rl), number(row.best_of_n), spread(row.lead)]


def _fit_table(name: str, fit: Overoptimised) -> Table:
    rows = [
        ["gold α", spread(fit.gold.alpha)],
        ["gold β", spread(fit.gold.beta)],
        ["proxy α", spread(fit.proxy.alpha)],
        ["proxy β", spread(fit.proxy.beta)],
        ["optimum, √KL", spread(fit.optimum.d)],
        ["optimum, KL in nats", spread(fit.optimum.kl_nats)],
        ["gold gain there", spread(fit.optimum.gain)],
        ["largest misfit, standard errors", number(fit.gold.misfit, 1)],
    ]
    return table(name, "95%", rows=rows)


def tax_tables(found: Tax) -> list[RenderableType]:
    shown: list[RenderableType] = []
    if found.bits_per_byte:
        title = f"{found.num_documents:,} texts, {found.num_bytes:,} bytes"
        shown.append(_changes("bits per byte (95%)", found.bits_per_byte, title))
    for task in found.tasks:
        title = f"{task.task}: {task.num_examples:,} examples, {task.num_shots} shots"
        shown.append(_changes("exact match (95%)", task.exact_match, title))
        shown.append(_changes("bits per byte of the answer (95%)", task.bits_per_byte, title))
    return shown


def _changes(what: str, changes: Mapping[str, Change], title: str) -> Table:
    rows = [[name, spread(change.value, 4), spread(change.above_before, 4)] for name, change in changes.items()]
    return table("policy", what, "minus the first (95%)", rows=rows, title=title)


def harness_table(found: "Sequence[TaskResult]") -> Table:
    rows = [
        [row.task, row.metric, number(row.value, 4), number(row.error, 4), f"{row.num_documents:,}"] for row in found
    ]
    return table("task", "metric", "value", "standard error", "documents", rows=rows)
