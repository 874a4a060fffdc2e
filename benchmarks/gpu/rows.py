"""The rows of the table, with their models and sizes."""

from dataclasses import dataclass
from typing import Literal

from lm.config import ModelConfig

Kind = Literal["pretrain", "generate", "ppo"]


@dataclass(frozen=True)
class Pretraining:
    """A step is `num_micro_batches` micro-batches of `micro_batch` rows. `options` are the engine's."""

    model: ModelConfig
    micro_batch: int
    num_micro_batches: int
    seq_len: int
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Generation:
    """A step is one response to each of `batch` prompts, all of the same length; nothing ends early."""

    model: ModelConfig
    batch: int
    prompt_tokens: int
    response_tokens: int


@dataclass(frozen=True)
class Iteration:
    """A step is a PPO iteration: `rollout` prompts, one epoch. `critic` is also the reward model's shape."""

    model: ModelConfig
    critic: ModelConfig
    rollout: int
    minibatch: int
    micro_batch: int
    prompt_tokens: int
    response_tokens: int


@dataclass(frozen=True)
class Row:
    """One measurement, in a separate process that is killed after `limit_seconds`.

    `aim` is the target share of the ceiling; 0 if there is none.
    """

    name: str
    kind: Kind
    sizes: Pretraining | Generation | Iteration
    warmup_steps: int
    timed_steps: int
    limit_seconds: float
    aim: float


def gpt(
    width: int, num_layers: int, num_heads: int, max_position_embeddings: int, vocab_size: int = 50_257
) -> ModelConfig:
    """Returns a model of GPT-2's and GPT-3's blocks, with every layer dense, and GPT-2's vocabulary."""
    return ModelConfig(
        vocab_size=vocab_size,
        max_position_embeddings=max_position_embeddings,
        hidden_size=width,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        head_dim=width // num_heads,
        intermediate_size=4 * width,
        mlp="gelu_tanh",
        mlp_bias=True,
        attention_bias="all",
        positions="learned",
        norm="layer",
    )


SMALL = gpt(768, 12, 12, 1024)  # GPT-2, 124M
MEDIUM = gpt(1024, 24, 16, 2048)  # GPT-3's 350M
LARGE = gpt(2048, 24, 16, 2048)  # GPT-3's 1.3B


def _small(*options: str) -> Pretraining:
    return Pretraining(SMALL, 32, 8, 1024, options)


# Together they take about eight minutes on an H100, by estimate; the limits allow for a machine that is slow or stuck.
ROWS = (
    Row("pretraining, 124M", "pretrain", _small(), 3, 8, 90, 0.5),
    Row("pretraining, 1.3B", "pretrain", Pretraining(LARGE, 4, 8, 2048), 2, 5, 120, 0.5),
    Row("generation, 124M, 256 sequences", "generate", Generation(SMALL, 256, 128, 256), 1, 3, 75, 0.6),
    Row("generation, 1.3B, 256 sequences", "generate", Generation(LARGE, 256, 128, 256), 1, 3, 120, 0.6),
    Row("PPO, 1.3B policy, 350M critic", "ppo", Iteration(LARGE, MEDIUM, 512, 128, 16, 128, 128), 1, 2, 240, 0),
    Row("pretraining, 124M, deterministic", "pretrain", _small("deterministic"), 3, 8, 90, 0),
    Row("pretraining, 124M, compiled", "pretrain", _small("compile_blocks"), 3, 8, 180, 0),
)

_TINY, _TINY_CRITIC = gpt(32, 2, 2, 48, 512), gpt(16, 2, 2, 48, 512)
# The same kinds at sizes that take seconds on a CPU. For tests only: the results mean nothing.
TINY_ROWS = (
    Row("pretraining, tiny", "pretrain", Pretraining(_TINY, 2, 2, 24), 1, 2, 120, 0.5),
    Row("pretraining, tiny, deterministic", "pretrain", Pretraining(_TINY, 2, 2, 24, ("deterministic",)), 1, 2, 120, 0),
    Row("generation, tiny", "generate", Generation(_TINY, 4, 8, 12), 1, 2, 120, 0.6),
    Row("PPO, tiny", "ppo", Iteration(_TINY, _TINY_CRITIC, 8, 4, 2, 8, 8), 1, 2, 120, 0),
)
