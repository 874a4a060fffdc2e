"""What the report of a run shows of the comparison. The comparison's own page has every prompt, test and rating."""

from collections.abc import Mapping
from math import isfinite, nan

import numpy as np

from compare.results import CompareResults, PolicyResults, SampledPrompt, WinRateResults
from intervals.estimates import Interval
from reports.curves import stage_block
from reports.parts import (
    Answer,
    Cell,
    Columns,
    Figure,
    Headline,
    Note,
    Part,
    Row,
    Section,
    StageReport,
    StageReporter,
    Table,
)
from reports.plots import KLPoint, KLSeries, Measured, interval_figure, kl_figure
from reports.samples import Samples, ShownPrompt, ShownResponse, anchor_of, folded, start_of
from reports.stage_folder import StageFolder
from reports.stage_report import headline_of, headline_of_share
from reports.styles import PolicyStyle, styles_of
from reports.text import UNKNOWN, count, ends_of, label, number, percent, share_ends

# Below these shares of what SFT shows, or of all responses, the answer warns of collapse.
LEAST_DIVERSITY_KEPT = 0.85
LEAST_END_RATE = 0.9
NUM_OPEN_SAMPLES = 3

Styles = Mapping[str, PolicyStyle]


def report(stage: StageFolder) -> StageReport:
    results = stage.results(CompareResults)
    if results is None:
        return StageReport((stage_block(stage, (), ()),))
    styles = styles_of(list(results.policies))
    return StageReport(
        sections=(
            Section("comparison", "The comparison", _parts(stage, results, styles)),
            Section("samples", "Samples side by side", _samples(results, styles)),
        ),
        headlines=_headlines(stage, results),
        answer=answer_of(results, styles),
        styles=tuple(styles.values()),
    )


def _parts(stage: StageFolder, results: CompareResults, styles: Styles) -> tuple[Part, ...]:
    facts = (
        ("Judge", label(results.judge.name)),
        ("Prompts", count(results.num_prompts)),
        ("Samples per prompt", count(results.num_samples)),
        ("Temperature", number(results.temperature)),
    )
    gold = [Measured(s.title, s.tone, s.marker, results.policies[name].gold_score) for name, s in styles.items()]
    unit = "mean and 95% interval over prompts, higher is better"
    kl_figures = [_kl_figure(results, styles, *which) for which in KL_FIGURES]
    return (
        Note(f"{REPORTER.about} The judge: {results.judge.description}"),
        *stage_block(stage, facts, (), in_a_row=True).parts,
        Columns((win_table(results, styles), interval_figure(gold, title="Gold score", unit=unit, name="gold"))),
        Columns(tuple(figure for figure in kl_figures if figure is not None)),
        Note(
            "SFT stands at 0 nats by definition. Best-of-n stands at its bound, log n − (n − 1)/n, the most its KL can"
            " be. The pretrained model is left out, since it does not start from SFT.",
            "aside",
        ),
        Columns((policy_table(results, styles), _kind_table(results, styles))),
        Note(
            "All prompts, with tests, ratings, diversity and every verdict:",
            "aside",
            (f"{stage.name}/report.html", "the page of the comparison"),
        ),
    )


def win_table(results: CompareResults, styles: Styles) -> Table:
    """Win rate of every policy over every other."""
    rows = tuple(
        Row((styles[first],), tuple(_win_cell(results, first, second) for second in styles)) for first in styles
    )
    caption = "How often the policy of the row beats the policy of the column. Bold: the 95% interval excludes 50%."
    return Table(caption, ("Row over column", *styles.values()), rows, "by-policy matrix", "Win rates")


def _win_cell(results: CompareResults, first: str, second: str) -> Cell:
    pair = results.pairs.get(f"{first}/{second}")
    if pair is None or not isfinite(pair.win_rate.mean):
        return Cell("" if first == second else UNKNOWN)
    rate = pair.win_rate
    is_clear = rate.low > 0.5 or rate.high < 0.5
    ends = share_ends(rate.low, rate.high)
    return Cell(percent(rate.mean), ends, tint=2 * rate.mean - 1, is_clear=is_clear)


def policy_table(results: CompareResults, styles: Styles) -> Table:
    """Every policy's figures with their intervals."""
    bounds = _kl_bounds(results)
    own = {name: results.policies[name] for name in styles}
    cells = {
        "Gold score": [_mean_cell(found.gold_score) for found in own.values()],
        "Share above the pass mark": [_share_cell(found.pass_share) for found in own.values()],
        "Reward model's score": [_mean_cell(found.proxy_score) for found in own.values()],
        "KL from SFT, nats": [
            Cell(f"≤ {number(bounds[name], 1)}", "bound") if name in bounds else _mean_cell(found.kl_nats, 1)
            for name, found in own.items()
        ],
        "Distinct-2": [Cell(number(found.distinct_2)) for found in own.values()],
        "Responses that end": [Cell(percent(found.end_rate)) for found in own.values()],
        "Mean length, tokens": [Cell(number(found.mean_tokens, 0)) for found in own.values()],
    }
    rows = tuple(Row((name,), tuple(found)) for name, found in cells.items() if any(c.text != UNKNOWN for c in found))
    caption = "Figures of each policy; 95% intervals over prompts below the means."
    return Table(caption, ("Figure", *styles.values()), rows, "by-policy", "Policies")


