"""A tiny encoder in BERT's layout, and a stage run in this process."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from classify.config import ClassifyConfig
from classify.examples import ARRAYS, HELDOUT_ARRAYS, example_parts
from classify.stage import known_labels, train
from lm.config import ModelConfig
from lm.encoder import MaskedLanguageModel
from lm.model import init_weights
from lm.tokenizer import Tokenizer
from lm.weights import save_model
from tests.rows import jsonl
from training.config import EngineConfig
from training.engine import StageContext
from training.tokens import TokenFolders, write_arrays

SHAPE = ModelConfig(
    kind="encoder", vocab_size=400, max_position_embeddings=48, hidden_size=24, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=2, intermediate_size=48, mlp="gelu", mlp_bias=True,
    attention_bias="all", positions="learned", type_vocab_size=2, embedding_norm=True, norm="layer", norm_place="post",
)  # fmt: skip
WORDS = "Mia Tom likes has a the red blue kite ball cake milk is at park lake happy sad . , ? What Where does very"


def config_for(folder: Path, task: str, rows: Sequence[dict[str, Any]], **changes: Any) -> ClassifyConfig:
    """All rows to learn from, and the same ones held out."""
    path = folder / f"{task}.jsonl"
    path.write_text(jsonl(rows), encoding="utf-8")
    values: dict[str, Any] = {
        "task": task, "data": ({"source": str(path)},), "heldout": ({"source": str(path)},), "seq_len": 40,
        "doc_stride": 8, "max_question_tokens": 16, "num_epochs": 30.0, "dropout": 0.0,
        "batch": {"batch_size": 8, "micro_batch_size": 4},
        "optimizer": {"learning_rate": 4e-3, "schedule": "constant"},
        "save_every_steps": 10, "evaluate_every_steps": 1000,
    }  # fmt: skip
    return ClassifyConfig.model_validate(values | changes)


def write_tokens(folder: Path, config: ClassifyConfig, start: Path, labels: Sequence[str]) -> TokenFolders:
    """Writes what the driver writes for the ranks."""
    tokenizer, found = Tokenizer.load(start), TokenFolders(folder / "train-tokens", folder / "heldout-tokens")
    parts = partial(example_parts, tokenizer, config)
    write_arrays(found.training, ARRAYS, lambda first: parts(config.data, labels, first))
    write_arrays(found.heldout, HELDOUT_ARRAYS, lambda first: parts(config.heldout, labels, first, with_gold=True))
    return found


def train_here(folder: Path, config: ClassifyConfig, start: Path, name: str = "run") -> Path:
    """Trains on one rank; returns the stage's folder."""
    context = StageContext(folder / name, 3, 1, EngineConfig(precision="fp32", trackers=()))
    context.folder.mkdir(exist_ok=True)
    labels = known_labels(config)
    train(context, config, start, write_tokens(folder, config, start, labels), labels)
    return context.folder


@pytest.fixture(scope="session")
def words_tokenizer() -> Tokenizer:
    return Tokenizer.train([WORDS] * 20, 400, "plain", has_mask=True)


@pytest.fixture(scope="session")
def bert_folder(tmp_path_factory: pytest.TempPathFactory, words_tokenizer: Tokenizer) -> Path:
    model, folder = MaskedLanguageModel(SHAPE), tmp_path_factory.mktemp("bert") / "model"
    init_weights(model, 4)
    save_model(folder, model, model.state_dict(), words_tokenizer)
    return folder


Trained = Callable[..., Path]
