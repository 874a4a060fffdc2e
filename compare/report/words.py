"""A comparison in words: the answer, as strong as the evidence and no stronger, and how numbers are written."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from evaluation.statistics.results import JudgeSummary, PairSummary, Rating, Ratings, Summary
from reports.text import Policy, label, number, percent, policies_of

# Colours and shapes for policies that the loop does not name, after those of the ones that it does.
FREE_LOOKS = (
    ("sft", "s"), ("best-of-n", "D"), ("ppo", "^"), ("other-1", "v"), ("other-2", "P"), ("other-3", "X"),
    ("pretrained", "o"),
)  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """What the comparison shows. `tone` is "better" where there is a winner, else "unclear"; `more` qualifies it."""

    tone: str
    text: str
    more: tuple[str, ...]


def looks_of(names: Sequence[str]) -> dict[str, Policy]:
    """A colour and a shape for every policy, kept through the whole page; of more than seven some share theirs."""
    known = {policy.name: policy for policy in policies_of(names) if not policy.tone.startswith("other")}
    taken = {policy.tone for policy in known.values()}
    free = [look for look in FREE_LOOKS if look[0] not in taken] or FREE_LOOKS
    others = [name for name in names if name not in known]
    for place, name in enumerate(others):
        known[name] = Policy(name, label(name), *free[place % len(free)])
    titles = [policy.title for policy in known.values()]
    return {
        name: known[name] if titles.count(known[name].title) == 1 else replace(known[name], title=name)
        for name in names
    }


def p_value(p: float) -> str:
    """A p-value with its sign: "p < .001", "p = .032", "p = .41"; "p unknown" for NaN."""
    if math.isnan(p):
        return "p unknown"
    if p < 0.001:
        return "p < .001"
    digits = 3 if p < 0.1 else 2
    return f"p = {p:.{digits}f}".replace("0.", ".", 1)


def points(share: float) -> str:
    """A difference of shares in percentage points."""
    value = 100 * share
    return f"{value:.1f}" if value < 9.95 else f"{value:.0f}"


def span(low: float, high: float) -> str:
    """An interval of shares, as in "68 to 76%"."""
    if math.isnan(low) or math.isnan(high):
        return "unknown"
    return f"{percent(low).removesuffix('%')} to {percent(high)}"


def listed(names: Sequence[str], word: str = "and") -> str:
    """ "a, b and c"."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} {word} {names[-1]}"


def of(num: int, what: str) -> str:
    """A count with its noun: "1 prompt", "1,200 prompts"."""
    return f"{number(num)} {what}{'' if num == 1 else 's'}"


def often(pair: PairSummary, looks: dict[str, Policy]) -> str:
    """How often the pair's first policy is preferred, as a clause; neither is named where neither is ahead."""
    if is_even(pair):
        return "every verdict is a tie" if all_tied(pair) else "each of the two is preferred half of the time"
    return f"{looks[pair.policy_a].title} is preferred {percent(pair.win_rate.mean)} of the time"


def is_even(pair: PairSummary) -> bool:
    """Whether a win rate is one half, but for rounding."""
    return math.isclose(pair.win_rate.mean, 0.5, rel_tol=0, abs_tol=1e-9)


def all_tied(pair: PairSummary) -> bool:
    """Whether no verdict prefers either policy."""
    return pair.verdicts.wins == pair.verdicts.losses == 0


def answer_of(summary: Summary, looks: dict[str, Policy]) -> Answer:
    """The answer by the first judge, and how far the others bear it out. Pairs have the policy ahead first."""
    judges = [judge for judge in summary.judges if judge.num_verdicts]
    if not judges:
        return Answer("unclear", "Nothing can be said: there is no verdict that did not fail.", ())
    first, *others = judges
    if len(summary.policies) == 2:
        tone, text = _of_two(first.pairs[0], first.judge, looks)
        more = [*_limits(first.pairs[0]), *(_beside(judge, first.pairs[0], looks) for judge in others)]
    else:
        tone, text = _of_many(first, len(summary.policies), looks)
        more = [
            *_lead(first, looks),
            _pairs_shown(first),
            *(_of_many(judge, len(summary.policies), looks)[1] for judge in others),
        ]
    return Answer(tone, text, tuple(more))


def figures(pair: PairSummary) -> str:
    """The evidence in brackets behind a claim on two policies."""
    rate = pair.win_rate
    return (
        f"95% interval {span(rate.low, rate.high)}, ties counting half; {p_value(pair.significance.holm_p)};"
        f" {of(pair.win_rate.num_prompts, 'prompt')}"
    )


def _of_two(pair: PairSummary, judge: str, looks: dict[str, Policy]) -> tuple[str, str]:
    ahead, behind, mean = looks[pair.policy_a].title, looks[pair.policy_b].title, percent(pair.win_rate.mean)
    if pair.different:
        return "better", f"{ahead} is preferred to {behind} {mean} of the time by the judge {judge} ({figures(pair)})."
    return "unclear", (
        f"No difference between {ahead} and {behind} is shown by the judge {judge}: {often(pair, looks)}"
        f" ({figures(pair)})."
    )