def _mean_cell(found: Interval | None, digits: int = 2) -> Cell:
    if found is None or not isfinite(found.mean):
        return Cell(UNKNOWN)
    return Cell(number(float(found.mean), digits), ends_of(found, digits))


def _share_cell(found: Interval) -> Cell:
    return Cell(percent(found.mean), share_ends(found.low, found.high))


def _kind_table(results: CompareResults, styles: Styles) -> Table:
    kinds = sorted({kind for found in results.policies.values() for kind in found.by_kind})
    rows = tuple(
        Row((label(kind),), tuple(Cell(number(results.policies[name].by_kind.get(kind))) for name in styles))
        for kind in kinds
    )
    caption = "Mean gold score by kind of prompt."
    return Table(caption, ("Kind", *styles.values()), rows, "by-policy", "Kinds of prompt")


KL_FIGURES = (
    ("gold_score", "Gold score against KL", "what the judge sees"),
    ("proxy_score", "Reward model's score against KL", "what PPO climbs"),
)


def _kl_figure(results: CompareResults, styles: Styles, field: str, title: str, unit: str) -> Figure | None:
    """What moving away from the SFT policy buys."""
    bounds = _kl_bounds(results)
    series = []
    if results.best_of_n:
        points = tuple(
            KLPoint(
                f"best of {found.n}", found.kl_bound_nats, getattr(found, field),
                f"n={found.n}" if found.n > 1 and f"best_of_{found.n}" not in styles else "",
            )
            for found in results.best_of_n
        )  # fmt: skip
        key = "best-of-n from SFT, at its KL bound"
        series.append(KLSeries(key, "best-of-n", "D", points, is_joined=True, is_band=True))
    if field == "proxy_score" and results.training_scores:
        trail = (np.array(results.training_kl_nats), np.array(results.training_scores))
        series.append(KLSeries("PPO in training", "ppo", "^", trail=trail))
    for name, style in styles.items():
        found = results.policies[name]
        kl = 0.0 if name == "sft" else bounds.get(name, nan if found.kl_nats is None else found.kl_nats.mean)
        score = getattr(found, field)
        # The pretrained model does not start from SFT; so far away, it would squeeze the rest into a corner.
        if name != "pretrained" and isfinite(kl) and score is not None and isfinite(score.mean):
            point = KLPoint(style.title, kl, score, style.title)
            series.append(KLSeries("", style.tone, style.marker, (point,)))
    if not series:
        return None
    name = field.replace("_", "-")
    return kl_figure(series, title=title, unit=unit, name=name, x_label="KL from SFT, nats")


def _kl_bounds(results: CompareResults) -> dict[str, float]:
    """The most that the KL of each best-of-n policy can be, in nats, by the policy's name."""
    return {f"best_of_{found.n}": found.kl_bound_nats for found in results.best_of_n}


def _samples(results: CompareResults, styles: Styles) -> tuple[Part, ...]:
    prompts = tuple(
        _shown(sample, styles, is_open=place < NUM_OPEN_SAMPLES) for place, sample in enumerate(results.samples)
    )
    about = Note("The first sample of each policy on held-out prompts, unselected.")
    return about, Samples(prompts, len(prompts))


def _shown(sample: SampledPrompt, styles: Styles, *, is_open: bool) -> ShownPrompt:
    messages = (("user", sample.prompt),)
    return ShownPrompt(
        anchor=anchor_of(sample.prompt_id),
        prompt_id=sample.prompt_id,
        category=sample.kind,
        start=start_of(messages),
        messages=tuple((role, folded(text)) for role, text in messages),
        responses=tuple(
            (style, (ShownResponse(0, folded(found.text), _scores(found.gold_score, found.proxy_score)),))
            for name, style in styles.items()
            if (found := sample.responses.get(name)) is not None
        ),
        is_open=is_open,
    )


def _scores(gold: float, proxy: float) -> str:
    return f"judge {number(float(gold))}, reward model {number(float(proxy))}"


