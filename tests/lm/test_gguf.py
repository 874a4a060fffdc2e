"""GGUF files: what is written is read back, by transformers too, and what cannot be read is named."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Vocabulary
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer

from files.hashes import file_hash
from lm.config import ModelConfig
from lm.gguf_files import GGUFFile, export_gguf
from lm.gguf_vocabulary import _CUTS, tokenizer_files, vocabulary_metadata
from lm.hub import model_directory, model_hash, on_this_machine
from lm.model import LanguageModel
from lm.source import RandomInit, load
from lm.tokenizer import Tokenizer
from lm.weights import save_model
from tests.models import load_language_model

TEXTS = [
    "The quick brown fox, 12345 times!",
    "  two  spaces\n\n\ttab\r\n ",
    "naïve café Ünïcode 漢字 😀👍🏽 it's IT'S",
    "def f(x):\n    return x**2  # <|end|> http://a.b/c?d=e",
]
BASE: dict[str, Any] = {
    "vocab_size": 330, "max_position_embeddings": 64, "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-biases": {"attention_bias": "all", "mlp_bias": True, "tie_word_embeddings": False},
    "llama-wide-heads": {"head_dim": 32},
    "llama-3.1": {"hidden_size": 128, "head_dim": 64, "rope_theta": 500_000.0, "rope_scaling": LLAMA3},
    "llama-yarn": {
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 30.0}
    },
    "llama-linear": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "arcee": {"mlp": "relu2"},
    "qwen2": {"attention_bias": "qkv", "norm_eps": 1e-6},
    "qwen3": {"qk_norm": True, "head_dim": 128},
    "qwen3-moe": {**EXPERTS, "norm_topk_prob": True, "qk_norm": True, "head_dim": 32, "tie_word_embeddings": False},
    "olmoe": {
        **EXPERTS, "moe_intermediate_size": 96, "qk_norm": True, "qk_norm_over": "projection", "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
    "mixtral": {**EXPERTS, "moe_intermediate_size": 96, "norm_topk_prob": True, "tie_word_embeddings": False},
    "gpt2": {  # transformers reads neither its context nor the width of its MLP, and takes GPT-2's
        "max_position_embeddings": 1024, "intermediate_size": 256,
        "num_key_value_heads": 4, "mlp": "gelu_tanh", "mlp_bias": True, "attention_bias": "all",
        "positions": "learned", "norm": "layer",
    },
}  # fmt: skip
# Of mixtures it ignores the width of experts (Qwen3-MoE) or all experts (Mixtral), or refuses the file (OLMoE).
UNREAD_BY_TRANSFORMERS = {
    "arcee", "llama-3.1", "llama-yarn", "llama-linear", "llama-biases", "qwen3-moe", "olmoe", "mixtral"
}  # fmt: skip


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


Make = Callable[..., tuple[Path, LanguageModel]]


@pytest.fixture
def make(tmp_path: Path, tokenizer: Tokenizer) -> Make:
    """A model directory of a shape, with weights that are far from 0, and its model."""

    def made(**changes: Any) -> tuple[Path, LanguageModel]:
        config = ModelConfig(**{**BASE, **changes})
        model = load(RandomInit(lambda: LanguageModel(config), 1)).eval()
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
        save_model(tmp_path / "model", model, dict(model.state_dict()), tokenizer)
        return tmp_path / "model", model

    return made


def tokens_of(config: ModelConfig) -> torch.Tensor:
    return torch.randint(config.vocab_size, (2, 14), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("name", SHAPES)
def test_a_written_file_is_read_back_to_the_bit(make: Make, tmp_path: Path, name: str) -> None:
    folder, model = make(**SHAPES[name])
    path = tmp_path / "model.gguf"
    export_gguf(folder, path, "f32")
    again = load_language_model(model_directory(str(path)))
    assert again.config == model.config
    expected = model.state_dict()
    assert all(torch.equal(tensor, expected[ours]) for ours, tensor in again.state_dict().items())


@pytest.mark.parametrize("name", sorted(SHAPES.keys() - UNREAD_BY_TRANSFORMERS))
def test_transformers_reads_the_same_logits_and_tokens(
    make: Make, tmp_path: Path, tokenizer: Tokenizer, name: str
) -> None:
    folder, model = make(**SHAPES[name])
    export_gguf(folder, tmp_path / "model.gguf", "f32")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32).eval()
    tokens_BT = tokens_of(model.config)
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens_BT).logits, model(tokens_BT), atol=1e-4, rtol=0)
    words = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    assert [words(text, split_special_tokens=True).input_ids for text in TEXTS] == tokenizer.encode_plain(TEXTS)
    messages = [{"role": "user", "content": "What is it?"}]
    rendered = words.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert rendered == tokenizer.render(messages, add_generation_prompt=True)
    assert (words.eos_token_id, words.pad_token_id) == (tokenizer.end_id, tokenizer.pad_id)


def test_experts_are_the_files_own_matrices_and_their_router_is_never_quantised(make: Make, tmp_path: Path) -> None:
    folder, model = make(**SHAPES["qwen3-moe"])
    export_gguf(folder, tmp_path / "model.gguf", "q8_0")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    assert tensors["blk.1.ffn_gate_inp.weight"].tensor_type.name == "F32"
    assert tensors["blk.1.ffn_down_exps.weight"].tensor_type.name == "Q8_0"
    export_gguf(folder, tmp_path / "model.gguf", "f32")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    up, down = (model.state_dict()[f"decoder.blocks.1.mlp.experts.{name}.weight"] for name in ("up", "down"))
    for expert in range(4):
        own = [tensors[f"blk.1.ffn_{name}_exps.weight"].data[expert] for name in ("gate", "up", "down")]
        assert np.array_equal(own[0], up[64 * expert : 64 * expert + 32])
        assert np.array_equal(own[1], up[64 * expert + 32 : 64 * expert + 64])
        assert np.array_equal(own[2], down[64 * expert : 64 * expert + 64])


@pytest.mark.parametrize(("kind", "tolerance"), [("f16", 0.02), ("q8_0", 0.4)])
def test_fewer_bits_change_logits_little(make: Make, tmp_path: Path, kind: Any, tolerance: float) -> None:
    folder, model = make()
    path = tmp_path / "model.gguf"
    export_gguf(folder, path, kind)
    file = gguf.GGUFReader(path)
    types = {tensor.name: tensor.tensor_type.name for tensor in file.tensors}
    assert types["blk.1.ffn_down.weight"] == types["token_embd.weight"] == kind.upper()
    assert types["blk.1.ffn_norm.weight"] == "F32"
    again, tokens_BT = load_language_model(model_directory(str(path))).eval(), tokens_of(model.config)
    with torch.no_grad():
        difference = (again(tokens_BT) - model(tokens_BT)).abs().max()
    assert 0 < difference < tolerance


def test_a_file_in_bf16_is_read(make: Make, tmp_path: Path) -> None:
    folder, model = make()
    export_gguf(folder, tmp_path / "f32.gguf", "f32")
    source = gguf.GGUFReader(tmp_path / "f32.gguf")
    _copy(source, tmp_path / "bf16.gguf", as_type=gguf.GGMLQuantizationType.BF16)
    again = load_language_model(model_directory(str(tmp_path / "bf16.gguf")))
    weight = model.decoder.blocks[0].mlp.down.weight
    assert torch.equal(again.decoder.blocks[0].mlp.down.weight, weight.bfloat16().float())


def test_sliding_windows_shorten_the_context(make: Make, tmp_path: Path) -> None:
    """llama.cpp would attend to all tokens, which is the same up to the window."""
    folder, _ = make(sliding_window=16)
    assert export_gguf(folder, tmp_path / "model.gguf", "f32") == 16
    assert load_language_model(model_directory(str(tmp_path / "model.gguf"))).config.max_position_embeddings == 16


def test_a_file_with_a_window_is_a_mistral(make: Make, tmp_path: Path) -> None:
    folder, _ = make()
    export_gguf(folder, tmp_path / "plain.gguf", "f32")
    changed = {"llama.attention.sliding_window": 7}
    _copy(gguf.GGUFReader(tmp_path / "plain.gguf"), tmp_path / "window.gguf", changed)
    assert load_language_model(model_directory(str(tmp_path / "window.gguf"))).config.sliding_window == (7,)


def test_a_file_is_converted_once_and_hashed_itself(make: Make, tmp_path: Path) -> None:
    folder, _ = make()
    path = tmp_path / "model.gguf"
    export_gguf(folder, path, "f16")
    made = model_directory(str(path))
    assert made.is_relative_to(tmp_path / "cache" / "heed" / "gguf")
    before = (made / "model.safetensors").stat().st_mtime_ns
    path.rename(tmp_path / "other.GGUF")
    assert model_directory(str(tmp_path / "other.GGUF")) == made
    assert (made / "model.safetensors").stat().st_mtime_ns == before
    assert model_hash(str(tmp_path / "other.GGUF")) == file_hash(tmp_path / "other.GGUF")
    assert list(made.parent.glob(".writing-*")) == []


def test_another_machine_has_the_folder_in_its_own_cache(make: Make, tmp_path: Path) -> None:
    folder, _ = make()
    export_gguf(folder, tmp_path / "model.gguf", "f16")
    made = model_directory(str(tmp_path / "model.gguf"))
    assert on_this_machine(Path("/home/of-another/.cache/heed/gguf") / made.name) == made
    assert on_this_machine(made) == made


@pytest.mark.parametrize("cut", sorted({rule: name for name, rule in reversed(_CUTS.items())}.values()))
def test_each_way_to_cut_text_is_recognised_and_restored(cut: str) -> None:
    bpe = Vocabulary(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = _CUTS[cut](), decoders.ByteLevel()
    bpe.normalizer = normalizers.NFC() if cut == "qwen2" else None
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(TEXTS * 3, trainers.BpeTrainer(
        vocab_size=360, initial_alphabet=alphabet, special_tokens=["<s>", "</s>", "<pad>"], show_progress=False,
    ))  # fmt: skip
    bpe.add_tokens(["<think>"])
    ours = Tokenizer(bpe, pad="<pad>", end="</s>", start="<s>", chat_template="chat")
    metadata = vocabulary_metadata(ours, 400)
    assert metadata["tokenizer.ggml.pre"] == cut
    files = tokenizer_files(metadata)
    again = Vocabulary.from_str(files["tokenizer.json"])
    texts = [*TEXTS, "a <think> b</s> c", "e\u0301"]
    assert [found.ids for found in again.encode_batch(texts)] == [found.ids for found in bpe.encode_batch(texts)]
    assert again.get_vocab_size() == bpe.get_vocab_size()
    config = json.loads(files["tokenizer_config.json"])
    assert (config["bos_token"], config["eos_token"], config["pad_token"]) == ("<s>", "</s>", "<pad>")


def test_a_sentencepiece_vocabulary_is_read_and_written() -> None:
    """Its merges follow from scores: a token of a higher score is merged first."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = ["▁", "t", "h", "e", "c", "a", "th", "▁t", "the", "▁the", "at", "cat", "▁cat"]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(words)]
    scores = [0.0] * 259 + [-float(number) for number in range(100, 100 + len(words))]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*pieces, *words],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    files = tokenizer_files(metadata)
    bpe = Vocabulary.from_str(files["tokenizer.json"])
    assert bpe.encode("the cat").tokens == ["<s>", "▁the", "▁cat"]
    assert bpe.encode("é", add_special_tokens=False).tokens == ["▁", "<0xC3>", "<0xA9>"]
    assert bpe.decode(bpe.encode("the cat é").ids) == "the cat é"
    ours = Tokenizer(bpe, end="</s>", start="<s>", chat_template="chat")
    written = vocabulary_metadata(ours, len(pieces) + len(words))
    assert written["tokenizer.ggml.token_type"] == kinds
    assert written["tokenizer.ggml.add_bos_token"] is True
    assert written["tokenizer.ggml.add_space_prefix"] is True
    again = Vocabulary.from_str(tokenizer_files(written)["tokenizer.json"])
    for text in ("the cat", "that cat theat é ▁", "  a"):
        assert again.encode(text).tokens == bpe.encode(text).tokens


