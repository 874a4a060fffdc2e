"""The report's charts of results: agreement, gold scores with intervals, and score against KL."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.ticker import MaxNLocator, PercentFormatter

from reports.run import Run, dig
from reports.svg import ROUND_STEPS, Chart, Key, draw, running_mean, tone
from reports.text import Policy, interval, label, number, percent, policies_of

WIDE_SIZE = {"width": 420, "height": 280}


@dataclass(frozen=True)
class Measured:
    """A row of a dot-and-interval chart."""

    name: str
    tone: str
    marker: str
    mean: dict[str, Any]


def interval_chart(
    rows: Sequence[Measured], *, title: str, unit: str, name: str, source: str, is_share: bool = False
) -> Chart:
    """Dots with 95% intervals, one row each, the first on top."""

    def paint(axes: Any) -> None:
        for place, row in enumerate(rows):
            y, mean, colour = len(rows) - 1 - place, float(row.mean["mean"]), tone(row.tone)
            low, high = row.mean.get("low"), row.mean.get("high")
            if low is not None and high is not None:
                axes.plot([low, high], [y, y], color=colour, linewidth=3, alpha=0.55)
            axes.plot([mean], [y], row.marker, color=colour, markersize=8, markeredgecolor=tone("page"))
            value = percent(mean) if is_share else number(mean)
            axes.annotate(value, (mean, y), (0, 8), textcoords="offset points", ha="center", va="bottom")
        axes.set_yticks(range(len(rows)), [label(row.name) for row in reversed(rows)])
        axes.tick_params(axis="y", labelcolor=tone("ink"), pad=8)
        axes.set_ylim(-0.5, len(rows) - 0.3)
        axes.grid(visible=True, axis="x")
        axes.grid(visible=False, axis="y")
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=ROUND_STEPS))
        axes.margins(x=0.12)
        if is_share:
            axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))

    longest = max(len(label(row.name)) for row in rows)
    spoken = [f"{row.name} {_spoken(row.mean, is_share)}" for row in rows]
    svg = draw(
        paint, width=WIDE_SIZE["width"], height=48 * len(rows) + 40, margins=(26 + 6.4 * longest, 16, 26, 8), name=name,
        label=f"{title}, dots with 95% intervals: {'; '.join(spoken)}.",
    )  # fmt: skip
    return Chart(title, unit, (), svg, source, is_wide=True)


def _spoken(mean: dict[str, Any], is_share: bool) -> str:
    value, span = mean["mean"], interval(mean, share=is_share)
    return f"{percent(value) if is_share else number(float(value))}" + (f" ({span})" if span else "")


def agreement_chart(run: Run) -> Chart | None:
    """How often two ways of ordering the same pair of responses agree, chance being 50%."""
    pairs = (
        ("Labelers, each other", "muted", "o", run.get("collect", "agreement")),
        ("Labelers, gold", "muted", "s", run.get("collect", "gold_accuracy")),
        ("Reward model, labelers", "heldout", "o", {"mean": run.get("reward", "heldout_accuracy")}),
        ("Reward model, gold", "heldout", "s", run.get("reward", "gold_accuracy")),
        ("Reward model, people", "heldout", "D", run.get("reward", "human_pairs_accuracy")),
    )
    rows = [Measured(*pair) for pair in pairs if dig(pair[3], "mean") is not None]
    if not rows:
        return None
    return interval_chart(
        rows, title="Agreement", unit="pairs of responses ordered alike; chance is 50%", name="agreement",
        source="collect/results.json, reward/results.json", is_share=True,
    )  # fmt: skip


def gold_chart(run: Run) -> Chart | None:
    """Every policy's mean gold score with its interval."""
    figures = run.get("compare", "policies")
    rows = [
        Measured(policy.title, policy.tone, policy.marker, figures[policy.name]["gold_score"])
        for policy in policies_of(figures or {})
        if dig(figures, policy.name, "gold_score", "mean") is not None
    ]
    if not rows:
        return None
    return interval_chart(
        rows, title="Gold score", unit="mean and 95% interval over prompts, higher is better", name="gold",
        source="compare/results.json",
    )  # fmt: skip


def kl_charts(run: Run) -> list[Chart]:
    """What moving away from the SFT policy buys: by the judge, and by the reward model that PPO climbs."""
    if not run.get("compare", "policies"):
        return []
    charts = [_kl_chart(run, "gold_score", "Gold score against KL", "what the judge sees")]
    charts.append(_kl_chart(run, "proxy_score", "Reward model's score against KL", "what PPO climbs"))
    return [chart for chart in charts if chart is not None]


