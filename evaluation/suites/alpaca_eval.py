"""AlpacaEval: how often a judge prefers the model's answer to a baseline's, plain and at equal length.

Dubois et al. 2024, Length-controlled AlpacaEval (arXiv 2404.04475). The judge's question is that of `heed compare`, and
not AlpacaEval's, so values are comparable among models that were evaluated here, but not with its leaderboard.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count

import numpy as np

from evaluation.judges.language_model import OWN_TEMPLATE, read_verdict
from evaluation.statistics.win_rates import (
    LEAST_OVERLAP,
    has_overlap,
    joint_fit,
    length_controlled,
    win_rate_at_equal_length,
)
from evaluation.suites.judging import CONSISTENCY, leads_over
from evaluation.suites.suite import Item, Measure, Model, Request, Row, Scored, Suite, Tools, failed, read_items
from evaluation.verdicts import Verdict, comparisons_of
from files.conversations import ConversationReader
from files.fields import any_text, optional_text
from reward.endpoint import Answer

MAX_NEW_TOKENS = 2048
JUDGE_TOKENS = 1024

WIN_RATE = "win_rate"
LENGTH_CONTROLLED = "length_controlled_win_rate"
LENGTH_DIFFERENCE = "length_difference"  # characters by which the model's answer is longer than the baseline's
BASELINE = ""
JOINT = "joint_length_controlled"  # an item's part of the win rate at equal length in the joint fit


def at_equal_length(scored: Sequence[Scored]) -> float:
    """Returns the win rate that would remain at equal lengths, by the joint fit of several models if there is one; NaN
    if it is not identified.
    """
    won_V, longer_V = (np.array([one.values[name] for one in scored]) for name in (WIN_RATE, LENGTH_DIFFERENCE))
    if all(JOINT in one.values for one in scored) and has_overlap(won_V, longer_V):
        return float(np.mean([one.values[JOINT] for one in scored]))
    return win_rate_at_equal_length(won_V, longer_V)


def together(scored: Mapping[str, Sequence[Scored]]) -> dict[str, list[Scored]]:
    """Adds each item's part of the joint fit of several models, whose mean is the win rate at equal length and whose
    spread is its error. A model whose own fit is unknown, or needs a prior, is without.
    """
    verdicts = [_verdict(model, row) for model, rows in scored.items() for row in rows if WIN_RATE in row.values]
    models = list(dict.fromkeys(verdict.policy_a for verdict in verdicts))
    every = comparisons_of(verdicts, (*models, BASELINE))
    pairs = {model: every.between(place, len(models)) for place, model in enumerate(models)}
    found = {model: list(rows) for model, rows in scored.items()}
    fitted = joint_fit(list(pairs.values())) if len(pairs) > 1 else ()
    for (model, pair), part in zip(pairs.items(), fitted, strict=False):
        alone = length_controlled(pair)
        if not alone.reason and not alone.shrunk:
            error_P = part.error_C[pair.prompt_V]
            values = part.mean + len(pair) * (error_P - error_P.mean())
            of_item = {every.prompts[place]: value for place, value in zip(pair.prompt_V, values.tolist(), strict=True)}
            found[model] = [
                replace(row, values={**row.values, JOINT: of_item[row.item_id]}) if row.item_id in of_item else row
                for row in found[model]
            ]
    return found


def _verdict(model: str, row: Scored) -> Verdict:
    won, longer = row.values[WIN_RATE], round(row.values[LENGTH_DIFFERENCE])
    own, other = max(longer, 0), max(-longer, 0)
    return Verdict(row.item_id, model, BASELINE, 0, 0, "", "", won, length_a=own, length_b=other)


MEASURES = (
    Measure(
        LENGTH_CONTROLLED,
        "The win rate over the baseline that a logistic fit predicts for answers of equal length; unknown if the model"
        f" or the baseline is longer on fewer than {LEAST_OVERLAP:.0%} of items.",
        aggregate=at_equal_length,
        is_share=True,
        reads=(WIN_RATE, LENGTH_DIFFERENCE),
    ),
    Measure(
        WIN_RATE,
        "The share of items on which the judge prefers the model's answer to the baseline's: the mean of both orders,"
        " with ties counting ½.",
        is_share=True,
    ),
    CONSISTENCY,
)


def read(source: str) -> list[Item]:
    """Reads a file in AlpacaEval's format; an item's id is the row's number, from 0, and its group the `dataset`.

    Raises: ValueError naming file, line and field.
    """
    numbers, reader = count(), ConversationReader("prompt", "alpaca")
    return read_items(source, lambda where, row: _item(where, row, str(next(numbers)), reader))


def score(model: Model, items: Sequence[Item], tools: Tools) -> list[Scored]:
    """The baseline's answers are the rows' `output`, unless the user gives others.

    Raises: ValueError if neither the user nor an item's row gives the baseline's answer.
    """
    requests = [Request(item.messages, max_new_tokens=MAX_NEW_TOKENS, item_id=item.item_id) for item in items]
    without = [item.item_id for item in items if "output" not in item.data]
    if without and tools.baseline is None:
        raise ValueError(
            f"suite 'alpaca-eval': {len(without):,} of {len(items):,} items, such as {without[0]!r}, have no field"
            " 'output'; one per item, or --baseline SPEC, was expected"
        )
    baseline = tools.baseline(requests) if tools.baseline else [Answer(item.data["output"]) for item in items]
    answers = model.answer(requests)
    leads = leads_over(baseline, items, answers, tools, template=OWN_TEMPLATE, read=_lead, max_tokens=JUDGE_TOKENS)
    scored = []
    for item, answer, other, lead in zip(items, answers, baseline, leads, strict=True):
        if lead.failure:
            scored.append(failed(item, lead.failure, MEASURES, answer.text))
            continue
        values = {
            WIN_RATE: (2 + lead.shown_first + lead.shown_second) / 4,
            LENGTH_DIFFERENCE: float(len(answer.text) - len(other.text)),
        }
        scored.append(Scored(item.item_id, values | lead.consistency(), answer.text))
    return scored


def _item(where: str, row: Row, item_id: str, reader: ConversationReader) -> Item:
    data = {} if row.get("output") is None else {"output": any_text(where, row, "output")}
    return Item(item_id, tuple(reader.read(where, row)), optional_text(where, row, "dataset"), data=data)


def _lead(reply: str) -> tuple[float, str]:
    first_wins, failure = read_verdict(reply)
    return 2 * first_wins - 1, failure


SUITE = Suite(
    name="alpaca-eval",
    title="AlpacaEval 2 (Dubois et al. 2024, arXiv 2404.04475)",
    asks="conversations",
    measures=MEASURES,
    read=read,
    score=score,
    files="alpaca_eval_gpt4_baseline.json of https://huggingface.co/datasets/tatsu-lab/alpaca_eval"
    " (CC BY-NC 4.0, about 1.9 MB)",
    needs=frozenset({"judge"}),
    uses=frozenset({"baseline", "scorer"}),
    together=together,
)
