"""Decoding steps: how generation computes one token per sequence.

| steps  | by                                                | on               |
|--------|---------------------------------------------------|------------------|
| eager  | the model's modules; on a CPU in bf16 `prepacked` | CPU, GPU         |
| fixed  | a recorded graph (`FixedSteps`)                   | GPU, a decoder   |
| native | one call (`lm.native.decoder`)                    | CPU, a decoder   |

Shape letters: B sequences, S columns of the cache, D model width, G key-value heads, H head dim, V vocabulary; of a
linear map M rows, D in, F out.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache as cached
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from lm.attention import Mask, OwnKeys
from lm.block import BlockInputs, run_blocks
from lm.cache import CrossAttentionCache, KVCache, TokenWriter, state_bytes
from lm.config import ModelConfig
from lm.delta import chunk_bytes
from lm.encoder import EncoderDecoder
from lm.experts import route_dtype
from lm.layers import Fp32Linear, Head, compute_dtype
from lm.model import LanguageModel
from lm.native.decoder import NativeSteps, what_native_steps_miss
from lm.positions import query_scale
from lm.tensor_parallel import LanguageModelPart

ROWS, COLUMNS = 8, 64  # recorded steps have multiples of these, up to the size of the cache
# Tokens of one pass over prompts on a GPU: enough to keep it busy, with little memory compared with the weights.
PROMPT_TOKENS = 8192

StepKind = Literal["auto", "eager", "fixed", "native"]
Step = Callable[[], None]


class Steps(Protocol):
    """Decoding steps for one batch at a time. Finished rows leave once at most the share `leave_below` still runs."""

    @property
    def leave_below(self) -> float: ...

    def next_logits(self, tokens_B: Tensor, columns_B: Tensor, cache: KVCache, num_columns: int) -> Tensor:
        """Returns the logits [B, V] after the tokens of the first slots; the next call may overwrite them.

        The tokens' keys and values go to `columns_B`. A sequence with `num_columns` tokens or more has ended.
        """

    def forget(self) -> None:
        """Release what belongs to the finished batch."""


def decoding_steps(model: LanguageModel | EncoderDecoder, kind: StepKind) -> Steps | None:
    """Returns steps of this kind; None = eager steps. "auto" is the fastest kind that the model and its device support.

    Raises: ValueError for a kind that they do not support.
    """
    if kind not in ("auto", "native"):
        return fixed_steps(model, kind)
    missing = what_native_steps_miss(model)
    if isinstance(model, LanguageModel) and not missing:
        return NativeSteps(model)
    if kind == "native":
        raise ValueError(f'steps is "native", which needs {missing}; "auto" or "eager" was expected')
    return fixed_steps(model, kind)


def cache_for(model: LanguageModel | EncoderDecoder, steps: Steps | None, max_rows: int, num_columns: int) -> KVCache:
    """Returns a cache for `max_rows` sequences of `num_columns` tokens, or as many as fit in the device's memory."""
    if isinstance(steps, FixedSteps):
        return steps.cache_for(max_rows, num_columns)
    rows = rows_that_fit(model, max_rows, num_columns)
    return KVCache.empty(model.config, rows, num_columns, like=model.head.weight)


def decode(
    model: LanguageModel | EncoderDecoder,
    tokens_B: Tensor,
    columns_B: Tensor,
    cache: KVCache,
    num_columns: int,
    cross_cache: CrossAttentionCache | None = None,
) -> Tensor:
    """Returns the logits [B, V] after the tokens of the first slots, whose keys and values go to `columns_B`.

    Neither shapes nor Python values depend on `columns_B`, so the step can be captured in a CUDA graph. A sequence with
    `num_columns` tokens or more has ended: it may idle, and nothing reads its logits.
    """
    stack, config = model.decoder, model.config
    columns_B = columns_B.clamp(max=num_columns - 1)
    positions_BT = columns_B.clamp(max=config.max_position_embeddings - 1)[:, None]
    x_BTD = stack.embed(tokens_B[:, None], positions_BT)
    rotary = stack.rotary(positions_BT, compute_dtype(x_BTD))
    by_window: dict[int, Mask] = {w: OwnKeys(columns_B, num_columns, w, x_BTD) for w in config.sliding_window}
    if stack.relative_bias is not None:
        by_window[0] = stack.relative_bias.of_step(columns_B, num_columns).to(compute_dtype(x_BTD))
    masks = [by_window[config.window(layer)] for layer in range(config.num_hidden_layers)]
    again_BTD = stack.layer_positions(positions_BT, x_BTD.dtype)
    writer = TokenWriter(cache, columns_B, num_columns)
    scale = query_scale(positions_BT, config.rope_scaling, compute_dtype(x_BTD))
    inputs = BlockInputs(
        masks, rotary, writer, cross_cache, positions_BTD=again_BTD, query_scale=scale, routes=writer,
        positions_BT=positions_BT,
    )  # fmt: skip
    hidden_BTD = run_blocks(stack.blocks, stack.norm, x_BTD, inputs)
    return model.head(hidden_BTD[:, -1])