def sentencepiece(merges: list[tuple[str, str]] | None = None, **changes: Any) -> Tokenizer:
    """A small vocabulary that llama.cpp reads as Heed does, but for `changes` of its parts."""
    merges = [("a", "b"), ("▁", "ab"), ("e", "l")] if merges is None else merges
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abceHl"]
    numbers = {token: number for number, token in enumerate([*pieces, *(left + right for left, right in merges)])}
    bpe = Vocabulary(models.BPE(numbers, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    bpe.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    bpe.add_special_tokens(["<unk>", "<s>", "</s>"])
    for name, part in changes.items():
        setattr(bpe, name, part)
    return Tokenizer(bpe, end="</s>", start="<s>", chat_template="chat")


def test_the_vocabulary_that_the_next_test_changes_is_written() -> None:
    ours = sentencepiece()
    metadata = vocabulary_metadata(ours, ours.vocab_size)
    again = Vocabulary.from_str(tokenizer_files(metadata)["tokenizer.json"])
    assert again.encode("<s> ab</s>ab").tokens == ours.vocabulary.encode("<s> ab</s>ab").tokens


REPLACE = normalizers.Replace(" ", "▁")


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": None, "pre_tokenizer": pre_tokenizers.Metaspace(prepend_scheme="first", split=False)},
        {"normalizer": None, "pre_tokenizer": pre_tokenizers.Metaspace(prepend_scheme="always", split=False)},
        {"normalizer": normalizers.Sequence([normalizers.NFKC(), normalizers.Prepend("▁"), REPLACE])},
        {"normalizer": normalizers.Sequence([normalizers.NFC(), normalizers.Prepend("▁"), REPLACE])},
        {"normalizer": normalizers.Sequence([normalizers.Lowercase(), normalizers.Prepend("▁"), REPLACE])},
        {"pre_tokenizer": pre_tokenizers.Split("l", "isolated")},
        {"merges": [("b", "c"), ("a", "b"), ("ab", "c")]},  # llama.cpp also merges "a" with "bc"
    ],
    ids=["first", "always", "NFKC", "NFC", "lower case", "split", "merges"],
)
def test_a_sentencepiece_vocabulary_that_llama_cpp_reads_otherwise_is_refused(changes: dict[str, Any]) -> None:
    ours = sentencepiece(**changes)
    with pytest.raises(
        ValueError, match=r"^in ['\"].*, the vocabulary has the tokens \[.*\] where llama\.cpp would have"
    ):
        vocabulary_metadata(ours, ours.vocab_size)


