"""Labels of steps: reading TRL's stepwise supervision and PRM800K, and their tokens (docs/data.md).

TRL's: {"prompt", "completions": [text of each step, ...], "labels": [whether each is right, ...]}. PRM800K's: the
lines of its `phase*_{train,test}.jsonl` (arXiv 2305.20050). A row may give several responses: PRM800K rates
alternatives to some steps. Heed's own labels of turns: {"messages", "labels": [whether each turn of the assistant is
right; null = not rated]}, where each turn is a step, which ends with the turn.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field

from files.conversations import tool_messages
from files.fields import (
    checked_messages,
    list_field,
    names,
    object_field,
    objects_field,
    present,
    shown,
    text_field,
    text_or_messages,
)
from files.rows import InvalidRows, Row
from lm.tokenizer import Messages, Tokenizer
from preferences.rankings import is_heldout
from preferences.records import Message
from preferences.statistics.estimates import Ints
from reward.comparisons import scored_part
from reward.scoring import StepTokens
from reward.steps import SEPARATOR
from training.data import OnOverlong, SourceConfig, SourceRows, read_valid, report_rows, uncounted, untold
from training.tokens import (
    CHECKED_SEQUENCES,
    FITS,
    SKIPPED,
    TRUNCATED,
    Part,
    Sequences,
    chunks,
    encode_rows,
    read_array,
    sequence_arrays,
    unusual_rows,
)

RIGHT, WRONG, UNLABELLED, NEUTRAL = 1, 0, -1, -2  # a neutral step is no error, and not learned either
FINISHES = ("found_error", "solution", "bad_problem", "give_up")  # PRM800K's
ARRAYS = (*CHECKED_SEQUENCES, "targets", "texts", "text_bytes")  # in a folder of step labels

BROKEN, BARE = "problem that its labeler found broken (left out)", "response without a label (left out)"

Labels = tuple[int, ...]  # RIGHT, WRONG, UNLABELLED or NEUTRAL, per step
# A prompt, the steps of a response, and their labels. A step that is a turn has the messages since the last step.
Labelled = tuple[Messages, Sequence[str | Messages], list[int]]
LABELS = (RIGHT, WRONG)


class StepLabelsConfig(SourceConfig):
    """Where labels of steps come from, and their format."""

    format: Literal["auto", "trl", "prm800k", "turns"] = Field(
        default="auto",
        description="Format of the rows: `trl` (`prompt`, `completions`, `labels`), `prm800k` or `turns` (`messages`,"
        " `labels`); `auto` recognises it by the rows' fields (docs/data.md).",
    )
    separator: str = Field(
        default=SEPARATOR,
        description="Text between the steps of a response, also when the model scores a policy's (TRL's"
        " `step_separator`). Within a step it becomes a space. Must be empty for `turns`, where each turn is one step.",
    )


def trl_rows(where: str, row: Row) -> list[Labelled]:
    """Read a row of TRL's stepwise supervision. Raises: ValueError naming `where`, field and what was expected."""
    labels = list_field(where, row, "labels")
    named = {f"completions[{number}]": text for number, text in enumerate(list_field(where, row, "completions"))}
    texts = [text_field(where, named, name) for name in named]
    if not texts or len(labels) != len(texts):
        raise ValueError(
            f"{where}: field 'labels' has {len(labels)} entries for {len(texts)} steps in 'completions'; one per step,"
            " and at least one, was expected"
        )
    for number, label in enumerate(labels):
        if label not in (True, False) or not isinstance(label, bool | int):
            raise ValueError(f"{where}: field 'labels[{number}]' is {shown(label)}; true or false was expected")
    return [(_prompt(where, row), texts, [int(label) for label in labels])]


