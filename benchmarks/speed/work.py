"""The work of all contenders: one model, its reward model, and data drawn from a seed."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lm.config import ModelConfig
from lm.model import LanguageModel, ScalarModel, init_weights
from lm.tokenizer import Tokenizer
from lm.weights import save_model

SHAPE = ModelConfig(
    vocab_size=8192,
    max_position_embeddings=512,
    hidden_size=512,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=8,
    head_dim=64,
    intermediate_size=1408,
)  # 30M parameters, the head tied to the embedding
FIRST_WORD = 256  # tokens below are bytes and special tokens, which no drawn text contains
NUM_RESPONSES = 4  # per comparison


@dataclass(frozen=True)
class Sizes:
    """Lengths in tokens, and numbers of examples. A step uses some of them."""

    prompt_tokens: int = 32
    response_tokens: int = 64
    seq_len: int = 256
    num_prompts: int = 512
    num_comparisons: int = 256
    num_conversations: int = 2048


def write_work(folder: Path, shape: ModelConfig, sizes: Sizes) -> None:
    """Writes `policy/` and `reward/` (random weights as Hugging Face directories) and data as lists of token ids.

    prompts.json: prompts of equal length. rows.json: full rows. comparisons.json: K sequences, best first, with
    responses of a quarter to all of the maximum length. conversations.json: a sequence and its prompt's length; lengths
    are log-normal, half of them below a quarter of a row, similar to instruction data.
    """
    rng = np.random.default_rng(0)
    tokenizer = _tokenizer(rng, shape.vocab_size)
    for name, model in (("policy", LanguageModel(shape)), ("reward", ScalarModel(shape))):
        init_weights(model, 0)
        save_model(folder / name, model, model.state_dict(), tokenizer)

    def draw(length: int) -> list[int]:
        return rng.integers(FIRST_WORD + 8, tokenizer.vocab_size, length).tolist()

    def responses(prompt: list[int]) -> list[list[int]]:
        lengths = rng.integers(sizes.response_tokens // 4, sizes.response_tokens + 1, NUM_RESPONSES)
        return [[*prompt, *draw(length - 1), tokenizer.end_id] for length in lengths]

    lengths = np.exp(rng.normal(np.log(sizes.seq_len / 4), 0.7, sizes.num_conversations))
    conversations = [draw(length) for length in lengths.astype(int).clip(6, sizes.seq_len)]
    data = {
        "prompts": [draw(sizes.prompt_tokens) for _ in range(sizes.num_prompts)],
        "rows": [draw(sizes.seq_len + 1) for _ in range(64)],
        "comparisons": [responses(draw(sizes.prompt_tokens)) for _ in range(sizes.num_comparisons)],
        "conversations": [(tokens, len(tokens) // 3) for tokens in conversations],
    }
    for name, rows in data.items():
        (folder / f"{name}.json").write_text(json.dumps(rows), encoding="utf-8")


def _tokenizer(rng: np.random.Generator, vocab_size: int) -> Tokenizer:
    """Trains a full vocabulary on random words; the only thing that matters is its size."""
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    words = ("".join(rng.choice(letters, 6)) for _ in range(2 * vocab_size))
    return Tokenizer.train([" ".join(words)] * 2, vocab_size, "chat")