@contextmanager
def prepacked(model: nn.Module, num_rows: int) -> Iterator[None]:
    """Inside this context the model's linear maps use copies of their weights, prepacked for a CPU's bf16 instructions
    (oneDNN), where that helps.

    The weights must not change inside it. The copies take as much memory as the weights.
    """
    linears = [m for m in model.modules() if isinstance(m, nn.Linear) and is_product(m) and gains(m.weight)]
    for linear in linears:
        linear.forward = PrepackedLinear(linear, num_rows)  # type: ignore[assignment]
    try:
        yield
    finally:
        for linear in linears:
            del linear.forward


def is_product(module: nn.Linear) -> bool:
    """Whether the module computes x Wᵀ + b in its operands' dtype, and nothing else."""
    return module.is_product if isinstance(module, Head) else not isinstance(module, Fp32Linear)


class PrepackedLinear:
    """x Wᵀ + b, the same numbers as `nn.Linear`, from a copy of W [F, D] packed for products with M rows.

    PyTorch packs W in every call, which takes as long as a product with few rows.
    """

    def __init__(self, linear: nn.Linear, num_rows: int) -> None:
        self.bias = linear.bias
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), num_rows)

    def __call__(self, x_MD: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x_MD, self.weight, self.bias, "none", [], "")
        return product


