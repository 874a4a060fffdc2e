"""How generation takes its steps, one token per sequence: by the model's modules, as a recorded graph on a GPU
(`lm.graphs`), or in one call on a CPU with a matrix unit (`lm.native.decoder`).

Shape letters: B sequences, V vocabulary.
"""

from typing import Protocol

from torch import Tensor

from lm.cache import KVCache
from lm.encoder_decoder import EncoderDecoder
from lm.graphs import StepKind, fixed_steps
from lm.model import LanguageModel
from lm.native.decoder import NativeSteps, what_native_steps_miss


class Steps(Protocol):
    """Steps of one batch at a time. Finished rows leave when no more than the share `leave_below` still runs."""

    @property
    def leave_below(self) -> float: ...

    def next_logits(self, tokens_B: Tensor, first_real_B: Tensor, cache: KVCache) -> Tensor:
        """Logits [B, V] of what follows the tokens, which the next call may overwrite.

        The tokens' keys and values go to the cache's next column; the caller advances the cache.
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
