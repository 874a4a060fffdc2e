"""A published model out of a GGUF file: its tokens, template, logits and answer; and the file written again."""

import io
import sys
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from heed.cli import main
from lm.gguf_files import export_gguf
from lm.hub import model_directory
from lm.tokenizer import Tokenizer
from tests.models import load_language_model
from tests.real.texts import TEXTS

pytestmark = pytest.mark.long

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
RENDERED = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
)
ANSWERED = [*QUESTION, {"role": "assistant", "content": "Paris."}]


def test_the_chat_template_brings_its_own_system_message(smollm2: Path) -> None:
    tokenizer = Tokenizer.load(smollm2)
    assert tokenizer.render(QUESTION, add_generation_prompt=True) == RENDERED
    asked = [{"role": "system", "content": "Be brief."}, *QUESTION]
    assert tokenizer.render(asked, add_generation_prompt=False).startswith("<|im_start|>system\nBe brief.<|im_end|>\n")
    tokens, is_response = tokenizer.encode_conversation(ANSWERED)
    response = [token for token, counts in zip(tokens, is_response, strict=True) if counts]
    assert tokenizer.decode(response) == "Paris."
    assert response[-1] == tokenizer.end_id == tokenizer.pad_id  # its padding is its end token, which is learned


def test_text_becomes_the_tokens_that_transformers_reads(smollm2: Path, gguf_file: Path) -> None:
    """transformers 5 cuts numbers otherwise than SmolLM2's own tokenizer does, digit by digit, as llama.cpp does."""
    theirs = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    ours = Tokenizer.load(smollm2)
    texts = ["".join(character for character in text if not character.isnumeric()) for text in TEXTS]
    assert ours.encode_plain(texts) == [theirs(text, split_special_tokens=True).input_ids for text in texts]
    assert [ours.token_text(token) for token in ours.encode("1234")] == ["1", "2", "3", "4"]
    assert [ours.decode(tokens) for tokens in ours.encode_plain(TEXTS)] == list(TEXTS)


@pytest.mark.nightly
def test_weights_are_those_that_transformers_reads_and_logits_agree(smollm2: Path, gguf_file: Path) -> None:
    """The difference left is fp32's: logits are up to 40, and their last bit is 4e-6."""
    tokenizer = Tokenizer.load(smollm2)
    theirs = AutoModelForCausalLM.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name, dtype=torch.float32)
    expected = theirs.state_dict()
    stored = {name: tensor for path in smollm2.glob("*.safetensors") for name, tensor in load_file(path).items()}
    assert stored.keys() == expected.keys() - {"lm_head.weight"}
    assert all(torch.equal(tensor, expected[name]) for name, tensor in stored.items())
    tokens_BT = torch.tensor([tokenizer.encode_conversation(ANSWERED)[0]])
    with torch.no_grad():
        ours_BTV, theirs_BTV = load_language_model(smollm2).eval()(tokens_BT), theirs.eval()(tokens_BT).logits
    torch.testing.assert_close(ours_BTV, theirs_BTV, atol=4e-4, rtol=0)
    torch.testing.assert_close(ours_BTV.log_softmax(-1).exp(), theirs_BTV.log_softmax(-1).exp(), atol=1e-4, rtol=0)


def test_it_knows_the_capital_of_france(
    smollm2: Path, gguf_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert smollm2.is_dir()  # read once, before
    monkeypatch.setattr(sys, "argv", ["heed", "chat", str(gguf_file), "--temperature", "0", "--max-new-tokens", "8"])
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is the capital of France?\n"))
    with pytest.raises(SystemExit, match="0"):
        main()
    assert "Paris" in capsys.readouterr().out


def test_it_continues_and_scores_a_sentence(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def complete(text: str, *options: str) -> str:
        monkeypatch.setattr(sys, "argv", ["heed", "complete", str(smollm2), text, *options])
        with pytest.raises(SystemExit, match="0"):
            main()
        return capsys.readouterr().out

    def score(text: str) -> float:
        said = complete(text, "--max-new-tokens", "0", "--logprobs")
        return float(said.splitlines()[-1].split()[-2])

    assert (
        complete("The capital of France is", "--greedy", "--max-new-tokens", "1") == "The capital of France is Paris\n"
    )
    assert score("The train pulled into the station.") > score("The peanut pulled into the station.") + 3


@pytest.mark.nightly  # in CI, tests/lm/test_gguf.py has every kind, and test_training.py this model in fp32
@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_a_written_file_is_read_by_transformers(short_smollm2: Path, tmp_path: Path, kind: str) -> None:
    tokenizer = Tokenizer.load(short_smollm2)
    path = tmp_path / "short.gguf"
    export_gguf(short_smollm2, path, kind)  # type: ignore[arg-type]
    metadata = {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}
    assert metadata["tokenizer.ggml.pre"] == "smollm"
    assert metadata["tokenizer.chat_template"] == tokenizer.chat_template
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32).eval()
    tokens_BT = torch.tensor([tokenizer.encode_conversation(ANSWERED)[0]])
    with torch.no_grad():
        ours_BTV, theirs_BTV = load_language_model(short_smollm2).eval()(tokens_BT), theirs(tokens_BT).logits
    largest = float(ours_BTV.abs().max())
    tolerance = {"f16": 2e-3, "q8_0": 2e-2}[kind]  # of the largest logit
    assert float((ours_BTV - theirs_BTV).abs().max()) < tolerance * largest


@pytest.mark.nightly  # in CI, test_training.py starts from a file that was written, and reads its tokenizer
def test_a_written_file_has_the_tokens_that_the_first_file_had(
    short_smollm2: Path, gguf_file: Path, tmp_path: Path
) -> None:
    export_gguf(short_smollm2, tmp_path / "again.gguf", "q8_0")
    first, again = (gguf.GGUFReader(path).fields for path in (gguf_file, tmp_path / "again.gguf"))
    for key in ("tokens", "merges", "token_type", "eos_token_id", "bos_token_id", "padding_token_id", "pre"):
        assert again[f"tokenizer.ggml.{key}"].contents() == first[f"tokenizer.ggml.{key}"].contents(), key
    assert Tokenizer.load(model_directory(str(tmp_path / "again.gguf"))) == Tokenizer.load(short_smollm2)
