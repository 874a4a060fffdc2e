"""What the page shows, in order: headline figures, the comparison's tables, samples, and each stage.

Everything here is plain text and numbers; the template escapes it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from reports.curves import stage_charts
from reports.plots import agreement_chart, kl_bounds
from reports.run import Run, dig
from reports.svg import Chart
from reports.text import Policy, count, duration, interval, label, number, percent, policies_of

SHOWN_CHARACTERS = 2_000  # of a prompt or a response; the rest is in report.json
NUM_OPEN_SAMPLES = 3


@dataclass(frozen=True)
class Cell:
    """A table cell: a value, its interval in small, and a tint from -1 (worse) over 0 to 1 (better)."""

    text: str
    small: str = ""
    tint: float = 0.0
    is_clear: bool = False


@dataclass(frozen=True)
class Table:
    """A table with one column a policy."""

    caption: str
    columns: Sequence[Policy]
    rows: Sequence[tuple[Policy | str, Sequence[Cell]]]


def win_table(run: Run) -> Table | None:
    """Win rate of every policy over every other."""
    pairs, policies = run.get("compare", "pairs"), policies_of(run.get("compare", "policies") or {})
    if not pairs:
        return None
    rows = [(first, [_win_cell(pairs, first, second) for second in policies]) for first in policies]
    caption = "How often the policy of the row beats the policy of the column. Bold: the 95% interval excludes 50%."
    return Table(caption, policies, rows)


def _win_cell(pairs: dict[str, Any], first: Policy, second: Policy) -> Cell:
    rate = dig(pairs, f"{first.name}/{second.name}", "win_rate")
    mean = dig(rate, "mean")
    if mean is None:
        return Cell("" if first == second else "–")
    low, high = dig(rate, "low"), dig(rate, "high")
    is_clear = low is not None and high is not None and (low > 0.5 or high < 0.5)
    return Cell(percent(mean), interval(rate, share=True), tint=2 * mean - 1, is_clear=is_clear)


# Rows of the policies' table: the field, its name, whether it is a share, digits after the point.
POLICY_ROWS = (
    ("gold_score", "Gold score", False, 2),
    ("positive_share", "Positive share", True, 0),
    ("pass_share", "Share above the pass mark", True, 0),
    ("proxy_score", "Reward model's score", False, 2),
    ("kl_nats", "KL from SFT, nats", False, 1),
    ("distinct_2", "Distinct-2", False, 2),
    ("end_rate", "Responses that end", True, 0),
    ("mean_tokens", "Mean length, tokens", False, 0),
)


def policy_table(run: Run) -> Table | None:
    """Every policy's figures with their intervals."""
    figures = run.get("compare", "policies")
    if not figures:
        return None
    policies, bounds = policies_of(figures), kl_bounds(run)
    rows = [
        (
            name,
            [
                _bound_cell(bounds[policy.name])
                if field == "kl_nats" and policy.name in bounds
                else _figure_cell(dig(figures, policy.name, field), is_share, digits)
                for policy in policies
            ],
        )
        for field, name, is_share, digits in POLICY_ROWS
        if any(dig(figures, policy.name, field) is not None for policy in policies)
    ]
    return Table("Figures of each policy; 95% intervals over prompts below the means.", policies, rows)


def _bound_cell(nats: float) -> Cell:
    return Cell(f"≤ {number(float(nats), 1)}", "bound")


def _figure_cell(value: Any, is_share: bool, digits: int) -> Cell:
    mean = dig(value, "mean") if isinstance(value, dict) else value
    if mean is None:
        return Cell("–")
    text = percent(mean) if is_share else number(float(mean), digits)
    return Cell(text, interval(value, share=is_share, digits=digits))


def kind_table(run: Run) -> Table | None:
    """Mean gold score of every policy on each kind of prompt."""
    figures = run.get("compare", "policies")
    policies = policies_of(figures or {})
    kinds = sorted({kind for policy in policies for kind in dig(figures, policy.name, "by_kind") or {}})
    if not kinds:
        return None
    rows = [
        (label(kind), [_figure_cell(dig(figures, policy.name, "by_kind", kind), False, 2) for policy in policies])
        for kind in kinds
    ]
    return Table("Mean gold score by kind of prompt.", policies, rows)


@dataclass(frozen=True)
class Response:
    """One policy's response in a sample."""

    policy: Policy
    text: str
    gold: str
    proxy: str


@dataclass(frozen=True)
class Sample:
    """A prompt with the policies' responses side by side."""

    prompt_id: str
    kind: str
    prompt: str
    responses: Sequence[Response]
    is_open: bool


def samples_of(run: Run) -> list[Sample]:
    """The samples that the compare stage chose to show; the first few are open."""
    samples = run.get("compare", "samples") or []
    policies = policies_of(run.get("compare", "policies") or {})
    return [_sample(sample, policies, place < NUM_OPEN_SAMPLES) for place, sample in enumerate(samples)]


def _sample(sample: dict[str, Any], policies: Sequence[Policy], is_open: bool) -> Sample:
    responses = []
    for policy in policies:
        response = dig(sample, "responses", policy.name)
        if response is not None:
            gold, proxy = dig(response, "gold_score"), dig(response, "proxy_score")
            text = _shorten(str(dig(response, "text") or ""))
            responses.append(Response(policy, text, number(gold), number(proxy)))
    kind, prompt_id = (str(sample.get(key) or "") for key in ("kind", "prompt_id"))
    return Sample(label(prompt_id), label(kind), _shorten(str(sample.get("prompt") or "")), responses, is_open)


