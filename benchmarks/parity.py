"""Parity with `transformers` on random models of odd shapes: `python -m benchmarks.parity FILE` writes the table.

Every family that `lm.families` knows, in both directions. `tests/lm/test_families.py` holds the same cases to 1e-4.
"""

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from lm.config import RopeScaling
from lm.families import family_of
from lm.generation import generate
from lm.model import LanguageModel, count_parameters
from lm.sampling import Choice
from lm.tokenizer import Tokenizer
from lm.weights import load_language_model, save_model

CONTEXT = 40

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 50.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 3.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 50.0, "factor": 4.0, "original_max_position_embeddings": 12}
LINEAR = {"rope_type": "linear", "rope_theta": 50.0, "factor": 2.5}


@dataclass(frozen=True)
class Case:
    """A shape as `transformers` spells it, and what of ours it must turn into."""

    prefix: str
    theirs: dict[str, Any]
    ours: dict[str, Any] = field(default_factory=dict)
    written_as: str | None = None  # another family holds the same shape and comes first

    def config(self) -> Any:
        if self.prefix == "GPT2":
            shape: dict[str, Any] = {
                "n_embd": 20,
                "n_layer": 3,
                "n_head": 5,
                "n_positions": CONTEXT,
                "layer_norm_epsilon": 1e-3,
            }
        else:
            shape = {
                "hidden_size": 20, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
                "head_dim": 6, "intermediate_size": 28, "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-3,
                "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
            }  # fmt: skip
        fixed = {"vocab_size": 288, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
        return getattr(transformers, f"{self.prefix}Config")(**fixed, **{**shape, **self.theirs})


CASES = {
    "gpt2": Case("GPT2", {}, {"positions": "learned", "norm": "layer", "mlp": "gelu_tanh", "mlp_width": 80}),
    "gpt2, n_inner, untied, relu": Case(
        "GPT2",
        {"n_inner": 28, "tie_word_embeddings": False, "activation_function": "relu"},
        {"mlp": "relu", "mlp_width": 28, "tie_embeddings": False},
    ),
    "llama": Case("Llama", {}, {"head_dim": 6, "num_kv_heads": 2, "attention_bias": "none"}),
    "llama, tied, one key head": Case(
        "Llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}, {"tie_embeddings": True, "num_kv_heads": 1}
    ),
    "llama, biases": Case(
        "Llama", {"attention_bias": True, "mlp_bias": True}, {"attention_bias": "all", "mlp_bias": True}
    ),
    "llama 3": Case(
        "Llama",
        {"rope_parameters": LLAMA3},
        {"rope_scaling": RopeScaling(kind="llama3", factor=4, original_context_tokens=16, high_freq_factor=3)},
    ),
    "llama, linear": Case(
        "Llama", {"rope_parameters": LINEAR}, {"rope_scaling": RopeScaling(kind="linear", factor=2.5)}
    ),
    "arcee": Case("Arcee", {"mlp_bias": True}, {"mlp": "relu2", "mlp_bias": True}),
    "mistral, window": Case("Mistral", {"sliding_window": 7}, {"windows": (7,)}),
    "mistral, no window": Case("Mistral", {"sliding_window": None}, {"windows": (0,)}, written_as="Llama"),
    "qwen2": Case("Qwen2", {}, {"attention_bias": "qkv", "windows": (0,)}),
    "qwen2, yarn, late windows": Case(
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "rope_parameters": YARN},
        {"windows": (0, 5, 5), "rope_scaling": RopeScaling(kind="yarn", factor=4, original_context_tokens=12)},
    ),
    "qwen3": Case("Qwen3", {"attention_bias": True}, {"qk_norm": True, "attention_bias": "all"}),
    "qwen3, alternating": Case(
        "Qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "tie_word_embeddings": True,
        },
        {"windows": (0, 9), "qk_norm": True, "attention_bias": "none"},
    ),
}  # fmt: skip


def shuffled(model: Any) -> Any:
    """Every weight away from its default, so a norm or a bias that is put in another's place shows."""
    generator = torch.Generator().manual_seed(4)
    for name, parameter in model.named_parameters():
        one = "norm" in name or ".ln_" in name
        if parameter.dim() == 1:
            parameter.data.uniform_(0.5, 1.5, generator=generator).sub_(0.0 if one and name.endswith("weight") else 1.0)
        else:
            parameter.data.normal_(0, 0.3, generator=generator)
    return model.eval()