def _kl_chart(run: Run, field: str, title: str, unit: str) -> Chart | None:
    points = _policies_by_kl(run, field)
    curve = [
        entry
        for entry in run.get("compare", "best_of_n") or []
        if dig(entry, "kl_bound_nats") is not None and dig(entry, field, "mean") is not None
    ]
    path = run.stages["ppo"].metrics if field == "proxy_score" else []
    path = [line for line in path if line.get("kl_nats") is not None and line.get("score") is not None]
    if not points and not curve:
        return None

    def paint(axes: Any) -> None:
        _best_of_n_curve(axes, curve, field, {policy.name for policy, _, _ in points})
        if path:
            xs, ys = (np.array([line[key] for line in path], dtype=np.float64) for key in ("kl_nats", "score"))
            window = max(1, len(xs) // 12)
            axes.plot(xs, ys, "o", color=tone("ppo"), markersize=2.5, alpha=0.35, markeredgewidth=0)
            axes.plot(running_mean(xs, window), running_mean(ys, window), color=tone("ppo"))
        _policy_points(axes, points)
        axes.set_xlabel("KL from SFT, nats", loc="right")
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=ROUND_STEPS))
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=ROUND_STEPS))
        axes.margins(x=0.1, y=0.16)

    spoken = [f"{policy.title} {number(y['mean'])} at {number(x, 1)} nats" for policy, x, y in points]
    svg = draw(
        paint, **WIDE_SIZE, margins=(44, 12, 36, 8), name=field.replace("_", "-"),
        label=f"{title}: {'; '.join(spoken)}.",
    )  # fmt: skip
    keys = [Key("best-of-n", "line", "best-of-n from SFT, at its KL bound")] if curve else []
    if path:
        keys.append(Key("ppo", "line", "PPO in training"))
    sources = "compare/results.json" + (", ppo/metrics.jsonl" if path else "")
    return Chart(title, unit, tuple(keys), svg, sources)


def kl_bounds(run: Run) -> dict[str, float]:
    """The most that the KL of each best-of-n policy can be, in nats, by the policy's name."""
    curve = run.get("compare", "best_of_n") or []
    return {f"best_of_{e.get('n')}": e["kl_bound_nats"] for e in curve if dig(e, "kl_bound_nats") is not None}


def _policies_by_kl(run: Run, field: str) -> list[tuple[Policy, float, dict[str, Any]]]:
    """Policies with their KL from SFT and their score. Best-of-n stands at the bound, which is all that is known."""
    figures = run.get("compare", "policies")
    bounds = kl_bounds(run)
    found = []
    for policy in policies_of(figures):
        kl = bounds.get(policy.name, dig(figures, policy.name, "kl_nats", "mean"))
        if policy.name == "sft":
            kl = 0.0  # by definition
        score = dig(figures, policy.name, field)
        # The pretrained model does not start from SFT; so far away, it would squeeze the rest into a corner.
        if policy.name != "pretrained" and kl is not None and dig(score, "mean") is not None:
            found.append((policy, float(kl), score))
    return found


def _best_of_n_curve(axes: Any, curve: Sequence[dict[str, Any]], field: str, labeled: set[str]) -> None:
    if not curve:
        return
    xs = [entry["kl_bound_nats"] for entry in curve]
    means = [entry[field]["mean"] for entry in curve]
    nan = math.nan
    lows, highs = ([nan if e[field].get(k) is None else e[field][k] for e in curve] for k in ("low", "high"))
    axes.fill_between(xs, lows, highs, color=tone("best-of-n"), alpha=0.15, linewidth=0)
    axes.plot(xs, means, "o-", color=tone("best-of-n"), markersize=3.5)
    for entry, x, y in zip(curve, xs, means, strict=True):
        if entry.get("n", 1) > 1 and f"best_of_{entry['n']}" not in labeled:
            axes.annotate(
                f"n={entry['n']}", (x, y), (-4, 3), textcoords="offset points", ha="right", va="bottom",
                color=tone("muted"), fontsize=9,
            )  # fmt: skip


def _policy_points(axes: Any, points: Sequence[tuple[Policy, float, dict[str, Any]]]) -> None:
    for policy, x, score in points:
        y, colour = score["mean"], tone(policy.tone)
        low, high = (y if score.get(end) is None else score[end] for end in ("low", "high"))
        axes.plot([x, x], [low, high], color=colour, linewidth=2.5, alpha=0.55)
        axes.plot([x], [y], policy.marker, color=colour, markersize=8, markeredgecolor=tone("page"), zorder=3)
        # Curves rise from SFT, so its label goes below.
        is_start = policy.name == "sft"
        axes.annotate(
            policy.title, (x, min(low, y) if is_start else max(high, y)), (0, -6 if is_start else 6),
            textcoords="offset points", ha="center", va="top" if is_start else "bottom", zorder=4,
        )  # fmt: skip
