"""Rankings as training examples: reading, checking, tokenizing.

One line of a rankings file: {"task_id", "prompt": [{"role", "content"}, ...], "responses": [...], "ranks": [...],
"labeler"}; rank 1 is best and equal ranks are ties. Two fields are optional: "ratings", a number per response,
higher is better; and "objective", the criterion of the labeler (default: "overall"). Published formats are read too
(docs/labels.md).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from files.fields import shown
from lm.tokenizer import Messages, Tokenizer
from preferences.records import Flags, Message, Ranking
from training.data import OnOverlong
from training.tokens import FITS, SKIPPED, TRUNCATED, chunks, encode_rows


@dataclass(frozen=True)
class Verdict:
    """One labeler's ranks of a task's responses, ratings and flags if any, and its weight in the loss."""

    ranks: tuple[int, ...]
    ratings: tuple[float, ...] = ()
    weight: float = 1.0
    flags: Flags = ()


@dataclass(frozen=True)
class Comparison:
    """One task, tokenized: K sequences of prompt, response and end token, and each labeler's verdict on them."""

    task_id: str
    sequences: tuple[Sequence[int], ...]
    verdicts: tuple[Verdict, ...]
    objective: int = 0  # the criterion of its labelers: an index into the model's objectives
    response_tokens: tuple[int, ...] = ()  # number of response tokens that end each sequence, including its end token

    @property
    def weight(self) -> float:
        """The mean weight of its verdicts."""
        return sum(verdict.weight for verdict in self.verdicts) / len(self.verdicts)


def encode_scored(tokenizer: Tokenizer, messages: Messages) -> tuple[int, ...]:
    """Returns the tokens of a conversation up to the end token of its last response, where the score is read.

    A policy's samples end there, so text that a template adds after it is left out.
    """
    return tuple(encode_answered(tokenizer, messages).tokens)


def encode_answered(tokenizer: Tokenizer, messages: Messages) -> "Encoded":
    """As `encode_scored`, with the length of the last response."""
    return scored_part(tokenizer, *tokenizer.encode_conversation(messages))


@dataclass(frozen=True)
class Encoded:
    """A conversation up to the end token of its last response, which is the last `response_tokens` tokens."""

    tokens: Sequence[int]
    response_tokens: int

    def cut(self, num_tokens: int, *, keeps_end: bool) -> "Encoded":
        """Returns the first `num_tokens` tokens; with `keeps_end`, the last of them is replaced by the end token."""
        num_cut = len(self.tokens) - num_tokens
        if num_cut <= 0:
            return self
        left = Encoded(self.tokens[:num_tokens], max(0, self.response_tokens - num_cut))
        return replace(left, tokens=(*left.tokens[:-1], self.tokens[-1])) if keeps_end else left


def scored_part(tokenizer: Tokenizer, tokens: Sequence[int], is_response: Sequence[bool]) -> Encoded:
    """Cuts a conversation's tokens after its last response, given which tokens belong to responses.

    Raises: ValueError if none does.
    """
    if True not in is_response:
        raise ValueError(f"chat_template {shown(tokenizer.chat_template)} leaves out the assistant's responses")
    end = len(tokens) - is_response[::-1].index(True)
    length = next((back for back in range(end) if not is_response[end - 1 - back]), end)
    return Encoded(tuple(tokens[:end]), length)


def encode_response(tokenizer: Tokenizer, prompt: Sequence[Message], response: str) -> tuple[int, ...]:
    """Call `encode_scored` on the conversation in which the assistant gives this response."""
    return encode_scored(tokenizer, _answered(prompt, response))


def _answered(prompt: Sequence[Message], response: str) -> Messages:
    """Returns the conversation in which the assistant gives this response."""
    return [*(message.turn for message in prompt), {"role": "assistant", "content": response}]


LabelerWeights = Mapping[tuple[str, str], float]  # by objective and labeler; 1 if absent


