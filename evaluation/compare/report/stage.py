"""The comparison in the report of a run, which ends with signs of reward hacking. The comparison's own page has every
prompt, test and rating.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import isfinite, nan

import numpy as np

from evaluation.compare.report.answer import answer_of_run, interval_name, prompts_of
from evaluation.compare.report.measures import hacking_section
from evaluation.compare.report.sections import win_table
from evaluation.compare.results import GOLD, CompareResults, JudgeResults, PolicyResults, SampledPrompt
from evaluation.policies import BEST_OF_N, INITIAL, PRETRAINED
from preferences.statistics.estimates import Interval
from stages.reports.parts import (
    Cell,
    Columns,
    Figure,
    Headline,
    Note,
    Part,
    Row,
    Samples,
    Section,
    ShownPrompt,
    ShownResponse,
    StageReport,
    StageReporter,
    Table,
    folded,
)
from stages.reports.plots import KLPoint, KLSeries, Measured, interval_figure, kl_figure
from stages.reports.run_folder import StageFolder
from stages.reports.stage_report import headline_of, headline_of_share, stage_block
from stages.reports.text import (
    UNKNOWN,
    PolicyStyle,
    count,
    ends_of,
    in_capital,
    kl_with_ends,
    label,
    number,
    percent,
    share_ends,
)

NUM_OPEN_SAMPLES = 3

Styles = Mapping[str, PolicyStyle]


def report(stage: StageFolder) -> StageReport:
    results = stage.results(CompareResults)
    if results is None:
        return StageReport((stage_block(stage, (), ()),))
    styles = results.styles
    return StageReport(
        sections=(
            Section("comparison", "The comparison", _parts(stage, results, styles)),
            *((hacking_section(results.hacking, results.names),) if results.hacking is not None else ()),
            Section("samples", "Samples side by side", _samples(results, styles)),
        ),
        headlines=_headlines(stage, results),
        answer=answer_of_run(results),
        styles=tuple(styles.values()),
    )


def judge_sentence(judge: JudgeResults) -> str:
    """Says who judged, and that this judge took no part in training or is not independent of it."""
    relation = "" if judge.is_reward else f"; {judge.relation or 'it took no part in training'}"
    return f"The judge: {judge.description}{relation}."


def _parts(stage: StageFolder, results: CompareResults, styles: Styles) -> tuple[Part, ...]:
    facts = (
        ("Judge", label(results.judge.name)),
        ("Prompts", count(results.num_prompts)),
        *(
            (("Clusters of prompts", f"{count(results.num_clusters)}, by {results.cluster_by}"),)
            * bool(results.cluster_by)
        ),
        ("Samples per prompt", count(results.num_samples)),
        ("Temperature", number(results.temperature)),
        *((("Prompts read", str(results.overlong)),) if results.overlong else ()),
        *(rows.fact for rows in results.sources),
    )
    scores = [Measured(s.title, s.tone, s.marker, results.policies[name].gold_score) for name, s in styles.items()]
    title, unit = score_title(results), f"mean and 95% interval over {_over_what(results)}, higher is better"
    is_scored = any(isfinite(policy.gold_score.mean) for policy in results.policies.values())  # people may not rate
    figures = (interval_figure(scores, title=title, unit=unit, name="gold"),) if is_scored else ()
    return (
        Note(f"{REPORTER.about} {judge_sentence(results.judge)}"),
        *stage_block(stage, facts, (), in_a_row=True).parts,
        Columns((win_table(results.pairs, list(styles.values())), *figures)),
        Columns(_kl_figures(results, styles)),
        Note(
            _kl_aside(results),
            "aside",
        ),
        Columns((policy_table(results, styles), *_kind_tables(results, styles))),
        Note(
            "All prompts, with tests, ratings, diversity and every verdict:",
            "aside",
            (f"{stage.name}/report.html", "the page of the comparison"),
        ),
    )


def _kl_aside(results: CompareResults) -> str:
    the_initial = results.names.the_initial
    best = " Best-of-n is drawn at log n − (n − 1)/n, the upper bound of its KL." if results.best_of_n else ""
    has_pretrained = any(one.policy.kind == PRETRAINED for one in results.policies.values())
    pretrained = f" The pretrained model is left out, since it does not start from {the_initial}."
    return f"{in_capital(the_initial)} stands at 0 nats by definition.{best}{pretrained if has_pretrained else ''}"


def _over_what(results: CompareResults) -> str:
    return "clusters of prompts" if results.cluster_by else "prompts"


def score_title(results: CompareResults) -> str:
    """Returns the name of the judge's score: gold only if the judge is a world's."""
    return "Gold score" if results.judge.kind == GOLD else "Judge's score"


def policy_table(results: CompareResults, styles: Styles) -> Table:
    """Returns every policy's metrics with their intervals."""
    bounds = _kl_bounds(results)
    policies = {name: results.policies[name] for name in styles}
    cells = {
        score_title(results): [_mean_cell(policy.gold_score) for policy in policies.values()],
        "Share above the pass mark": [_share_cell(policy.pass_share) for policy in policies.values()],
        in_capital(results.names.score): [_mean_cell(policy.proxy_score) for policy in policies.values()],
        f"{results.names.kl}, nats": [
            Cell(f"≤ {number(bounds[name], 1)}", "bound") if name in bounds else _kl_cell(policy.kl_nats)
            for name, policy in policies.items()
        ],
        "Distinct-2": [Cell(number(policy.distinct_2)) for policy in policies.values()],
        "Responses that end": [Cell(percent(policy.end_rate)) for policy in policies.values()],
        "Mean length, tokens": [Cell(number(policy.mean_tokens, 0)) for policy in policies.values()],
    }
    rows = tuple(
        Row((name,), tuple(policy_cells))
        for name, policy_cells in cells.items()
        if any(c.text != UNKNOWN for c in policy_cells)
    )
    caption = (
        f"Figures of each policy; 95% intervals over {_over_what(results)} below the means. To tell whether two"
        " policies differ, use the win rates, not these intervals."
    )
    return Table(caption, ("Figure", *styles.values()), rows, "by-policy", "Policies")


