"""`pytest -p tests.fake_cuda.plugin`: all tests of this process run on the fake device."""

import pytest

from tests.fake_cuda import device

device.preload()  # here, before another plugin imports PyTorch


def pytest_configure(config: pytest.Config) -> None:
    from tests.fake_cuda import runtime

    del config
    runtime.install()
