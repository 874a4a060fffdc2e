"""The transformer (embeddings, blocks, final norm), and decoders with a next-token head or a scalar head.

The file also initialises and freezes weights. Models with an encoder are in `lm.encoder`.

Shape letters: B batch, T query tokens, S key tokens, D model width, V vocabulary, C selected positions.
"""

import math
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

import lm.native.install  # noqa: F401 - puts the kernels in place
from lm.attention import (
    FixedSegments,
    Mask,
    PackedMask,
    attention_mask,
    grouped_mask,
    is_on_gpu,
    packed_mask,
    takes_packed_rows,
    whole_rows,
    with_window,
)
from lm.block import Block, BlockInputs, PostNormBlock, run_blocks, run_compiled_blocks
from lm.cache import CrossAttentionCache, PassCache
from lm.config import ModelConfig
from lm.dropout import Dropout, token_keys
from lm.experts import PassRoutes, Routers, Seen
from lm.layers import Fp32Linear, Head, compute_dtype, make_norm
from lm.positions import RelativeBias, Rotary, query_scale, rotary_tables, sinusoids
from lm.sampling import token_logprobs
from lm.sequence_parallel import SequenceGroup, SplitRows, check_sequence_split
from lm.transfer import at_positions, upload

SCORE = "score"  # the label of a model with one number per token
ENCODES, DECODES, HEAD = 0, 1, 2  # parts of a model, each with its own dropout masks


