"""Sampling responses with a key-value cache.

Shape letters: B batch, P prompt tokens, S key tokens, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lm.attention import KVCache
from lm.model import LanguageModel

LEAVE_BELOW = 0.8  # share of running rows at which the finished ones leave


@dataclass(frozen=True)
class Generated:
    """Responses in the order of the prompts. A finished response ends with the end token; others were cut off."""

    responses: list[list[int]]
    finished: list[bool]


@torch.inference_mode()
def generate(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    end_id: int,
    temperature: float,
    seeds: Sequence[int],
) -> Generated:
    """Sample one response a prompt; `temperature` 0 is greedy.

    Every sequence draws from its own seed, so a sample does not depend on its batch mates beyond rounding.
    Errors: ValueError for an empty prompt or one that leaves no room in the model's context.
    """
    if not prompts or len(seeds) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts with {len(seeds)} seeds; at least one prompt and a seed for each")
    _check_room(model, prompts, max_new_tokens)
    device = model.head.weight.device
    tokens_BP, first_real_B = _pad_left(prompts, end_id, device)
    uniforms_BR = torch.from_numpy(_uniforms(seeds, max_new_tokens)).to(device)
    cache = KVCache(
        model.config.num_layers, len(prompts), model.config.num_kv_heads, tokens_BP.shape[1] + max_new_tokens,
        model.config.head_dim, like=model.decoder.blocks[0].attention.qkv.weight,  # type: ignore[union-attr, arg-type]
    )  # fmt: skip
    responses: list[list[int]] = [[] for _ in prompts]
    finished = [False] * len(prompts)
    rows = torch.arange(len(prompts), device=device)  # which prompt each row of the batch belongs to
    inputs_BT = tokens_BP
    for step in range(max_new_tokens):
        logits_BV = _next_logits(model, inputs_BT, first_real_B, cache)
        next_B = _choose(logits_BV, uniforms_BR[:, step], temperature)
        for row, token in zip(rows.tolist(), next_B.tolist(), strict=True):
            if not finished[row]:
                responses[row].append(token)
                finished[row] = token == end_id
        running = [place for place, row in enumerate(rows.tolist()) if not finished[row]]
        if not running:
            break
        # Leaving copies the cache, so finished rows idle until enough of them can leave together.
        if len(running) <= LEAVE_BELOW * len(rows):
            stay = torch.tensor(running, device=device)
            rows, next_B, first_real_B, uniforms_BR = rows[stay], next_B[stay], first_real_B[stay], uniforms_BR[stay]
            cache.keep(stay)
        inputs_BT = next_B[:, None]
    return Generated(responses, finished)


def _check_room(model: LanguageModel, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    room = model.config.context_tokens - max_new_tokens
    for index, prompt in enumerate(prompts):
        if not 1 <= len(prompt) <= room:
            raise ValueError(
                f"prompt {index} has {len(prompt)} tokens; 1 to {room} were expected: the context of"
                f" {model.config.context_tokens} tokens less {max_new_tokens} for the response"
            )


def _pad_left(prompts: Sequence[Sequence[int]], fill: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Prompts aligned at their right end [B, P], and the column of each one's first real token [B]."""
    width = max(len(prompt) for prompt in prompts)
    padded = np.full((len(prompts), width), fill, dtype=np.int64)
    for row, prompt in enumerate(prompts):
        padded[row, width - len(prompt) :] = prompt
    first_real = torch.tensor([width - len(prompt) for prompt in prompts], device=device)
    return torch.from_numpy(padded).to(device), first_real


def _uniforms(seeds: Sequence[int], num_steps: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """One uniform number a sequence and step, [B, R], each row from its own counter-based generator."""
    draws = np.empty((len(seeds), num_steps), dtype=np.float32)
    for row, seed in enumerate(seeds):
        draws[row] = np.random.Generator(np.random.Philox(key=seed)).random(num_steps, dtype=np.float32)
    return draws


def _next_logits(model: LanguageModel, inputs_BT: Tensor, first_real_B: Tensor, cache: KVCache) -> Tensor:
    """Logits [B, V] after the last input token, in fp32; the inputs' keys and values enter the cache."""
    T = inputs_BT.shape[1]
    columns_T = torch.arange(cache.length, cache.length + T, device=inputs_BT.device)
    positions_BT = (columns_T[None] - first_real_B[:, None]).clamp(min=0)
    columns_S = torch.arange(cache.length + T, device=inputs_BT.device)
    real_BS = columns_S[None] >= first_real_B[:, None]
    # A padding query may see itself: a row of the softmax must not be empty, and nothing reads its result.
    mask_BTS = (columns_S[None, None] <= columns_T[None, :, None]) & (
        real_BS[:, None, :] | (columns_S[None, None] == columns_T[None, :, None])
    )
    hidden_BTD = model.decoder(inputs_BT, positions_BT, mask_BTS, cache)
    cache.advance(T)
    return model.head(hidden_BTD[:, -1]).float()


def _choose(logits_BV: Tensor, uniforms_B: Tensor, temperature: float) -> Tensor:
    """The next token [B] by inverting the distribution's cumulative sum at a uniform draw."""
    if temperature == 0:
        return logits_BV.argmax(dim=-1)
    cumulative_BV = torch.softmax(logits_BV / temperature, dim=-1).cumsum(dim=-1)
    # The sum ends near 1, not at it; scaling the draw keeps it inside the table.
    threshold_B1 = (uniforms_B * cumulative_BV[:, -1])[:, None]
    return (cumulative_BV <= threshold_B1).sum(dim=-1).clamp(max=logits_BV.shape[-1] - 1)
