"""Fixtures that several packages' tests share: a tiny shape, a tiny tokenizer, a tiny model on disk, a label store in
memory."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

# Read when the libraries are first imported: no test reaches for the network or for a GPU's DeepSpeed backend, and
# matrices of 16 columns gain nothing from threads.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

if TYPE_CHECKING:
    from lm.config import ModelConfig
    from lm.tokenizer import Tokenizer
    from preferences.records import Judgment, Task

# Enough repetition for a few merges, and bytes outside ASCII.
TEXTS = (
    "The quick brown fox jumps over the lazy dog. The dog sleeps on.",
    "A bird in the hand is worth two in the bush, and the bush is far.",
    "Über den Wolken muss die Freiheit wohl grenzenlos sein. 山高月小。",
    "The fox and the dog and the bird went over the bush and slept in the hand.",
)


@pytest.fixture(scope="session")
def tokenizer() -> "Tokenizer":
    """A byte-level vocabulary of 280 tokens with the chat template."""
    from lm.tokenizer import Tokenizer

    return Tokenizer.train(TEXTS, 280, "chat")


@pytest.fixture(scope="session")
def wordpiece() -> "Tokenizer":
    """A vocabulary of ten tokens as BERT has it: in lower case, without accents, spaces left out."""
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    from lm.tokenizer import Tokenizer

    pieces = ["[PAD]", "[SEP]", "[UNK]", "the", "uber", "dog", "##s", "sleep", "!", "山"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    bpe = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    bpe.normalizer = normalizers.BertNormalizer()
    bpe.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    bpe.decoder = decoders.WordPiece()
    bpe.add_special_tokens(pieces[:3])
    return Tokenizer(bpe, pad="[PAD]", end="[SEP]", chat_template="")


@pytest.fixture(scope="session")
def tiny_config() -> "ModelConfig":
    """Two layers, grouped queries, swiglu, tied; 288 tokens, so that the vocabulary above fits with room to spare."""
    from lm.config import ModelConfig

    return ModelConfig(
        vocab_size=288, context_tokens=96, width=16, num_layers=2, num_heads=4, num_kv_heads=2, mlp_width=24
    )


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: "Tokenizer", tiny_config: "ModelConfig") -> Path:
    """A language model of random weights with its tokenizer, in the Hugging Face layout. Read only."""
    from lm.model import LanguageModel, initialise
    from lm.weights import save_model

    model = LanguageModel(tiny_config)
    initialise(model, seed=7)
    folder = tmp_path_factory.mktemp("tiny") / "model"
    save_model(folder, model, model.state_dict(), tokenizer)
    return folder


@pytest.fixture(scope="session")
def masking_tokenizer() -> "Tokenizer":
    """A byte-level vocabulary of 284 tokens, a mask token among them, with the plain template."""
    from lm.tokenizer import Tokenizer

    return Tokenizer.train(TEXTS, 284, "plain", has_mask=True)


@pytest.fixture(scope="session")
def encoder_folder(tmp_path_factory: pytest.TempPathFactory, masking_tokenizer: "Tokenizer") -> Path:
    """An encoder of BERT's shape and random weights with its tokenizer, in the Hugging Face layout. Read only."""
    from lm.config import ModelConfig
    from lm.encoder import MaskedLanguageModel
    from lm.model import initialise
    from lm.weights import save_model

    config = ModelConfig(
        kind="encoder", vocab_size=288, context_tokens=64, width=16, num_layers=2, num_heads=2, num_kv_heads=2,
        mlp_width=24, mlp="gelu", mlp_bias=True, attention_bias="all", positions="learned", norm="layer",
        norm_place="post", embedding_norm=True, token_types=2,
    )  # fmt: skip
    model = MaskedLanguageModel(config)
    initialise(model, seed=8)
    folder = tmp_path_factory.mktemp("encoder") / "model"
    save_model(folder, model, model.state_dict(), masking_tokenizer)
    return folder


@dataclass(frozen=True)
class Stored:
    """A task as a store gives it back."""

    task: "Task"
    batch: str
    num_labelers: int


class Book:
    """What imports and exports ask of a label store; judgments by (task, labeler, revision), each told once."""

    def __init__(self) -> None:
        self.stored: dict[str, Stored] = {}
        self.acts: dict[tuple[str, str, int], Judgment] = {}

    def add_tasks(self, new_tasks: "Sequence[Task]", *, batch: str, num_labelers: int | Sequence[int]) -> None:
        quotas = [num_labelers] * len(new_tasks) if isinstance(num_labelers, int) else num_labelers
        for task, quota in zip(new_tasks, quotas, strict=True):
            stored = Stored(task, batch, quota)
            assert self.stored.setdefault(task.task_id, stored) == stored

    def import_judgments(self, batch: str, judgments: "Sequence[Judgment]") -> None:
        for act in judgments:
            assert self.stored[act.task_id].batch == batch
            assert self.acts.setdefault((act.task_id, act.labeler, act.revision), act) == act

    def tasks(self, batch: str | None = None) -> list[Stored]:
        return [one for one in self.stored.values() if batch in (None, one.batch)]

    def judgments(self, batch: str | None = None) -> "list[Judgment]":
        return [act for act in self.acts.values() if batch in (None, self.stored[act.task_id].batch)]


@pytest.fixture(scope="session")
def new_book() -> Callable[[], Book]:
    return Book