@pytest.mark.parametrize(("cut", "ignores_merges"), [("llama-bpe", False), ("gpt-2", True)])
def test_words_that_merges_do_not_make_are_read_as_llama_cpp_does_or_refused(cut: str, ignores_merges: bool) -> None:
    def words(ignores_merges: bool) -> Tokenizer:
        numbers = {token: number for number, token in enumerate([*"abc", "ab", "bc", "abc", "</s>"])}
        merges = [("a", "b"), ("b", "c")]  # "abc" is a token that they do not make
        bpe = Vocabulary(models.BPE(numbers, merges, ignore_merges=ignores_merges))
        bpe.pre_tokenizer, bpe.decoder = _CUTS[cut](), decoders.ByteLevel()
        bpe.add_special_tokens(["</s>"])
        return Tokenizer(bpe, end="</s>", chat_template="chat")

    assert vocabulary_metadata(words(not ignores_merges), 7)["tokenizer.ggml.pre"] == cut
    with pytest.raises(ValueError, match=r"^in 'abc', the vocabulary has the tokens \["):
        vocabulary_metadata(words(ignores_merges), 7)


def test_several_end_tokens_are_kept() -> None:
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["a", "<end>", "<turn>"],
        "tokenizer.ggml.token_type": [1, 3, 3],
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.eot_token_id": 2,
    }
    files = tokenizer_files(metadata)
    assert json.loads(files["generation_config.json"]) == {"eos_token_id": [1, 2]}
    bpe = Vocabulary.from_str(files["tokenizer.json"])
    ours = Tokenizer(bpe, end="<end>", other_ends=["<turn>"], chat_template="{{ messages[0].content }}")
    written = vocabulary_metadata(ours, 3)
    assert written["tokenizer.ggml.eos_token_id"] == 1
    assert written["tokenizer.ggml.eot_token_id"] == 2
    assert "tokenizer.ggml.padding_token_id" not in written


