"""Decoding steps on a CPU: a whole step is one call (decoder.cpp).

Shape letters: B sequences, D model width, F outputs of a product, C columns of the cache, H head dim, V vocabulary.
"""

import json
from ctypes import CDLL, POINTER, Structure, byref, c_bool, c_double, c_int64, c_void_p, sizeof
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from lm.attention import Attention
from lm.block import Block
from lm.cache import KVCache
from lm.config import ModelConfig
from lm.layers import MLP, Linear
from lm.model import LanguageModel
from lm.native.kernels import library
from lm.native.operators import TYPES
from lm.tensor_parallel import LanguageModelPart

LARGEST_HEAD = 256
ACTIVATIONS = {"swiglu": 0, "relu2": 1, "gelu_tanh": 2, "relu": 3}  # decoder.cpp's `Activation`
LEAVE_BELOW = 0.8  # finished rows leave once at most this share still runs; others move into their slots
KC = 32  # numbers that one step of the kernel's sums reads; widths must be multiples of it


def what_native_steps_miss(model: nn.Module) -> str:
    """Returns what the native step needs but this model lacks; "" if the native step supports the model."""
    if not isinstance(model, LanguageModel):
        return "a decoder"
    if isinstance(model, LanguageModelPart):
        return "a decoder that a single rank computes"
    weight = model.head.weight
    if not weight.is_cpu or torch.is_autocast_enabled("cpu"):
        return "weights on a CPU, without autocast"
    return what_a_decoder_misses(model.config, weight.dtype)


def what_a_decoder_misses(config: ModelConfig, dtype: torch.dtype) -> str:
    """Returns `what_native_steps_miss` for a decoder with weights of this dtype on this CPU."""
    if dtype not in TYPES:
        return "weights in fp32 or bf16"
    sums_over = (config.hidden_size, config.num_attention_heads * config.head_dim, config.intermediate_size)
    if config.head_dim > LARGEST_HEAD or config.head_dim % 2 or any(width % KC for width in sums_over):
        return f"an even head_dim of at most {LARGEST_HEAD}, and widths that are multiples of {KC}"
    if config.norm_place != "pre" or config.mlp not in ACTIVATIONS:
        return f'norm_place "pre" and mlp of {list(ACTIVATIONS)}'
    for field in (
        "kv_lora_rank",
        "layer_types",
        "attn_output_gate",
        "num_experts",
        "attention_sinks",
        "positions_every_layer",
        "qk_norm_over",
        "query_pre_attn_scalar",
        "rope_local_base_freq",
        "partial_rotary_factor",
        "rope_interleave",
        "layers_without_positions",
        "attn_logit_softcapping",
        "residual_multiplier",
        "logits_scaling",
        "final_logit_softcapping",
    ):
        default = ModelConfig.model_fields[field].default
        if getattr(config, field) != default:
            return f"{field} {json.dumps(default)}"
    if config.rope_scaling is not None and config.rope_scaling.llama_4_scaling_beta:
        return "llama_4_scaling_beta 0.0"
    return "" if _functions() is not None else "a compiler"


class _Layer(Structure):
    """decoder.cpp's `Layer`."""

    _fields_ = (
        *((name, c_void_p) for name in ("attention_norm", "attention_norm_bias", "qkv", "qkv_bias")),
        *((name, c_void_p) for name in ("query_norm", "key_norm", "out", "out_bias", "mlp_norm", "mlp_norm_bias")),
        *((name, c_void_p) for name in ("up", "up_bias", "down", "down_bias")),
        ("window", c_int64),
    )


class _Decoder(Structure):
    """decoder.cpp's `Decoder`."""

    _fields_ = (
        *((name, c_int64) for name in ("width", "num_heads", "num_kv_heads", "head_dim", "mlp_width", "vocab_size")),
        *((name, c_int64) for name in ("num_layers", "activation", "norm_is_rms", "is_bf16")),
        ("eps", c_double),
        ("layers", POINTER(_Layer)),
        *((name, c_void_p) for name in ("norm", "norm_bias", "head")),
    )


class _Step(Structure):
    """decoder.cpp's `Step`."""

    _fields_ = (
        *((name, c_int64) for name in ("num_rows", "slots", "capacity")),
        *((name, c_void_p) for name in ("columns", "x", "keys", "values", "logits", "cos", "sin", "scratch")),
    )


@cache
def _functions() -> Any:
    """Returns decoder.cpp's functions with their types; None if it is not compiled."""
    loaded = library()
    if loaded is None:
        return None
    check_layouts(loaded)
    _typed(loaded.packed_bytes, c_int64, c_int64, c_int64, c_bool)
    _typed(loaded.pack_weight, None, c_void_p, c_int64, c_int64, c_bool, c_void_p)
    _typed(loaded.scratch_bytes, c_int64, POINTER(_Decoder), c_int64)
    _typed(loaded.decode, None, POINTER(_Decoder), POINTER(_Step))
    return loaded


def check_layouts(loaded: CDLL) -> None:
    """Compare sizes and offsets of the structs here with those that the C++ compiler reports.

    Raises: RuntimeError naming the struct and both layouts if they differ.
    """
    for structure, name in ((_Layer, "layer"), (_Decoder, "decoder"), (_Step, "step")):
        ours = [sizeof(structure), *(getattr(structure, field[0]).offset for field in structure._fields_)]
        theirs = list((c_int64 * len(ours)).in_dll(loaded, f"{name}_layout"))
        if ours != theirs:
            raise RuntimeError(f"{structure.__name__} has size and offsets {ours}; decoder.cpp has {theirs}")


