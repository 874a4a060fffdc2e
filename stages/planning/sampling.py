"""Memory for sampling: the key-value cache, one step's logits, and the prefill of prompts."""

import torch

from lm.config import ModelConfig
from lm.decoding import PROMPT_TOKENS, rows_in
from lm.inspection import Pass, cache_bytes_per_token, forward_bytes
from lm.logprobs import LOGITS_AT_ONCE
from lm.native.decoder import what_a_decoder_misses
from lm.padding import MAX_ROWS, MAX_TOKENS
from stages.planning.memory import MAX_LIVE, Counts, Layout, casts_of, forward_pass

GENERATION_ROWS = 128  # lm.generation.generate's max_rows
LOGIT_BYTES = 12  # per logit: fp32, divided by the temperature, and exponentiated for the normaliser


def rows_at_once(config: ModelConfig, layout: Layout, free: int, rows: int, seq_len: int) -> int:
    """Returns how many rows generation runs at once in `free` bytes. On a GPU it runs fewer instead of failing."""
    if not layout.is_gpu or free <= 0:
        return rows
    return rows_in(free, config, layout.compute_bytes, rows, seq_len)


def scoring_phase(config: ModelConfig, counts: Counts, layout: Layout, of: Pass) -> dict[str, int]:
    """Returns the bytes for scoring with a model in training, with weights that ZeRO-3 gathers or autocast casts."""
    found = {"a pass": forward_bytes(config, of)}
    if layout.zero_stage == 3:
        found["gathered weights"] = layout.weight_bytes * min(MAX_LIVE, counts.total - counts.kept_whole)
    if layout.is_autocast:
        found["weights in bf16"] = casts_of(counts, layout)
    return found


def rows_of_a_pass(seq_len: int) -> int:
    """Returns the rows of a pass without gradients, batched as in `lm.padding`."""
    return max(1, min(MAX_ROWS, MAX_TOKENS // seq_len))


def sampling_phase(
    config: ModelConfig, layout: Layout, num_parameters: int, rows: int, prompt_tokens: int, response_tokens: int
) -> dict[str, int]:
    """Returns the bytes for generating `rows` responses at once.

    The cache is allocated once. Prefill (on a GPU a few thousand tokens at a time, on a CPU all of them) and drawing
    (logits and fp32 probabilities) do not overlap, so the larger counts. On a CPU the weights are there a second time,
    in the layout of its kernels, unless they are in fp32 and of a shape that these do not take.
    """
    c, prompts = layout.compute_bytes, rows
    if layout.is_gpu:
        prompts = min(rows, -(-PROMPT_TOKENS // prompt_tokens))
    prompt_pass = forward_bytes(config, forward_pass(layout, prompts, prompt_tokens))
    drawing = (2 * c + 12) * rows * config.vocab_size
    held = {
        "key-value cache": cache_bytes_per_token(config, c) * rows * (prompt_tokens + response_tokens),
        "prompts being read, or logits": max(prompt_pass, drawing),
    }
    if not layout.is_gpu and (layout.is_bf16 or not what_a_decoder_misses(config, torch.float32)):
        held["weights as the CPU reads them"] = c * num_parameters
    return held


def measuring_phase(config: ModelConfig, layout: Layout, seq_len: int, response_tokens: int) -> dict[str, int]:
    """Returns the bytes for log-probs and scores of samples without gradients.

    A pass has as many rows as `lm.padding` allows, logits are computed for some positions at a time, and on a GPU the
    head's weights are in fp32.
    """
    rows = rows_of_a_pass(seq_len)
    logits = min(rows * response_tokens * config.vocab_size, LOGITS_AT_ONCE["cuda" if layout.is_gpu else "cpu"])
    head = 4 * config.vocab_size * config.hidden_size if layout.is_gpu else 0
    a_pass = forward_bytes(config, forward_pass(layout, rows, seq_len))
    return {"a pass, or logits": max(a_pass, LOGIT_BYTES * logits), "head in fp32": head}