def _limits(pair: PairSummary) -> list[str]:
    """What the prompts could have shown, beside a difference that they did not; and an interval that says otherwise."""
    excludes_half = pair.win_rate.low > 0.5 or pair.win_rate.high < 0.5
    if pair.different:
        return [] if excludes_half else ["A close call: the test finds a difference, the interval includes 50%."]
    found = ["A close call: the interval leaves out 50%, the test finds no difference."] if excludes_half else []
    return [*found, detectable(pair)]


def detectable(pair: PairSummary) -> str:
    """The smallest difference that this many prompts could have shown."""
    prompts = of(pair.win_rate.num_prompts, "prompt")
    if math.isnan(pair.power.detectable):
        decided = pair.prompts.wins + pair.prompts.losses
        if decided == pair.win_rate.num_prompts:
            return f"With {prompts} no difference could have been shown."
        are = "is" if decided == 1 else "are"
        ties = f"of which {number(decided)} {are} no tie" if decided else "every one a tie"
        return f"With {prompts}, {ties}, no difference could have been shown."
    return (
        f"With {prompts} only a win rate {points(pair.power.detectable)} points or more from 50% would have been"
        " seen in 4 of 5 such studies."
    )


def _beside(judge: JudgeSummary, first: PairSummary, looks: dict[str, Policy]) -> str:
    """What another judge says of the same two policies."""
    pair = judge.pairs[0]
    said = f"{often(pair, looks)} ({figures(pair)})"
    if not pair.different:
        return f"The judge {judge.judge} shows no difference: {said}."
    contrary = "contrary to the first judge, " if first.different and pair.policy_a != first.policy_a else ""
    return f"By the judge {judge.judge}, {contrary}{said}."


def _lead(judge: JudgeSummary, looks: dict[str, Policy]) -> list[str]:
    """How often the policy rated highest is preferred to the next, where a judge has verdicts on the two."""
    top = {rating.policy for rating in by_rating(judge.ratings[0])[:2]}
    found = [pair for pair in judge.pairs if {pair.policy_a, pair.policy_b} == top]
    return [_lead_in_words(pair, looks) for pair in found]


def _lead_in_words(pair: PairSummary, looks: dict[str, Policy]) -> str:
    a, b = looks[pair.policy_a].title, looks[pair.policy_b].title
    if is_even(pair):
        return f"Of {a} and {b} {often(pair, looks)} ({figures(pair)})."
    return f"{a} is preferred to {b} {percent(pair.win_rate.mean)} of the time ({figures(pair)})."


def _pairs_shown(judge: JudgeSummary) -> str:
    """How many pairs differ, and what could have been shown of the others."""
    shown = sum(pair.different for pair in judge.pairs)
    least = [pair.power.detectable for pair in judge.pairs if not pair.different]
    if not least:
        return f"All {of(shown, 'pair')} differ after Holm's correction."
    text = f"Of {of(len(judge.pairs), 'pair')} {shown} differ{'s' if shown == 1 else ''} after Holm's correction"
    if any(math.isnan(value) for value in least):
        return f"{text}; of others there are too few prompts to show any difference."
    return (
        f"{text}; of the {'other' if len(least) == 1 else 'others'} a win rate {points(max(least))} points or more from"
        " 50% would have been seen in 4 of 5 such studies."
    )


def _of_many(judge: JudgeSummary, num_policies: int, looks: dict[str, Policy]) -> tuple[str, str]:
    """The ranking by the first ratings of a judge, as far as its rank ranges go."""
    ratings = judge.ratings[0]
    if len(ratings.islands) > 1:
        return "unclear", f"There is no ranking of all policies by the judge {judge.judge}: {islands(ratings, looks)}."
    if not ratings.policies:
        return "unclear", f"There is no ranking by the judge {judge.judge}: {ratings.reason}."
    ordered = by_rating(ratings)
    leaders = [f"{looks[r.policy].title} ({rank_range(r)})" for r in ordered if r.best_rank == 1]
    rest = [f"{looks[r.policy].title} ({rank_range(r)})" for r in ordered if r.best_rank > 1]
    if len(leaders) == 1:
        best = looks[ordered[0].policy].title
        return (
            "better",
            f"{best} is the best of {num_policies} policies by the judge {judge.judge}, ahead of {listed(rest)}.",
        )
    not_best = f", {listed(rest)} {'is' if len(rest) == 1 else 'are'} not" if rest else ""
    return "unclear", (
        f"Which of {num_policies} policies is the best is not settled by the judge {judge.judge}:"
        f" {listed(leaders, 'or')} may be{not_best}."
    )


def by_rating(ratings: Ratings) -> list[Rating]:
    """Best first; equal ratings in the comparison's order."""
    return sorted(ratings.policies, key=lambda rating: -rating.value)


def rank_range(rating: Rating) -> str:
    """ "rank 1", or "rank 1 to 3"."""
    if rating.best_rank == rating.worst_rank:
        return f"rank {rating.best_rank}"
    return f"rank {rating.best_rank} to {rating.worst_rank}"


def islands(ratings: Ratings, looks: dict[str, Policy]) -> str:
    """Which groups of policies no verdict connects."""
    first, *rest = [listed([looks[name].title for name in group]) for group in ratings.islands]
    return f"no verdict connects {first} with {' or with '.join(rest)}"