def _typed(function: Any, result: Any, *arguments: Any) -> None:
    function.restype, function.argtypes = result, arguments


class NativeSteps:
    """Steps of a decoder, from a copy of its weights packed for the CPU's products.

    The weights must not change afterwards. Numbers in bf16 are rounded where the model's own modules round them.
    """

    leave_below = LEAVE_BELOW

    def __init__(self, model: LanguageModel) -> None:
        self._library, self._transformer, self._config = _functions(), model.decoder, model.config
        self._dtype = model.head.weight.dtype
        self._is_bf16 = self._dtype == torch.bfloat16
        self._kept: list[Tensor] = []  # what the structs point to
        config = model.config
        blocks = [block for block in model.decoder.blocks if isinstance(block, Block)]
        layers = [self._layer(block, config.window(number)) for number, block in enumerate(blocks)]
        norm, norm_bias = self._norm(model.decoder.norm)
        self._decoder = _Decoder(
            config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim,
            config.intermediate_size, config.vocab_size,
            config.num_hidden_layers, ACTIVATIONS[config.mlp], config.norm == "rms", self._is_bf16, config.norm_eps,
            (_Layer * len(layers))(*layers), norm, norm_bias, self._weight(model.head),
        )  # fmt: skip
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._tables: list[Tensor] = []

    def next_logits(self, tokens_B: Tensor, columns_B: Tensor, cache: KVCache, num_columns: int) -> Tensor:
        config, transformer, B = self._config, self._transformer, len(tokens_B)
        assert num_columns <= cache.num_columns, f"the cache has {cache.num_columns} columns, fewer than {num_columns}"
        assert cache.num_slots >= B, f"the cache has {cache.num_slots} slots, fewer than {B}"
        assert all(part.is_contiguous() for part in (cache.keys, cache.values))
        columns_B = columns_B.clamp(max=num_columns - 1)  # a finished sequence may idle past its end
        positions_B1 = columns_B.clamp(max=config.max_position_embeddings - 1)[:, None]
        x_B1D = transformer.embed(tokens_B[:, None], positions_B1).contiguous()
        tables = [table[positions_B1[:, 0]] for table in self._tables_for(cache.num_columns)]
        logits_BV = x_B1D.new_empty(B, config.vocab_size)
        cos, sin = (table.data_ptr() for table in tables) if tables else (None, None)
        step = _Step(
            B, cache.num_slots, cache.num_columns, columns_B.data_ptr(), x_B1D.data_ptr(), cache.keys.data_ptr(),
            cache.values.data_ptr(), logits_BV.data_ptr(), cos, sin, self._scratch_for(B),
        )  # fmt: skip
        self._library.decode(byref(self._decoder), byref(step))
        return logits_BV

    def forget(self) -> None:
        """Does nothing: only scratch memory is kept after a batch, and it fits any batch."""

    def _tables_for(self, capacity: int) -> list[Tensor]:
        """Returns cos and sin [C, H] of every position that fits in the cache; none without rotary positions."""
        if not self._tables or len(self._tables[0]) < capacity:
            tables = self._transformer.rotary(torch.arange(capacity)[None], self._dtype)[0]
            self._tables = [table[0, :, 0] for table in tables or ()]
        return self._tables

    def _scratch_for(self, num_rows: int) -> int:
        needed = self._library.scratch_bytes(byref(self._decoder), num_rows)
        if needed > len(self._scratch):
            self._scratch = torch.zeros(needed, dtype=torch.uint8)
        return self._scratch.data_ptr()

    def _layer(self, block: Block, window: int) -> _Layer:
        attention, mlp = block.attention, block.mlp
        assert isinstance(attention, Attention), "native steps have no linear layers"
        qkv = attention.qkv
        assert isinstance(mlp, MLP), "native steps have no experts"
        assert isinstance(qkv, Linear), "native steps have no latent attention"
        return _Layer(
            *self._norm(block.attention_norm), self._weight(qkv), self._vector(qkv.bias),
            *(self._norm(norm)[0] for norm in (attention.query_norm, attention.key_norm)),
            self._weight(attention.out), self._vector(attention.out.bias),
            *self._norm(block.mlp_norm), self._weight(mlp.up), self._vector(mlp.up.bias),
            self._weight(mlp.down), self._vector(mlp.down.bias), window,
        )  # fmt: skip

    def _norm(self, norm: nn.Module | None) -> tuple[int | None, int | None]:
        return self._vector(getattr(norm, "weight", None)), self._vector(getattr(norm, "bias", None))

    def _vector(self, numbers: Tensor | None) -> int | None:
        return None if numbers is None else self._keep(numbers.detach().float().contiguous())

    def _weight(self, linear: nn.Linear) -> int:
        """Packs the weight [F, D] and returns its address."""
        weight = linear.weight.detach().contiguous()
        packed = torch.empty(self._library.packed_bytes(*weight.shape, self._is_bf16), dtype=torch.uint8)
        self._library.pack_weight(weight.data_ptr(), *weight.shape, self._is_bf16, packed.data_ptr())
        return self._keep(packed)

    def _keep(self, tensor: Tensor) -> int:
        self._kept.append(tensor)
        return tensor.data_ptr()