def turn_rows(where: str, row: Row) -> list[Labelled]:
    """Read a conversation with a label for each turn of the assistant. What follows the last one is left out.

    Raises: ValueError naming `where`, field and what was expected.
    """
    messages = tool_messages(where, present(where, row, "messages"), "messages")
    labels, steps, read = list_field(where, row, "labels"), list[Messages](), 0
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            steps, read = [*steps, messages[read : place + 1]], place + 1
    if not steps or len(labels) != len(steps):
        raise ValueError(
            f"{where}: field 'labels' has {len(labels)} entries for {len(steps)} turns of the assistant in 'messages';"
            " one per turn, and at least one, was expected"
        )
    for number, label in enumerate(labels):
        if label is not None and not isinstance(label, bool) and label not in LABELS:
            raise ValueError(f"{where}: field 'labels[{number}]' is {shown(label)}; true, false or null was expected")
    prompt, steps[0] = steps[0][:-1], steps[0][-1:]
    if not prompt:
        raise ValueError(f"{where}: field 'messages[0].role' is 'assistant'; the user's message was expected before it")
    return [(prompt, steps, [UNLABELLED if label is None else int(label) for label in labels])]


def _prompt(where: str, row: Row) -> Messages:
    prompt = text_or_messages(where, row, "prompt")
    if isinstance(prompt, str):
        return [{"role": "user", "content": text_field(where, row, "prompt")}]
    return checked_messages(where, prompt, "prompt", ends_with="user")


def prm800k_rows(where: str, row: Row) -> list[Labelled]:
    """Read a line of PRM800K: the response that was followed, and one for each other completion of a step that has a
    label, with only this label. Nothing is read of a problem that the labeler found to be broken.

    Raises: ValueError naming `where`, field and what was expected.
    """
    problem = text_field(f"{where}: question", object_field(where, row, "question"), "problem")
    label = object_field(where, row, "label")
    finish = present(f"{where}: label", label, "finish_reason")
    if finish not in FINISHES:
        raise ValueError(
            f"{where}: field 'label.finish_reason' is {shown(finish)}; one of {', '.join(FINISHES)} was expected"
        )
    if finish == "bad_problem":
        return []
    prompt: Messages = [{"role": "user", "content": problem}]
    found, texts, labels = list[Labelled](), list[str](), list[int]()
    for number, step in enumerate(objects_field(f"{where}: label", label, "steps")):
        place = f"{where}: label.steps[{number}]"
        options = [] if step.get("completions") is None else objects_field(place, step, "completions")
        rated = [_rated(f"{place}.completions[{at}]", option) for at, option in enumerate(options)]
        chosen = _followed(place, step, rated)
        found += [
            (prompt, [*texts, text], [UNLABELLED] * len(texts) + [rating])
            for text, rating in rated
            if rating in LABELS and (text, rating) != chosen
        ]
        texts, labels = [*texts, chosen[0]], [*labels, chosen[1]]
    if not texts:
        raise ValueError(f"{where}: field 'label.steps' is empty; at least one step was expected")
    return [(prompt, texts, labels), *found]


def _rated(where: str, completion: Row) -> tuple[str, int]:
    rating = completion.get("rating")
    if rating not in (-1, 0, 1, None) or isinstance(rating, bool):
        raise ValueError(f"{where}: field 'rating' is {shown(rating)}; -1, 0, 1 or null was expected")
    labels = {1: RIGHT, 0: NEUTRAL, -1: WRONG, None: UNLABELLED}
    return text_field(where, completion, "text"), labels[rating]


def _followed(where: str, step: Row, rated: Sequence[tuple[str, int]]) -> tuple[str, int]:
    """Returns the completion of a step that the response went on with: the chosen one, the labeler's own, which is
    right, or, where labeling ended with an error, the first.
    """
    chosen, human = step.get("chosen_completion"), step.get("human_completion")
    if chosen is not None:
        if type(chosen) is not int or not 0 <= chosen < len(rated):
            raise ValueError(
                f"{where}: field 'chosen_completion' is {shown(chosen)}; the index of one of {len(rated)} completions,"
                " or null, was expected"
            )
        return rated[chosen]
    if human is not None:
        text = human if isinstance(human, Mapping) else {"text": human}
        return text_field(f"{where}: human_completion", text, "text"), RIGHT
    if not rated:
        raise ValueError(f"{where}: field 'completions' is empty, and there is no human_completion; one was expected")
    return rated[0]


FORMATS: Mapping[str, tuple[tuple[str, ...], Callable[[str, Row], list[Labelled]]]] = {
    "trl": (("prompt", "completions", "labels"), trl_rows),
    "prm800k": (("question", "label"), prm800k_rows),
    "turns": (("messages", "labels"), turn_rows),
}


