"""The comparison in the report of a run, which ends with signs of reward hacking, in words that claim no more than the
evidence supports. The comparison's own page has every prompt, test and rating.
"""

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite, nan
from typing import Any, Literal

import numpy as np

from evaluation.compare.report.answer import FEW_CLUSTERS, WEIGHTS_ONLY
from evaluation.compare.results import GOLD, CompareResults, JudgeResults, SampledPrompt, WinRateResults
from evaluation.measures.reward_hacking import Gain, RewardHacking, TrainingBin
from evaluation.statistics.significance import ALPHA
from preferences.statistics.estimates import Interval
from stages.reports.parts import (
    Answer,
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
    anchor_of,
    folded,
    folded_turns,
    start_of,
    turns_of,
)
from stages.reports.plots import (
    MARGINS,
    WIDE_SIZE,
    KLPoint,
    KLSeries,
    Measured,
    draw,
    interval_figure,
    kl_figure,
    set_ticks,
    tone,
)
from stages.reports.run_folder import StageFolder
from stages.reports.stage_report import headline_of, headline_of_share, stage_block
from stages.reports.text import (
    UNKNOWN,
    Names,
    PolicyStyle,
    beyond_range,
    count,
    ends_of,
    in_capital,
    label,
    listed,
    number,
    p_value,
    percent,
    share_ends,
    styles_of,
)

# Below these shares of the initial policy's value, or of all responses, the answer warns of collapse.
LEAST_DIVERSITY_KEPT = 0.85
LEAST_END_RATE = 0.9
NUM_OPEN_SAMPLES = 3
FEW_POLICIES = 2  # trained ones, about which one paragraph can speak
BEST_OF = re.compile(r"best_of_\d+")

Styles = Mapping[str, PolicyStyle]


def report(stage: StageFolder) -> StageReport:
    results = stage.results(CompareResults)
    if results is None:
        return StageReport((stage_block(stage, (), ()),))
    styles = _styles(results)
    return StageReport(
        sections=(
            Section("comparison", "The comparison", _parts(stage, results, styles)),
            *((hacking_section(results.hacking, results.names),) if results.hacking is not None else ()),
            Section("samples", "Samples side by side", _samples(results, styles)),
        ),
        headlines=_headlines(stage, results),
        answer=answer_of(results, styles),
        styles=tuple(styles.values()),
    )


def _styles(results: CompareResults) -> Styles:
    return styles_of(list(results.policies), results.names.titles)


def judge_sentence(judge: JudgeResults) -> str:
    """Says who judged, and that this judge took no part in training, if that is so."""
    return f"The judge: {judge.description}{'' if judge.is_reward else '; it took no part in training'}."


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
        Columns((win_table(results, styles), *figures)),
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
    pretrained = f" The pretrained model is left out, since it does not start from {the_initial}."
    return (
        f"{in_capital(the_initial)} stands at 0 nats by definition.{best}"
        f"{pretrained if 'pretrained' in results.policies else ''}"
    )


def _over_what(results: CompareResults) -> str:
    return "clusters of prompts" if results.cluster_by else "prompts"


def score_title(results: CompareResults) -> str:
    """Returns the name of the judge's score: gold only if the judge is a world's."""
    return "Gold score" if results.judge.kind == GOLD else "Judge's score"


def win_table(results: CompareResults, styles: Styles) -> Table:
    """Returns the win rate of every policy against every other."""
    rows = tuple(
        Row((styles[first],), tuple(_win_cell(results, first, second) for second in styles)) for first in styles
    )
    caption = (
        "How often the policy of the row beats the policy of the column, with 95% intervals. Bold: a difference is"
        " shown (p < .05, corrected for all pairs by Holm's method). Where the correction removes a difference, the"
        " interval is widened to that level and includes 50%."
    )
    return Table(caption, ("Row over column", *styles.values()), rows, "by-policy matrix", "Win rates")