def test_ends_without_a_key_are_known_by_name(tmp_path: Path) -> None:
    """A published Qwen2.5-Instruct names only the end of a turn; its generation_config.json has both."""
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": ["a", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|end|>", "[PAD5]"],
        "tokenizer.ggml.token_type": [1, 3, 3, 3, 1, 5],  # "<|end|>" is no control token
        "tokenizer.ggml.eos_token_id": 3,
        "tokenizer.ggml.padding_token_id": 1,
    }
    for name, text in tokenizer_files(metadata).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    found = Tokenizer.load(tmp_path)
    assert (found.end_id, found.end_ids) == (3, (3, 1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"general.architecture": "mamba"},
            "general.architecture is 'mamba'; one of llama, arcee, qwen2, qwen3, qwen3moe, ",
        ),
        ({"llama.expert_count": 8}, "llama.expert_used_count is missing; a number was expected"),
        ({"llama.rope.scaling.type": "longrope"}, "llama.rope.scaling.type is 'longrope'"),
        ({"llama.block_count": None}, "llama.block_count is missing; a number was expected"),
        (
            {"llama.block_count": 3},
            "9 tensors do not fit the metadata: .*blk.2.attn_q.weight: expected .*, missing",
        ),
        ({"llama.block_count": 1}, "9 tensors do not fit the metadata: blk.1.*: found, not expected"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count is 8; 16 was expected"),
        ({"tokenizer.ggml.pre": "chameleon"}, "tokenizer.ggml.pre is 'chameleon'; one of gpt-2, "),
        ({"tokenizer.ggml.pre": None}, "tokenizer.ggml.pre is 'missing'; one of gpt-2, "),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model is 'bert'; 'gpt2' or 'llama' was expected"),
        ({"split.count": 2}, "one of several parts; merge them"),
        ({"llama.attention.scale": 0.5}, "llama.attention.scale is 0.5; no such key was expected"),
        ({"tokenizer.ggml.eos_token_id": 999}, "tokenizer.ggml.eos_token_id is 999; the file has 330 tokens"),
        ({"tokenizer.ggml.merges": ["x nothing"]}, "tokenizer.ggml.merges: .*nothing"),
    ],
)
def test_what_is_not_supported_is_named(make: Make, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    folder, _ = make()
    export_gguf(folder, tmp_path / "plain.gguf", "f32")
    path = tmp_path / "changed.gguf"
    _copy(gguf.GGUFReader(tmp_path / "plain.gguf"), path, changes)
    with pytest.raises(ValueError, match=rf"changed\.gguf: {message}"):
        model_directory(str(path))
    assert list((tmp_path / "cache" / "heed" / "gguf").glob("[!.]*[0-9]")) == []


def test_damaged_and_missing_files_are_named(make: Make, tmp_path: Path) -> None:
    folder, _ = make()
    path = tmp_path / "model.gguf"
    export_gguf(folder, path, "f32")
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(ValueError, match=r"model\.gguf: incomplete, damaged or not a GGUF file"):
        model_directory(str(path))
    path.write_text("something else")
    with pytest.raises(ValueError, match=r"model\.gguf: incomplete, damaged or not a GGUF file"):
        model_directory(str(path))
    with pytest.raises(ValueError, match=r"^models/none\.gguf: no such file in /.*, where relative paths start$"):
        model_directory("models/none.gguf")


def test_a_quantisation_that_the_library_lacks_is_named(make: Make, tmp_path: Path) -> None:
    folder, _ = make()
    export_gguf(folder, tmp_path / "plain.gguf", "f32")
    file = GGUFFile(tmp_path / "plain.gguf")
    file._tensors["blk.0.ffn_up.weight"] = file._tensors["blk.0.ffn_up.weight"]._replace(
        tensor_type=gguf.GGMLQuantizationType.Q8_K
    )
    with pytest.raises(ValueError, match=r"blk\.0\.ffn_up\.weight is quantised as Q8_K, which Heed cannot read"):
        list(file.tensors(LanguageModel(file.config)))


def test_frequencies_that_llama_3_does_not_make_are_named(make: Make, tmp_path: Path) -> None:
    folder, _ = make(**SHAPES["llama-3.1"])
    export_gguf(folder, tmp_path / "plain.gguf", "f32")
    file = GGUFFile(tmp_path / "plain.gguf")
    divisors = file._tensors["rope_freqs.weight"]
    changed = np.array(divisors.data)
    changed[-1] *= 3
    for values, message in ((changed, "scales the rotary frequencies by an unknown"), (np.ones_like(changed), "")):
        file = GGUFFile(tmp_path / "plain.gguf")
        file._tensors["rope_freqs.weight"] = divisors._replace(data=values)
        if message:
            with pytest.raises(ValueError, match=message):
                _ = file.config
        else:
            assert file.config.rope_scaling is None


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"sliding_window": (0, 8), "qk_norm": True, "positions": "rotary", "mlp": "relu2"}, "model_type is 'heed'"),
        ({"partial_rotary_factor": 0.5}, "model_type is 'phi3'"),
        ({"qk_norm": True, "attention_bias": "all"}, "the model has biases, which llama.cpp does not add"),
        (
            {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 4,
                    "original_max_position_embeddings": 16,
                    "truncate": False,
                }
            },
            r"model.rope_scaling.truncate is false; llama.cpp computes true",
        ),
        ({"attention_bias": "qkv", "rope_scaling": LLAMA3}, "rope_type is 'llama3', .* in a model of qwen2"),
        ({"qk_norm": True, "rope_scaling": LLAMA3}, "rope_type is 'llama3', .* in a model of qwen3"),
        (
            {**SHAPES["qwen3-moe"], "norm_topk_prob": False},
            "model.norm_topk_prob is False; llama.cpp computes True in a",
        ),
        (
            {**SHAPES["qwen3-moe"], "mlp_only_layers": [1]},
            r"model.mlp_only_layers is \[1\]; llama.cpp computes \[\] in",
        ),
        ({**SHAPES["olmoe"], "tie_word_embeddings": True}, "model.tie_word_embeddings is True"),
        ({**SHAPES["olmoe"], "num_key_value_heads": 2}, "model.num_key_value_heads is 2; llama.cpp computes 4"),
        ({**SHAPES["qwen3-moe"], "scoring_func": "sigmoid"}, "model_type is 'heed'"),
        (
            {
                **EXPERTS,
                "shared_expert_intermediate_size": 32,
                "kv_lora_rank": 8,
                "qk_nope_head_dim": 4,
                "qk_rope_head_dim": 4,
                "v_head_dim": 6,
                "num_key_value_heads": 4,
                "tie_word_embeddings": False,
                "rope_interleave": True,
            },
            "model_type is 'deepseek_v2'",
        ),
        ({"attention_sinks": True}, "model_type is 'heed'"),
        ({"attn_logit_softcapping": 5.0}, "model_type is 'heed'"),
        ({"final_logit_softcapping": 5.0}, "model_type is 'heed'"),
        ({"embedding_multiplier": 2.0, "residual_multiplier": 0.5}, "model_type is 'granite'"),
        ({"logits_scaling": 2.0}, "model_type is 'granite'"),
        ({"layers_without_positions": [1]}, "model_type is 'smollm3'"),
        ({**SHAPES["qwen3-moe"], "shared_expert_intermediate_size": 8}, "model_type is 'heed'"),
        ({"vocab_size": 200}, "the vocabulary has .* tokens, the model 200"),
    ],
)
def test_what_llama_cpp_does_not_compute_is_not_written(
    make: Make, tmp_path: Path, shape: dict[str, Any], message: str
) -> None:
    folder, _ = make(**shape)
    with pytest.raises(ValueError, match=rf"model: {message}"):
        export_gguf(folder, tmp_path / "model.gguf", "f16")
    assert not (tmp_path / "model.gguf").exists()


