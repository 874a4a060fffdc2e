"""The transformer: a stack of blocks, and what sits on a decoder: next-token head, scalar head.

Shape letters: B batch, T query tokens, S key tokens, D model width, V vocabulary, C selected positions.
"""

import math
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lm.attention import CrossAttentionCache, KVCache, attention_mask, sliding_window_mask
from lm.block import Block
from lm.config import ModelConfig
from lm.dropout import Dropout, token_keys
from lm.heads import Rotary
from lm.linear import Linear
from lm.norms import add_norm, compute_dtype, make_norm
from lm.positions import rotary_tables, sinusoids

ENCODES, DECODES, HEAD = 0, 1, 2  # parts of a model, whose dropout differs at equal positions
SCORE = "score"  # the label of a model that gives one number


class Transformer(nn.Module):
    """Tokens to hidden states: embeddings, blocks, and a final norm where norms come first.

    A decoder's tokens see those before them; with `causal` False, an encoder's see all of their sequence. With
    `cross_attention` every block also looks at an encoder's states. `embedding` shares another stack's table.
    """

    def __init__(
        self,
        config: ModelConfig,
        dropout: float = 0.0,
        *,
        causal: bool = True,
        cross_attention: bool = False,
        embedding: nn.Embedding | None = None,
    ) -> None:
        super().__init__()
        self.config, self.causal = config, causal
        self.recomputes = False  # set by `checkpoint_activations`
        self.embedding = embedding or nn.Embedding(config.vocab_size, config.hidden_size)
        learned = config.positions == "learned"
        self.positions = nn.Embedding(config.max_position_embeddings, config.hidden_size) if learned else None
        self.token_types = nn.Embedding(config.type_vocab_size, config.hidden_size) if config.type_vocab_size else None
        self.embedding_norm = make_norm(config, config.hidden_size) if config.embedding_norm else nn.Identity()
        self.dropout = Dropout(dropout)
        num_layers = config.num_hidden_layers if causal or not config.num_encoder_layers else config.num_encoder_layers
        self.blocks = nn.ModuleList(Block(config, dropout, cross_attention=cross_attention) for _ in range(num_layers))
        # With norms last the final block's own norm is the last one.
        self.norm = make_norm(config, config.hidden_size) if config.norm_place == "pre" else nn.Identity()

    def forward(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor,
        mask_BTS: Tensor | None,
        cache: KVCache | None = None,
        cross_cache: CrossAttentionCache | None = None,
        token_types_BT: Tensor | None = None,
        sequence_keys_BT: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [B, T, D]. `mask_BTS`: True = may attend; None = causal, or everything for an encoder.

        `sequence_keys_BT` (or [B, 1]) are needed in training with dropout (`lm.dropout`).
        """
        keys_BT = None
        if sequence_keys_BT is not None and self.dropout.is_active:
            keys_BT = token_keys(sequence_keys_BT, positions_BT, DECODES if self.causal else ENCODES)
        x_BTD = self.embed(tokens_BT, positions_BT, token_types_BT, keys_BT)
        branch_BTD: Tensor | None = None
        rotary = self.rotary(positions_BT, compute_dtype(x_BTD))
        T = tokens_BT.shape[1]
        S = T + (cache.length if cache is not None else 0)
        if mask_BTS is None and not self.causal:
            mask_BTS = torch.ones(1, T, S, dtype=torch.bool, device=tokens_BT.device)
        recomputes = self.recomputes and torch.is_grad_enabled()
        masks = {
            window: sliding_window_mask(mask_BTS, window, T, S, tokens_BT.device)
            for window in self.config.sliding_window
        }
        for layer, block in enumerate(self.blocks):
            if recomputes and branch_BTD is not None:
                x_BTD, branch_BTD = x_BTD + branch_BTD, None  # a block's input, all that is kept of it, is one tensor
            run = partial(checkpoint, block, use_reentrant=False) if recomputes else block
            mask = masks[self.config.window(layer)]
            x_BTD, branch_BTD = run(x_BTD, branch_BTD, rotary, mask, cache, layer, cross_cache, keys_BT)
        return add_norm(x_BTD, branch_BTD, self.norm)[1]

    def embed(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor,
        token_types_BT: Tensor | None = None,
        keys_BT: Tensor | None = None,
    ) -> Tensor:
        """Token embeddings [B, T, D], with what positions and token types (0 where not given) add to them."""
        x_BTD = self.embedding(tokens_BT)
        if self.config.scale_embedding:
            x_BTD = x_BTD * math.sqrt(self.config.hidden_size)
        if self.positions is not None:
            x_BTD = x_BTD + self.positions(positions_BT)
        elif self.config.positions == "sinusoidal":
            x_BTD = x_BTD + sinusoids(positions_BT, self.config.hidden_size).to(x_BTD.dtype)
        if self.token_types is not None:
            x_BTD = x_BTD + self.token_types(torch.zeros_like(tokens_BT) if token_types_BT is None else token_types_BT)
        return self.dropout(self.embedding_norm(x_BTD), keys_BT, 0)

    def rotary(self, positions_BT: Tensor, dtype: torch.dtype) -> Rotary | None:
        config = self.config
        if config.positions != "rotary":
            return None
        return rotary_tables(positions_BT, config.head_dim, config.rope_theta, config.rope_scaling, dtype)

    def hidden(
        self,
        tokens_BT: Tensor,
        segments_BT: Tensor | None,
        cross_cache: CrossAttentionCache | None = None,
        token_types_BT: Tensor | None = None,
        sequence_keys_BT: Tensor | None = None,
    ) -> Tensor:
        """Hidden states of whole rows. `segments_BT` numbers the sequences packed in a row from 1; 0 = padding.

        Positions restart at 0 in every segment and no token attends across segments, so a packed row gives each of
        its sequences what it would get alone. None means one sequence a row; padding on the right is harmless to a
        decoder, and none may be there for an encoder. `sequence_keys_BT` as for `forward`.
        """
        T = tokens_BT.shape[1]
        if segments_BT is None:
            positions_BT = torch.arange(T, device=tokens_BT.device).expand(tokens_BT.shape)
            return self(tokens_BT, positions_BT, None, None, cross_cache, token_types_BT, sequence_keys_BT)
        mask_BTS = attention_mask(segments_BT, causal=self.causal)
        positions_BT = segment_positions(segments_BT)
        return self(tokens_BT, positions_BT, mask_BTS, None, cross_cache, token_types_BT, sequence_keys_BT)

    def cross_attention_cache(self, states_BSD: Tensor, real_BS: Tensor) -> CrossAttentionCache:
        """An encoder's states as this decoder's blocks look at them; `real_BS` is False at padding."""
        pairs = [block.cross.cross_attention_cache(states_BSD) for block in self.blocks]  # type: ignore[union-attr, operator]
        return CrossAttentionCache(tuple(k for k, _ in pairs), tuple(v for _, v in pairs), real_BS)


class LanguageModel(nn.Module):
    """A decoder with a next-token head."""

    def __init__(self, config: ModelConfig, dropout: float = 0.0) -> None:
        config.require_kind("decoder")
        super().__init__()
        self.config = config
        self.decoder = Transformer(config, dropout)
        self.head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tie()

    def tie(self) -> None:
        """Make the head's matrix the embedding's, where the config says so."""
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
        hidden_BTD = self.decoder.hidden(tokens_BT, segments_BT, sequence_keys_BT=sequence_keys_BT)
        return self.head(hidden_BTD if selected_BT is None else hidden_BTD[selected_BT])


class ScalarModel(nn.Module):
    """A decoder with one number a token: a reward model's score (higher is better) or a value function.

    A reward model of several objectives has a number for each of its `labels`, and a head (a row of `score`) behind it.
    """

    def __init__(self, config: ModelConfig, dropout: float = 0.0, labels: Sequence[str] = (SCORE,)) -> None:
        config.require_kind("decoder")
        super().__init__()
        self.config, self.labels = config, tuple(labels)
        self.decoder = Transformer(config, dropout)
        self.score = nn.Linear(config.hidden_size, len(self.labels), bias=False)
        # Not a parameter: it is set once, after training, so that demonstrations score 0 on average.
        self.register_buffer("bias", torch.zeros(len(self.labels) if len(self.labels) > 1 else ()))
        self.bias: Tensor

    def forward(
        self,
        tokens_BT: Tensor,
        segments_BT: Tensor | None = None,
        selected_BT: Tensor | None = None,
        sequence_keys_BT: Tensor | None = None,
    ) -> Tensor:
        """Scores [C] of the positions that `selected_BT` marks True, row by row; [B, T] where it is None.

        With several labels they are the last dimension of both.
        """
        hidden_BTD = self.decoder.hidden(tokens_BT, segments_BT, sequence_keys_BT=sequence_keys_BT)
        selected = hidden_BTD if selected_BT is None else hidden_BTD[selected_BT]
        return self.score(selected).squeeze(-1).float() + self.bias


def segment_positions(segments_BT: Tensor) -> Tensor:
    """Position of each token in its segment: (1, 1, 2, 2, 2, 0) gives (0, 1, 0, 1, 2, 0)."""
    T = segments_BT.shape[1]
    index_BT = torch.arange(T, device=segments_BT.device).expand(segments_BT.shape)
    starts_BT = torch.ones_like(segments_BT, dtype=torch.bool)
    starts_BT[:, 1:] = segments_BT[:, 1:] != segments_BT[:, :-1]
    return index_BT - torch.where(starts_BT, index_BT, 0).cummax(dim=1).values


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
    """Every parameter's name and first value, as `init_weights` gives it; only shapes are read."""
    generator = torch.Generator().manual_seed(seed)
    config = model.config
    assert isinstance(config, ModelConfig)
    for name, parameter in model.named_parameters():
        yield name, initial_weight(name, parameter.shape, config, generator)


def initial_weight(name: str, shape: Sequence[int], config: ModelConfig, generator: torch.Generator) -> Tensor:
    """The first value of the parameter of this name; the table is in `init_weights`."""
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
    """Transfer learning: gradients reach the last `num_blocks` blocks, what follows them, and an untied head.

    An encoder-decoder's encoder lies before its decoder. A tied head is the embedding, which lies before all blocks
    and is frozen with it.
    Errors: ValueError for more blocks than there are.
    """
    stacks = [stack for _, stack in sorted(_stacks(model).items(), key=lambda named: STACKS.index(named[0]))]
    blocks = [block for stack in stacks for block in stack.blocks]
    if num_blocks > len(blocks):
        raise ValueError(f"{num_blocks} blocks are to be trained; the model has {len(blocks)}")
    still: list[nn.Module | None] = [*blocks[: len(blocks) - num_blocks]]
    for stack in stacks:
        still += [stack.embedding, stack.positions, stack.token_types, stack.embedding_norm]
    if len(stacks) > 1 and num_blocks <= len(stacks[-1].blocks):  # nothing of the encoder moves
        still.append(stacks[0].norm)
    for module in still:
        if module is not None:
            module.requires_grad_(False)


def checkpoint_activations(model: nn.Module) -> None:
    """Backward passes compute each block again from its input, with the same dropout, and keep nothing else of it."""
    for stack in _stacks(model).values():
        stack.recomputes = True


STACKS = ("encoder", "decoder")  # in the order in which a signal passes them


def _stacks(model: nn.Module) -> dict[str, Transformer]:
    # By the last part of the name: a reward model under training lies inside another module.
    return {name.rpartition(".")[2]: stack for name, stack in model.named_modules() if isinstance(stack, Transformer)}


def count_parameters(models: Sequence[nn.Module]) -> int:
    """Distinct parameters; tied weights count once."""
    return sum(p.numel() for model in models for p in model.parameters())
