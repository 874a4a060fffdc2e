"""Decoding in steps of fixed shape, which a GPU records once and replays.

A step of one token is hundreds of short kernels, and launching each takes the CPU longer than most of them run. A CUDA
graph launches all at once; but it records addresses, not values, so everything that changes between steps is in fixed
buffers, the number of tokens in the cache included. A step reads the cache up to a fixed column and masks what is not
written yet. It is recorded again when rows leave or enter, and when that column is reached.

Shape letters: B rows, S columns of the cache, D model width, G key-value heads, H head dim, V vocabulary.
"""

from collections.abc import Callable
from functools import cache as cached
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from lm.block import BlockInputs, run_blocks
from lm.cache import KVCache
from lm.encoder_decoder import EncoderDecoder
from lm.model import LanguageModel
from lm.norms import compute_dtype

# Recorded steps read a multiple of this many columns: a larger value reads more for nothing, a smaller one records more
# often.
COLUMNS = 64

StepKind = Literal["auto", "eager", "fixed", "native"]
Step = Callable[[], Tensor]


class FixedCache(KVCache):
    """The first columns of a cache; `append` writes the column `column_1` and returns all columns, written or not."""

    def __init__(self, cache: KVCache, num_columns: int, column_1: Tensor) -> None:
        super().__init__(cache.keys[:, :, :, :num_columns], cache.values[:, :, :, :num_columns], num_columns)
        self.column_1 = column_1

    def append(self, layer: int, k_BGTH: Tensor, v_BGTH: Tensor) -> tuple[Tensor, Tensor]:
        """Append one token (T = 1); return the layer's keys and values, [B, G, S, H] each."""
        keys_BGSH, values_BGSH = self.keys[layer], self.values[layer]
        keys_BGSH.index_copy_(2, self.column_1, k_BGTH.to(keys_BGSH.dtype))
        values_BGSH.index_copy_(2, self.column_1, v_BGTH.to(values_BGSH.dtype))
        return keys_BGSH, values_BGSH


def fixed_step(model: LanguageModel, tokens_B: Tensor, first_real_B: Tensor, cache: FixedCache) -> Tensor:
    """Logits [B, V] of the next tokens; the tokens' keys and values go to the cache's column `cache.column_1`.

    Neither shapes nor Python values depend on that column, so the step can be captured in a CUDA graph. `first_real_B`
    is each row's first column that is not padding.
    """
    stack, config, column_1 = model.decoder, model.config, cache.column_1
    # A finished sequence may idle past the end of the context; nothing reads its logits.
    positions_BT = (column_1 - first_real_B).clamp(0, config.max_position_embeddings - 1)[:, None]
    x_BTD = stack.embed(tokens_B[:, None], positions_BT)
    rotary = stack.rotary(positions_BT, compute_dtype(x_BTD))
    columns_S = torch.arange(cache.capacity, device=tokens_B.device)
    distance_S = column_1 - columns_S
    seen_BTS = ((distance_S >= 0) & (columns_S >= first_real_B[:, None]))[:, None]
    by_window = {window: seen_BTS & (distance_S < window) if window else seen_BTS for window in config.sliding_window}
    masks_BTS = [by_window[config.window(layer)] for layer in range(config.num_hidden_layers)]
    hidden_BTD = run_blocks(stack.blocks, stack.norm, x_BTD, BlockInputs(masks_BTS, rotary, cache))
    return model.head(hidden_BTD[:, -1])


class FixedSteps:
    """Steps of one batch at a time, recorded when its cache is new or the recorded columns are full."""

    leave_below = 0.5  # each time rows leave, a step is recorded again

    def __init__(self, model: LanguageModel) -> None:
        self.model, self.num_recordings = model, 0
        self.forget()

    def forget(self) -> None:
        """Release the recording, and with it the cache."""
        self._keys = self._tokens_B = self._column_1 = torch.empty(0)
        self._columns = 0
        self._replay: Step | None = None

    def next_logits(self, tokens_B: Tensor, first_real_B: Tensor, cache: KVCache) -> Tensor:
        """Logits [B, V] of what follows the tokens, which the next call may overwrite.

        The tokens' keys and values go to the cache's next column; the caller advances the cache.
        """
        if self._replay is None or cache.keys is not self._keys or cache.length >= self._columns:
            return self._record(tokens_B, first_real_B, cache)
        self._tokens_B.copy_(tokens_B)
        self._column_1.fill_(cache.length)
        return self._replay()

    def _record(self, tokens_B: Tensor, first_real_B: Tensor, cache: KVCache) -> Tensor:
        self._replay = None  # frees the last recording's memory for the next one
        if cache.keys is not self._keys:
            # Masked values count 0 times, but 0 times uninitialised memory may be NaN.
            cache.keys[:, :, :, cache.length :] = 0
            cache.values[:, :, :, cache.length :] = 0
        self._keys = cache.keys
        self._tokens_B, self._column_1 = tokens_B.clone(), tokens_B.new_tensor([cache.length])
        self._columns = min(cache.capacity, (cache.length // COLUMNS + 1) * COLUMNS)
        fixed = FixedCache(cache, self._columns, self._column_1)
        step = partial(fixed_step, self.model, self._tokens_B, first_real_B, fixed)
        logits_BV, self._replay = record(step, tokens_B.device)
        self.num_recordings += 1
        return logits_BV


def fixed_steps(model: LanguageModel | EncoderDecoder, kind: StepKind) -> FixedSteps | None:
    """None = eager steps. "auto" is fixed steps for a decoder on a GPU; they gain nothing on a CPU, and under autocast
    every replay would round the weights again. Raises: ValueError for fixed steps of an encoder-decoder.
    """
    if isinstance(model, EncoderDecoder):
        if kind == "fixed":
            raise ValueError('steps is "fixed", which only a decoder takes; "auto" or "eager" was expected')
        return None
    gains = _is_on_gpu(model) and not torch.is_autocast_enabled(model.head.weight.device.type)
    return FixedSteps(model) if kind == "fixed" or (kind == "auto" and gains) else None


def _is_on_gpu(model: LanguageModel) -> bool:
    return model.head.weight.is_cuda


def record(step: Step, device: torch.device) -> tuple[Tensor, Step]:
    """The step's result, and a function that repeats it on the same buffers: its kernels on a GPU, else all of it.

    Each replay overwrites the last one's result. Repeating the step must be harmless.
    """
    return _capture(step, device) if device.type == "cuda" else (step(), step)


def _capture(step: Step, device: torch.device) -> tuple[Tensor, Step]:
    stream, current = _side_stream(device), torch.cuda.current_stream(device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        # Loads kernels and makes workspaces, which a capture cannot do; this is also the requested step.
        result = step()
    current.wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # Another thread may be copying a checkpoint at the same time.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        buffer = step()

    def replay() -> Tensor:
        graph.replay()
        return buffer

    return result, replay


@cached
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for all captures, since each stream keeps its own workspace."""
    return torch.cuda.Stream(device)