def _mean_cell(mean: Interval | None, digits: int = 2) -> Cell:
    if mean is None or not isfinite(mean.mean):
        return Cell(UNKNOWN)
    return Cell(number(float(mean.mean), digits), ends_of(mean, digits))


def _kl_cell(kl: Interval | None) -> Cell:
    return Cell(UNKNOWN) if kl is None or not isfinite(kl.mean) else Cell(*kl_with_ends(kl))


def _share_cell(share: Interval) -> Cell:
    return Cell(percent(share.mean), share_ends(share.low, share.high))


def _kind_tables(results: CompareResults, styles: Styles) -> tuple[Table, ...]:
    """Returns one table, or none if the prompts have no kinds."""
    kinds = sorted({kind for policy in results.policies.values() for kind in policy.by_kind})
    if kinds in ([], [""]):
        return ()
    rows = tuple(
        Row((label(kind),), tuple(Cell(number(results.policies[name].by_kind.get(kind))) for name in styles))
        for kind in kinds
    )
    caption = "Mean score of the judge by kind of prompt."
    return (Table(caption, ("Kind", *styles.values()), rows, "by-policy", "Kinds of prompt"),)


def _kl_figures(results: CompareResults, styles: Styles) -> tuple[Part, ...]:
    names = results.names
    by_training = f"what {names.algorithm} is trained on" if results.raising else "what chooses best-of-n"
    figures = (
        _kl_figure(results, styles, "gold_score", "Judge's score against KL", "what the judge sees"),
        _kl_figure(results, styles, "proxy_score", f"{in_capital(names.score)} against KL", by_training),
    )
    return tuple(figure for figure in figures if figure is not None)


def _kl_figure(results: CompareResults, styles: Styles, field: str, title: str, unit: str) -> Figure | None:
    """Returns a chart of scores against KL from the initial policy; None if there is nothing to draw."""
    names = results.names
    bounds = _kl_bounds(results)
    drawn = [one.policy.n for one in results.policies.values()]
    series = []
    if results.best_of_n:
        points = tuple(
            KLPoint(
                f"best of {best.n}", best.kl_bound_nats, getattr(best, field),
                f"n={best.n}" if best.n > 1 and best.n not in drawn else "",
            )
            for best in results.best_of_n
        )  # fmt: skip
        key = f"best-of-n from {names.the_initial}, at the upper bound of its KL"
        series.append(KLSeries(key, "best-of-n", "D", points, is_joined=True, is_band=True))
    if field == "proxy_score" and results.training_scores:
        trail = (np.array(results.training_kl_nats), np.array(results.training_scores))
        series.append(KLSeries(f"{names.algorithm} in training", "ppo", "^", trail=trail))
    for name, style in styles.items():
        policy = results.policies[name]
        kl = (
            0.0
            if policy.policy.kind == INITIAL
            else bounds.get(name, nan if policy.kl_nats is None else policy.kl_nats.mean)
        )
        score = getattr(policy, field)
        # The pretrained model is so far from the initial policy that it would squeeze the others into a corner.
        if policy.policy.kind != PRETRAINED and isfinite(kl) and score is not None and isfinite(score.mean):
            point = KLPoint(style.title, kl, score, style.title)
            series.append(KLSeries("", style.tone, style.marker, (point,)))
    if not series:
        return None
    return kl_figure(series, title=title, unit=unit, name=field.replace("_", "-"), x_label=f"{names.kl}, nats")


