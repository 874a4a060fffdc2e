"""Demonstrations as tokens: which tokens count in the loss, and what happens to conversations that are too long."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from files.conversations import TEXT_ROLE, num_bytes
from files.fields import shown
from lm.tokenizer import Messages, Tokenizer
from stages.sizes import Lengths, Measured, RowSample
from training.data import DataConfig, OnOverlong, SourceRows, read_conversations, untold
from training.tokens import FITS, SKIPPED, TRUNCATED, Part, chunks, encode_rows, sequence_arrays, unusual_rows


@dataclass(frozen=True)
class Limit:
    """The most tokens of a conversation or, with `has_source`, of its source and of its target each."""

    has_source: bool
    seq_len: int
    on_overlong: OnOverlong = "refuse"


@dataclass(frozen=True)
class Rows:
    """Selects training or held-out rows. Every `every`-th row is held out, from the first on; with 0, no row is, since
    held-out rows come from other sources.
    """

    every: int = 0
    is_heldout: bool = False

    def have(self, number: int) -> bool:
        return not self.every or (number % self.every == 0) == self.is_heldout


ALL_ROWS = Rows()


def demonstration_parts(
    tokenizer: Tokenizer,
    sources: Sequence[DataConfig],
    limit: Limit,
    first_row: int,
    *,
    rows: Rows = ALL_ROWS,
    tell: Callable[[str], None] = untold,
) -> Iterator[Part]:
    """Yields the tokens of conversations from `first_row` on that are in `rows`. At the end, `tell` gets lines about
    each source.

    Raises: ValueError as for `encode_demonstrations`.
    """
    lines, counted = list[str](), list[SourceRows]()
    read = enumerate(read_conversations(sources, lines.append, takes_texts=not limit.has_source, count=counted.append))
    for chunk in chunks(itertools.islice(read, first_row, None)):
        chosen = [conversation for number, conversation in chunk if rows.have(number)]
        encoded = [one for of_one in encode_demonstrations(tokenizer, chosen, limit) for one in of_one]
        kept = sequence_arrays((tokens, is_response) for tokens, is_response, fate in encoded if fate != SKIPPED)
        yield Part(len(chunk), {**kept, "overlong": np.array([fate for *_, fate in encoded])})
    for line in lines:
        tell(line)
    yield from unusual_rows(counted)


def encode_demonstrations(
    tokenizer: Tokenizer, conversations: Sequence[tuple[str, Messages]], limit: Limit
) -> Iterator[list[tuple[Sequence[int], Sequence[bool], int]]]:
    """Yields the sequences of each (where, messages): tokens, which of them are the assistant's, and whether they fit,
    were truncated or skipped.

    Raises: ValueError naming file and line of a conversation that has no response or is too long or, with a source,
    has nothing before its last response.
    """
    for (where, _), sequences in zip(conversations, encoded_all(tokenizer, conversations), strict=True):
        marked = [(tokens, is_response) for tokens, is_response in sequences if any(is_response)]
        if not marked:
            raise ValueError(
                f"{where}: sft.chat_template {shown(tokenizer.chat_template)} leaves out the assistant's responses"
            )
        yield [_fitted(where, tokens, is_response, limit) for tokens, is_response in marked]


def _fitted(
    where: str, tokens: Sequence[int], is_response: Sequence[bool], limit: Limit
) -> tuple[Sequence[int], Sequence[bool], int]:
    parts = split_pair(tokens, is_response) if limit.has_source else (tokens,)
    if not parts[0]:
        raise ValueError(f"{where}: nothing comes before the response; a text for the encoder was expected")
    if max(map(len, parts)) <= limit.seq_len:
        return tokens, is_response, FITS
    if limit.on_overlong == "refuse":
        what, lengths = "source and target have" if limit.has_source else "the conversation has", map(len, parts)
        raise ValueError(
            f"{where}: {what} {' and '.join(map(str, lengths))} tokens; sft.seq_len allows {limit.seq_len}"
            ' (sft.on_overlong = "skip" or "truncate" accepts longer ones)'
        )
    return _shortened(tokens, is_response, limit)


def encoded_all(
    tokenizer: Tokenizer, conversations: Sequence[tuple[str, Messages]]
) -> Iterator[list[tuple[list[int], list[bool]]]]:
    """Yields the sequences of each conversation, as `Tokenizer.encode_responses`; of a plain text all tokens are the
    assistant's, the end token included.

    Raises: ValueError naming file and line of a plain text that contains a special token's name, or of a conversation
    that the chat template refuses.
    """
    is_text = [messages[0]["role"] == TEXT_ROLE for _, messages in conversations]
    texts = [messages[0]["content"] for (_, messages), plain in zip(conversations, is_text, strict=True) if plain]
    for (where, messages), plain in zip(conversations, is_text, strict=True):
        if plain and tokenizer.marked(messages[0]["content"]) != messages[0]["content"]:
            raise ValueError(
                f"{where}: the text contains the name of a special token, as a rendered chat template does; the"
                " conversation itself was expected, in `messages`"
            )
    of_texts = iter(tokenizer.encode_plain(texts))
    with_turns = [row for row, plain in zip(conversations, is_text, strict=True) if not plain]
    of_turns = iter(encode_rows(tokenizer.encode_responses, with_turns))
    for plain in is_text:
        if plain:
            tokens = [*next(of_texts), tokenizer.end_id]
            yield [(tokens, [True] * len(tokens))]
        else:
            yield next(of_turns)


def demonstration_lengths(
    tokenizer: Tokenizer, sources: Sequence[DataConfig], limit: Limit, tell: Callable[[str], None] = untold
) -> Lengths:
    """Returns the conversations' lengths.

    Raises: ValueError as `read_conversations` and `encode_demonstrations`.
    """
    sample = RowSample[tuple[str, Messages]]()
    for where, turns in read_conversations(sources, tell, takes_texts=True):
        sample.add((where, turns), num_bytes(turns))

    def count(conversations: Sequence[tuple[str, Messages]]) -> Iterator[list[Measured]]:
        for sequences in encode_demonstrations(tokenizer, conversations, limit):
            yield [(len(tokens), sum(is_response), fate) for tokens, is_response, fate in sequences]

    return sample.lengths(count, limit.seq_len)


def _shortened(
    tokens: Sequence[int], is_response: Sequence[bool], limit: Limit
) -> tuple[Sequence[int], Sequence[bool], int]:
    """Truncate a conversation that is too long to its beginning; skip it if that has no response."""
    if limit.on_overlong == "skip":
        return [], [], SKIPPED
    if limit.has_source:
        source, target = (part[: limit.seq_len] for part in split_pair(tokens, is_response))
        return [*source, *target], [False] * len(source) + [True] * len(target), TRUNCATED
    if not any(is_response[1 : limit.seq_len]):
        return [], [], SKIPPED
    return tokens[: limit.seq_len], is_response[: limit.seq_len], TRUNCATED


def split_pair(tokens: Sequence[int], is_response: Sequence[bool]) -> tuple[Sequence[int], Sequence[int]]:
    """Split a conversation into what comes before the last response, and that response with its end token."""
    end = len(tokens) - is_response[::-1].index(True)
    length = next((back for back in range(end) if not is_response[end - 1 - back]), end)
    return tokens[: end - length], tokens[end - length : end]
