"""Rankings as training examples: reading, checking, tokenizing.

One line of a rankings file: {"task_id", "prompt": [{"role", "content"}, ...], "responses": [...], "ranks": [...],
"labeler"}; rank 1 is best and equal ranks are ties. Two fields are optional: "ratings", a number per response,
higher is better; and "objective", what the labeler judged by (default: "overall"). Published formats are read too
(docs/labels.md).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import Field, field_validator

from lm.tokenizer import Messages, Tokenizer
from preferences.records import Message, Ranking
from training.data import DataConfig, read_rows
from training.tokens import chunks

if TYPE_CHECKING:
    from preferences.formats.merging import Found


@dataclass(frozen=True)
class Verdict:
    """One labeler's ranks of a task's responses, ratings if any, and its weight in the loss."""

    ranks: tuple[int, ...]
    ratings: tuple[float, ...] = ()
    weight: float = 1.0


@dataclass(frozen=True)
class Comparison:
    """One task, tokenized: K sequences of prompt, response and end token, and what each labeler said of them."""

    task_id: str
    sequences: tuple[Sequence[int], ...]
    verdicts: tuple[Verdict, ...]
    objective: int = 0  # what its labelers judged by: an index into the model's objectives


class RankingsConfig(DataConfig):
    """Where rankings come from, and their format."""

    format: str = Field(default="rankings", description="Format of the rows, one of those in docs/labels.md.")

    @field_validator("format")
    @classmethod
    def _is_known(cls, name: str) -> str:
        from preferences.formats.registry import format_to_read  # needs SQLAlchemy, which a bare GPU machine lacks

        return format_to_read(name).name


def read_judgments(data: RankingsConfig) -> "Found":
    """Tasks, judgments, warnings about rows, and what is held back from training.

    Raises: ValueError naming file, line and field.
    """
    from preferences.formats.merging import collect_all, report_excluded
    from preferences.formats.registry import format_to_read

    found = collect_all(format_to_read(data.format), read_rows(data))
    if not found.judgments:
        raise ValueError(f"{data.source}: no rankings; at least one was expected")
    report_excluded(found)
    if not found.rankings:
        counts = ", ".join(f"{count:,} x {kind}" for kind, count in found.report.counts().items())
        raise ValueError(f"{data.source}: no ranking to train on ({counts}); at least one was expected")
    return found


def read_rankings(data: RankingsConfig) -> list[Ranking]:
    """The current rankings. Raises as for `read_judgments`."""
    return read_judgments(data).rankings


def encode_scored(tokenizer: Tokenizer, messages: Messages) -> tuple[int, ...]:
    """Tokens of a conversation up to the end token of its last response, where the score is read.

    A policy's samples end there, so text that a template adds after it is left out.
    """
    return _scored(*tokenizer.encode_conversation(messages))


def _scored(tokens: Sequence[int], is_response: Sequence[bool]) -> tuple[int, ...]:
    return tuple(tokens[: len(tokens) - is_response[::-1].index(True)])


def encode_response(tokenizer: Tokenizer, prompt: Sequence[Message], response: str) -> tuple[int, ...]:
    """`encode_scored` of the conversation in which the assistant gives this response."""
    return encode_scored(tokenizer, _answered(prompt, response))


def _answered(prompt: Sequence[Message], response: str) -> Messages:
    """The conversation in which the assistant gives this response."""
    turns = [{"role": message.role, "content": message.content} for message in prompt]
    return [*turns, {"role": "assistant", "content": response}]


LabelerWeights = Mapping[tuple[str, str], float]  # by objective and labeler; 1 if absent


def encode_rankings(
    tokenizer: Tokenizer,
    rankings: Sequence[Ranking],
    max_tokens: int,
    *,
    objectives: Sequence[str] = (),
    weights: LabelerWeights | None = None,
) -> list[Comparison]:
    """One comparison per task, in order of first appearance; each response is encoded once, for all its labelers.

    `objectives` are the model's, in order; () if there is only one. `weights` are those of the labelers' rankings.

    Raises: ValueError naming the task whose conversation is longer than `max_tokens`, or whose rankings are not all of
    the same prompt and responses.
    """
    found = list[Comparison]()
    for judged, encoded in encode_tasks(tokenizer, rankings_by_task(rankings), max_tokens):
        found += [
            comparison_of(sequences, task, objectives, weights or {})
            for task, sequences in zip(judged, encoded, strict=True)
        ]
    return found


def rankings_by_task(rankings: Sequence[Ranking]) -> list[list[Ranking]]:
    """The rankings of each task, in order of first appearance.

    Raises: ValueError naming the task whose rankings are not all of the same prompt, responses and objective.
    """
    by_task: dict[str, list[Ranking]] = {}
    for ranking in rankings:
        by_task.setdefault(ranking.task_id, []).append(ranking)
    for task, *others in by_task.values():
        for other in others:
            for field in ("prompt", "responses", "objective"):
                if getattr(other, field) != getattr(task, field):
                    raise ValueError(
                        f"task {task.task_id!r}: field {field!r} differs between the rankings of {task.labeler!r} and"
                        f" {other.labeler!r}; rankings of one task are of the same responses by the same objective"
                    )
    return list(by_task.values())


EncodedTasks = tuple[list[list[Ranking]], list[tuple[tuple[int, ...], ...]]]  # tasks, and each one's sequences


def encode_tasks(tokenizer: Tokenizer, tasks: Sequence[list[Ranking]], max_tokens: int) -> Iterator[EncodedTasks]:
    """The tasks in chunks, each with the tokens of its responses. Each response is encoded once, for all its labelers.

    Raises: ValueError naming the task whose conversation is longer than `max_tokens`.
    """
    for judged in chunks(tasks):
        conversations = [_answered(task[0].prompt, response) for task in judged for response in task[0].responses]
        encoded = iter(tokenizer.encode_conversations(conversations))
        found = [tuple(_scored(*next(encoded)) for _ in task[0].responses) for task in judged]
        for task, sequences in zip(judged, found, strict=True):
            longest = max(len(sequence) for sequence in sequences)
            if longest > max_tokens:
                raise ValueError(
                    f"task {task[0].task_id!r}: prompt and response have {longest} tokens; the model's context holds"
                    f" {max_tokens}"
                )
        yield judged, found


def comparison_of(
    sequences: tuple[Sequence[int], ...], judged: Sequence[Ranking], objectives: Sequence[str], weights: LabelerWeights
) -> Comparison:
    """The comparison of a task, given its responses' tokens and its rankings."""
    task = judged[0]
    verdicts = [Verdict(r.ranks, r.ratings, weights.get((r.objective, r.labeler), 1.0)) for r in judged]
    objective = objectives.index(task.objective) if objectives else 0
    return Comparison(task.task_id, sequences, tuple(verdicts), objective)
