"""How well a model foretells whole texts, each by itself: bits a byte, which compare across vocabularies.

A text begins behind the token that begins texts (the end token, where a vocabulary has no other), as in pretraining.
One that is longer than the model's context is read in windows side by side: every token is foretold once, the first of
a window from the last of the window before, and the last window begins early enough to be a full one.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from evaluation.sampling import sequence_logprobs
from intervals.resampling import Floats
from lm.model import LanguageModel
from lm.tokenizer import Tokenizer

Window = tuple[list[int], list[int]]  # what is given, what is foretold


def windows(tokens: Sequence[int], start_id: int, context_tokens: int) -> Iterator[Window]:
    """The text's tokens in order, in windows that fill the context; the last has what is before it to fill its own."""
    behind_start = [start_id, *tokens]
    for begin in range(1, len(behind_start), context_tokens - 1):
        end = min(begin + context_tokens - 1, len(behind_start))
        yield behind_start[max(0, end - context_tokens) : begin], behind_start[begin:end]


def text_logprobs(model: LanguageModel, tokenizer: Tokenizer, texts: Sequence[str]) -> list[float]:
    """log p of each text, nats; 0 for an empty one."""
    encoded = tokenizer.encode_plain(texts)
    pieces = [
        (text, window)
        for text, tokens in enumerate(encoded)
        for window in windows(tokens, tokenizer.start_id, model.config.context_tokens)
    ]
    pieces.sort(key=lambda piece: len(piece[1][1]))  # of like length together, so that little is padded
    totals = [0.0] * len(texts)
    if pieces:
        queries, answers = [given for _, (given, _) in pieces], [foretold for _, (_, foretold) in pieces]
        logprobs = sequence_logprobs(model, queries, answers, 1.0)
        for (text, _), logprob in zip(pieces, logprobs, strict=True):
            totals[text] += logprob
    return totals


def bits_and_bytes(model: LanguageModel, tokenizer: Tokenizer, texts: Sequence[str]) -> tuple[Floats, Floats]:
    """Of each text the bits that it takes to write it with the model's help, and its bytes. Errors: an empty text."""
    for number, text in enumerate(texts):
        if not text:
            raise ValueError(f"text {number} is empty; it has no bytes to measure bits by")
    bits = -np.array(text_logprobs(model, tokenizer, texts)) / math.log(2)
    return bits, np.array([len(text.encode()) for text in texts], dtype=np.float64)
