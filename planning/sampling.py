"""What a rank holds that samples: the cache of keys and values, a step's logits, and the pass that reads prompts."""

from lm.activations import forward_bytes
from lm.config import ModelConfig
from lm.graphs import PROMPT_TOKENS
from lm.inspection import cache_bytes_per_token
from lm.logprobs import LOGITS_AT_ONCE
from lm.padding import MAX_ROWS, MAX_TOKENS
from planning.memory import Layout, forward_pass

GENERATION_ROWS = 128  # lm.generation.generate's max_rows
LOGIT_BYTES = 12  # per measured logit: fp32, divided by the temperature, and the exponentials of their sum


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
    prompt_pass = forward_bytes(config, forward_pass(config, layout, prompts, prompt_tokens))
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
    rows = max(1, min(MAX_ROWS, MAX_TOKENS // seq_len))
    logits = min(rows * response_tokens * config.vocab_size, LOGITS_AT_ONCE["cuda" if layout.is_gpu else "cpu"])
    head = 4 * config.vocab_size * config.hidden_size if layout.is_gpu else 0
    a_pass = forward_bytes(config, forward_pass(config, layout, rows, seq_len))
    return {"a pass, or logits": max(a_pass, LOGIT_BYTES * logits), "head in fp32": head}
