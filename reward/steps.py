"""Rewards of steps: where a response's steps end, what their scores add up to, and what each step is paid.

A step is a piece of a response's text up to a separator; blank pieces are no steps. Without a separator, a whole turn
is one step. With a form F and the scores s_1, .., s_K, the response's score is F(s_1, .., s_K), and step k is paid

    r_k = F(s_1, .., s_k) - F(s_1, .., s_k-1),   F() = 0,

so the payments always add up to the response's score, and the policy gradient is that of E[F] (docs/rewards.md).
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Literal

from pydantic import ConfigDict, Field

from lm.tokenizer import Tokenizer
from training.config import Config

SEPARATOR = "\n"  # TRL's default

_FORMS: dict[str, Callable[[Sequence[float]], float]] = {
    "sum": math.fsum,
    "min": min,
    "product": math.prod,
    "last": lambda scores: scores[-1],
}


class StepsConfig(Config):
    """Scores of a response's steps, in place of one score of the whole response."""

    model_config = ConfigDict(title="Reward steps")

    form: Literal["min", "sum", "product", "last"] = Field(
        default="min",
        description="What the scores of a response's steps amount to: `min`, the worst step; `sum`; `product`, for"
        " probabilities; `last`, the last step. A step is paid the change that it makes (docs/rewards.md).",
    )
    separator: str = Field(
        default="",
        description="Text that ends a step; empty = that of the step-wise model, or a line break for functions and"
        " endpoints.",
    )

    def split(self, text: str) -> list[str]:
        """Returns the texts of a response's steps, at least one."""
        return split_text(text, self.separator or SEPARATOR)

    def total(self, scores: Sequence[float]) -> float:
        """Returns what the scores of at least one step amount to; higher is better."""
        return float(_FORMS[self.form](scores))

    def paid(self, scores: Sequence[float]) -> list[float]:
        """Returns what each step is paid: the change that it makes to the total of the steps so far."""
        totals = [0.0, *(self.total(scores[:number]) for number in range(1, len(scores) + 1))]
        return [after - before for before, after in itertools.pairwise(totals)]


def split_text(text: str, separator: str) -> list[str]:
    """Returns the pieces of a text between separators that are not blank; a blank text is one step."""
    return [piece for piece in text.split(separator) if piece.strip()] or [text]


def step_ends(tokenizer: Tokenizer, response: Sequence[int], separator: str) -> list[int]:
    """Returns the place of each step's last token, in order: the token that completes the separator after it, or for
    the last step the response's last token. A token that completes several steps occurs several times. Without a
    separator, the response is one step.
    """
    if not separator:
        return [len(response) - 1]
    ends = list[int]()
    for place, token in enumerate(response):
        spelled = tokenizer.spelled(token)
        if isinstance(spelled, bytes) or separator[-1] in spelled:  # the others complete nothing
            closed = tokenizer.decode(response[: place + 1]).split(separator)[:-1]
            ends += [place] * (sum(bool(piece.strip()) for piece in closed) - len(ends))
    num_steps = len(split_text(tokenizer.decode(response), separator))
    return [*ends[: num_steps - 1], len(response) - 1]