def gains(weight: Tensor) -> bool:
    """Whether prepacking helps: bf16 on a CPU that multiplies it natively."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


class FixedSteps:
    """Steps over one cache. Each size is recorded the first time that it is needed.

    A step of one token is hundreds of short kernels, and launching each takes the CPU longer than most of them run. A
    CUDA graph launches all at once; but it records addresses, not values, so everything that changes between steps,
    including the sequences' lengths, is in fixed buffers. A step reads the cache up to a fixed column and masks what a
    sequence has not written yet. Rows and columns are rounded up to a few sizes; a step is recorded once for each pair
    of sizes.

    Keep an instance between calls of `generate` to keep its cache and recordings; the weights may change in place.
    """

    leave_below = 0.9  # leaving early lets others in, but moves rows and reads few prompts at a time

    def __init__(self, model: LanguageModel) -> None:
        self.model, self.num_recordings = model, 0
        self.forget()

    def forget(self) -> None:
        """Release the recordings and the cache."""
        self._replays: dict[tuple[int, int], Step] = {}
        self._cache: KVCache | None = None
        self._tokens_B = self._columns_B = self._logits_BV = torch.empty(0)
        self._pool: Any = None
        self._max_rows = 0

    @property
    def num_bytes(self) -> int:
        """The bytes of the cache, which is most of what is kept."""
        return 0 if self._cache is None else self._cache.nbytes

    def cache_for(self, max_rows: int, num_columns: int) -> KVCache:
        """Returns the cache of these steps, for at most `max_rows` sequences; a new one if the last is too small."""
        if self._cache is None or self._max_rows < max_rows or self._cache.num_columns < num_columns:
            self.forget()
            columns = -(-num_columns // 8) * 8  # the attention kernels' masks are aligned to 16 bytes
            rows = rows_that_fit(self.model, max_rows, columns)
            self._take(KVCache.empty(self.model.config, rows, columns, like=self.model.head.weight))
            self._max_rows = max_rows
        assert self._cache is not None
        return self._cache

    def _take(self, cache: KVCache) -> None:
        if cache is not self._cache:
            self.forget()
            self._cache, weight = cache, self.model.head.weight
            self._tokens_B = torch.zeros(cache.num_slots, dtype=torch.int64, device=weight.device)
            self._columns_B = torch.zeros_like(self._tokens_B)
            self._logits_BV = weight.new_empty(cache.num_slots, self.model.config.vocab_size)

    def next_logits(self, tokens_B: Tensor, columns_B: Tensor, cache: KVCache, num_columns: int) -> Tensor:
        """Returns the logits [B, V] after the tokens; the next call may overwrite them."""
        self._take(cache)
        B = len(tokens_B)
        self._tokens_B[:B].copy_(tokens_B)
        self._columns_B[:B].copy_(columns_B)
        size = rounded_up(B, ROWS, cache.num_slots), rounded_up(num_columns, COLUMNS, cache.num_columns)
        if size in self._replays:
            self._replays[size]()
        else:
            self._record(cache, size)
        return self._logits_BV[:B]

    def _record(self, cache: KVCache, size: tuple[int, int]) -> None:
        B, S = size
        tokens_B, columns_B, logits_BV = self._tokens_B[:B], self._columns_B[:B], self._logits_BV[:B]

        def step() -> None:
            # Rows beyond the running ones write to unused slots. All sizes share one buffer for logits: recordings
            # share the memory of intermediate results, but each would have its own memory for the final one.
            logits_BV.copy_(decode(self.model, tokens_B, columns_B, cache, S))

        self._replays[size], self._pool = record(step, tokens_B.device, self._pool)
        self.num_recordings += 1


def fixed_steps(model: LanguageModel | EncoderDecoder, kind: StepKind) -> FixedSteps | None:
    """Returns fixed steps; None = eager steps. "auto" is fixed steps for a decoder on a GPU.

    Fixed steps gain nothing on a CPU, and under autocast every replay would round the weights again.
    Raises: ValueError for fixed steps of an encoder-decoder.
    """
    if isinstance(model, EncoderDecoder):
        if kind == "fixed":
            raise ValueError('steps is "fixed", which only a decoder takes; "auto" or "eager" was expected')
        return None
    helps = _is_on_gpu(model) and not torch.is_autocast_enabled(model.head.weight.device.type)
    helps = helps and not _waits_for_experts(model)
    return FixedSteps(model) if kind == "fixed" or (kind == "auto" and helps) else None


def _waits_for_experts(model: LanguageModel) -> bool:
    """Whether grouped products read on the CPU where each expert's rows end, which no recording can: all but bf16 on
    GPUs of compute capability 9 and 10 (PyTorch's GroupedBlas.cpp).
    """
    weight = model.head.weight
    return model.config.num_experts > 0 and not (
        weight.dtype == torch.bfloat16 and torch.cuda.get_device_capability(weight.device)[0] in (9, 10)
    )


def _is_on_gpu(model: LanguageModel) -> bool:
    return model.head.weight.is_cuda


def rounded_up(count: int, multiple: int, limit: int) -> int:
    """Round up to a multiple of `multiple`, or of the power of two from 1/8 to 1/4 of `count` if that is larger.

    This gives few sizes, and none is more than a quarter (or one `multiple`) too large.
    """
    step = max(multiple, 1 << max(0, count.bit_length() - 3))
    return min(-(-count // step) * step, limit)


def record(step: Step, device: torch.device, pool: Any) -> tuple[Step, Any]:
    """Take the step; return a function that repeats it on the same buffers, and the recordings' memory pool.

    On a GPU the function replays the step's kernels; otherwise it is the step itself. The next recording shares the
    pool. The step is computed once: states of linear layers move on with each.
    """
    if device.type == "cuda":
        return _capture(step, device, pool or torch.cuda.graph_pool_handle())
    step()
    return step, pool


def _capture(step: Step, device: torch.device, pool: Any) -> tuple[Step, Any]:
    stream, current = _side_stream(device), torch.cuda.current_stream(device)
    stream.wait_stream(current)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        # This is the requested step. It also loads kernels and makes workspaces, which a capture cannot do.
        step()
        # `torch.cuda.graph` would also wait for the device and free all cached memory, at every recording.
        # Another thread may be copying a checkpoint at the same time.
        # What is captured is not computed.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            step()
        finally:
            graph.capture_end()
    current.wait_stream(stream)
    return graph.replay, pool


@cached
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for all captures, since each stream keeps its own workspace."""
    return torch.cuda.Stream(device)


def rows_that_fit(model: LanguageModel | EncoderDecoder, max_rows: int, num_columns: int) -> int:
    """Returns how many of `max_rows` sequences of `num_columns` tokens fit in a GPU's free memory; on a CPU all."""
    weight = model.head.weight
    if not weight.is_cuda:
        return max_rows
    free, _ = torch.cuda.mem_get_info(weight.device)
    free += torch.cuda.memory_reserved(weight.device) - torch.cuda.memory_allocated(weight.device)
    rows = rows_in(free, model.config, weight.itemsize, max_rows, num_columns)
    return model.team.least(rows, weight.device) if isinstance(model, LanguageModelPart) else rows


def rows_in(free: int, config: ModelConfig, itemsize: int, max_rows: int, num_columns: int) -> int:
    """Returns how many sequences fit in `free` bytes, at least 1. A tenth of the memory stays free."""
    heads = config.num_attention_heads + 2 * config.num_key_value_heads
    # Activations of a pass over prompts, and per row the cache, logits and what is drawn from them in fp32.
    experts = 3 * config.num_experts_per_tok * (config.hidden_size + config.moe_intermediate_size)
    experts += 3 * config.shared_expert_intermediate_size
    mlp = max(3 * config.intermediate_size, experts if config.num_experts else 0)
    width = mlp + 6 * config.hidden_size + (3 if config.kv_lora_rank else 2) * heads * config.head_dim
    width = max(width, chunk_bytes(config) // itemsize)
    with_keys = config.num_hidden_layers - config.num_linear_layers
    cache = 2 * with_keys * config.num_key_value_heads * num_columns * config.head_dim
    routes = route_dtype(config.num_experts).itemsize * config.num_hidden_layers * config.num_experts_per_tok
    row = itemsize * (cache + 2 * config.vocab_size) + 16 * config.vocab_size + routes * num_columns
    row += state_bytes(config, itemsize)
    rows = max(1, int(0.9 * free - itemsize * PROMPT_TOKENS * width) // row)
    return min(max_rows, rows // ROWS * ROWS or rows)
