"""The report's words: numbers as people read them, the policies' names, and the verdict in a paragraph."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from reports.run import Run, dig

LABEL_CHARACTERS = 24
# A policy keeps its colour and its marker through the whole page; see svg.py for the colours.
KNOWN_POLICIES = {
    "pretrained": ("Pretrained", "pretrained", "o"),
    "sft": ("SFT", "sft", "s"),
    "ppo": ("PPO", "ppo", "^"),
}
# Below these shares of what SFT shows, or of all responses, the verdict warns of collapse.
LEAST_DIVERSITY_KEPT = 0.85
LEAST_END_RATE = 0.9


@dataclass(frozen=True)
class Policy:
    """A policy as the page shows it."""

    name: str
    title: str
    tone: str
    marker: str


def policies_of(names: Iterable[str]) -> list[Policy]:
    """The policies in the order of the loop: pretrained, SFT, best-of-n, PPO, then any others."""
    known: list[Policy] = []
    num_others = 0
    for name in names:
        best_of = re.fullmatch(r"best_of_(\d{1,9})", name)
        if name in KNOWN_POLICIES:
            known.append(Policy(name, *KNOWN_POLICIES[name]))
        elif best_of and not any(policy.tone == "best-of-n" for policy in known):
            known.append(Policy(name, f"Best of {best_of[1]}", "best-of-n", "D"))
        else:
            num_others += 1
            known.append(Policy(name, label(name), f"other-{(num_others - 1) % 3 + 1}", "vPX"[(num_others - 1) % 3]))
    order = ["pretrained", "sft", "best-of-n", "ppo", "other-1", "other-2", "other-3"]
    return sorted(known, key=lambda policy: order.index(policy.tone))


def label(text: str) -> str:
    """A name from a file, short enough for a chart or a table's head."""
    text = " ".join(text.split())
    return text if len(text) <= LABEL_CHARACTERS else text[: LABEL_CHARACTERS - 1] + "…"