def test_weights_beyond_f16_are_named(make: Make, tmp_path: Path, tokenizer: Tokenizer) -> None:
    folder, model = make()
    with torch.no_grad():
        model.decoder.blocks[1].mlp.down.weight[0, 0] = 1e5
    save_model(folder, model, dict(model.state_dict()), tokenizer)
    with pytest.raises(ValueError, match=r"blk\.1\.ffn_down\.weight has weights beyond the range of f16; --type f32"):
        export_gguf(folder, tmp_path / "model.gguf", "f16")


def _copy(
    source: gguf.GGUFReader,
    path: Path,
    changes: dict[str, Any] | None = None,
    as_type: gguf.GGMLQuantizationType | None = None,
) -> None:
    """A GGUF file with some metadata changed (None: left out), or its matrices in another type."""
    metadata = {name: field.contents() for name, field in source.fields.items() if not name.startswith("GGUF.")}
    metadata |= changes or {}
    writer = gguf.GGUFWriter(path, metadata.pop("general.architecture"))
    for key, value in metadata.items():
        kind = gguf.GGUFValueType.get_type(value) if value is not None else None
        if kind is not None:
            is_number = kind == gguf.GGUFValueType.INT32
            writer.add_key_value(key, value, gguf.GGUFValueType.UINT32 if is_number else kind)
    for tensor in source.tensors:
        data = np.array(tensor.data)
        if as_type is not None and data.ndim > 1:
            writer.add_tensor(tensor.name, gguf.quantize(data, as_type), raw_dtype=as_type)
        else:
            writer.add_tensor(tensor.name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
