"""Judges a model's answers against a baseline's: a language model reads each pair twice, once in either order; a
judge that scores single responses reads each once.

A pair counts only if both orders gave a verdict. With one of them, the judge's preference for a position would pass for
a preference for a model.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from evaluation.judges.judge import ScoreJudge
from evaluation.judges.language_model import fill
from evaluation.suites.suite import Item, Measure, Tools
from reward.endpoint import Answer, Read, read_reply

CONSISTENCY = Measure(
    "position_consistency",
    "The share of items on which the judge prefers the same answer (or ties) in both orders. Identical answers are not"
    " shown to the judge and do not count.",
    is_share=True,
)


@dataclass(frozen=True)
class Leads:
    """How far the model's answer is ahead of the baseline's according to the judge, once per order.

    Above 0, the model's answer is better; 0 is a tie. Both are NaN if there is a `failure`. Identical answers tie, and
    scores are compared, without being `asked` about.
    """

    shown_first: float  # the model's answer was shown first
    shown_second: float
    failure: str = ""
    asked: bool = True

    def consistency(self) -> dict[str, float]:
        """Returns the value of CONSISTENCY; none if it does not apply."""
        agree = (self.shown_first > 0) == (self.shown_second > 0) and (self.shown_first < 0) == (self.shown_second < 0)
        return {CONSISTENCY.name: float(agree)} if self.asked else {}


def leads_over(
    baseline: Sequence[Answer],
    items: Sequence[Item],
    answers: Sequence[Answer],
    tools: Tools,
    *,
    template: str,
    read: Read,
    max_tokens: int,
) -> list[Leads]:
    """Returns the leads of a model's answers over the baseline's, all in the order of the items.

    `template` has the fields of `evaluation.judges.language_model`. `read` returns from the judge's reply how far the
    answer shown first is ahead. Neither is for a scorer, by which the higher score leads.
    """
    if tools.scorer is not None:
        return _by_scores(tools.scorer, items, answers, baseline)
    assert tools.judge is not None
    prompts = []
    for item, answer, other in zip(items, answers, baseline, strict=True):
        if not _known(answer, other):
            for first, second in ((answer, other), (other, answer)):
                prompts.append(({"role": "user", "content": fill(template, item.messages, first.text, second.text)},))
    replies = iter(tools.judge.ask(prompts, max_tokens) if prompts else ())
    return [
        _known(answer, other) or _leads(next(replies), next(replies), read, max_tokens)
        for answer, other in zip(answers, baseline, strict=True)
    ]


def _known(answer: Answer, other: Answer) -> Leads | None:
    """Returns the leads that need no judge: those of a failed answer, and of identical answers."""
    if answer.failure or other.failure:
        return Leads(math.nan, math.nan, answer.failure or f"the baseline: {other.failure}", asked=False)
    return Leads(0.0, 0.0, asked=False) if answer.text == other.text else None


def _by_scores(
    scorer: ScoreJudge, items: Sequence[Item], answers: Sequence[Answer], baseline: Sequence[Answer]
) -> list[Leads]:
    known = [_known(answer, other) for answer, other in zip(answers, baseline, strict=True)]
    rows = [row for row, leads in enumerate(known) if leads is None]
    texts = [side[row].text for side in (answers, baseline) for row in rows]
    scored = scorer.score([items[row].messages for row in (*rows, *rows)], texts) if rows else ()
    own, others = scored[: len(rows)], scored[len(rows) :]
    for row, one, other in zip(rows, own, others, strict=True):
        failure = one.failure or (f"the baseline: {other.failure}" if other.failure else "")
        lead = float(one.score > other.score) - float(one.score < other.score)
        known[row] = Leads(math.nan, math.nan, failure, False) if failure else Leads(lead, lead, asked=False)
    return [leads for leads in known if leads is not None]


def _leads(own_first: Answer, own_second: Answer, read: Read, max_tokens: int) -> Leads:
    first, first_failure = read_reply(own_first, read, max_tokens)
    second, second_failure = read_reply(own_second, read, max_tokens)
    if first_failure or second_failure:
        return Leads(math.nan, math.nan, f"the judge: {first_failure or second_failure}")
    return Leads(first, -second)
