"""vLLM, where it is installed, samples from a published model that came as a GGUF file."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engines.conftest import vllm_python
from tests.heed.jobs.conftest import HeedCommand

__all__ = ["vllm_python"]

pytestmark = pytest.mark.long


def test_vllm_holds_the_policy_that_it_is_sent(
    vllm_python: str,
    short_smollm2: Path,
    heed: Callable[..., HeedCommand],
) -> None:
    command = heed("verify-sampler", "vllm", str(short_smollm2), "--python", vllm_python)
    assert command.wait() == 0, command.output
