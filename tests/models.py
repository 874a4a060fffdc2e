"""Models in memory: those of a directory, and the weights of one in training."""

from pathlib import Path

from torch import Tensor

from lm.model import LanguageModel, ScalarModel
from lm.weights import load_model
from training.engine import AnyModule, Engine


def load_language_model(folder: Path) -> LanguageModel:
    return load_model(folder, LanguageModel)


def load_scalar_model(folder: Path) -> ScalarModel:
    return load_model(folder, ScalarModel)


def full_weights(engine: Engine[AnyModule]) -> dict[str, Tensor]:
    """Returns all weights in fp32 on every rank's device, tied ones once; a collective call."""
    on_main: dict[str, Tensor] = engine.gather(dict(engine.weights_for_file()))[0]
    return {name: weight.to(engine.device) for name, weight in on_main.items()}
