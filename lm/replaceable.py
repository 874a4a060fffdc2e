"""Functions with more than one implementation, so that the model's code states equations and names no hardware."""

from collections.abc import Callable
from functools import update_wrapper
from typing import Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Replaceable(Generic[P, R]):
    """A function in plain PyTorch, and implementations that replace it where they accept the arguments.

    A replacement returns the same numbers up to rounding. `lm.native.install` adds those for CPUs.
    """

    def __init__(self, plain: Callable[P, R]) -> None:
        self.plain = plain
        self._replacements: list[tuple[Callable[P, bool], Callable[P, R]]] = []
        update_wrapper(self, plain)

    def replace_where(self, accepts: Callable[P, bool], implementation: Callable[P, R]) -> None:
        """Use `implementation` for arguments that it `accepts`; of several the one that was added first."""
        self._replacements.append((accepts, implementation))

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        for accepts, implementation in self._replacements:
            if accepts(*args, **kwargs):
                return implementation(*args, **kwargs)
        return self.plain(*args, **kwargs)
