"""Over-optimisation: gold and proxy score of policies at growing distance from the reference, and the fitted curves.

measures.json has them as `over_optimisation`, a list of

    {"kind": "rl" or "best_of_n", "points": [evaluation.measures.curves.Point], "fitted":
     evaluation.measures.overoptimisation.Overoptimised or null}
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.ticker import MaxNLocator

from evaluation.measures.overoptimisation import gain_at
from heed.report_plots import WIDE_SIZE
from heed.report_run import dig
from heed.report_svg import ROUND_STEPS, Chart, Key, draw, tone
from heed.report_words import interval, number

CURVES = "over_optimisation"
TITLES = {"rl": "RL", "best_of_n": "best-of-n"}
TONES = {"rl": "ppo", "best_of_n": "best-of-n"}
MARKERS = {"rl": "^", "best_of_n": "D"}
NUM_PLACES = 120  # of a drawn curve


@dataclass(frozen=True)
class CurveView:
    """A chart with what it says in words."""

    charts: tuple[Chart, ...]
    words: tuple[str, ...]


def curve_view(measures: Mapping[str, Any]) -> CurveView:
    """Gold beside proxy score, all curves in each; where to stop, and where the optimum is.

    Errors: ValueError naming the entry of measures.json that is not a curve.
    """
    curves = measures.get(CURVES) or []
    for place, curve in enumerate(curves):
        if dig(curve, "kind") not in TITLES or not isinstance(dig(curve, "points"), list) or not curve["points"]:
            raise ValueError(
                f"measures.json: {CURVES}[{place}]: kind {' or '.join(TITLES)} and a list of points were expected"
            )
    if not curves:
        return CurveView((), ())
    charts = (
        _chart(curves, "gold", "Gold score against KL", "above the reference's; what counts"),
        _chart(curves, "proxy", "Proxy score against KL", "above the reference's; what is climbed"),
    )
    return CurveView(charts, tuple(text for curve in curves for text in _words(curve)))


def _words(curve: Mapping[str, Any]) -> list[str]:
    advice = dig(curve, "fitted", "advice")
    if not advice:
        return []
    optimum = dig(curve, "fitted", "optimum", "kl_nats")
    ends = interval(optimum)
    where = f" Fitted optimum: KL {number(optimum['mean'])} nats" if dig(optimum, "mean") is not None else ""
    where += f" (95% {ends})." if where and ends else ("." if where else "")
    return [f"{TITLES[curve['kind']]}: {advice!s}{where}"]


def _chart(curves: Sequence[Mapping[str, Any]], field: str, title: str, unit: str) -> Chart:
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
        for point in curve["points"]
    ]
    svg = draw(
        paint, **WIDE_SIZE, margins=(44, 12, 36, 8), name=f"over-{field}",
        label=f"{title}: {'; '.join(text for text in spoken)}.",
    )  # fmt: skip
    kinds = list(dict.fromkeys(curve["kind"] for curve in curves))
    keys = tuple(Key(TONES[kind], "line", TITLES[kind]) for kind in kinds)
    return Chart(title, unit, keys, svg, "measures.json", is_wide=True)


def _paint(axes: Any, curve: Mapping[str, Any], field: str) -> None:
    kind, colour = curve["kind"], tone(TONES[curve["kind"]])
    furthest = 0.0
    for point in curve["points"]:
        x, y = point["kl_nats"]["mean"], point[field]["mean"]
        low, high = (y if point[field][end] is None else point[field][end] for end in ("low", "high"))
        axes.plot([x, x], [low, high], color=colour, linewidth=2.5, alpha=0.55)
        axes.plot([x], [y], MARKERS[kind], color=colour, markersize=7, markeredgecolor=tone("page"), zorder=3)
        furthest = max(furthest, x)
    alpha, beta = (dig(curve, "fitted", field, name, "mean") for name in ("alpha", "beta"))
    if alpha is not None and beta is not None:
        d = np.sqrt(np.linspace(0, furthest, NUM_PLACES)[1:])
        axes.plot(d**2, gain_at(kind, alpha, beta, d), color=colour)
    low, high = (dig(curve, "fitted", "optimum", "kl_nats", end) for end in ("low", "high"))
    if field == "gold" and low is not None and low < furthest:
        axes.axvspan(low, min(furthest, furthest if high is None else high), color=colour, alpha=0.12, linewidth=0)
