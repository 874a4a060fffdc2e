"""How generation takes its steps, one token per sequence: by the model's modules, as a recorded graph on a GPU
(`lm.graphs`), or in one call on a CPU (`lm.native.decoder`).

Shape letters: B sequences, V vocabulary.
"""

from typing import Protocol

from torch import Tensor

from lm.cache import KVCache
from lm.encoder_decoder import EncoderDecoder
from lm.graphs import FixedSteps, StepKind, fixed_steps, rows_that_fit
from lm.model import LanguageModel
from lm.native.decoder import NativeSteps, what_native_steps_miss


class Steps(Protocol):
    """Steps of one batch at a time. Finished rows leave when no more than the share `leave_below` still runs."""

    @property
    def leave_below(self) -> float: ...

    def next_logits(self, tokens_B: Tensor, columns_B: Tensor, cache: KVCache, num_columns: int) -> Tensor:
        """Logits [B, V] of what follows the tokens of the first slots, which the next call may overwrite.

        Their keys and values go to `columns_B`. What has `num_columns` tokens or more has ended.
        """

    def forget(self) -> None:
        """The batch is finished: release what belongs to it."""


def decoding_steps(model: LanguageModel | EncoderDecoder, kind: StepKind) -> Steps | None:
    """None = eager steps. "auto" is the fastest kind that the model and its device allow.

    Raises: ValueError for a kind that they do not allow.
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
    """A cache for at most `max_rows` sequences of so many tokens: fewer if the device's memory does not hold them."""
    if isinstance(steps, FixedSteps):
        return steps.cache_for(max_rows, num_columns)
    rows = rows_that_fit(model, max_rows, num_columns)
    return KVCache.empty(model.config, rows, num_columns, like=model.head.weight)