def number(value: Any, digits: int = 2) -> str:
    """A number with a true minus sign and thousands set apart; a dash where there is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "–"
    text = f"{value:,}" if isinstance(value, int) else f"{value:,.{digits}f}"
    return text.replace("-", "\u2212")


def count(value: Any) -> str:
    """A count, long ones in thousands or millions."""
    if isinstance(value, int | float) and value >= 10_000_000:
        return f"{value / 1e6:,.0f} M"
    if isinstance(value, int | float) and value >= 1_000_000:
        return f"{value / 1e6:.1f} M"
    return number(value, 0)


def percent(value: Any) -> str:
    """A share as a whole percentage. Only a true 0, ½ or 1 shows as 0%, 50% or 100%; others get up to two digits."""
    if not isinstance(value, int | float):
        return "–"
    texts = [f"{100 * value:.{digits}f}" for digits in range(3)]
    is_true = [float(text) not in (0, 50, 100) or math.isclose(float(text), 100 * value) for text in texts]
    return f"{texts[is_true.index(True) if True in is_true else 2]}%"


def duration(seconds: float | None) -> str:
    """Wall-clock time in the units a person would use."""
    if seconds is None:
        return "–"
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def interval(mean: Any, *, share: bool = False, digits: int = 2) -> str:
    """The 95% interval of {mean, low, high}; empty where it has none (a single prompt)."""
    low, high = dig(mean, "low"), dig(mean, "high")
    if low is None or high is None:
        return ""
    if share:
        return f"{percent(low).removesuffix('%')}–{percent(high)}"
    return f"{number(float(low), digits)} to {number(float(high), digits)}"


@dataclass(frozen=True)
class Verdict:
    """A paragraph, and its tone: better, worse, or unclear."""

    tone: str
    text: str


def verdict_of(run: Run) -> Verdict:
    """What the run shows, in plain words; above all whether PPO's policy is preferred to SFT's."""
    rate = dig(run.get("compare", "pairs"), "ppo/sft", "win_rate")
    if dig(rate, "mean") is None:
        will_be = "compare" in run.stage_names
        begin = "PPO and SFT have not been compared yet." if will_be else "This job compares no policies."
        return Verdict("unclear", " ".join([begin, *_figures_so_far(run)]))
    tone, sentence = _win_sentence(rate)
    kl = dig(run.get("compare", "policies"), "ppo", "kl_nats", "mean")
    if kl is not None:
        sentence += f", at {number(float(kl), 1)} nats of KL from SFT"
    return Verdict(tone, " ".join([sentence + ".", *_gold_sentences(run), *_warnings(run)]))


def _win_sentence(rate: dict[str, Any]) -> tuple[str, str]:
    mean, low, high, num_prompts = (rate.get(key) for key in ("mean", "low", "high", "num_prompts"))
    where = f"of the time on {number(num_prompts)} held-out prompts (ties count half"
    if low is None or high is None:
        return "unclear", f"PPO beats SFT {percent(mean)} {where}), too few prompts for an interval"
    span = f"95% interval {interval(rate, share=True)}"
    if low > 0.5:
        return "better", f"PPO beats SFT {percent(mean)} {where}; {span})"
    if high < 0.5:
        return "worse", f"PPO is worse than SFT: it wins only {percent(mean)} {where}; {span})"
    return "unclear", (
        f"No difference between PPO and SFT is shown: PPO wins {percent(mean)} {where}), and the {span} includes 50%"
    )


def _gold_sentences(run: Run) -> list[str]:
    policies = run.get("compare", "policies")
    means = {
        policy.title: number(float(mean))
        for policy in policies_of(policies)
        if (mean := dig(policies, policy.name, "gold_score", "mean")) is not None
    }
    if not {"SFT", "PPO"} <= means.keys():
        return []
    best_of = [
        f"{title} from SFT reaches {mean}".replace("Best of ", "best-of-")
        for title, mean in means.items()
        if title.startswith("Best of")
    ]
    change = f"The judge's mean score goes from {means['SFT']} (SFT) to {means['PPO']} (PPO)"
    return ["; ".join([change, *best_of]) + "."]


def _warnings(run: Run) -> list[str]:
    """What a win rate alone would hide: best-of-n still ahead, repetition, responses that never end."""
    policies, warnings = run.get("compare", "policies"), []
    for policy in policies_of(policies):
        rate = dig(run.get("compare", "pairs"), f"ppo/{policy.name}", "win_rate")
        high = dig(rate, "high")
        if policy.tone == "best-of-n" and high is not None and high < 0.5:
            warnings.append(f"{policy.title} is still ahead of PPO, which wins {percent(rate['mean'])} against it.")
    before, after = dig(policies, "sft", "distinct_2"), dig(policies, "ppo", "distinct_2")
    if before is not None and after is not None and after < LEAST_DIVERSITY_KEPT * before:
        warnings.append(f"PPO's responses are less varied: distinct-2 fell from {number(before)} to {number(after)}.")
    end_rate = dig(policies, "ppo", "end_rate")
    if end_rate is not None and end_rate < LEAST_END_RATE:
        warnings.append(f"Only {percent(end_rate)} of PPO's responses end by themselves.")
    return warnings


def _figures_so_far(run: Run) -> list[str]:
    """One sentence for each earlier stage that has finished."""
    bits = run.get("pretrain", "heldout_bits_per_byte")
    loss, accuracy = run.get("sft", "heldout_loss"), run.get("reward", "heldout_accuracy")
    sentences = []
    if bits is not None:
        sentences.append(f"Pretraining reaches {number(bits)} bits per byte on held-out text.")
    if loss is not None:
        sentences.append(f"SFT reaches a held-out loss of {number(loss)} nats per token.")
    if accuracy is not None:
        sentences.append(f"The reward model orders {percent(accuracy)} of held-out pairs as the labelers did.")
    return sentences