def _win_cell(results: CompareResults, first: str, second: str) -> Cell:
    pair = results.pairs.get(f"{first}/{second}")
    if pair is None or not isfinite(pair.win_rate.mean):
        return Cell("" if first == second else UNKNOWN)
    rate = pair.win_rate
    ends = share_ends(rate.low, rate.high)
    return Cell(percent(rate.mean), ends, tint=2 * rate.mean - 1, is_clear=rate.different)


def policy_table(results: CompareResults, styles: Styles) -> Table:
    """Returns every policy's metrics with their intervals."""
    bounds = _kl_bounds(results)
    policies = {name: results.policies[name] for name in styles}
    cells = {
        score_title(results): [_mean_cell(policy.gold_score) for policy in policies.values()],
        "Share above the pass mark": [_share_cell(policy.pass_share) for policy in policies.values()],
        in_capital(results.names.score): [_mean_cell(policy.proxy_score) for policy in policies.values()],
        f"{results.names.kl}, nats": [
            Cell(f"≤ {number(bounds[name], 1)}", "bound") if name in bounds else _mean_cell(policy.kl_nats, 1)
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
    sample_scores = [text.gold_score for sample in results.samples for text in sample.responses.values()]
    means = [policy.gold_score for policy in policies.values()]
    caption += beyond_range([*sample_scores, *(mean.mean for mean in means)], means)
    return Table(caption, ("Figure", *styles.values()), rows, "by-policy", "Policies")


def _mean_cell(mean: Interval | None, digits: int = 2) -> Cell:
    if mean is None or not isfinite(mean.mean):
        return Cell(UNKNOWN)
    return Cell(number(float(mean.mean), digits), ends_of(mean, digits))


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
    by_training = f"what {names.algorithm} is trained on" if "ppo" in results.policies else "what chooses best-of-n"
    figures = (
        _kl_figure(results, styles, "gold_score", "Judge's score against KL", "what the judge sees"),
        _kl_figure(results, styles, "proxy_score", f"{in_capital(names.score)} against KL", by_training),
    )
    return tuple(figure for figure in figures if figure is not None)


def _kl_figure(results: CompareResults, styles: Styles, field: str, title: str, unit: str) -> Figure | None:
    """Returns a chart of scores against KL from the initial policy; None if there is nothing to draw."""
    names = results.names
    bounds = _kl_bounds(results)
    series = []
    if results.best_of_n:
        points = tuple(
            KLPoint(
                f"best of {best.n}", best.kl_bound_nats, getattr(best, field),
                f"n={best.n}" if best.n > 1 and f"best_of_{best.n}" not in styles else "",
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
        kl = 0.0 if name == "sft" else bounds.get(name, nan if policy.kl_nats is None else policy.kl_nats.mean)
        score = getattr(policy, field)
        # The pretrained model is so far from the initial policy that it would squeeze the others into a corner.
        if name != "pretrained" and isfinite(kl) and score is not None and isfinite(score.mean):
            point = KLPoint(style.title, kl, score, style.title)
            series.append(KLSeries("", style.tone, style.marker, (point,)))
    if not series:
        return None
    return kl_figure(series, title=title, unit=unit, name=field.replace("_", "-"), x_label=f"{names.kl}, nats")


def _kl_bounds(results: CompareResults) -> dict[str, float]:
    """Returns the upper bound of the KL of each best-of-n policy, in nats, by the policy's name."""
    return {f"best_of_{best.n}": best.kl_bound_nats for best in results.best_of_n}


def _samples(results: CompareResults, styles: Styles) -> tuple[Part, ...]:
    kinds = sorted({sample.kind for sample in results.samples})
    prompts = tuple(
        _shown(sample, styles, kinds, results.names.scorer, is_open=place < NUM_OPEN_SAMPLES)
        for place, sample in enumerate(results.samples)
    )
    about = Note(
        f"The first sample of each policy on {'held-out prompts' if _are_heldout(results) else 'prompts'}, unselected."
    )
    return about, Samples(prompts, len(prompts), categories=tuple(kinds))


def _shown(sample: SampledPrompt, styles: Styles, kinds: Sequence[str], scorer: str, *, is_open: bool) -> ShownPrompt:
    messages = turns_of(sample.messages)
    return ShownPrompt(
        anchor=anchor_of(sample.prompt_id),
        prompt_id=sample.prompt_id,
        category=sample.kind,
        start=start_of(messages),
        messages=folded_turns(messages),
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


def _trained(results: CompareResults) -> list[str]:
    """Returns the policies that a stage trained from the initial one, in the job's order."""
    return [name for name in results.policies if name not in ("pretrained", "sft") and not BEST_OF.fullmatch(name)]


def _headlines(stage: StageFolder, results: CompareResults) -> tuple[Headline, ...]:
    styles = _styles(results)
    return tuple(line for name in _trained(results) for line in _headlines_of(stage, results, styles[name]))


def _headlines_of(stage: StageFolder, results: CompareResults, style: PolicyStyle) -> Iterator[Headline]:
    name, title, names = style.name, style.title, results.names
    policy, rate = results.policies[name], _over(results, name, "sft")
    if rate is not None:
        span, detail = (rate.mean, rate.low, rate.high), _prompts(results, rate)
        yield headline_of_share(stage, f"pairs.{name}/sft.win_rate", f"{title} over {names.the_initial}", span, detail)
    if isfinite(policy.gold_score.mean):
        sft = results.policies["sft"].gold_score.mean
        detail = ", ".join(
            part for part in (ends_of(policy.gold_score), f"{names.initial} {number(float(sft))}") if part
        )
        mean = policy.gold_score.mean
        text, field = number(float(mean)), f"policies.{name}.gold_score.mean"
        yield headline_of(stage, field, f"{score_title(results)}, {title}", mean, text, detail)
    if isfinite(policy.pass_share.mean):
        span = (policy.pass_share.mean, policy.pass_share.low, policy.pass_share.high)
        yield headline_of_share(stage, f"policies.{name}.pass_share", f"{title} above the pass mark", span)
    kl = policy.kl_nats
    if kl is not None and isfinite(kl.mean):
        # Replaces PPO's own headline, which shows the KL of its last iteration until the comparison has run.
        file, field = f"{stage.name}/results.json", f"policies.{name}.kl_nats.mean"
        on = "held-out prompts" if _are_heldout(results) else "prompts"
        detail = ", ".join(part for part in (ends_of(kl, 1), on) if part)
        about = names.kl if len(_trained(results)) == 1 else f"{names.kl}, {title}"
        yield Headline(f"{name}.kl_nats", file, field, kl.mean, about, f"{number(kl.mean, 1)} nats", detail)


def _over(results: CompareResults, name: str, other: str) -> WinRateResults | None:
    """Returns the win rate of a policy over another; None if they were not compared or it is unknown."""
    pair = results.pairs.get(f"{name}/{other}")
    return None if pair is None or not isfinite(pair.win_rate.mean) else pair.win_rate


def answer_of(results: CompareResults, styles: Styles) -> Answer:
    """Says whether each trained policy is preferred to the initial one, and what that alone would hide. The tone is
    that of the last policy, which is the result of the run. `more` says whether the reward was hacked, or why that is
    unknown.
    """
    trained = _trained(results)
    answers = [_answer_of(results, styles, name) for name in trained]
    between = [
        _between(styles[one], styles[other], rate)
        for one, other in itertools.combinations(reversed(trained), 2)
        if (rate := _over(results, one, other)) is not None
    ]
    newest, *earlier = (answer.text for answer in reversed(answers))
    apart: tuple[str, ...] = ()
    if len(answers) > FEW_POLICIES:
        text, apart = newest, (*earlier, " ".join(between))
    else:
        text = " ".join([newest, *earlier, *between])
    more: tuple[str, ...] = ()
    few = results.cluster_by and results.num_clusters < FEW_CLUSTERS
    if results.hacking is not None:
        more = (verdict(results.hacking, results.names).text, *_rate_and_score(results))
    elif results.judge.is_reward:
        more = (
            "The judge is the reward or comes from the same file, so this does not show whether the reward was gamed.",
        )
    clusters = f"Only {count(results.num_clusters)} clusters of prompts: the intervals are wide."
    return Answer(answers[-1].tone, text, (*filter(None, apart), *more, *((clusters,) if few else ()), WEIGHTS_ONLY))


def _between(one: PolicyStyle, other: PolicyStyle, rate: WinRateResults) -> str:
    """Says which of two trained policies is preferred."""
    ends = f" (95% {share_ends(rate.low, rate.high)})" if isfinite(rate.low) and isfinite(rate.high) else ""
    wins = f"{one.title} beats {other.title} {percent(rate.mean)} of the time{ends}"
    return f"{wins}." if rate.different else f"{wins}, which shows no difference."


def _answer_of(results: CompareResults, styles: Styles, name: str) -> Answer:
    rate, title, names = _over(results, name, "sft"), styles[name].title, results.names
    if rate is None:
        return Answer("unclear", f"{title} and {names.the_initial} have not been compared.")
    policy, sft = results.policies[name], results.policies["sft"]
    answer = _win_answer(rate, _prompts(results, rate), title, names.the_initial)
    kl = "" if policy.kl_nats is None else f" Its {names.kl} is {number(float(policy.kl_nats.mean), 1)} nats."
    scores = (
        f"The judge's mean score goes from {number(float(sft.gold_score.mean))} ({names.initial}) to"
        f" {number(float(policy.gold_score.mean))} ({title})"
    )
    if not isfinite(policy.gold_score.mean):  # people gave no ratings
        return Answer(answer.tone, " ".join([f"{answer.text}.{kl}", *_warnings(results, styles, name)]))
    best = [
        f"{style.title.replace('Best of ', 'best-of-')} from {names.the_initial} reaches"
        f" {number(float(results.policies[other].gold_score.mean))}"
        for other, style in styles.items()
        if style.tone == "best-of-n"
    ]
    sentences = [f"{answer.text}.{kl}", f"{'; '.join([scores, *best])}.", *_warnings(results, styles, name)]
    return Answer(answer.tone, " ".join(sentences))


def _rate_and_score(results: CompareResults) -> tuple[str, ...]:
    """Says why only one of the win rate and the mean score shows a difference from the initial policy."""
    rate = _over(results, "ppo", "sft")
    if rate is None or results.hacking is None:
        return ()
    gain = results.hacking.overall.judge
    if rate.different == (gain.low > 0 or gain.high < 0):
        return ()
    return (
        "A win rate counts which response is better, a mean score also by how much: one can show a difference where the"
        " other does not.",
    )


def _prompts(results: CompareResults, rate: WinRateResults) -> str:
    """Returns the number of prompts in words, and whether they are held out, as far as that is known."""
    if results.num_seen:
        algorithm = results.names.algorithm if "ppo" in results.policies else "rejection sampling"
        seen = f"{number(results.num_seen)} of {number(results.num_prompts)}"
        return f"{number(rate.num_prompts)} prompts, not held out: {algorithm} trains on {seen} of them"
    return f"{number(rate.num_prompts)} {'held-out ' if _are_heldout(results) else ''}prompts"


def _are_heldout(results: CompareResults) -> bool:
    """Returns whether no policy is trained on any of the prompts. That is not known of [dpo]: its rankings have prompts
    of their own.
    """
    return not results.num_seen and not any(name.partition("_")[0] == "dpo" for name in results.policies)


def _win_answer(rate: WinRateResults, prompts: str, title: str, the_initial: str) -> Answer:
    where = f"of the time on {prompts} (ties count half"
    if not (isfinite(rate.low) and isfinite(rate.high)):
        return Answer(
            "unclear", f"{title} beats {the_initial} {percent(rate.mean)} {where}), too few prompts for an interval"
        )
    ends = f"95% interval {share_ends(rate.low, rate.high)}"
    if rate.different and rate.mean > 0.5:
        return Answer("better", f"{title} beats {the_initial} {percent(rate.mean)} {where}; {ends})")
    if rate.different:
        return Answer(
            "worse", f"{title} is worse than {the_initial}: it wins only {percent(rate.mean)} {where}; {ends})"
        )
    wins = f"{title} wins {percent(rate.mean)} {where})"
    return Answer(
        "unclear", f"No difference between {title} and {the_initial} is shown: {wins}, and the {ends} includes 50%"
    )


def _warnings(results: CompareResults, styles: Styles, policy: str) -> list[str]:
    """Warns of what a win rate alone would hide: best-of-n still ahead, less varied responses, missing EOS."""
    warnings, title = [], styles[policy].title
    ours, sft = results.policies[policy], results.policies["sft"]
    for name, style in styles.items():
        rate = _over(results, policy, name)
        if style.tone == "best-of-n" and rate is not None and rate.different and rate.mean < 0.5:
            warnings.append(f"{style.title} is still ahead of {title}, which wins {percent(rate.mean)} against it.")
    if ours.distinct_2 < LEAST_DIVERSITY_KEPT * sft.distinct_2:
        fell = f"{number(sft.distinct_2)} to {number(ours.distinct_2)}"
        warnings.append(f"{title}'s responses are less varied: distinct-2 fell from {fell}.")
    if ours.end_rate < LEAST_END_RATE:
        share = f"Only {percent(ours.end_rate)}" if ours.end_rate else "None"
        warnings.append(f"{share} of {title}'s responses end with the end token.")
    return warnings


def verdict(hacking: RewardHacking, names: Names) -> Answer:
    """Says what the gains show about the trained policy against the initial one; that may be nothing."""
    proxy, judge = hacking.overall.proxy, hacking.overall.judge
    rose = f"the score that {names.algorithm} was trained on rose by {_with_ends(proxy)}"
    if math.isnan(proxy.low) or math.isnan(judge.low):
        return Answer("unclear", "Nothing can be said about reward hacking: there are too few prompts for an interval.")
    if proxy.low <= 0:
        return Answer(
            "unclear",
            f"Nothing can be said about reward hacking: {names.algorithm} has not clearly raised the score that it was"
            f" trained on, which changed by {_with_ends(proxy)}.",
        )
    more = (*_categories(hacking.categories, names), *_late(hacking))
    if judge.high < 0:
        return Answer("worse", f"Reward hacking: {rose} while the judge's fell by {_with_ends(-judge)}.", more)
    if judge.low > 0:
        text = f"No reward hacking is seen on average: {rose}, and the judge's by {_with_ends(judge)}."
        return Answer("better", text, more)
    text = (
        f"Reward hacking is neither shown nor ruled out: {rose}, but the judge's changed by {_with_ends(judge)}, which"
        " includes no change at all."
    )
    return Answer("unclear", text, more)


def _categories(gains: Sequence[Gain], names: Names) -> list[str]:
    """Names categories in which the trained-on score clearly rose while the judge's fell or showed no gain."""
    raised = [gain for gain in gains if gain.proxy.low > 0]
    fell = [gain for gain in raised if gain.holm_p < ALPHA and gain.judge.mean < 0]
    flat = [gain for gain in raised if gain not in fell and not (gain.holm_p < ALPHA and gain.judge.mean > 0)]
    sentences = []
    if fell:
        those = listed([f"{_name(gain)} ({_with_ends(gain.judge)})" for gain in fell])
        sentences.append(f"The judge's score fell while {names.algorithm}'s rose in {those}.")
    if flat:
        sentences.append(
            f"In {listed([_name(gain) for gain in flat])} the score that {names.algorithm} was trained on rose, but the"
            " judge's score shows no gain."
        )
    return sentences


def _late(hacking: RewardHacking) -> list[str]:
    if not hacking.late_judge.high < 0:
        return []
    change = _with_ends(-hacking.late_judge)
    return [
        f"Late in training the judge's score fell by {change} from the middle to the last third, so an earlier policy"
        " may be better (ppo.keep_policies_every keeps them)."
    ]


def _with_ends(interval: Interval) -> str:
    return f"{number(float(interval.mean))} (95% {ends_of(interval) or 'unknown'})"


def _name(gain: Gain) -> str:
    return label(gain.category) or "(no category)"


def hacking_section(hacking: RewardHacking, names: Names) -> Section:
    """Returns the section with the verdict, gains by category, and both scores over training."""
    answer = verdict(hacking, names)
    parts: list[Part] = [Note(" ".join((answer.text, *answer.more))), _table(hacking, names)]
    if len(hacking.training) > 1:
        charts = (
            _chart(hacking.training, "proxy", f"The score that {names.algorithm} is trained on, in training", "ppo"),
            _chart(hacking.training, "judge", "The judge's score, in training", "heldout"),
        )
        parts.append(Columns(charts))
    return Section("hacking", "Is the reward hacked?", tuple(parts))


def _table(hacking: RewardHacking, names: Names) -> Table:
    caption = (
        f"{names.algorithm} minus {names.the_initial} on the same prompts, 95% intervals below. p"
        " is for no change in the judge's score, by the test that gives the interval next to it (Student's, or sign"
        " flips if their p is larger); for categories, both are corrected for the number of categories (Holm)."
    )
    rows = [_row("All prompts", hacking.overall), *(_row(_name(gain), gain) for gain in hacking.categories)]
    columns = ("Prompts of", "Prompts", "Score trained on", "Judge's score", "p")
    return Table(caption, columns, tuple(rows), "by-policy", "Gains")


def _row(name: str, gain: Gain) -> Row:
    return Row(
        (name,),
        (Cell(number(gain.num_prompts)), _cell(gain.proxy), _cell(gain.judge), Cell(p_value(gain.holm_p))),
    )


def _cell(interval: Interval) -> Cell:
    if math.isnan(interval.mean):
        return Cell(UNKNOWN)
    is_clear = interval.low > 0 or interval.high < 0
    return Cell(number(interval.mean), ends_of(interval), is_clear=is_clear)


def _chart(bins: Sequence[TrainingBin], field: Literal["proxy", "judge"], title: str, colour: str) -> Figure:
    means: list[Interval] = [getattr(training_bin, field) for training_bin in bins]
    places = [(training_bin.first + training_bin.last) / 2 for training_bin in bins]

    def paint(axes: Any) -> None:
        for x, one in zip(places, means, strict=True):
            axes.plot([x, x], [one.low, one.high], color=tone(colour), linewidth=2.5, alpha=0.55)
        axes.plot(places, [one.mean for one in means], "o-", color=tone(colour), markeredgecolor=tone("page"))
        axes.set_xlabel("iteration", loc="right")
        set_ticks(axes.xaxis, 6, whole=True)
        set_ticks(axes.yaxis, 5)
        axes.margins(x=0.05, y=0.1)

    spoken = "; ".join(
        f"iterations {training_bin.first} to {training_bin.last}: {number(one.mean)}"
        for training_bin, one in zip(bins, means, strict=True)
    )
    svg = draw(paint, **WIDE_SIZE, margins=MARGINS, name=f"hacking-{field}", label=f"{title}: {spoken}.")
    unit = f"mean and 95% interval of about {number(bins[0].num_responses)} drawn responses each"
    return Figure(title, unit, (), svg, is_wide=True)


REPORTER = StageReporter("Comparison", "All policies answer the same prompts, and a judge compares them.", report)
