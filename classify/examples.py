"""Labelled rows as tokens with targets, the files that hold them, and batches of them packed into rows.

A text is read as BERT reads it: `[CLS] text [SEP]`, and a pair as `[CLS] first [SEP] second [SEP]` with token type 1
from the second text on; Heed's own vocabularies have the end token in all of these places. A text that is longer than a
window, with its question, is read in several that overlap.

Every token has a target. For `sequence`, a text's first token has the text's label; for `token`, a word's first token
has the word's tag; others have -1. For `span`, 1 = the answer begins here, 2 = it ends here, 3 = both; without an
answer in the window, the first token has 3.

Shape letters: N examples, B packed rows, T tokens of a row, C counted positions.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from classify.config import PAIR_MARKS, QUESTION_MARKS, ClassifyConfig, ClassifyData
from classify.rows import LabelledText, Question, TaggedWords, read_labelled
from lm.model import segment_positions
from lm.tokenizer import Tokenizer
from lm.transfer import upload
from stages.sizes import Lengths, Measured, RowSample
from training.data import SourceRows, untold
from training.packing import IntArray, packed_rows
from training.tokens import FITS, SKIPPED, TRUNCATED, Part, Sequences, chunks, read_array, unusual_rows

ARRAYS = ("tokens", "token_types", "targets", "lengths", "overlong")
HELDOUT_ARRAYS = (*ARRAYS, "texts", "text_bytes")
BEGINS, ENDS = 1, 2  # bits of a span's targets
SHOWN_LABELS = 20


@dataclass(frozen=True)
class EncodedExample:
    """One sequence for the model. `gold` has what its prediction is compared with, and how to read the prediction."""

    tokens: list[int]
    token_types: list[int]
    targets: list[int]
    gold: Mapping[str, Any]


Encoded = tuple[Sequence[EncodedExample], int]  # a row's examples, and whether it fits, was truncated or skipped


class Encoder:
    """Encodes rows for a tokenizer, a config and the labels that are known."""

    def __init__(self, tokenizer: Tokenizer, config: ClassifyConfig, labels: Sequence[str]) -> None:
        self.tokenizer, self.config = tokenizer, config
        self.numbers = {label: number for number, label in enumerate(labels)}

    def encode(self, where: str, row: LabelledText | TaggedWords | Question) -> Encoded:
        """Returns a row's examples; several only for a question about a long text.

        Raises: ValueError naming file and line for a label that training does not have, or a row that is too long.
        """
        if isinstance(row, LabelledText):
            return self._text(where, row)
        return self._sentence(where, row) if isinstance(row, TaggedWords) else self._windows(where, row)

    def _number(self, where: str, label: str) -> int:
        if label not in self.numbers:
            known = ", ".join([*islice(self.numbers, SHOWN_LABELS)]) + (", ..." * (len(self.numbers) > SHOWN_LABELS))
            lacks = "classify.labels does not have" if self.config.labels else "no row of classify.data has"
            raise ValueError(f"{where}: label {label!r}, which {lacks}; one of {known} was expected")
        return self.numbers[label]

    def _text(self, where: str, row: LabelledText) -> Encoded:
        texts, fate = self.tokenizer.encode_plain(row.texts), FITS
        room = self.config.seq_len - (PAIR_MARKS if len(texts) > 1 else PAIR_MARKS - 1)
        label = self._number(where, row.label)
        if sum(map(len, texts)) > room:
            fate = self._fate(where, "the text has", sum(map(len, texts)), room)
            if fate == SKIPPED:
                return (), fate
            while sum(map(len, texts)) > room:  # the longer text of a pair loses its last token, as in BERT
                max(texts, key=len).pop()
        tokens, types = marked(self.tokenizer, texts)
        return (EncodedExample(tokens, types, [label, *[-1] * (len(tokens) - 1)], {"label": row.label}),), fate

    def _sentence(self, where: str, row: TaggedWords) -> Encoded:
        spelled, firsts = encode_words(self.tokenizer, row.words)
        room, fate = self.config.seq_len - (PAIR_MARKS - 1), FITS
        if len(spelled) > room:
            fate = self._fate(where, "the sentence has", len(spelled), room)
            if fate == SKIPPED:
                return (), fate
        tokens, types = marked(self.tokenizer, [spelled[:room]])
        targets = [-1] * len(tokens)
        # A word that is cut off, or that the vocabulary spells by no token, has no prediction and counts as outside.
        read = [(word, place) for word, place in enumerate(firsts) if 0 <= place < room]
        for word, place in read:
            targets[place + 1] = self._number(where, row.tags[word])
        gold = {"words": row.words, "tags": row.tags, "read": [[word, place + 1] for word, place in read]}
        return (EncodedExample(tokens, types, targets, gold),), fate

    def _windows(self, where: str, row: Question) -> Encoded:
        config, fate = self.config, FITS
        (question, _), (context, places) = self.tokenizer.encode_with_places([row.question, row.context])
        if len(question) > config.max_question_tokens:
            fate = self._fate(where, "the question has", len(question), config.max_question_tokens)
            if fate == SKIPPED:
                return (), fate
            question = question[: config.max_question_tokens]
        first = last = -1
        if row.answers:
            text, start = row.answers[0]
            first = next((token for token, (_, end) in enumerate(places) if end > start), -1)
            last = max((token for token, (begin, _) in enumerate(places) if begin < start + len(text)), default=-1)
            if not 0 <= first <= last:
                raise ValueError(f"{where}: the vocabulary has no token for the answer {text!r}; another was expected")
        gold = {"id": row.question_id, "context": row.context, "answers": [text for text, _ in row.answers]}
        windows = context_windows(len(context), config.seq_len - len(question) - QUESTION_MARKS, config.doc_stride)
        best = best_windows(windows, len(context))
        examples = []
        for number, window in enumerate(windows):
            tokens, types = marked(self.tokenizer, [question, context[window.start : window.stop]])
            before = len(question) + QUESTION_MARKS - 1  # tokens before the window's text
            targets = [0] * len(tokens)
            begins, ends = (0, 0) if first not in window or last not in window else (
                before + first - window.start, before + last - window.start
            )  # fmt: skip
            targets[begins] |= BEGINS
            targets[ends] |= ENDS
            spans = [[*places[token], int(best[token] == number)] for token in window]
            examples.append(
                EncodedExample(tokens, types, targets, {**gold, "window": number, "before": before, "places": spans})
            )
        return examples, fate

    def _fate(self, where: str, what: str, num_tokens: int, room: int) -> int:
        if self.config.on_overlong == "refuse":
            field = "max_question_tokens" if "question" in what else "seq_len"
            raise ValueError(
                f"{where}: {what} {num_tokens} tokens; classify.{field} = {getattr(self.config, field)} leaves room for"
                f' {room} (classify.on_overlong = "skip" or "truncate" accepts longer ones)'
            )
        return SKIPPED if self.config.on_overlong == "skip" else TRUNCATED


def marked(tokenizer: Tokenizer, texts: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Returns the tokens of one or two texts with the marks around them, and their token types."""
    tokens = [tokenizer.start_id, *texts[0], tokenizer.end_id]
    second = [*texts[1], tokenizer.end_id] if len(texts) > 1 else []
    return [*tokens, *second], [0] * len(tokens) + [1] * len(second)


