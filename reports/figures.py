"""The headline figures and where each comes from: a report's field, and the file and field it was copied from."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from reports.run import STAGES, Run, dig
from reports.text import duration, interval, number, percent, policies_of


@dataclass(frozen=True)
class Headline:
    """A figure with its interval, its card, and its source. `field` is its place in report.json."""

    field: str
    file: str
    source_field: str
    value: Any
    title: str
    text: str
    detail: str
    bar: tuple[float, float, float] | None = None  # low, mean, high of a share


def headlines(run: Run) -> list[Headline]:
    """The figures on the page's cards, those that the run has."""
    found = [
        _share(run, "compare", "pairs.ppo/sft.win_rate", "PPO over SFT", "num_prompts", "held-out prompts"),
        _gold(run),
        _share(run, "compare", "policies.ppo.positive_share", "PPO's positive share", "", ""),
        _share(run, "compare", "policies.ppo.pass_share", "PPO's pass share", "", ""),
        kl_headline(run),
        _plain(
            run,
            "reward",
            "heldout_accuracy",
            "Reward model accuracy",
            percent,
            "held-out pairs ordered as labelers did",
        ),
        _share(run, "reward", "gold_accuracy", "Reward model, gold", "num_pairs", "pairs"),
        _share(run, "reward", "human_pairs_accuracy", "Reward model, people", "num_pairs", "pairs"),
        _share(run, "collect", "agreement", "Labelers agree", "num_pairs", "pairs"),
        _plain(run, "sft", "heldout_loss", "SFT held-out loss", number, _loss_before(run)),
        _plain(run, "pretrain", "heldout_bits_per_byte", "Bits per byte", number, "pretraining, held-out text"),
    ]
    return [headline for headline in found if headline is not None]


def _plain(run: Run, stage: str, field: str, title: str, show: Callable[[Any], str], detail: str) -> Headline | None:
    value = run.get(stage, field)
    if value is None:
        return None
    return Headline(f"{stage}.{field}", f"{stage}/results.json", field, value, title, show(value), detail)


def _share(run: Run, stage: str, field: str, title: str, count_field: str, unit: str) -> Headline | None:
    """A share with its interval and how many of what it was measured on."""
    figure = run.get(stage, field)
    mean, low, high, num = (dig(figure, key) for key in ("mean", "low", "high", count_field))
    if mean is None:
        return None
    has_interval = low is not None and high is not None
    parts = [f"95% interval {interval(figure, share=True)}"] if has_interval else ["no interval"]
    parts += [f"{number(num)} {unit}"] if num is not None else []
    bar = (low, mean, high) if low is not None and high is not None else None
    file = f"{stage}/results.json"
    return Headline(f"{stage}.{field}.mean", file, f"{field}.mean", mean, title, percent(mean), ", ".join(parts), bar)


def _gold(run: Run) -> Headline | None:
    field = "policies.ppo.gold_score"
    mean = run.get("compare", f"{field}.mean")
    if mean is None:
        return None
    before = run.get("compare", "policies.sft.gold_score.mean")
    span = interval(run.get("compare", field))
    detail = ", ".join(part for part in (span, "" if before is None else f"SFT {number(float(before))}") if part)
    path = f"{field}.mean"
    return Headline(f"compare.{path}", "compare/results.json", path, mean, "PPO's gold score", number(mean), detail)


def kl_headline(run: Run) -> Headline | None:
    """PPO's KL from SFT: of held-out prompts, or of its last iteration until the comparison has run."""
    field = "policies.ppo.kl_nats"
    mean = run.get("compare", f"{field}.mean")
    if mean is not None:
        detail = ", ".join(part for part in (interval(run.get("compare", field), digits=1), "held-out prompts") if part)
        file, field = "compare/results.json", f"{field}.mean"
    else:
        metrics = run.stages["ppo"].metrics if run.stages["ppo"].results else []
        mean = dig(metrics[-1], "kl_nats") if metrics else None
        file, field, detail = "ppo/metrics.jsonl", "kl_nats of the last line", "last iteration of training"
    if mean is None:
        return None
    return Headline("ppo.kl_nats", file, field, mean, "KL from SFT", f"{number(float(mean), 1)} nats", detail)


def _loss_before(run: Run) -> str:
    before = run.get("sft", "heldout_loss_before")
    return "nats per token" + ("" if before is None else f", {number(before)} before")


def seconds_of(run: Run) -> dict[str, float]:
    """Wall-clock seconds of each finished stage, and their sum."""
    seconds = {name: taken for name in STAGES if (taken := run.stages[name].seconds) is not None}
    return {**seconds, "total": sum(seconds.values())}


def sources_of(run: Run) -> dict[str, dict[str, str]]:
    """For a field of report.json, the file and field it was copied from; else the longest known prefix tells."""
    sources = {
        name: {"file": f"{name}/results.json", "field": "the same path below the stage's name"}
        for name in STAGES
        if run.stages[name].results
    }
    named = {headline.field: {"file": headline.file, "field": headline.source_field} for headline in headlines(run)}
    for policy in policies_of(run.get("compare", "policies") or {}):
        path = f"policies.{policy.name}.gold_score"
        named[f"compare.{path}"] = {"file": "compare/results.json", "field": path}
    times = {
        f"seconds.{name}": {"file": f"{name}/lineage.json", "field": "seconds"}
        for name in seconds_of(run)
        if name != "total"
    }
    return {**sources, **named, **times}


def total_time(run: Run) -> str:
    """The sum of the stages' times, as text."""
    return duration(seconds_of(run)["total"])
