"""Tests of engines that need an environment of their own (`make test-engines`); without it they are skipped."""

import pytest

from samplers.environment import require_vllm
from tests.jobs.conftest import heed

__all__ = ["heed"]


@pytest.fixture(scope="session")
def vllm_python() -> str:
    try:
        return require_vllm()
    except ValueError as error:
        pytest.skip(f"{error}")
