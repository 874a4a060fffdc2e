"""Scores of whole sequences: the number at the last token. Shape letters: B sequences, T tokens."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lm.model import ScalarModel


def pad_right(sequences: Sequence[Sequence[int]], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens [B, T] and a mask [B, T] that is True at each sequence's last token.

    With padding on the right and causal attention no real token sees padding, so no attention mask is needed.
    """
    width = max(len(sequence) for sequence in sequences)
    tokens = np.full((len(sequences), width), pad_id, dtype=np.int64)
    is_last = np.zeros(tokens.shape, dtype=np.bool_)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence)] = sequence
        is_last[row, len(sequence) - 1] = True
    return torch.from_numpy(tokens).to(device), torch.from_numpy(is_last).to(device)


def last_token_scores(model: ScalarModel, sequences: Sequence[Sequence[int]], pad_id: int) -> Tensor:
    """Scores [B]; higher is better. Gradients flow."""
    tokens_BT, is_last_BT = pad_right(sequences, pad_id, next(model.parameters()).device)
    return model(tokens_BT, None, is_last_BT)


def score_responses(
    model: ScalarModel,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    *,
    end_id: int,
    pad_id: int,
) -> list[float]:
    """Scores of sampled responses, each to its prompt, in order; higher is better.

    Reward models learn from whole texts, the end token behind them, so one that was cut off is scored with it too.
    """
    sequences = [
        [*prompt, *response, *([] if end_id in response[-1:] else [end_id])]
        for prompt, response in zip(prompts, responses, strict=True)
    ]
    return score_sequences(model, sequences, pad_id)


@torch.inference_mode()
def score_sequences(
    model: ScalarModel, sequences: Sequence[Sequence[int]], pad_id: int, batch_size: int = 128
) -> list[float]:
    """Scores of any number of sequences, in order; sorted by length inside, so little is padded."""
    scores = [0.0] * len(sequences)
    order = sorted(range(len(sequences)), key=lambda index: len(sequences[index]))
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        found = last_token_scores(model, [sequences[index] for index in chosen], pad_id)
        for index, score in zip(chosen, found.tolist(), strict=True):
            scores[index] = score
    return scores