def read_step_labels(
    data: StepLabelsConfig,
    tell: Callable[[str], None] = untold,
    count: Callable[[SourceRows], None] = uncounted,
) -> Iterator[tuple[str, Labelled]]:
    """Stream (where, prompt, steps and labels) of responses with at least one label. At the end, `tell` gets lines
    about unusual rows, and `count` their numbers.

    Raises: ValueError naming file, line, field.
    """
    invalid, unusual = InvalidRows(data.source, data.on_invalid), Counter[str]()

    def read(where: str, row: Row) -> list[Labelled]:
        name = data.format if data.format != "auto" else _recognised(where, row)
        if (name == "turns") != (not data.separator):
            labelled, wanted = ("turns", 'separator = ""') if name == "turns" else ("steps", "a text between steps")
            raise ValueError(
                f"{where}: {labelled} are labelled, and reward.step_labels.separator is {data.separator!r};"
                f" {wanted} was expected"
            )
        return FORMATS[name][1](where, row)

    for where, responses in read_valid(data, read, invalid):
        unusual[BROKEN] += not responses
        for prompt, texts, labels in responses:
            # At use, a separator ends a step, so none may be inside of one.
            steps = [
                " ".join(filter(None, map(str.strip, text.split(data.separator)))) if isinstance(text, str) else text
                for text in texts
            ]
            if set(labels).isdisjoint(LABELS):
                unusual[BARE] += 1
            else:
                yield where, (prompt, steps, labels)
    report_rows(invalid, +unusual, tell, count)


def _recognised(where: str, row: Row) -> str:
    for name, (fields, _) in FORMATS.items():
        if all(field in row for field in fields):
            return name
    wanted = " or ".join(f"{', '.join(fields)} ({name})" for name, (fields, _) in FORMATS.items())
    raise ValueError(f"{where}: found the fields {names(row)}; {wanted} were expected")


def step_parts(
    tokenizer: Tokenizer,
    data: StepLabelsConfig,
    max_tokens: int,
    on_overlong: OnOverlong,
    heldout_share: float,
    seed: int,
    first_row: int,
    *,
    tell: Callable[[str], None] = untold,
) -> Iterator[Part]:
    """Tokenize the responses from number `first_row` on. A token that ends a step is counted, and its target is the
    step's label. With "truncate", a response that is too long loses the steps that do not fit.

    Raises: ValueError naming file, line, field.
    """
    sources, rows = list[SourceRows](), 0
    for chunk in chunks(read_step_labels(data, tell, sources.append)):
        kept = chunk[max(0, first_row - rows) :]
        rows += len(chunk)
        if not kept:
            continue
        whole = [(where, _conversation(prompt, steps, data.separator)) for where, (prompt, steps, _) in kept]
        fitted = [
            _fit(tokenizer, data, where, of, labels, max_tokens, on_overlong)
            for (where, (_, _, labels)), of in zip(
                kept, encode_rows(tokenizer.encode_conversations, whole), strict=True
            )
        ]
        texts = [_problem(prompt, heldout_share, seed) for _, (prompt, _, _) in kept]
        held = [(step, text) for step, text in zip(fitted, texts, strict=True) if step.fate != SKIPPED]
        yield Part(
            len(kept),
            {
                **sequence_arrays((step.tokens.tokens, step.tokens.is_end) for step, _ in held),
                "targets": np.array([target for step, _ in held for target in step.targets], dtype=np.int32),
                "overlong": np.array([step.fate for step in fitted]),
                "texts": np.frombuffer(b"".join(text for _, text in held), np.uint8),
                "text_bytes": np.array([len(text) for _, text in held]),
            },
        )
    yield from unusual_rows(sources)


def _conversation(prompt: Messages, steps: Sequence[str | Messages], separator: str) -> Messages:
    """Returns the whole conversation: the prompt, then the response that the steps make up, or the turns."""
    texts = [step for step in steps if isinstance(step, str)]
    turns = [message for step in steps if not isinstance(step, str) for message in step]
    return [*prompt, *turns, *([{"role": "assistant", "content": separator.join(texts)}] if texts else [])]


