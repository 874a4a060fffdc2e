"""Tests on a GPU: `python -m pytest --confcutdir=tests/gpu tests/gpu`, on a machine that has one.

They need torch 2.11 or newer, NumPy, accelerate, psutil, tokenizers, safetensors, huggingface-hub, jinja2, pytest and
pytest-timeout. Without a GPU they are skipped, and `tests/fake_cuda` runs them on a fake one, so that they work when
there is a real one. `--confcutdir` leaves out tests/conftest.py, which hides GPUs from the other tests.
"""

import pytest
import torch

import benchmarks.gpu  # noqa: F401  (stands in for pydantic where it is not installed)

HOW = "python -m pytest --confcutdir=tests/gpu tests/gpu, on a machine with a GPU"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "tests/gpu" in item.path.as_posix():
            item.add_marker(pytest.mark.skip(reason=f"no GPU: {HOW}"))


@pytest.fixture
def real_gpu() -> None:
    """Skips what the fake device cannot show: its kernels are the CPU's."""
    if torch.cuda.get_device_name().startswith("Fake"):
        pytest.skip(f"a fake GPU: {HOW}")
