"""How well a model predicts whole texts, each independently: bits per byte, which compare across vocabularies.

A text follows the token that begins texts (EOS, if a vocabulary has no other), as in pretraining. A text longer than
the model's context is read in adjacent windows: every token is predicted once, the first token of a window from the
last of the window before, and the last window starts early enough to be full.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from lm.model import LanguageModel
from lm.sequence_logprobs import sequence_logprobs
from lm.tokenizer import Tokenizer
from preferences.statistics.estimates import Floats

Window = tuple[list[int], list[int]]  # (given, predicted)


def windows(tokens: Sequence[int], start_id: int, max_position_embeddings: int) -> Iterator[Window]:
    """Yields the text's tokens in order, in windows that fill the context; the last reaches back to fill its own."""
    with_start = [start_id, *tokens]
    for begin in range(1, len(with_start), max_position_embeddings - 1):
        end = min(begin + max_position_embeddings - 1, len(with_start))
        yield with_start[max(0, end - max_position_embeddings) : begin], with_start[begin:end]


def text_logprobs(model: LanguageModel, tokenizer: Tokenizer, texts: Sequence[str]) -> list[float]:
    """Returns log p of each text, nats; 0 for an empty one."""
    encoded = tokenizer.encode_plain(texts)
    pieces = [
        (text, window)
        for text, tokens in enumerate(encoded)
        for window in windows(tokens, tokenizer.start_id, model.config.max_position_embeddings)
    ]
    pieces.sort(key=lambda piece: len(piece[1][1]))  # sorting by length minimises padding
    totals = [0.0] * len(texts)
    if pieces:
        queries, answers = [given for _, (given, _) in pieces], [predicted for _, (_, predicted) in pieces]
        logprobs = sequence_logprobs(model, queries, answers, 1.0)
        for (text, _), logprob in zip(pieces, logprobs, strict=True):
            totals[text] += logprob
    return totals


def bits_and_bytes(model: LanguageModel, tokenizer: Tokenizer, texts: Sequence[str]) -> tuple[Floats, Floats]:
    """Returns each text's bits under the model, and its bytes. Raises: ValueError for an empty text."""
    for number, text in enumerate(texts):
        if not text:
            raise ValueError(f"text {number} is empty; bits per byte need at least one byte")
    bits = -np.array(text_logprobs(model, tokenizer, texts)) / math.log(2)
    return bits, np.array([len(text.encode()) for text in texts], dtype=np.float64)