def _headlines(stage: StageFolder, results: CompareResults) -> tuple[Headline, ...]:
    found, policy = [], results.policies["ppo"]
    rate = _ppo_over(results, "sft")
    if rate is not None:
        span, detail = (rate.mean, rate.low, rate.high), f"{number(rate.num_prompts)} held-out prompts"
        found.append(headline_of_share(stage, "pairs.ppo/sft.win_rate", "PPO over SFT", span, detail))
    if isfinite(policy.gold_score.mean):
        sft = results.policies["sft"].gold_score.mean
        detail = ", ".join(part for part in (ends_of(policy.gold_score), f"SFT {number(float(sft))}") if part)
        mean = policy.gold_score.mean
        text, field = number(float(mean)), "policies.ppo.gold_score.mean"
        found.append(headline_of(stage, field, "PPO's gold score", mean, text, detail))
    if isfinite(policy.pass_share.mean):
        span = (policy.pass_share.mean, policy.pass_share.low, policy.pass_share.high)
        found.append(headline_of_share(stage, "policies.ppo.pass_share", "PPO's pass share", span))
    kl = policy.kl_nats
    if kl is not None and isfinite(kl.mean):
        # At PPO's own place, where the KL of its last iteration stands until the comparison has run.
        file, field = f"{stage.name}/results.json", "policies.ppo.kl_nats.mean"
        detail = ", ".join(part for part in (ends_of(kl, 1), "held-out prompts") if part)
        found.append(Headline("ppo.kl_nats", file, field, kl.mean, "KL from SFT", f"{number(kl.mean, 1)} nats", detail))
    return tuple(found)


def _ppo_over(results: CompareResults, other: str) -> WinRateResults | None:
    """None where they were not compared, or nothing is known."""
    pair = results.pairs.get(f"ppo/{other}")
    return None if pair is None or not isfinite(pair.win_rate.mean) else pair.win_rate


def answer_of(results: CompareResults, styles: Styles) -> Answer:
    """Whether PPO's policy is preferred to SFT's, and what that alone would hide."""
    rate = _ppo_over(results, "sft")
    if rate is None:
        return Answer("unclear", "PPO and SFT have not been compared.")
    ppo, sft = results.policies["ppo"], results.policies["sft"]
    answer = _win_answer(rate)
    kl = "" if ppo.kl_nats is None else f", at {number(float(ppo.kl_nats.mean), 1)} nats of KL from SFT"
    scores = (
        f"The judge's mean score goes from {number(float(sft.gold_score.mean))} (SFT) to"
        f" {number(float(ppo.gold_score.mean))} (PPO)"
    )
    best = [
        f"{style.title.replace('Best of ', 'best-of-')} from SFT reaches"
        f" {number(float(results.policies[name].gold_score.mean))}"
        for name, style in styles.items()
        if style.tone == "best-of-n"
    ]
    sentences = [f"{answer.text}{kl}.", f"{'; '.join([scores, *best])}.", *_warnings(results, styles, ppo, sft)]
    return Answer(answer.tone, " ".join(sentences))


def _win_answer(rate: WinRateResults) -> Answer:
    where = f"of the time on {number(rate.num_prompts)} held-out prompts (ties count half"
    if not (isfinite(rate.low) and isfinite(rate.high)):
        return Answer("unclear", f"PPO beats SFT {percent(rate.mean)} {where}), too few prompts for an interval")
    ends = f"95% interval {share_ends(rate.low, rate.high)}"
    if rate.low > 0.5:
        return Answer("better", f"PPO beats SFT {percent(rate.mean)} {where}; {ends})")
    if rate.high < 0.5:
        return Answer("worse", f"PPO is worse than SFT: it wins only {percent(rate.mean)} {where}; {ends})")
    wins = f"PPO wins {percent(rate.mean)} {where})"
    return Answer("unclear", f"No difference between PPO and SFT is shown: {wins}, and the {ends} includes 50%")


def _warnings(results: CompareResults, styles: Styles, ppo: PolicyResults, sft: PolicyResults) -> list[str]:
    """What a win rate alone would hide: best-of-n still ahead, repetition, responses that never end."""
    found = []
    for name, style in styles.items():
        rate = _ppo_over(results, name)
        if style.tone == "best-of-n" and rate is not None and rate.high < 0.5:
            found.append(f"{style.title} is still ahead of PPO, which wins {percent(rate.mean)} against it.")
    if ppo.distinct_2 < LEAST_DIVERSITY_KEPT * sft.distinct_2:
        fell = f"{number(sft.distinct_2)} to {number(ppo.distinct_2)}"
        found.append(f"PPO's responses are less varied: distinct-2 fell from {fell}.")
    if ppo.end_rate < LEAST_END_RATE:
        found.append(f"Only {percent(ppo.end_rate)} of PPO's responses end with the end token.")
    return found


REPORTER = StageReporter(
    "Comparison", "All policies on held-out prompts, judged by a scorer that training never saw.", report
)