def _messages(prompt: Messages) -> list[Message]:
    return [Message.of(turn) for turn in prompt]


def _problem(prompt: Messages, share: float, seed: int) -> bytes:
    """Returns which side of the split a problem is on, and a hash of it, as text."""
    digest = hashlib.sha256("\0".join(turn["content"] for turn in prompt).encode()).hexdigest()[:16]
    return f"{int(is_heldout(_messages(prompt), share, seed))}{digest}".encode()


@dataclass(frozen=True)
class _Fitted:
    """A response's tokens and its labels, as far as the model reads them."""

    tokens: StepTokens
    targets: Sequence[int]  # per token
    fate: int


def _fit(
    tokenizer: Tokenizer,
    data: StepLabelsConfig,
    where: str,
    whole: tuple[Sequence[int], Sequence[bool]],
    labels: Sequence[int],
    max_tokens: int,
    on_overlong: OnOverlong,
) -> _Fitted:
    encoded = scored_part(*whole)
    found, fate = encoded, FITS
    if len(encoded.tokens) > max_tokens:
        if on_overlong == "refuse":
            raise ValueError(
                f"{where}: prompt and response have {len(encoded.tokens)} tokens; the model's context is {max_tokens}"
                ' (reward.on_overlong = "skip" or "truncate" accepts longer ones)'
            )
        found, fate = encoded.cut(max_tokens, keeps_end=False), TRUNCATED
    if data.separator:
        steps = StepTokens.of(tokenizer, encoded.tokens, encoded.response_tokens, data.separator)
    else:
        ends = [place for place, (own, after) in enumerate(pairwise([*whole[1], False])) if own and not after]
        steps = StepTokens(encoded.tokens, ends, ends)
    if len(steps.all_ends) != len(labels):
        raise ValueError(
            f"{where}: {len(labels)} steps are labelled, but with the separator {data.separator!r} the chat template's"
            f" text has {len(steps.all_ends)}; as many were expected"
        )
    by_end = dict[int, int]()
    for end, label in zip(steps.all_ends, labels, strict=True):  # steps that share a last token are as bad as the worst
        by_end[end] = WRONG if WRONG in (label, by_end.get(end)) else label
    ends = [end for end in steps.ends if end < len(found.tokens)]
    if (on_overlong == "skip" and fate == TRUNCATED) or not any(by_end[end] in LABELS for end in ends):
        return _Fitted(StepTokens((), ()), (), SKIPPED)
    targets = [by_end.get(place, UNLABELLED) for place in range(len(found.tokens))]
    return _Fitted(StepTokens(found.tokens, ends), targets, fate)


@dataclass(frozen=True)
class StepLabels:
    """Responses with labelled steps, in a folder that `step_parts` filled."""

    folder: Path

    @cached_property
    def sequences(self) -> Sequences:
        return Sequences.read(self.folder)

    @cached_property
    def targets(self) -> Ints:
        """The label of the step that ends there, of every token of all responses."""
        return np.asarray(read_array(self.folder, "targets"), dtype=np.int64)

    @cached_property
    def problems(self) -> list[str]:
        """For each response "1" or "0", for held out or not, and a hash of its problem."""
        texts = read_array(self.folder, "texts").tobytes().decode()
        ends = np.cumsum(read_array(self.folder, "text_bytes"), dtype=np.int64).tolist()
        return [texts[start:end] for start, end in zip([0, *ends], ends, strict=False)]

    def rows(self, *, heldout: bool) -> list[int]:
        """Returns the numbers of the responses on one side of the split, which is made by problem."""
        return [row for row, problem in enumerate(self.problems) if (problem[0] == "1") == heldout]

    def steps(self, row: int) -> StepTokens:
        tokens, is_end = self.sequences[row]
        return StepTokens(tokens.tolist(), np.flatnonzero(is_end).tolist())

    def labels(self, row: int) -> Labels:
        """Returns the label of each step of a response."""
        end = int(self.sequences.ends[row])
        start = end - int(self.sequences.lengths[row])
        is_end = self.sequences.counted[start:end]
        return tuple(self.targets[start:end][is_end].tolist())