class Transformer(nn.Module):
    """Embeddings, blocks and, in pre-norm models, a final norm: tokens to hidden states.

    A decoder's tokens attend to earlier tokens. With `causal` False the transformer is an encoder, whose tokens attend
    to their whole sequence. With `cross_attention` every block also attends to an encoder. `embedding` shares another
    transformer's table.
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
        self.recomputes = self.compiles = False  # set by `checkpoint_activations` and `compile_blocks`
        self.group: SequenceGroup | None = None  # set by `split_sequences`
        self.routers: Routers | None = None  # set by `record_routes`
        self.embedding = embedding or nn.Embedding(config.vocab_size, config.hidden_size)
        learned = config.positions == "learned"
        self.positions = nn.Embedding(config.max_position_embeddings, config.hidden_size) if learned else None
        self.relative_bias = RelativeBias(config, causal=causal) if config.positions == "relative" else None
        self.token_types = nn.Embedding(config.type_vocab_size, config.hidden_size) if config.type_vocab_size else None
        self.embedding_norm = make_norm(config, config.hidden_size) if config.embedding_norm else nn.Identity()
        self.dropout = Dropout(dropout)
        num_layers = config.num_hidden_layers if causal or not config.num_encoder_layers else config.num_encoder_layers
        block = PostNormBlock if config.norm_place == "post" else Block
        self.blocks = nn.ModuleList(
            block(
                config,
                dropout,
                cross_attention=cross_attention,
                has_experts=config.has_experts(layer),
                is_linear=config.is_linear(layer),
            )
            for layer in range(num_layers)
        )
        # In a post-norm model the last block ends with a norm.
        self.norm = nn.Identity() if config.norm_place == "post" else make_norm(config, config.hidden_size)

    def forward(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor,
        mask: Mask,
        cache: PassCache | None = None,
        cross_cache: CrossAttentionCache | None = None,
        token_types_BT: Tensor | None = None,
        sequence_keys_BT: Tensor | None = None,
        routes: PassRoutes | None = None,
        real_BT: Tensor | None = None,
    ) -> Tensor:
        """Returns hidden states [B, T, D]; with `split_sequences`, those of this rank's slice of the rows.

        `mask` [B, T, T]: True = may attend; None = causal, or everything for an encoder. `routes` are a mixture's:
        of tokens that this rank computes; a cache records them if there are none.

        Training with dropout needs `sequence_keys_BT` (or [B, 1]); see `lm.dropout.Dropout`. Routers learn nothing from
        padding, where `real_BT` is False.
        """
        seen = self._seen(positions_BT, real_BT)
        keys_BT = None
        if sequence_keys_BT is not None and self.dropout.is_active:
            keys_BT = token_keys(sequence_keys_BT, positions_BT, DECODES if self.causal else ENCODES)
        T, packs = tokens_BT.shape[1], self.packs_rows()
        if mask is None and not self.causal:
            everything = torch.ones(1, T, T, dtype=torch.bool, device=tokens_BT.device)
            mask = whole_rows(tokens_BT, causal=False) if packs else everything
        if self.relative_bias is not None:
            assert mask is None or isinstance(mask, Tensor), "relative positions need a mask of whole rows"
            mask = self.relative_bias.of_rows(mask, tokens_BT).to(compute_dtype(self._table()))
        by_window = {window: with_window(mask, window, tokens_BT, packs=packs) for window in self.config.sliding_window}
        masks = [by_window[self.config.window(layer)] for layer in range(len(self.blocks))]
        split = None
        if self.group is not None:
            assert cache is None, "a cache has whole rows"
            split = SplitRows(self.group, T)
            tokens_BT, positions_BT = self.group.slice_of(tokens_BT), self.group.slice_of(positions_BT)
            keys_BT = None if keys_BT is None else self.group.slice_of(keys_BT)
        x_BTD = self.embed(tokens_BT, positions_BT, token_types_BT, keys_BT)
        rotary = self.rotary(positions_BT, compute_dtype(x_BTD))
        again_BTD = self.layer_positions(positions_BT, x_BTD.dtype)
        scale = query_scale(positions_BT, self.config.rope_scaling, compute_dtype(x_BTD))
        inputs = BlockInputs(
            masks, rotary, cache, cross_cache, keys_BT, split, seen, again_BTD, scale, routes or cache, positions_BT
        )
        recompute = self.recomputes and torch.is_grad_enabled()
        if self.compiles and cache is None and cross_cache is None:
            return self.norm(run_compiled_blocks(self.blocks, x_BTD, inputs, recompute=recompute))
        return run_blocks(self.blocks, self.norm, x_BTD, inputs, recompute)

    def _seen(self, positions_BT: Tensor, real_BT: Tensor | None) -> Seen | None:
        """Returns the tokens from which routers learn; None if they do not learn."""
        if self.routers is None or not torch.is_grad_enabled():
            return None
        counted_BT = torch.ones_like(positions_BT, dtype=torch.bool) if real_BT is None else real_BT
        if not self.routers.counts_batch:
            counted_BT = torch.zeros_like(counted_BT)
        if self.group is not None:  # places in the slice: routers have no loss per sequence then
            counted_BT = self.group.slice_of(counted_BT)
            positions_BT = torch.zeros_like(counted_BT, dtype=torch.long)
        index_N = torch.arange(positions_BT.numel(), device=positions_BT.device)
        return Seen(self.routers, index_N - positions_BT.flatten(), counted_BT.flatten())

    def embed(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor,
        token_types_BT: Tensor | None = None,
        keys_BT: Tensor | None = None,
    ) -> Tensor:
        """Returns token embeddings [B, T, D] plus those of positions and token types (default: type 0)."""
        x_BTD = self.embedding(tokens_BT)
        if self.config.scale_embedding:
            x_BTD = x_BTD * math.sqrt(self.config.hidden_size)
        if self.config.embedding_multiplier != 1:
            x_BTD = x_BTD * self.config.embedding_multiplier
        if self.config.adds_positions:
            x_BTD = x_BTD + self._position_vectors(positions_BT, x_BTD.dtype)
        if self.token_types is not None:
            x_BTD = x_BTD + self.token_types(torch.zeros_like(tokens_BT) if token_types_BT is None else token_types_BT)
        return self.dropout(self.embedding_norm(x_BTD), keys_BT, 0)

    def layer_positions(self, positions_BT: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Returns what every block but the first adds to its input (`positions_every_layer`), or None."""
        return self._position_vectors(positions_BT, dtype) if self.config.positions_every_layer else None

    def _position_vectors(self, positions_BT: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns learned or sinusoidal positions [B, T, D]; all layers share them."""
        if self.positions is not None:
            return self.positions(positions_BT)
        return sinusoids(positions_BT, self.config.hidden_size).to(dtype)

    def rotary(self, positions_BT: Tensor, dtype: torch.dtype) -> Sequence[Rotary | None]:
        """Returns each layer's rotary tables, None without rotary positions; layers share them."""
        config, layers = self.config, range(len(self.blocks))
        if config.positions != "rotary":
            return [None for _ in layers]
        bare = config.layers_without_positions
        tables = rotary_tables(positions_BT, config.rotary_dim, config.rope_theta, config.rope_scaling, dtype)
        if not config.rope_local_base_freq:
            return [None if layer in bare else tables for layer in layers]
        local = rotary_tables(positions_BT, config.rotary_dim, config.rope_local_base_freq, None, dtype)
        return [None if layer in bare else local if config.window(layer) else tables for layer in layers]

    def hidden(
        self,
        tokens_BT: Tensor,
        segments_BT: Tensor | FixedSegments | None,
        cross_cache: CrossAttentionCache | None = None,
        token_types_BT: Tensor | None = None,
        sequence_keys_BT: Tensor | None = None,
        routes: PassRoutes | None = None,
    ) -> Tensor:
        """Returns the hidden states of whole rows.

        `segments_BT` numbers the sequences packed in a row from 1; 0 = padding.

        Positions restart at 0 in every segment and no token attends across segments, so a sequence has the same hidden
        states in a packed row as in a row of its own. Segments may stay in CPU memory (`packed_mask`). None means one
        sequence per row. A decoder's rows may then be padded on the right; an encoder's must not be padded.
        `sequence_keys_BT` and `routes` are as for `forward`.
        """
        T = tokens_BT.shape[1]
        if segments_BT is None:
            positions_BT = torch.arange(T, device=tokens_BT.device).expand(tokens_BT.shape)
            return self(tokens_BT, positions_BT, None, None, cross_cache, token_types_BT, sequence_keys_BT, routes)
        mask = self.mask_of(segments_BT, tokens_BT.device)
        segments_BT = segments_BT.segments_BT if isinstance(segments_BT, FixedSegments) else segments_BT
        positions_BT = upload(segment_positions(segments_BT), tokens_BT.device)
        real_BT = None if self.routers is None else upload(segments_BT > 0, tokens_BT.device)
        return self(tokens_BT, positions_BT, mask, None, cross_cache, token_types_BT, sequence_keys_BT, routes, real_BT)

    def states(self, hidden_BTD: Tensor, selected_BT: Tensor | None) -> Tensor:
        """Returns the hidden states at the selected positions [C, D] (`at_positions`), or all of them for None. With
        `split_sequences`, hidden states are those of this rank's slice, and so are the results.
        """
        if selected_BT is None:
            assert self.group is None, "positions of split rows are selected by a mask of the whole rows"
            return hidden_BTD
        return at_positions(hidden_BTD, selected_BT if self.group is None else self.group.slice_of(selected_BT))

    def mask_of(self, segments_BT: Tensor | FixedSegments, device: torch.device) -> Mask:
        """Returns the mask of packed rows on `device`. The segments may be on another device."""
        if isinstance(segments_BT, FixedSegments):
            starts, segments_BT = segments_BT.starts, segments_BT.segments_BT
            if self.packs_rows():
                return PackedMask(starts, segments_BT.shape[1], self.causal)
            return attention_mask(segments_BT, causal=self.causal)
        # Segments on a GPU are not read here: the CPU would wait for them.
        is_plain = segments_BT.is_cpu and one_per_row(segments_BT)
        if is_plain and self.causal:
            return None
        if self.packs_rows():
            return packed_mask(segments_BT, device, causal=self.causal)
        # Compiled blocks get no groups: each number of groups would need another graph.
        in_groups = not is_plain and not self.compiles and self.relative_bias is None
        if in_groups and not is_on_gpu(self._table()):
            return grouped_mask(segments_BT, causal=self.causal)
        return attention_mask(segments_BT.to(device), causal=self.causal)

    def packs_rows(self) -> bool:
        """Whether variable-length attention supports this model on its device and in its precision."""
        is_plain = self.relative_bias is None and not self.config.attn_logit_softcapping
        return is_plain and takes_packed_rows(self._table(), self.config.head_dim)

    def _table(self) -> Tensor:
        """The embedding's matrix. Use only its dtype and device.

        Under ZeRO-3, reading `embedding.weight` in a pass gathers it. Gathering is a collective call, but whether a
        rank gets here depends on its own rows.
        """
        return next(self.embedding.parameters(recurse=False))

    def cross_attention_cache(self, states_BSD: Tensor, real_BS: Tensor) -> CrossAttentionCache:
        """Returns each block's keys and values of an encoder's states; `real_BS` is False at padding."""
        pairs = [block.cross.keys_and_values(states_BSD) for block in self.blocks]  # type: ignore[union-attr, operator]
        return CrossAttentionCache(tuple(k for k, _ in pairs), tuple(v for _, v in pairs), real_BS)


def one_per_row(segments_BT: Tensor) -> bool:
    """Whether each row has one sequence, numbered 1, and padding only on the right."""
    return bool((segments_BT <= 1).all() and (segments_BT[:, 1:] <= segments_BT[:, :-1]).all())


def segment_positions(segments_BT: Tensor) -> Tensor:
    """Returns each token's position in its segment, 0 at padding: (1, 1, 2, 2, 2, 0, 0) gives (0, 1, 0, 1, 2, 0, 0)."""
    T = segments_BT.shape[1]
    index_BT = torch.arange(T, device=segments_BT.device).expand(segments_BT.shape)
    starts_BT = torch.ones_like(segments_BT, dtype=torch.bool)
    starts_BT[:, 1:] = segments_BT[:, 1:] != segments_BT[:, :-1]
    positions_BT = index_BT - torch.where(starts_BT, index_BT, 0).cummax(dim=1).values
    return positions_BT * (segments_BT > 0)  # padding in a row wider than the context has no position


def language_head(config: ModelConfig, num_rows: int) -> Head:
    """Returns a decoder's next-token head, or a part of its rows."""
    scaling, cap = config.logits_scaling, config.final_logit_softcapping
    return Head(config.hidden_size, num_rows, bias=False, scaling=scaling, cap=cap)


class LanguageModel(nn.Module):
    """A decoder with a next-token head."""

    def __init__(self, config: ModelConfig, dropout: float = 0.0) -> None:
        config.require_kind("decoder")
        super().__init__()
        self.config = config
        self.decoder = Transformer(config, dropout)
        self.head = language_head(config, config.vocab_size)
        self.tie()

    def tie(self) -> None:
        """Share the embedding's matrix with the head if the config says so."""
        if self.config.tie_word_embeddings:
            self.head.weight = self.decoder.embedding.weight

    def forward(
        self,
        tokens_BT: Tensor,
        segments_BT: Tensor | FixedSegments | None = None,
        selected_BT: Tensor | None = None,
        sequence_keys_BT: Tensor | None = None,
        targets: Tensor | None = None,
        temperature: float = 1.0,
        routes: PassRoutes | None = None,
    ) -> Tensor:
        """Returns logits [C, V] at the positions where `selected_BT` is True, row by row; [B, T, V] if it is None.

        With `targets` [C] or [B, T], returns their log-probs instead (`lm.sampling.token_logprobs`). With
        `split_sequences`, logits are those of this rank's slice of the rows, and log-probs those of the whole rows.
        `routes` are as for `Transformer.forward`.
        """
        if self.decoder.group is not None and selected_BT is None:
            selected_BT = torch.ones(tokens_BT.shape, dtype=torch.bool, device="cpu")
        hidden_BTD = self.decoder.hidden(tokens_BT, segments_BT, sequence_keys_BT=sequence_keys_BT, routes=routes)
        return self.read(hidden_BTD, selected_BT, targets, temperature)

    def read(
        self,
        hidden_BTD: Tensor,
        selected_BT: Tensor | None,
        targets: Tensor | None = None,
        temperature: float = 1.0,
    ) -> Tensor:
        """Computes `forward` from the decoder's hidden states."""
        states, group = self.decoder.states(hidden_BTD, selected_BT), self.decoder.group
        if targets is None:
            return self.head(states)
        logprobs = partial(token_logprobs, temperature=temperature)
        if group is None or selected_BT is None:
            return self.head(states, logprobs, targets)
        own_C = upload(group.own(selected_BT), targets.device)
        return group.whole(self.head(states, logprobs, targets.flatten()[own_C]), selected_BT).view(targets.shape)


class ScalarModel(nn.Module):
    """A decoder with one number per token: a reward model's score (higher is better) or a value function.

    A reward model with several objectives has one number and one head (a row of `score`) per label.
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
        segments_BT: Tensor | FixedSegments | None = None,
        selected_BT: Tensor | None = None,
        sequence_keys_BT: Tensor | None = None,
    ) -> Tensor:
        """Returns fp32 scores [C] at the positions where `selected_BT` is True, row by row; [B, T] if it is None.

        With several labels, both have one more dimension, the labels.
        """
        hidden_BTD = self.decoder.hidden(tokens_BT, segments_BT, sequence_keys_BT=sequence_keys_BT)
        scores, group = self.read(hidden_BTD, selected_BT), self.decoder.group
        return scores if group is None or selected_BT is None else group.whole(scores, selected_BT)

    def read(self, hidden_BTD: Tensor, selected_BT: Tensor | None) -> Tensor:
        """Computes `forward` from the decoder's hidden states; with `split_sequences`, for this rank's slice."""
        return self.score(self.decoder.states(hidden_BTD, selected_BT)).squeeze(-1) + self.bias


def init_weights(model: nn.Module, seed: int) -> None:
    """Initialise all weights of a model from this package, given a `seed`.

    | weight                        | distribution   | why                                                        |
    |-------------------------------|----------------|------------------------------------------------------------|
    | embeddings, heads             | N(0, 1/D)      | first logits have unit variance                            |
    | qkv, up                       | N(0, 1/D)      | outputs keep the input's variance at every width           |
    | out, down (into the residual) | N(0, 1/(2LF))  | as above for fan-in F; L layers add 2L branches (GPT-2);   |
    |                               |                | 3L where they also read an encoder                         |
    | norms                         | 1              |                                                            |
    | biases, sinks                 | 0              |                                                            |
    | a_log, of linear layers       | ln U(1, 16)    | as in Mamba-2 (arXiv 2405.21060): with dt_bias, states     |
    | dt_bias, of linear layers     | softplus⁻¹(dt) | decay in 1 to 1,000 tokens; ln dt is U(ln .001, ln .1)     |
    | score                         | N(0, 1/(D+1))  | a fresh score has unit variance                            |
    | relative bias                 | N(0, 1/D)      | as in T5, nearly none                                      |

    GPT-2's fixed 0.02 is 1/√D at a width of 2,500. On narrow models it leaves attention nearly uniform, and heads that
    copy from the context took more than three times as many steps to form (docs/negative-results.md).
    """
    model.load_state_dict(dict(initial_weights(model, seed)), strict=False)


def initial_weights(model: nn.Module, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yields each parameter's name and initial value, as `init_weights` draws them. Reads only the shapes."""
    generator = torch.Generator().manual_seed(seed)
    config = model.config
    assert isinstance(config, ModelConfig)
    for name, parameter in model.named_parameters():
        yield name, initial_weight(name, parameter.shape, config, generator)


def initial_weight(name: str, shape: Sequence[int], config: ModelConfig, generator: torch.Generator) -> Tensor:
    """Draws the initial value of the parameter with this name, by the table in `init_weights`."""
    if name.endswith(("norm.weight", "attention.norm")):
        return torch.ones(*shape)
    if name.endswith("attention.a_log"):
        return torch.empty(*shape).uniform_(1, 16, generator=generator).log()
    if name.endswith("attention.dt_bias"):
        dt = torch.empty(*shape).uniform_(math.log(0.001), math.log(0.1), generator=generator).exp()
        return dt.expm1().log()
    if name.endswith((".bias", ".sinks")):
        return torch.zeros(*shape)
    if name.startswith("score."):  # summarize-from-feedback, `query_response_model.py`
        std = 1 / math.sqrt(shape[-1] + 1)
    elif "relative_bias." in name:
        std = 1 / math.sqrt(config.hidden_size)
    else:
        in_decoder = (3 if config.kind == "encoder-decoder" else 2) * config.num_hidden_layers
        in_encoder = 2 * (config.num_encoder_layers or config.num_hidden_layers)
        branches = in_encoder if name.startswith("encoder.") else in_decoder
        into_residual = name.endswith(("out.weight", "down.weight"))
        std = 1 / math.sqrt(shape[-1] * (branches if into_residual else 1))
    return torch.empty(*shape).normal_(std=std, generator=generator)


def freeze_all_but_last(model: nn.Module, num_blocks: int) -> None:
    """Freeze all but the last `num_blocks` blocks, what follows them, and an untied head (transfer learning).

    An encoder-decoder's encoder comes before its decoder. A tied head is frozen, because it is the embedding, which
    comes before all blocks.
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
        frozen.append(transformer.relative_bias)
    if len(transformers) > 1 and num_blocks <= len(transformers[-1].blocks):  # the whole encoder is frozen
        frozen.append(transformers[0].norm)
    for module in frozen:
        if module is not None:
            module.requires_grad_(False)


def checkpoint_activations(model: nn.Module) -> None:
    """Turn on activation checkpointing: backward passes recompute each block from its input, with the same dropout."""
    for transformer in _transformers(model).values():
        transformer.recomputes = True


def check_compiles(config: ModelConfig) -> None:
    """Raises: ValueError for a mixture of experts, attention with sinks, or linear attention."""
    for what, is_there in (
        ("a mixture of experts", config.num_experts),
        ("attention with sinks", config.attention_sinks),
        ("linear attention", config.num_linear_layers),
    ):
        if is_there:
            raise ValueError(f"engine.compile_blocks is true, but {what} cannot be compiled")


def compile_blocks(model: nn.Module) -> None:
    """Compile the blocks with `torch.compile` at the first pass over whole rows (`lm.block`); see `check_compiles`."""
    for transformer in _transformers(model).values():
        check_compiles(transformer.config)
        transformer.compiles = True


def record_routes(model: nn.Module, device: torch.device, balance_coef: float, z_coef: float) -> Routers | None:
    """Let a mixture's routers learn and be counted as `lm.experts.Routers` says; None for a model without experts."""
    mixture = next((found for found in _transformers(model).values() if found.config.num_experts), None)
    if mixture is not None:
        mixture.routers = Routers(mixture.config, device, balance_coef, z_coef)
        return mixture.routers
    return None


def split_sequences(model: nn.Module, group: SequenceGroup) -> None:
    """Compute every pass together with the other ranks of `group`, each for its slice of the rows' tokens.

    Raises: ValueError if the model cannot be split among that many ranks.
    """
    for transformer in _transformers(model).values():
        check_sequence_split(transformer.config, group.size)
        transformer.group = group


TRANSFORMERS = ("encoder", "decoder")  # in the order of the forward pass


def _transformers(model: nn.Module) -> dict[str, Transformer]:
    # By the last part of the name: a reward model in training is inside another module.
    return {
        name.rpartition(".")[2]: module for name, module in model.named_modules() if isinstance(module, Transformer)
    }


def count_parameters(models: Sequence[nn.Module]) -> int:
    """Count distinct parameters; tied weights count once."""
    return sum(p.numel() for model in models for p in model.parameters())