def rankings_by_task(rankings: Sequence[Ranking]) -> list[list[Ranking]]:
    """Group rankings by task, in order of first appearance.

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
                        f" {other.labeler!r}; all rankings of a task need the same prompt, responses and objective"
                    )
    return list(by_task.values())


# A task as messages name it, such as by its file and line, and its rankings.
Judged = tuple[str, list[Ranking]]
EncodedTask = tuple[str, list[Ranking], tuple[Encoded, ...]]  # the same, and the responses with their prompt


def encode_tasks(tokenizer: Tokenizer, tasks: Iterable[Judged], max_tokens: int, section: str) -> Iterator[EncodedTask]:
    """Yields each task with the tokens of its responses. Each response is encoded once for all labelers.

    Raises: ValueError naming a task whose conversation is longer than `max_tokens` or is refused by the chat template.
    """
    for where, task, sequences in encode_unchecked(tokenizer, tasks):
        longest = max(len(sequence.tokens) for sequence in sequences)
        if longest > max_tokens:
            raise ValueError(
                f"{where}: prompt and response have {longest} tokens; the model's context is"
                f' {max_tokens} ({section}.on_overlong = "skip" or "truncate" accepts longer ones)'
            )
        yield where, task, sequences


def encode_unchecked(tokenizer: Tokenizer, tasks: Iterable[Judged]) -> Iterator[EncodedTask]:
    """As `encode_tasks`, for tasks of any length."""
    for judged in chunks(tasks):
        answers = [(where, task[0].prompt, response) for where, task in judged for response in task[0].responses]
        encoded = iter(encode_answers(tokenizer, answers))
        for where, task in judged:
            yield where, task, tuple(next(encoded) for _ in task[0].responses)


Answer = tuple[str, Sequence[Message], str]  # file and line of its task, its prompt, its text


def encode_answers(tokenizer: Tokenizer, answers: Sequence[Answer]) -> list[Encoded]:
    """Encode each prompt with its response.

    Raises: ValueError naming file and line of a conversation that the chat template refuses.
    """
    conversations = [(where, _answered(prompt, response)) for where, prompt, response in answers]
    encoded = encode_rows(tokenizer.encode_conversations, conversations)
    return [scored_part(tokenizer, *one) for one in encoded]


def fit_tasks(
    tokenizer: Tokenizer,
    tasks: Iterable[Judged],
    max_tokens: int,
    on_overlong: OnOverlong,
    section: str,
    *,
    keeps_end: bool,
) -> Iterator[tuple[list[Ranking], tuple[Encoded, ...], int]]:
    """Yields each task with its sequences, and whether they fit, were truncated or skipped. A skipped task has none.

    With `keeps_end`, a truncated response still ends with the end token. A task is also skipped if truncation leaves
    nothing of a response or makes different ones equal, as happens when the prompt is too long.

    Raises: ValueError as `encode_tasks`, if `on_overlong` is "refuse".
    """
    if on_overlong == "refuse":
        yield from ((task, of_task, FITS) for _, task, of_task in encode_tasks(tokenizer, tasks, max_tokens, section))
        return
    for _, task, sequences in encode_unchecked(tokenizer, tasks):
        cut = tuple(sequence.cut(max_tokens, keeps_end=keeps_end) for sequence in sequences)
        if cut == sequences:
            yield task, sequences, FITS
        elif on_overlong == "skip" or len(set(cut)) < len(set(sequences)) or not all(of.response_tokens for of in cut):
            yield task, (), SKIPPED
        else:
            yield task, cut, TRUNCATED


def comparison_of(
    sequences: Sequence[Encoded], judged: Sequence[Ranking], objectives: Sequence[str], weights: LabelerWeights
) -> Comparison:
    """Build the comparison of a task from its responses' tokens and its rankings."""
    task = judged[0]
    verdicts = [Verdict(r.ranks, r.ratings, weights.get((r.objective, r.labeler), 1.0), r.flags) for r in judged]
    objective = objectives.index(task.objective) if objectives else 0
    tokens, response_tokens = zip(*((of.tokens, of.response_tokens) for of in sequences), strict=True)
    return Comparison(task.task_id, tokens, tuple(verdicts), objective, response_tokens)
