"""What a rank holds that samples: the cache of keys and values, a step's logits, and the pass that reads prompts."""

from lm.activations import forward_bytes
from lm.config import ModelConfig
from lm.graphs import PROMPT_TOKENS
from lm.inspection import cache_bytes_per_token
from planning.memory import Layout, forward_pass

GENERATION_ROWS = 128  # lm.generation.generate's max_rows


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
