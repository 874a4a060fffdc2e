"""`pytest -p tests.fake_cuda.plugin`: all tests of this process run on the fake device."""

import gc
from collections.abc import Iterator

import pytest

from tests.fake_cuda import device

device.preload()  # here, before another plugin imports PyTorch


def pytest_configure(config: pytest.Config) -> None:
    from tests.fake_cuda import runtime

    del config
    runtime.install()


def pytest_collection_finish() -> None:
    import torch._dynamo  # noqa: F401 - compiled blocks and recomputed activations would import it in a test

    _freeze_garbage_collector()


@pytest.fixture(scope="module", autouse=True)
def _freeze_after_each_file() -> Iterator[None]:
    yield
    _freeze_garbage_collector()


def _freeze_garbage_collector() -> None:
    """Engines collect garbage when they close, which would take a quarter of the time."""
    gc.collect()
    gc.freeze()
