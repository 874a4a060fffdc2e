"""Work and memory of a row, as `heed plan` counts them (docs/plan.md)."""

from benchmarks.gpu.rows import Generation, Iteration, Pretraining
from heed.jobs.memory import (
    Layout,
    PPOModels,
    PPOWork,
    count,
    forward_pass,
    ppo_memory,
    sampling_phase,
    training_memory,
)
from lm.config import ModelConfig
from lm.inspection import cache_bytes_per_token, flops_per_token
from training.config import OptimizerConfig
from training.packing import bucket

BF16_BYTES = 2
LAYOUT = Layout(ranks=1, zero_stage=0, is_bf16=True, is_gpu=True)
OPTIMIZER = OptimizerConfig(learning_rate=1e-5, schedule="constant")


def training_flops(model: ModelConfig, seq_len: int) -> int:
    """Returns FLOPs per token of a training step: three forward passes for a token that attends to half of its row.
    Recomputation and wasted work do not count.
    """
    return 3 * flops_per_token(model, (seq_len + 1) // 2)


def decoded_bytes(sizes: Generation) -> int:
    """Returns the minimum bytes that the decoding steps after the prompts must read: per token, all weights that are
    multiplied, and the keys and values of that token and of those before it.

    The first token of a response comes from the pass over the prompts.
    """
    weights = BF16_BYTES * count(sizes.model, OPTIMIZER).linear
    per_token = sizes.batch * cache_bytes_per_token(sizes.model, BF16_BYTES)
    seen = (sizes.prompt_tokens + place for place in range(1, sizes.response_tokens))
    return sum(weights + per_token * tokens for tokens in seen)


def planned_bytes(sizes: Pretraining | Generation | Iteration) -> int:
    """Returns the peak device memory that the plan expects."""
    if isinstance(sizes, Pretraining):
        return _planned_pretraining(sizes)
    if isinstance(sizes, Generation):
        total, tokens = count(sizes.model, OPTIMIZER).total, (sizes.prompt_tokens, sizes.response_tokens)
        return BF16_BYTES * total + sum(sampling_phase(sizes.model, LAYOUT, total, sizes.batch, *tokens).values())
    return _planned_iteration(sizes)


def _planned_pretraining(sizes: Pretraining) -> int:
    counts = count(sizes.model, OPTIMIZER)
    of = forward_pass(LAYOUT, sizes.micro_batch, sizes.seq_len)
    num_logits = sizes.micro_batch * sizes.seq_len * sizes.model.vocab_size
    return training_memory(counts, LAYOUT, of, num_logits, sizes.num_micro_batches).peak


def _planned_iteration(sizes: Iteration) -> int:
    policy, value = count(sizes.model, OPTIMIZER), count(sizes.critic, OPTIMIZER, num_scores=1)
    tokens = sizes.prompt_tokens + sizes.response_tokens
    of = forward_pass(LAYOUT, sizes.micro_batch, bucket(tokens))
    num_logits = sizes.micro_batch * sizes.response_tokens * sizes.model.vocab_size
    micro_batches = sizes.minibatch // sizes.micro_batch
    work = PPOWork(of, of, num_logits, sizes.rollout, sizes.prompt_tokens, sizes.response_tokens, micro_batches)
    return ppo_memory(PPOModels(policy, value, value), LAYOUT, work).peak