def encode_words(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[list[int], list[int]]:
    """Returns the tokens of words joined by spaces, and the place of each word's first token; -1 if it has none."""
    ((tokens, places),) = tokenizer.encode_with_places([" ".join(words)])
    firsts, start, at = [], 0, 0
    for word in words:
        end = start + len(word)
        while at < len(tokens) and places[at][1] <= start:
            at += 1
        firsts.append(at if at < len(tokens) and places[at][0] < end else -1)
        start = end + 1
    return tokens, firsts


def context_windows(num_tokens: int, room: int, stride: int) -> list[range]:
    """Returns windows of at most `room` tokens that begin every `stride` tokens and cover the text (BERT)."""
    windows = [range(min(room, num_tokens))]
    while windows[-1].stop < num_tokens:
        start = windows[-1].start + min(room, stride)
        windows.append(range(start, min(start + room, num_tokens)))
    return windows


def best_windows(windows: Sequence[range], num_tokens: int) -> list[int]:
    """Returns, for each token of a text, the window that shows most around it: its `max context` in BERT.

    A window's score for a token is the lesser number of tokens to its left and right there, plus a hundredth of the
    window's length; of equal ones the first is taken.
    """

    def seen(token: int, window: range) -> float:
        return min(token - window.start, window.stop - 1 - token) + 0.01 * len(window)

    return [
        max((n for n, window in enumerate(windows) if token in window), key=lambda n: seen(token, windows[n]))
        for token in range(num_tokens)
    ]


def example_parts(
    tokenizer: Tokenizer,
    config: ClassifyConfig,
    sources: Sequence[ClassifyData],
    labels: Sequence[str],
    first_row: int,
    *,
    with_gold: bool = False,
    tell: Callable[[str], None] = untold,
) -> Iterator[Part]:
    """Yields the examples of the rows from `first_row` on, as ARRAYS or, `with_gold`, as HELDOUT_ARRAYS.

    Raises: ValueError as `read_labelled` and `Encoder.encode`.
    """
    encoder, counted, lines = Encoder(tokenizer, config, labels), list[SourceRows](), list[str]()
    rows = read_labelled(config.task, config.labels, sources, counted, lines)
    for chunk in chunks(islice(rows, first_row, None)):
        encoded = [encoder.encode(where, row) for where, row in chunk]
        examples = [example for of_row, _ in encoded for example in of_row]
        arrays: dict[str, NDArray[Any]] = {
            name: np.array([value for example in examples for value in getattr(example, name)])
            for name in ("tokens", "token_types", "targets")
        }
        arrays["lengths"] = np.array([len(example.tokens) for example in examples])
        arrays["overlong"] = np.array([fate for _, fate in encoded])
        if with_gold:
            texts = [json.dumps(example.gold).encode() for example in examples]
            arrays |= {"texts": np.frombuffer(b"".join(texts), np.uint8), "text_bytes": np.array([*map(len, texts)])}
        yield Part(len(chunk), arrays)
    for line in lines:
        tell(line)
    yield from unusual_rows(counted)


def example_lengths(tokenizer: Tokenizer, config: ClassifyConfig, labels: Sequence[str]) -> Lengths:
    """Returns the lengths of the training examples for a plan, from a sample of the rows if there are many.

    A question's text may be several examples. Raises: ValueError as `read_labelled` and `Encoder.encode`.
    """
    sample, encoder = RowSample[tuple[str, Any]](), Encoder(tokenizer, config, labels)
    for where, row in read_labelled(config.task, config.labels, config.data, [], []):
        sample.add((where, row), row.num_bytes)

    def encode(rows: Sequence[tuple[str, Any]]) -> Iterator[list[Measured]]:
        for examples, fate in (encoder.encode(where, row) for where, row in rows):
            yield [(len(example.tokens), 0, fate) for example in examples] or [(0, 0, fate)]

    return sample.lengths(encode, config.seq_len)


@dataclass(frozen=True)
class Examples:
    """Examples one after another in memory-mapped arrays; `ends` [N] are their ends."""

    tokens: NDArray[np.int32]
    token_types: NDArray[np.uint8]
    targets: NDArray[np.int32]
    ends: NDArray[np.int64]
    folder: Path

    @classmethod
    def read(cls, folder: Path) -> Self:
        tokens, token_types, targets = (read_array(folder, name) for name in ("tokens", "token_types", "targets"))
        ends = np.cumsum(read_array(folder, "lengths"), dtype=np.int64)
        return cls(tokens, token_types, targets, ends, folder)

    def __len__(self) -> int:
        return len(self.ends)

    def starts_of(self, rows: IntArray) -> IntArray:
        """Places of these examples' first tokens in the arrays."""
        starts: IntArray = np.where(rows > 0, self.ends[rows - 1], 0)
        return starts

    def lengths_of(self, rows: IntArray) -> IntArray:
        lengths: IntArray = self.ends[rows] - self.starts_of(rows)
        return lengths

    def golds(self) -> list[dict[str, Any]]:
        """What predictions of held-out examples are compared with, in order."""
        texts = read_array(self.folder, "texts")
        ends = np.cumsum(read_array(self.folder, "text_bytes"), dtype=np.int64)
        return [json.loads(part.tobytes()) for part in np.split(texts, ends[:-1])]


@dataclass(frozen=True)
class PackedExamples:
    """Examples packed into few rows. `example_BT` numbers each token's example, from 0 in the order of `rows`, and
    `place_BT` its place there; both are arbitrary at padding. Segments and targets stay in CPU memory.
    """

    tokens_BT: Tensor
    segments_BT: Tensor
    token_types_BT: Tensor
    targets_BT: Tensor
    example_BT: Tensor
    place_BT: Tensor

    @classmethod
    def of(cls, examples: Examples, rows: IntArray, device: torch.device) -> Self:
        starts, lengths = examples.starts_of(rows), examples.lengths_of(rows)
        packed = packed_rows(
            Sequences.of(
                (examples.tokens[start : start + length].tolist(), [False] * int(length))
                for start, length in zip(starts, lengths, strict=True)
            ),
            device,
        )
        segments_BT, example_BT = torch.from_numpy(packed.segments), packed.sequence_of_tokens()
        place_BT = segment_positions(segments_BT)
        real_BT = packed.segments > 0
        at_BT = np.where(real_BT, starts[example_BT] + place_BT.numpy(), 0)
        types_BT = torch.from_numpy(examples.token_types[at_BT].astype(np.int64) * real_BT)
        targets_BT = torch.from_numpy(np.where(real_BT, examples.targets[at_BT], -1).astype(np.int64))
        tokens_BT = upload(torch.from_numpy(packed.tokens), device)
        return cls(tokens_BT, segments_BT, upload(types_BT, device), targets_BT, torch.from_numpy(example_BT), place_BT)

    @property
    def real_BT(self) -> Tensor:
        """True = a token, not padding."""
        return self.segments_BT > 0
