"""The charts of measures.json: over-optimisation, and a reward model's reliability.

Over-optimisation is gold and proxy score of policies at growing distance from the reference, with the fitted curves:
`over_optimisation`, an evaluation.measures.checkpoints.OverOptimisation. Reliability is how often a reward model is
right beside how sure it is: `reward_model`, an evaluation.measures.reward_model.RewardMeasures.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from matplotlib.ticker import MaxNLocator, PercentFormatter

from evaluation.measures.overoptimisation import gain_at
from reports.plots import WIDE_SIZE
from reports.run import dig
from reports.svg import ROUND_STEPS, Chart, Key, draw, tone
from reports.text import interval, number, percent

TITLES = {"rl": "RL", "best_of_n": "best-of-n"}
TONES = {"rl": "ppo", "best_of_n": "best-of-n"}
MARKERS = {"rl": "^", "best_of_n": "D"}
NUM_PLACES = 120  # of a drawn curve


@dataclass(frozen=True)
class CurveView:
    """Charts with what they say in words."""

    charts: tuple[Chart, ...]
    words: tuple[str, ...]


@dataclass(frozen=True)
class _Curve:
    """Points of one kind as JSON has them; `fitted` is empty where there were too few to fit."""

    kind: Literal["rl", "best_of_n"]
    points: Sequence[Mapping[str, Any]]
    fitted: Mapping[str, Any]


def curve_view(measures: Mapping[str, Any]) -> CurveView:
    """Gold beside proxy score, RL and best-of-n in each; reliability; where to stop, and where the optimum is."""
    found = measures.get("over_optimisation") or {}
    kinds: tuple[Literal["rl", "best_of_n"], ...] = ("rl", "best_of_n")
    curves = [_Curve(kind, dig(found, f"{kind}_points") or [], dig(found, kind) or {}) for kind in kinds]
    curves = [curve for curve in curves if curve.points]
    charts = []
    if curves:
        charts.append(_chart(curves, "gold", "Gold score against KL", "above the reference's; what counts"))
        charts.append(_chart(curves, "proxy", "Proxy score against KL", "above the reference's; what is climbed"))
    reliability = reliability_chart(measures)
    charts += [] if reliability is None else [reliability]
    return CurveView(tuple(charts), tuple(text for curve in curves for text in _words(curve)))


def _words(curve: _Curve) -> list[str]:
    advice = curve.fitted.get("advice")
    if not advice:
        return []
    optimum = dig(curve.fitted, "optimum", "kl_nats")
    ends = interval(optimum)
    where = f" Fitted optimum: KL {number(optimum['mean'])} nats" if dig(optimum, "mean") is not None else ""
    where += f" (95% {ends})." if where and ends else ("." if where else "")
    return [f"{TITLES[curve.kind]}: {advice}{where}"]


def _chart(curves: Sequence[_Curve], field: str, title: str, unit: str) -> Chart:
    def paint(axes: Any) -> None:
        for curve in curves:
            _paint(axes, curve, field)
        axes.axhline(0, color=tone("muted"), linewidth=1, linestyle=(0, (4, 3)))
        axes.set_xlabel("KL from the reference, nats", loc="right")
        axes.set_xlim(left=0)
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=ROUND_STEPS))
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=ROUND_STEPS))
        axes.margins(y=0.12)

    spoken = [
        f"{point['name']} {number(point[field]['mean'])} at {number(point['kl_nats']['mean'])} nats"
        for curve in curves
        for point in curve.points
    ]
    svg = draw(
        paint, **WIDE_SIZE, margins=(44, 12, 36, 8), name=f"over-{field}", label=f"{title}: {'; '.join(spoken)}."
    )  # fmt: skip
    keys = tuple(Key(TONES[curve.kind], "line", TITLES[curve.kind]) for curve in curves)
    return Chart(title, unit, keys, svg, "measures.json", is_wide=True)


def _paint(axes: Any, curve: _Curve, field: str) -> None:
    kind, colour = curve.kind, tone(TONES[curve.kind])
    furthest = 0.0
    for point in curve.points:
        x, y = point["kl_nats"]["mean"], point[field]["mean"]
        low, high = (y if point[field][end] is None else point[field][end] for end in ("low", "high"))
        axes.plot([x, x], [low, high], color=colour, linewidth=2.5, alpha=0.55)
        axes.plot([x], [y], MARKERS[kind], color=colour, markersize=7, markeredgecolor=tone("page"), zorder=3)
        furthest = max(furthest, x)
    alpha, beta = (dig(curve.fitted, field, name, "mean") for name in ("alpha", "beta"))
    if alpha is not None and beta is not None:
        d = np.sqrt(np.linspace(0, furthest, NUM_PLACES)[1:])
        axes.plot(d**2, gain_at(kind, alpha, beta, d), color=colour)
    low, high = (dig(curve.fitted, "optimum", "kl_nats", end) for end in ("low", "high"))
    if field == "gold" and low is not None and low < furthest:
        axes.axvspan(low, min(furthest, furthest if high is None else high), color=colour, alpha=0.12, linewidth=0)


def reliability_chart(measures: Mapping[str, Any]) -> Chart | None:
    """Accuracy in bins of confidence, on the diagonal where the model is as sure as it should be."""
    bins = [
        entry
        for entry in dig(measures, "reward_model", "calibration", "bins") or []
        if dig(entry, "accuracy", "mean") is not None and dig(entry, "confidence") is not None
    ]
    ceiling = dig(measures, "reward_model", "ceiling", "mean")
    if not bins:
        return None

    def paint(axes: Any) -> None:
        axes.plot([0.5, 1], [0.5, 1], color=tone("muted"), linewidth=1, linestyle=(0, (4, 3)))
        if ceiling is not None:
            axes.axhline(ceiling, color=tone("best-of-n"), linewidth=1.4, linestyle=(0, (1, 2)))
        for entry in bins:
            x, share = entry["confidence"], entry["accuracy"]
            if share["low"] is not None and share["high"] is not None:
                axes.plot([x, x], [share["low"], share["high"]], color=tone("heldout"), linewidth=2.5, alpha=0.55)
            axes.plot([x], [share["mean"]], "o", color=tone("heldout"), markeredgecolor=tone("page"))
        axes.set_xlabel("confidence", loc="right")
        for side in (axes.xaxis, axes.yaxis):
            side.set_major_locator(MaxNLocator(5, steps=ROUND_STEPS))
            side.set_major_formatter(PercentFormatter(1, decimals=0))

    spoken = "; ".join(f"right {percent(e['accuracy']['mean'])} where {percent(e['confidence'])} sure" for e in bins)
    svg = draw(
        paint, **WIDE_SIZE, margins=(44, 12, 36, 8), name="reliability",
        label=f"The reward model's reliability: {spoken}.",
    )  # fmt: skip
    keys = [Key("muted", "line", "as sure as it is right")]
    if ceiling is not None:
        keys.append(Key("best-of-n", "line", f"ceiling by the labelers' own agreement, {percent(ceiling)}"))
    title, unit = "The reward model's reliability", "how often it is right"
    return Chart(title, unit, tuple(keys), svg, "measures.json", is_wide=True)
