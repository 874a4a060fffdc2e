"""What a rank holds that samples: the cache of keys and values, a step's logits, and the pass that reads prompts."""

from lm.activations import forward_bytes
from lm.config import ModelConfig
from lm.graphs import PROMPT_TOKENS, rows_in
from lm.inspection import cache_bytes_per_token
from lm.logprobs import LOGITS_AT_ONCE
from lm.padding import MAX_ROWS, MAX_TOKENS
from planning.memory import MAX_LIVE, Counts, Layout, forward_pass

GENERATION_ROWS = 128  # lm.generation.generate's max_rows
LOGIT_BYTES = 12  # per measured logit: fp32, divided by the temperature, and the exponentials of their sum


def rows_at_once(config: ModelConfig, layout: Layout, free: int, rows: int, seq_len: int) -> int:
    """How many of the rows generation runs at once with so many bytes free: on a GPU fewer, rather than fail."""
    if not layout.is_gpu or free <= 0:
        return rows
    return rows_in(free, config, layout.compute_bytes, rows, seq_len)


def scoring_phase(config: ModelConfig, counts: Counts, layout: Layout, seq_len: int) -> dict[str, int]:
    """Scores by the model in training: a pass over as many rows as `lm.padding` allows; ZeRO-3 gathers the weights, and
    autocast keeps its bf16 copies.
    """
    a_pass = forward_bytes(config, forward_pass(layout, rows_of_a_pass(seq_len), seq_len))
    found = {"a pass": a_pass}
    if layout.zero_stage == 3:
        found["gathered weights"] = layout.weight_bytes * min(MAX_LIVE, counts.total - counts.kept_whole)
    if layout.is_autocast:
        found["weights in bf16"] = 2 * counts.linear
    return found


def rows_of_a_pass(seq_len: int) -> int:
    """Rows of a pass without gradients, as `lm.padding` makes batches of them."""
    return max(1, min(MAX_ROWS, MAX_TOKENS // seq_len))


def sampling_phase(
    config: ModelConfig, layout: Layout, num_parameters: int, rows: int, prompt_tokens: int, response_tokens: int
) -> dict[str, int]:
    """Generation of so many rows at once: the cache, which is allocated once; either the pass that reads prompts, on a
    GPU some thousand tokens at a time and on a CPU all, or logits and fp32 probabilities to draw from; and on a CPU in
    bf16 the weights once more, as its matrix unit reads them.
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
    if layout.is_bf16 and not layout.is_gpu:
        held["weights as the CPU reads them"] = 2 * num_parameters
    return held


def measuring_phase(config: ModelConfig, layout: Layout, seq_len: int, response_tokens: int) -> dict[str, int]:
    """Log-probs and scores of samples by passes without gradients: a pass over as many rows as `lm.padding` allows, the
    logits of some positions at a time, and on a GPU the head's matrix in fp32.
    """
    rows = rows_of_a_pass(seq_len)
    logits = min(rows * response_tokens * config.vocab_size, LOGITS_AT_ONCE["cuda" if layout.is_gpu else "cpu"])
    head = 4 * config.vocab_size * config.hidden_size if layout.is_gpu else 0
    a_pass = forward_bytes(config, forward_pass(layout, rows, seq_len))
    return {"a pass, or logits": max(a_pass, LOGIT_BYTES * logits), "head in fp32": head}
