"""Tests of engines that need an environment of their own (`make test-engines`); without it they are skipped."""

import os

import pytest

from lm.samplers.vllm_engine import require_vllm
from tests.heed.jobs.conftest import heed
from tests.lm.samplers.conftest import untied

__all__ = ["heed", "untied"]


@pytest.fixture(scope="session")
def vllm_python() -> str:
    try:
        return require_vllm()
    except ValueError as error:
        if os.environ.get("HEED_REQUIRE_ENGINES"):
            raise
        pytest.skip(f"{error}")
