"""Warnings that a reader should know before relying on a comparison."""

import math
from collections import Counter
from collections.abc import Sequence

from evaluation.compare.folder import ComparisonFolder
from evaluation.compare.report.answer import Styles
from evaluation.statistics.results import JudgeSummary, PairSummary, Summary
from evaluation.verdicts import Verdict
from stages.reports.text import count_of, listed, number, percent, share_ends

FEW_PROMPTS = 100
MANY_FLIPS = 0.2
LEAST_AGREEMENT = 0.667  # below it Krippendorff would draw no conclusions (Content Analysis, 2004, ch. 11)
UNEVEN_ORDER = 0.1  # distance from ½ of a pair's verdicts


def warnings_of(folder: ComparisonFolder, summary: Summary, styles: Styles) -> tuple[str, ...]:
    """Returns warnings, a sentence or two each, in the order of the report's sections."""
    found = [*_few_prompts(summary)]
    for judge in summary.judges:
        found += [*_labelers(folder, judge), *_lost(judge), *_order(folder, judge, styles), *_lengths(judge, styles)]
    return (*found, *_agreement(summary), *_missing(folder))


def _few_prompts(summary: Summary) -> list[str]:
    if summary.num_prompts >= FEW_PROMPTS:
        return []
    return [f"Only {count_of(summary.num_prompts, 'prompt')}: relevant differences may go undetected."]


def _labelers(folder: ComparisonFolder, judge: JudgeSummary) -> list[str]:
    names = {verdict.labeler for verdict in folder.verdicts if verdict.judge == judge.judge and not verdict.failure}
    if len(names) == 1 and names != {judge.judge}:
        return [f"All verdicts of the judge {judge.judge} are by one labeler; another may judge differently."]
    if len(names) == 1 and len(folder.judges) == 1:
        return [f"{judge.judge} is the only judge: no interval here accounts for its errors."]
    apart = [pair for pair in judge.pairs if pair.different and pair.win_rate.over_labelers.low <= 0.5]
    if apart:
        rate, over = apart[0].win_rate, apart[0].win_rate.over_labelers
        return [
            f"Other labelers than these {number(rate.num_labelers)} of the judge {judge.judge} might show no"
            f" difference: the interval that also covers other labelers is {share_ends(over.low, over.high)}."
        ]
    return []


def _lost(judge: JudgeSummary) -> list[str]:
    """Failed verdicts, and prompts that a pair has no verdict on."""
    found = []
    if judge.num_failed:
        share = judge.num_failed / (judge.num_failed + judge.num_verdicts)
        found.append(
            f"{count_of(judge.num_failed, 'verdict')} of the judge {judge.judge} failed ({percent(share)}); they are"
            " left out."
        )
    missing = max((pair.num_prompts_missing for pair in judge.pairs), default=0)
    if missing:
        found.append(
            f"The judge {judge.judge} has no successful verdict on up to {count_of(missing, 'prompt')} of a pair."
        )
    return found


def _order(folder: ComparisonFolder, judge: JudgeSummary, styles: Styles) -> list[str]:
    found, bias = [], judge.position_bias
    if bias.low > 0.5 or bias.high < 0.5:
        which = "first" if bias.mean > 0.5 else "second"
        often = bias.mean if bias.mean > 0.5 else 1 - bias.mean
        found.append(
            f"The judge {judge.judge} prefers the response shown {which}, {percent(often)} of the time"
            f" ({share_ends(bias.low, bias.high) if bias.mean > 0.5 else share_ends(1 - bias.high, 1 - bias.low)})."
        )
        found += [text for pair in judge.pairs for text in _uneven(folder.verdicts, judge, pair, styles)]
    changed = judge.flips.changed
    if changed.mean > MANY_FLIPS:
        found.append(
            f"The judge {judge.judge} changes {percent(changed.mean)} of its verdicts"
            f" ({share_ends(changed.low, changed.high)}) when the order is swapped."
        )
    return found


def _uneven(verdicts: Sequence[Verdict], judge: JudgeSummary, pair: PairSummary, styles: Styles) -> list[str]:
    """Warns of pairs whose first policy was shown first much more, or much less, often than its second."""
    firsts = Counter(
        row.policy_a if row.first == "a" else row.policy_b
        for row in verdicts
        if row.judge == judge.judge and {row.policy_a, row.policy_b} == {pair.policy_a, pair.policy_b}
        and row.first and not row.failure
    )  # fmt: skip
    if not firsts or abs(firsts[pair.policy_a] / firsts.total() - 0.5) <= UNEVEN_ORDER:
        return []
    share = percent(firsts[pair.policy_a] / firsts.total())
    a, b = styles[pair.policy_a].title, styles[pair.policy_b].title
    return [f"{a} was shown before {b} in {share} of these verdicts, and the bias turns that into wins."]


def _lengths(judge: JudgeSummary, styles: Styles) -> list[str]:
    """Warns of pairs whose difference is explained by length."""
    found = []
    for pair in judge.pairs:
        fitted = pair.length_controlled
        if pair.different and not math.isnan(fitted.mean) and fitted.low <= 0.5:
            a, b = styles[pair.policy_a].title, styles[pair.policy_b].title
            found.append(
                f"At equal length the judge {judge.judge} shows no preference for {a} over {b}: {percent(fitted.mean)}"
                f" ({share_ends(fitted.low, fitted.high)}), not {percent(pair.win_rate.mean)}."
            )
    return found


def _agreement(summary: Summary) -> list[str]:
    found = []
    for judge in summary.judges:
        alpha = judge.labelers.alpha.value
        if judge.num_labelers > 1 and alpha < LEAST_AGREEMENT:
            found.append(
                f"The labelers of the judge {judge.judge} agree little: Krippendorff's α is {number(float(alpha))};"
                f" {number(LEAST_AGREEMENT)} is the minimum for tentative conclusions about single prompts."
            )
    for entry in summary.agreement:
        if entry.share.low <= 0.5:
            found.append(
                f"The judges {entry.judge_a} and {entry.judge_b} are not shown to agree more often than by chance."
            )
    return found


def _missing(folder: ComparisonFolder) -> list[str]:
    """Prompts that a policy has no response to."""
    answered = Counter(policy for policy, _ in {(row.policy, row.prompt_id) for row in folder.responses})
    short = {name: len(folder.prompts) - answered[name] for name in folder.policies}
    lacking = [f"{name} to {number(num)}" for name, num in short.items() if num]
    if not lacking:
        return []
    return [f"Responses are missing, of {count_of(len(folder.prompts), 'prompt')}: {listed(lacking)}."]
