"""The charts of measures.json: over-optimisation, and a reward model's reliability.

Over-optimisation plots gold and proxy score of policies at growing distance from the reference, with the fitted curves:
`over_optimisation`, an evaluation.measures.checkpoints.OverOptimisation. Reliability plots a reward model's accuracy
against its confidence: `reward_model`, an evaluation.measures.reward_model.RewardMeasures.
"""

from collections.abc import Mapping
from math import isfinite, nan
from typing import Any, Literal

import numpy as np

from evaluation.measures.checkpoints import OverOptimisation
from evaluation.measures.curves import Point
from evaluation.measures.overoptimisation import Overoptimised, gain_at
from evaluation.measures.reward_model import RewardMeasures
from files.records import record_of
from stages.reports.parts import Columns, Figure, Key, Note, Part
from stages.reports.plots import MARGINS, WIDE_SIZE, KLPoint, KLSeries, draw, kl_figure, set_ticks, show_percent, tone
from stages.reports.text import ends_of, number, percent

Kind = Literal["rl", "best_of_n"]
STYLES: Mapping[Kind, tuple[str, str, str]] = {"rl": ("RL", "ppo", "^"), "best_of_n": ("best-of-n", "best-of-n", "D")}
NUM_PLACES = 120  # points of a drawn curve


def curve_parts(measures: Mapping[str, Any]) -> tuple[Part, ...]:
    """Gold and proxy score against KL, with RL and best-of-n in each; reliability; where to stop, and the optimum.

    Raises: ValueError naming the field if a measure is not as `heed measure` writes it.
    """
    figures, notes = [], []
    if measures.get("over_optimisation"):
        found = record_of(measures["over_optimisation"], OverOptimisation, "measures.json: over_optimisation")
        counts, trained = "above the reference's; what counts", "above the reference's; what RL is trained on"
        figures.append(_gain_figure(found, "gold", "Gold score against KL", counts))
        figures.append(_gain_figure(found, "proxy", "Proxy score against KL", trained))
        notes = [Note(text) for text in (_advice("rl", found.rl), _advice("best_of_n", found.best_of_n)) if text]
    if measures.get("reward_model"):
        figures += reliability_figures(
            record_of(measures["reward_model"], RewardMeasures, "measures.json: reward_model")
        )
    aside = (
        "Points are policies, lines the fits of Gao et al. 2022; shaded is the 95% interval of the optimum, as far as"
        " was measured. From measures.json."
    )
    notes += [Note(aside, "aside")] if notes else []
    return (Columns(tuple(figures)), *notes) if figures else ()


def _advice(kind: Kind, fit: Overoptimised | None) -> str:
    if fit is None or not fit.advice:
        return ""
    optimum = fit.optimum.kl_nats
    ends = ends_of(optimum)
    where = f" Fitted optimum: KL {number(float(optimum.mean))} nats" if isfinite(optimum.mean) else ""
    where += f" (95% {ends})." if where and ends else ("." if where else "")
    return f"{STYLES[kind][0]}: {fit.advice}{where}"


def _gain_figure(found: OverOptimisation, score: Literal["gold", "proxy"], title: str, unit: str) -> Figure:
    series = [_series("rl", found.rl_points, found.rl, score)] if found.rl_points else []
    if found.best_of_n_points:
        series.append(_series("best_of_n", found.best_of_n_points, found.best_of_n, score))
    x_label = "KL from the reference, nats"
    return kl_figure(series, title=title, unit=unit, name=f"over-{score}", x_label=x_label, zero_line=True)


def _series(
    kind: Kind, points: tuple[Point, ...], fit: Overoptimised | None, score: Literal["gold", "proxy"]
) -> KLSeries:
    key, colour, marker = STYLES[kind]
    shown = tuple(KLPoint(point.name, point.kl_nats.mean, getattr(point, score)) for point in points)
    furthest = max(point.kl_nats for point in shown)
    gain = None if fit is None else (fit.gold if score == "gold" else fit.proxy)
    line, shaded = None, None
    if gain is not None and isfinite(gain.alpha.mean) and isfinite(gain.beta.mean):
        d = np.sqrt(np.linspace(0, max(furthest, 0.0), NUM_PLACES)[1:])
        line = (d**2, gain_at(kind, gain.alpha.mean, gain.beta.mean, d))
    low, high = (nan, nan) if fit is None else (fit.optimum.kl_nats.low, fit.optimum.kl_nats.high)
    if score == "gold" and isfinite(low) and low < furthest:
        shaded = (low, min(furthest, high) if isfinite(high) else furthest)
    return KLSeries(key, colour, marker, shown, line, shaded=shaded)


def reliability_figures(model: RewardMeasures) -> list[Figure]:
    """Accuracy in bins of confidence; a calibrated model is on the diagonal."""
    bins = [one for one in model.calibration.bins if isfinite(one.accuracy.mean) and isfinite(one.confidence)]
    ceiling = model.ceiling.mean
    if not bins:
        return []

    def paint(axes: Any) -> None:
        axes.plot([0.5, 1], [0.5, 1], color=tone("muted"), linewidth=1, linestyle=(0, (4, 3)))
        if isfinite(ceiling):
            axes.axhline(ceiling, color=tone("best-of-n"), linewidth=1.4, linestyle=(0, (1, 2)))
        for one in bins:
            x, share = one.confidence, one.accuracy
            axes.plot([x, x], [share.low, share.high], color=tone("heldout"), linewidth=2.5, alpha=0.55)
            axes.plot([x], [share.mean], "o", color=tone("heldout"), markeredgecolor=tone("page"), clip_on=False)
        axes.set_xlabel("confidence", loc="right")
        for side in (axes.xaxis, axes.yaxis):
            set_ticks(side, 5)
            show_percent(side)

    spoken = "; ".join(f"right {percent(one.accuracy.mean)} where {percent(one.confidence)} sure" for one in bins)
    said = f"The reward model's reliability: {spoken}."
    svg = draw(paint, **WIDE_SIZE, margins=MARGINS, name="reliability", label=said)
    keys = [Key("muted", "line", "as sure as it is right")]
    if isfinite(ceiling):
        keys.append(Key("best-of-n", "line", f"ceiling by the labelers' own agreement, {percent(ceiling)}"))
    return [Figure("The reward model's reliability", "how often it is right", tuple(keys), svg, is_wide=True)]
