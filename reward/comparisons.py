"""Rankings as training examples: reading, checking, tokenizing.

One line of a rankings file: {"task_id", "prompt": [{"role", "content"}, ...], "responses": [...], "ranks": [...],
"labeler"}; rank 1 is best and equal ranks are ties. Two fields may be added: "ratings", a number a response, higher is
better; and "objective", what the labeler judged by ("overall" where it is not given).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lm.tokenizer import Messages, Tokenizer
from preferences.records import MAX_RESPONSES, MIN_RESPONSES, OVERALL, Message, Ranking, dense_ranks
from training.data import DataConfig, checked_messages, read_rows, text_field


@dataclass(frozen=True)
class Verdict:
    """One labeler's ranks of a task's responses, ratings if there are any, and what it weighs in the loss."""

    ranks: tuple[int, ...]
    ratings: tuple[float, ...] = ()
    objective: int = 0  # place in the model's list of objectives
    weight: float = 1.0


@dataclass(frozen=True)
class Comparison:
    """One task, tokenized: K sequences of prompt, response and end token, and what each labeler said of them."""

    task_id: str
    sequences: tuple[tuple[int, ...], ...]
    verdicts: tuple[Verdict, ...]


def read_rankings(data: DataConfig) -> list[Ranking]:
    """Errors: ValueError naming file, line and field; a ranking of one is no comparison and is refused."""
    rankings = []
    for where, row in read_rows(data):
        prompt = checked_messages(where, row.get("prompt"), "prompt", ends_with="user")
        responses, ranks = row.get("responses"), row.get("ranks")
        if not isinstance(responses, list) or not MIN_RESPONSES <= len(responses) <= MAX_RESPONSES:
            found = f"{len(responses)} entries" if isinstance(responses, list) else type(responses).__name__
            raise ValueError(
                f"{where}: field 'responses' has {found}; a list of {MIN_RESPONSES} to {MAX_RESPONSES} was expected"
            )
        if not all(isinstance(response, str) for response in responses):
            raise ValueError(f"{where}: field 'responses': strings were expected")
        if not isinstance(ranks, list) or not all(type(rank) is int and rank >= 1 for rank in ranks):
            raise ValueError(f"{where}: field 'ranks' is {ranks!r}; a list of whole numbers from 1 was expected")
        if len(ranks) != len(responses):
            raise ValueError(f"{where}: field 'ranks' has {len(ranks)} entries for {len(responses)} responses")
        rankings.append(
            Ranking(
                task_id=text_field(where, row, "task_id"),
                prompt=tuple(Message(**message) for message in prompt),
                responses=tuple(responses),
                ranks=dense_ranks(ranks),
                labeler=text_field(where, row, "labeler"),
                objective=text_field(where, {"objective": OVERALL, **row}, "objective"),
                ratings=_ratings(where, row.get("ratings", []), len(responses)),
            )
        )
    if not rankings:
        raise ValueError(f"{data.source}: no rankings; at least one was expected")
    return rankings


def _ratings(where: str, ratings: Any, num_responses: int) -> tuple[float, ...]:
    """One finite number a response, or none at all."""
    is_list = isinstance(ratings, list) and all(type(rating) in (int, float) for rating in ratings)
    if not is_list or not all(map(math.isfinite, ratings)):
        raise ValueError(f"{where}: field 'ratings' is {ratings!r}; a list of finite numbers was expected")
    if ratings and len(ratings) != num_responses:
        raise ValueError(f"{where}: field 'ratings' has {len(ratings)} entries for {num_responses} responses")
    return tuple(map(float, ratings))


def encode_scored(tokenizer: Tokenizer, messages: Messages) -> tuple[int, ...]:
    """Tokens of a conversation up to the end token of its last response, where its score is read.

    Samples of a policy end there, so nothing that a template writes after it is scored.
    """
    tokens, is_response = tokenizer.encode_conversation(messages)
    return tuple(tokens[: len(tokens) - is_response[::-1].index(True)])


def encode_response(tokenizer: Tokenizer, prompt: Sequence[Message], response: str) -> tuple[int, ...]:
    """`encode_scored` of the conversation in which the assistant gives this response."""
    turns = [{"role": message.role, "content": message.content} for message in prompt]
    return encode_scored(tokenizer, [*turns, {"role": "assistant", "content": response}])


def encode_rankings(
    tokenizer: Tokenizer, rankings: Sequence[Ranking], max_tokens: int, weights: Mapping[str, float] | None = None
) -> list[Comparison]:
    """One comparison a task, in order of first appearance: a completion is read once however many labelers ranked it.

    `weights` are what each labeler's rankings count for, 1 where it is not given.

    Errors: ValueError naming the task whose conversation is longer than `max_tokens`, or whose rankings are not all of
    the same prompt and responses.
    """
    by_task: dict[str, list[Ranking]] = {}
    for ranking in rankings:
        by_task.setdefault(ranking.task_id, []).append(ranking)
    return [_encode_task(tokenizer, judged, max_tokens, weights or {}) for judged in by_task.values()]


def _encode_task(
    tokenizer: Tokenizer, judged: Sequence[Ranking], max_tokens: int, weights: Mapping[str, float]
) -> Comparison:
    task = judged[0]
    for other in judged[1:]:
        for field in ("prompt", "responses"):
            if getattr(other, field) != getattr(task, field):
                raise ValueError(
                    f"task {task.task_id!r}: field {field!r} differs between the rankings of {task.labeler!r} and"
                    f" {other.labeler!r}; rankings of one task are of the same responses"
                )
    sequences = tuple(encode_response(tokenizer, task.prompt, response) for response in task.responses)
    longest = max(len(sequence) for sequence in sequences)
    if longest > max_tokens:
        raise ValueError(
            f"task {task.task_id!r}: prompt and response have {longest} tokens; the model's context holds {max_tokens}"
        )
    verdicts = [Verdict(r.ranks, r.ratings, weight=weights.get(r.labeler, 1.0)) for r in judged]
    return Comparison(task.task_id, sequences, tuple(verdicts))
