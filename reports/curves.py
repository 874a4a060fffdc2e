"""A stage's training curves, from its metrics.jsonl."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from matplotlib.ticker import MaxNLocator, PercentFormatter

from reports.run import Run
from reports.svg import ROUND_STEPS, Chart, Floats, Key, draw, running_mean, tone
from reports.text import label, number, percent

CURVE_SIZE = {"width": 340, "height": 200}
MAX_POINTS = 600  # more would only make the page heavier


@dataclass(frozen=True)
class Series:
    """One field of metrics.jsonl: a curve, or dots where it is measured now and then."""

    field: str
    name: str
    tone: str
    is_sparse: bool = False


@dataclass(frozen=True)
class Panel:
    """One chart of a stage's metrics. A share is shown in percent."""

    title: str
    unit: str
    series: tuple[Series, ...]
    is_share: bool = False


LOSS = (Series("loss", "train", "train"), Series("heldout_loss", "held-out", "heldout", is_sparse=True))
ACCURACY = (Series("accuracy", "train", "train"), Series("heldout_accuracy", "held-out", "heldout", is_sparse=True))
PANELS = {
    "pretrain": (
        Panel("Loss", "nats per token", LOSS),
        Panel("Gradient norm", "", (Series("gradient_norm", "train", "train"),)),
    ),
    "sft": (
        Panel("Loss", "nats per response token", LOSS),
        Panel("Gradient norm", "", (Series("gradient_norm", "train", "train"),)),
    ),
    "reward": (
        Panel("Loss", "nats per pair", LOSS),
        Panel("Accuracy", "pairs ordered as the labelers did", ACCURACY, is_share=True),
    ),
    "ppo": (
        Panel("Score", "from the reward model, higher is better", (Series("score", "PPO", "ppo"),)),
        Panel("KL from SFT", "nats per response", (Series("kl_nats", "PPO", "ppo"),)),
        Panel("Responses that end", "before the length limit", (Series("eos_rate", "PPO", "ppo"),), is_share=True),
        Panel("Response length", "tokens", (Series("response_tokens", "PPO", "ppo"),)),
        Panel("Entropy", "nats per token, estimated", (Series("entropy_estimate", "PPO", "ppo"),)),
    ),
}


def stage_charts(run: Run, stage: str) -> list[Chart]:
    """The curves of a stage, without those that its metrics lack."""
    metrics = run.stages[stage].metrics
    panels = (*PANELS.get(stage, ()), *_objective_panels(stage, metrics))
    charts = [_curves(panel, metrics, stage, number) for number, panel in enumerate(panels)]
    return [chart for chart in charts if chart is not None]


def _objective_panels(stage: str, metrics: Sequence[dict[str, Any]]) -> list[Panel]:
    """A chart for each objective of a reward model of several."""
    fields = dict.fromkeys(field for line in metrics for field in line)
    split = [field.split("/", 1) for field in fields if "/" in field]
    if stage == "ppo":
        scores = [(name, Series(f"score/{name}", "PPO", "ppo")) for kind, name in split if kind == "score"]
        return [Panel(f"Score, {label(name)}", "from the head of this objective", (series,)) for name, series in scores]
    names = [name for kind, name in split if kind == "accuracy"]
    train, heldout = ACCURACY
    return [
        Panel(
            f"Accuracy, {label(name)}",
            "pairs of this objective",
            (replace(train, field=f"accuracy/{name}"), replace(heldout, field=f"heldout_accuracy/{name}")),
            is_share=True,
        )
        for name in names
    ]


def _points(metrics: Sequence[dict[str, Any]], field: str) -> tuple[Floats, Floats]:
    """Steps and finite values of a field, thinned to at most MAX_POINTS by averaging neighbours."""
    pairs = [(line.get("step"), line.get(field)) for line in metrics]
    kept = [(x, y) for x, y in pairs if isinstance(x, int | float) and isinstance(y, int | float)]
    points = np.array(kept, dtype=np.float64).reshape(-1, 2)
    if len(points) > MAX_POINTS:
        points = np.array([part.mean(axis=0) for part in np.array_split(points, MAX_POINTS)])
    return points[:, 0], points[:, 1]


def _curves(panel: Panel, metrics: Sequence[dict[str, Any]], stage: str, place: int) -> Chart | None:
    drawn = [(series, *_points(metrics, series.field)) for series in panel.series]
    drawn = [(series, xs, ys) for series, xs, ys in drawn if len(xs) > 0]
    if not drawn:
        return None
    show = percent if panel.is_share else number

    def paint(axes: Any) -> None:
        for series, xs, ys in drawn:
            _curve(axes, series, xs, ys)
        axes.set_xlabel("iteration" if stage == "ppo" else "step", loc="right")
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 5, 10]))
        axes.yaxis.set_major_locator(MaxNLocator(4, steps=ROUND_STEPS))
        if panel.is_share:
            axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axes.margins(x=0.02)

    parts = [f"{series.name} from {show(ys[0])} to {show(ys[-1])}" for series, _, ys in drawn]
    svg = draw(
        paint, **CURVE_SIZE, margins=(44, 10, 34, 8), name=f"{stage}-{place}",
        label=f"Curves of {stage}, {panel.title.lower()}: {'; '.join(parts)}; {number(int(drawn[0][1][-1]))} steps.",
    )  # fmt: skip
    keys = tuple(
        Key(series.tone, "o" if series.is_sparse else "line", f"{series.name} {show(ys[-1])}")
        for series, _, ys in drawn
    )
    return Chart(panel.title, panel.unit, keys, svg, f"{stage}/metrics.jsonl")


def _curve(axes: Any, series: Series, xs: Floats, ys: Floats) -> None:
    colour = tone(series.tone)
    if series.is_sparse or len(xs) < 30:
        axes.plot(xs, ys, "o-", color=colour, markersize=4 if len(xs) < 40 else 0, linewidth=1.6)
        return
    axes.plot(xs, ys, color=colour, linewidth=0.8, alpha=0.35)
    axes.plot(xs, running_mean(ys, max(3, len(xs) // 20)), color=colour)
