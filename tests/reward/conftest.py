"""Two gloo ranks, as in `tests/training`."""

from tests.training.conftest import start_two_ranks

__all__ = ["start_two_ranks"]