@dataclass(frozen=True)
class Parity:
    """Largest absolute difference of logits where we read their checkpoint, and where they read ours.

    `same_tokens` of `num_tokens` greedy tokens equal those of their `generate`.
    """

    name: str
    written_as: str
    num_parameters: int
    reading: float
    writing: float
    same_tokens: int
    num_tokens: int


@torch.no_grad()
def measure(name: str, tokenizer: Tokenizer, num_rows: int = 3) -> Parity:
    """One case, both ways."""
    case = CASES[name]
    tokens = torch.randint(2, 288, (num_rows, CONTEXT), generator=torch.Generator().manual_seed(0))
    with tempfile.TemporaryDirectory() as folder:
        theirs = shuffled(transformers.AutoModelForCausalLM.from_config(case.config(), attn_implementation="eager"))
        theirs.save_pretrained(Path(folder) / "theirs")
        ours = load_language_model(Path(folder) / "theirs").eval()
        reading = float((ours(tokens) - theirs(tokens).logits).abs().max())
        own = shuffled(LanguageModel(ours.config))
        save_model(Path(folder) / "ours", own, own.state_dict(), tokenizer)
        again = transformers.AutoModelForCausalLM.from_pretrained(
            Path(folder) / "ours", attn_implementation="eager"
        ).eval()
        writing = float((own(tokens) - again(tokens).logits).abs().max())
    prompts = [row[: 5 + 4 * place].tolist() for place, row in enumerate(tokens)]
    same, total = _same_tokens(ours, theirs, prompts)
    family = family_of(ours.config, "language").model_type
    return Parity(name, family, count_parameters([ours]), reading, writing, same, total)


def _same_tokens(ours: LanguageModel, theirs: Any, prompts: Sequence[list[int]]) -> tuple[int, int]:
    """Greedy tokens up to the end of the context that both choose, and all of them; ours in one batch, theirs alone."""
    num_new = CONTEXT - max(map(len, prompts))
    found = generate(
        ours, prompts, max_new_tokens=num_new, end_id=-1, choice=Choice(0), seeds=[0] * len(prompts), max_rows=2
    )
    same = 0
    for prompt, response in zip(prompts, found.responses, strict=True):
        expected: Tensor = theirs.generate(
            torch.tensor([prompt]), max_new_tokens=num_new, min_new_tokens=num_new, do_sample=False
        )
        same += sum(a == b for a, b in zip(response, expected[0, len(prompt) :].tolist(), strict=True))
    return same, num_new * len(prompts)


def table(rows: Sequence[Parity]) -> str:
    """Markdown."""
    lines = [
        "| case | written as | parameters | we read theirs | they read ours | same greedy tokens |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row.name} | {row.written_as} | {row.num_parameters:,} | {row.reading:.1e} | {row.writing:.1e} |"
            f" {row.same_tokens} of {row.num_tokens} |"
        )
    return "\n".join(lines)


INTRODUCTION = """# Parity with transformers

Largest absolute difference between our logits and those of `transformers` {version} in fp32, on randomly initialised
models: all weights, norms and biases far from their defaults, 3 rows of {context} tokens, odd shapes (heads whose size
is not the width over their number, grouped queries, windows shorter than the text, a rotary clock that is stretched).
"Written as" is the family that our own checkpoint of the shape takes. Greedy tokens: our batch of ragged prompts, two
of which run at a time, against `generate` on each alone.

Made by `python -m benchmarks.parity docs/parity.md`; `tests/lm/test_families.py` holds every difference below 1e-4, and
`tests/lm/test_encoder.py` and `tests/lm/test_encoder_decoder.py` do so for BERT's heads and BART.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="where the table goes: docs/parity.md")
    file: Path = parser.parse_args().file
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    text = [f"{number} and some words" for number in range(50)]
    tokenizer = Tokenizer.train(text, 288, "chat")
    introduction = INTRODUCTION.format(version=transformers.__version__, context=CONTEXT)
    rows = table([measure(name, tokenizer) for name in CASES])
    file.write_text(f"{introduction}\n{rows}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
