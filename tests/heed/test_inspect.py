"""`heed inspect` and `heed few-shot` as a user calls them."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from heed.cli import main
from lm.config import ModelConfig
from lm.encoder import EncoderDecoder
from lm.source import RandomInit, load
from lm.tokenizer import Tokenizer
from lm.weights import save_model
from tests.rows import jsonl

ROOT = Path(__file__).parents[2]

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Runs `heed` with arguments: its exit code, standard output and standard error."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["heed", *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
        said = capsys.readouterr()
        return int(caught.value.code or 0), said.out, said.err

    return run


def test_a_shape_in_numbers(call: Call) -> None:
    code, said, _ = call("inspect", str(ROOT / "configs" / "models" / "gpt3-175b.toml"))
    assert code == 0
    row = next(line for line in said.splitlines() if line.startswith("all "))
    assert int(row.split()[-1].replace(",", "")) == pytest.approx(175e9, rel=0.01)
    assert any(
        line.startswith("blocks.*.attention.qkv.weight") and "36,864 x 12,288" in line for line in said.splitlines()
    )
    cache = next(line for line in said.splitlines() if line.startswith("key-value cache"))
    assert cache.split()[-1] == f"{2 * 96 * 12288 * 2:,}"


def test_shapes_of_an_encoder_and_of_a_translator_in_numbers(call: Call) -> None:
    for name, parameters in (("google-bert/bert-large-uncased", "335,174,458"), ("vaswani-big", "214,171,648")):
        code, said, _ = call("inspect", str(ROOT / "configs" / "models" / f"{name}.toml"))
        assert code == 0
        row = next(line for line in said.splitlines() if line.startswith("all "))
        assert row.split()[-1] == parameters


def test_the_model_of_a_directory_and_of_a_job(call: Call, model_folder: Path) -> None:
    for target in (model_folder, ROOT / "configs" / "jobs" / "demo.toml"):
        code, said, _ = call("inspect", str(target))
        assert code == 0
        assert "without embeddings" in said


def test_what_is_no_shape_is_refused_by_name(call: Call, tmp_path: Path) -> None:
    path = tmp_path / "shape.toml"
    path.write_text(
        "vocab_size = 300\nmax_position_embeddings = 8\nhidden_size = 6\nnum_hidden_layers = 1\n"
        "num_attention_heads = 4\n"
    )
    code, _, said = call("inspect", str(path))
    assert code == 2
    assert "shape.toml" in said
    assert "6 is not a multiple of 4" in said
    code, _, said = call("inspect", str(tmp_path / "none.toml"))
    assert code == 2
    assert "none.toml: no such file" in said


def test_few_shot_prints_a_row_for_each_number_of_shots(call: Call, model_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(jsonl({"prompt": f"{i}:", "completion": str(i)} for i in range(9)))
    code, said, _ = call("few-shot", str(model_folder), str(path), "--shots", "0", "--shots", "3", "--max-rows", "8")
    assert code == 0
    rows = [line.split() for line in said.splitlines()[1:]]
    assert [row[:2] for row in rows if row] == [["0", "8"], ["3", "8"]]


def test_shapes_of_other_kinds(call: Call, encoder_folder: Path, translator: Path) -> None:
    code, said, _ = call("inspect", str(encoder_folder))
    assert code == 0
    assert "token_types.weight" in said
    assert "key-value cache" not in said
    code, said, _ = call("inspect", str(translator))
    assert code == 0
    assert "decoder.blocks.*.cross.query.weight" in said
    assert "FLOPs per source token, of 64" in said


@pytest.fixture
def translator(tmp_path: Path, masking_tokenizer: Tokenizer) -> Path:
    config = ModelConfig(
        kind="encoder-decoder", vocab_size=288, max_position_embeddings=64, hidden_size=16, num_hidden_layers=1,
        num_encoder_layers=1, num_attention_heads=2, num_key_value_heads=2, intermediate_size=24,
    )  # fmt: skip
    model = load(RandomInit(lambda: EncoderDecoder(config), 1))
    save_model(tmp_path / "translator", model, model.state_dict(), masking_tokenizer)
    return tmp_path / "translator"
