"""Models on a decoder: next-token head, scalar head; and how weights are drawn and frozen.

Shape letters: B batch, T tokens, V vocabulary, C selected positions.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from lm.config import ModelConfig
from lm.head import Head
from lm.linear import Fp32Linear
from lm.transformer import Transformer
from lm.upload import at_positions

SCORE = "score"  # the label of a model with one number per token


class LanguageModel(nn.Module):
    """A decoder with a next-token head."""

    def __init__(self, config: ModelConfig, dropout: float = 0.0) -> None:
        config.require_kind("decoder")
        super().__init__()
        self.config = config
        self.decoder = Transformer(config, dropout)
        self.head = Head(config.hidden_size, config.vocab_size, bias=False)
        self.tie()

    def tie(self) -> None:
        """Share the embedding's matrix with the head if the config says so."""
        if self.config.tie_word_embeddings:
            self.head.weight = self.decoder.embedding.weight

    def forward(
        self,
        tokens_BT: Tensor,
        segments_BT: Tensor | None = None,
        selected_BT: Tensor | None = None,
        sequence_keys_BT: Tensor | None = None,
    ) -> Tensor:
        """Logits [C, V] of the positions that `selected_BT` marks True, row by row; [B, T, V] where it is None."""
        return self.read(self.decoder.hidden(tokens_BT, segments_BT, sequence_keys_BT=sequence_keys_BT), selected_BT)

    def read(self, hidden_BTD: Tensor, selected_BT: Tensor | None) -> Tensor:
        """`forward` from the decoder's hidden states on."""
        return self.head(hidden_BTD if selected_BT is None else at_positions(hidden_BTD, selected_BT))


class ScalarModel(nn.Module):
    """A decoder with one number per token: a reward model's score (higher is better) or a value function.

    A reward model of several objectives has a number, and a head (a row of `score`), for each of its `labels`.
    """

    def __init__(self, config: ModelConfig, dropout: float = 0.0, labels: Sequence[str] = (SCORE,)) -> None:
        config.require_kind("decoder")
        super().__init__()
        self.config, self.labels = config, tuple(labels)
        self.decoder = Transformer(config, dropout)
        self.score = Fp32Linear(config.hidden_size, len(self.labels), bias=False)
        # Not a parameter: it is set once after training, so that demonstrations score 0 on average.
        self.register_buffer("bias", torch.zeros(len(self.labels) if len(self.labels) > 1 else ()))
        self.bias: Tensor

    def forward(
        self,
        tokens_BT: Tensor,
        segments_BT: Tensor | None = None,
        selected_BT: Tensor | None = None,
        sequence_keys_BT: Tensor | None = None,
    ) -> Tensor:
        """Scores [C] in fp32 of the positions that `selected_BT` marks True, row by row; [B, T] where it is None.

        Several labels are the last dimension of both.
        """
        return self.read(self.decoder.hidden(tokens_BT, segments_BT, sequence_keys_BT=sequence_keys_BT), selected_BT)

    def read(self, hidden_BTD: Tensor, selected_BT: Tensor | None) -> Tensor:
        """`forward` from the decoder's hidden states on."""
        selected = hidden_BTD if selected_BT is None else at_positions(hidden_BTD, selected_BT)
        return self.score(selected).squeeze(-1) + self.bias


def init_weights(model: nn.Module, seed: int) -> None:
    """Draw all weights of a model of this package from `seed`.

    | weight                        | distribution   | why                                                        |
    |-------------------------------|----------------|------------------------------------------------------------|
    | embeddings, heads             | N(0, 1/D)      | first logits have unit variance                            |
    | qkv, up                       | N(0, 1/D)      | outputs keep the input's variance at every width           |
    | out, down (into the residual) | N(0, 1/(2LF))  | as above for fan-in F; L layers add 2L branches (GPT-2);   |
    |                               |                | 3L where they also read an encoder                         |
    | norms                         | 1              |                                                            |
    | biases                        | 0              |                                                            |
    | score                         | N(0, 1/(D+1))  | a fresh score has unit variance                            |

    GPT-2's fixed 0.02 is 1/√D at a width of 2,500. On narrow models it leaves attention nearly uniform, and heads that
    copy from the context took more than three times as many steps to form (docs/log.md).
    """
    model.load_state_dict(dict(initial_weights(model, seed)), strict=False)


def initial_weights(model: nn.Module, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Every parameter's name and initial value, as `init_weights` draws them; only shapes are read."""
    generator = torch.Generator().manual_seed(seed)
    config = model.config
    assert isinstance(config, ModelConfig)
    for name, parameter in model.named_parameters():
        yield name, initial_weight(name, parameter.shape, config, generator)


def initial_weight(name: str, shape: Sequence[int], config: ModelConfig, generator: torch.Generator) -> Tensor:
    """The initial value of the parameter of this name; the table is in `init_weights`."""
    if name.endswith("norm.weight"):
        return torch.ones(*shape)
    if name.endswith(".bias"):
        return torch.zeros(*shape)
    if name.startswith("score."):  # summarize-from-feedback, `query_response_model.py`
        std = 1 / math.sqrt(shape[-1] + 1)
    else:
        in_decoder = (3 if config.kind == "encoder-decoder" else 2) * config.num_hidden_layers
        in_encoder = 2 * (config.num_encoder_layers or config.num_hidden_layers)
        branches = in_encoder if name.startswith("encoder.") else in_decoder
        into_residual = name.endswith(("out.weight", "down.weight"))
        std = 1 / math.sqrt(shape[-1] * (branches if into_residual else 1))
    return torch.empty(*shape).normal_(std=std, generator=generator)


def freeze_all_but_last(model: nn.Module, num_blocks: int) -> None:
    """Transfer learning: train only the last `num_blocks` blocks, what follows them, and an untied head.

    An encoder-decoder's encoder comes before its decoder. A tied head is the embedding, which comes before all blocks
    and is frozen.
    Raises: ValueError for more blocks than there are.
    """
    by_name = _transformers(model)
    transformers = [by_name[name] for name in TRANSFORMERS if name in by_name]
    blocks = [block for transformer in transformers for block in transformer.blocks]
    if num_blocks > len(blocks):
        raise ValueError(f"{num_blocks} blocks are to be trained; the model has {len(blocks)}")
    frozen: list[nn.Module | None] = [*blocks[: len(blocks) - num_blocks]]
    for transformer in transformers:
        frozen += [transformer.embedding, transformer.positions, transformer.token_types, transformer.embedding_norm]
    if len(transformers) > 1 and num_blocks <= len(transformers[-1].blocks):  # nothing of the encoder moves
        frozen.append(transformers[0].norm)
    for module in frozen:
        if module is not None:
            module.requires_grad_(False)


def checkpoint_activations(model: nn.Module) -> None:
    """Activation checkpointing: backward passes recompute each block from its input, with the same dropout."""
    for transformer in _transformers(model).values():
        transformer.recomputes = True


def compile_blocks(model: nn.Module) -> None:
    """Passes over whole rows run blocks that `torch.compile` has compiled, at their first pass (`lm.compiled`)."""
    for transformer in _transformers(model).values():
        transformer.compiles = True


TRANSFORMERS = ("encoder", "decoder")  # in the order of the forward pass


def _transformers(model: nn.Module) -> dict[str, Transformer]:
    # By the last part of the name: a reward model in training is inside another module.
    return {
        name.rpartition(".")[2]: module for name, module in model.named_modules() if isinstance(module, Transformer)
    }


def count_parameters(models: Sequence[nn.Module]) -> int:
    """Distinct parameters; tied weights count once."""
    return sum(p.numel() for model in models for p in model.parameters())