def _shorten(text: str) -> str:
    if len(text) <= SHOWN_CHARACTERS:
        return text
    return f"{text[:SHOWN_CHARACTERS]}… ({number(len(text) - SHOWN_CHARACTERS)} more characters in report.json)"


@dataclass(frozen=True)
class StageView:
    """One stage's section."""

    name: str
    title: str
    about: str
    status: str
    time: str
    facts: Sequence[tuple[str, str]]
    charts: Sequence[Chart]


ABOUT = {
    "pretrain": ("Pretraining", "A tokenizer and a language model, from raw text."),
    "sft": ("Supervised fine-tuning", "Demonstrations teach it to follow instructions; loss on responses only."),
    "collect": ("Collecting preferences", "Labelers rank several responses of the SFT policy to each prompt."),
    "reward": ("Reward model", "The SFT model with a scalar head learns to order responses as the labelers did."),
    "ppo": ("PPO", "The policy climbs the reward model's score, held near SFT by a KL penalty."),
    "compare": ("Comparison", "All policies on held-out prompts, judged by a scorer that training never saw."),
}  # fmt: skip

Show = Callable[[Any], str]
FACTS: dict[str, tuple[tuple[str, str, Show], ...]] = {
    "pretrain": (
        ("Parameters", "num_parameters", count),
        ("Vocabulary", "vocab_size", count),
        ("Tokens of text", "train_tokens", count),
        ("Tokens trained on", "trained_tokens", count),
        ("Held-out loss", "heldout_loss", number),
        ("Bits per byte", "heldout_bits_per_byte", number),
        ("Hidden words found", "heldout_accuracy", percent),
    ),
    "sft": (
        ("Packed rows", "num_rows", count),
        ("Steps", "num_steps", count),
        ("Held-out loss before", "heldout_loss_before", number),
        ("Held-out loss after", "heldout_loss", number),
        ("Packing efficiency", "packing_efficiency", percent),
    ),
    "collect": (
        ("Prompts", "num_prompts", count),
        ("Responses a prompt", "responses_per_prompt", count),
        ("Judgments", "num_judgments", count),
        ("Ties", "tie_share", percent),
    ),
    "reward": (
        ("Comparisons, train", "train_comparisons", count),
        ("Rankings of them", "train_rankings", count),
        ("Comparisons, held-out", "heldout_comparisons", count),
        ("Held-out pairs", "heldout_pairs", count),
        ("Held-out accuracy", "heldout_accuracy", percent),
        ("Wins and ties foretold, nats a pair", "ties.heldout_log_likelihood", lambda value: number(value, 4)),
        ("Ratings explained, held-out", "ratings.heldout_explained", percent),
        ("Score of samples, mean", "sample_score_mean", number),
        ("Score of samples, std", "sample_score_std", number),
    ),
    "ppo": (
        ("Iterations", "num_iterations", count),
        ("Final KL coefficient", "final_kl_coef", lambda value: number(value, 4)),
    ),
    "compare": (
        ("Judge", "judge.name", lambda value: label(str(value))),
        ("Prompts", "num_prompts", count),
        ("Samples a prompt", "num_samples", count),
        ("Temperature", "temperature", number),
    ),
}


def stage_views(run: Run) -> list[StageView]:
    """The job's stages in the order of the loop, those that have not run included: they say so."""
    return [_stage_view(run, name) for name in run.stage_names]


def _stage_view(run: Run, name: str) -> StageView:
    stage = run.stages[name]
    facts = [
        (title, show(run.get(name, field))) for title, field, show in FACTS[name] if run.get(name, field) is not None
    ]
    if name == "collect" and stage.results:
        labelers = [label(str(labeler)) for labeler in stage.results.get("labelers") or []]
        facts.append(("Labelers", ", ".join(labelers)))
    if name == "reward":
        facts += _objective_facts(run.get(name, "objectives") or {})
    charts = stage_charts(run, name)
    if name == "collect":
        charts += [chart for chart in [agreement_chart(run)] if chart is not None]
    facts += _metric_facts(stage.metrics)
    title, about = ABOUT[name]
    status = stage.status
    if status == "unfinished":
        last = stage.metrics[-1]
        status = f"unfinished: step {number(last.get('step'))} of {number(last.get('num_steps'))}"
    return StageView(name, title, about, status, duration(stage.seconds), facts, charts)


def _objective_facts(objectives: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Of each head of a reward model of several objectives."""
    return [
        (
            f"Held-out accuracy, {label(name)}",
            f"{percent(figures.get('heldout_accuracy'))} of {number(figures.get('heldout_pairs'))} pairs",
        )
        for name, figures in objectives.items()
    ]


def _metric_facts(metrics: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Figures that are of the whole course of training."""
    facts = []
    speeds = [line["tokens_per_second"] for line in metrics if line.get("tokens_per_second") is not None]
    if speeds:
        facts.append(("Tokens per second, median", count(median(speeds))))
    if any("failed_scores" in line for line in metrics):
        facts.append(("Responses without a score", count(int(sum(line.get("failed_scores") or 0 for line in metrics)))))
    return facts