def _kl_bounds(results: CompareResults) -> dict[str, float]:
    """Returns the upper bound of the KL of each best-of-n policy, in nats, by the policy's name."""
    by_n = {best.n: best.kl_bound_nats for best in results.best_of_n}
    return {name: by_n.get(one.policy.n, nan) for name, one in results.policies.items() if one.policy.kind == BEST_OF_N}


def _samples(results: CompareResults, styles: Styles) -> tuple[Part, ...]:
    kinds = sorted({sample.kind for sample in results.samples})
    prompts = tuple(
        _shown(sample, styles, kinds, results.names.scorer, is_open=place < NUM_OPEN_SAMPLES)
        for place, sample in enumerate(results.samples)
    )
    about = Note(
        f"The first sample of each policy on {'held-out prompts' if results.are_heldout else 'prompts'}, unselected."
    )
    return about, Samples(prompts, len(prompts), categories=tuple(kinds))


def _shown(sample: SampledPrompt, styles: Styles, kinds: Sequence[str], scorer: str, *, is_open: bool) -> ShownPrompt:
    return ShownPrompt(
        prompt_id=sample.prompt_id,
        category=sample.kind,
        messages=sample.messages,
        responses=tuple(
            (style, (ShownResponse(0, folded(sampled.text), _scores(sampled.gold_score, sampled.proxy_score, scorer)),))
            for name, style in styles.items()
            if (sampled := sample.responses.get(name)) is not None
        ),
        is_open=is_open,
        category_place=kinds.index(sample.kind),
    )


def _scores(gold: float, proxy: float, scorer: str) -> str:
    parts = {"judge": gold, scorer: proxy}
    return ", ".join(f"{name} {number(float(score))}" for name, score in parts.items() if isfinite(score))


def _headlines(stage: StageFolder, results: CompareResults) -> tuple[Headline, ...]:
    styles = results.styles
    return tuple(line for one in results.trained for line in _headlines_of(stage, results, one, styles))


def _headlines_of(
    stage: StageFolder, results: CompareResults, policy: PolicyResults, styles: Styles
) -> Iterator[Headline]:
    initial, names = results.initial, results.names
    name, title = policy.policy.name, styles[policy.policy.name].title
    pair = results.pair(policy.policy, initial.policy)
    if pair is not None:
        span = (pair.win_rate.mean, pair.win_rate.low, pair.win_rate.high)
        field, about = f"pairs.{name}/{initial.policy.name}.win_rate", f"{title} over {names.the_initial}"
        yield headline_of_share(stage, field, about, span, prompts_of(results, pair), interval_name(pair))
    if isfinite(policy.gold_score.mean):
        before = f"{names.initial} {number(float(initial.gold_score.mean))}"
        detail = ", ".join(part for part in (ends_of(policy.gold_score), before) if part)
        mean = policy.gold_score.mean
        text, field = number(float(mean)), f"policies.{name}.gold_score.mean"
        yield headline_of(stage, field, f"{score_title(results)}, {title}", mean, text, detail)
    if isfinite(policy.pass_share.mean):
        span = (policy.pass_share.mean, policy.pass_share.low, policy.pass_share.high)
        yield headline_of_share(stage, f"policies.{name}.pass_share", f"{title} above the pass mark", span)
    kl = policy.kl_nats
    if kl is not None and isfinite(kl.mean):
        # Replaces the trainer's own headline, which shows the KL of its last iteration until the comparison has run.
        file, field = f"{stage.name}/results.json", f"policies.{name}.kl_nats.mean"
        on = "held-out prompts" if results.are_heldout else "prompts"
        text, ends = kl_with_ends(kl)
        detail = ", ".join(part for part in (ends, on) if part)
        about = names.kl if len(results.trained) == 1 else f"{names.kl}, {title}"
        yield Headline(f"{name}.kl_nats", file, field, kl.mean, about, f"{text} nats", detail)


REPORTER = StageReporter("Comparison", "All policies answer the same prompts, and a judge compares them.", report)
