"""`heed inspect` and `heed few-shot` as a user calls them."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from heed.cli import main
from lm.config import ModelConfig
from lm.encoder import EncoderDecoder
from lm.source import RandomInit, load
from lm.tokenizer import Tokenizer
from lm.weights import save_model

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
    code, said, _ = call("inspect", "model", str(ROOT / "configs" / "models" / "gpt3-175b.toml"))
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
        code, said, _ = call("inspect", "model", str(ROOT / "configs" / "models" / f"{name}.toml"))
        assert code == 0
        row = next(line for line in said.splitlines() if line.startswith("all "))
        assert row.split()[-1] == parameters


def test_the_model_of_a_directory_and_of_a_job(call: Call, model_folder: Path) -> None:
    for target in (model_folder, ROOT / "configs" / "jobs" / "demo.toml"):
        code, said, _ = call("inspect", "model", str(target))
        assert code == 0
        assert "without embeddings" in said


def test_what_is_no_shape_is_refused_by_name(call: Call, tmp_path: Path) -> None:
    path = tmp_path / "shape.toml"
    path.write_text(
        "vocab_size = 300\nmax_position_embeddings = 8\nhidden_size = 6\nnum_hidden_layers = 1\n"
        "num_attention_heads = 4\n"
    )
    code, _, said = call("inspect", "model", str(path))
    assert code == 2
    assert "shape.toml" in said
    assert "6 is not a multiple of 4" in said
    code, _, said = call("inspect", "model", str(tmp_path / "none.toml"))
    assert code == 2
    assert "none.toml: no such file" in said


def test_attention_as_a_picture(call: Call, model_folder: Path, tmp_path: Path) -> None:
    png = tmp_path / "pictures" / "attention.png"
    code, _, _ = call("inspect", "attention", str(model_folder), "the fox runs", "--layer", "0", "--png", str(png))
    assert code == 0
    picture = Image.open(png).convert("L")
    assert min(picture.size) > 300
    # The first word attends to itself alone: there is black. What is masked, and the page, is white.
    assert picture.getextrema() == (0, 255)


def test_heads_are_listed_by_their_attention_to_the_preceding_token(
    call: Call, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": f"the fox {word} " * 40}) + "\n" for word in ("runs", "sits")))
    png = str(tmp_path / "attention.png")
    measured = []
    for num_texts, more in ((100, ()), (100, ("--texts", str(texts))), (1, ("--texts", str(texts)))):
        monkeypatch.setattr("heed.commands.inspect.NUM_TEXTS", num_texts)
        code, said, _ = call("inspect", "attention", str(model_folder), "the fox runs", *more, "--png", png)
        assert code == 0, said
        head, *rows = [line for line in said.splitlines() if line.strip() and line.split()[0] in "layer 0 1"]
        assert head.split()[:3] == ["layer", "head", "preceding"]
        assert {tuple(row.split()[:2]) for row in rows} == {(f"{i}", f"{j}") for i in range(2) for j in range(4)}
        preceding = [float(row.split()[2]) for row in rows]
        assert preceding == sorted(preceding, reverse=True)
        measured.append(rows)
    assert measured[0] != measured[1] != measured[2]
    code, said, more = call("inspect", "attention", str(model_folder), "a", "--png", png)
    assert code == 0
    assert "heads are not measured: no text has three tokens" in said + more


def test_long_texts_are_cut(call: Call, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of a text of 32,000 tokens would not fit in memory."""
    monkeypatch.setattr("stages.reports.attention.MAX_MEASURED_TOKENS", 8)
    said = []
    for name, text in (("long", "abcdefgh and so on"), ("short", "abcdefgh")):
        (tmp_path / f"{name}.txt").write_text(text)
        options = ("--texts", str(tmp_path / f"{name}.txt"), "--png", str(tmp_path / "attention.png"))
        said.append(call("inspect", "attention", str(model_folder), "the fox runs", *options)[1])
    assert len(Tokenizer.load(model_folder).encode_plain(["abcdefgh"])[0]) == 8
    assert said[0] == said[1] != ""


def test_heads_are_not_measured_across_texts(call: Call, translator: Path) -> None:
    code, _, said = call("inspect", "attention", str(translator), "a", "--target", "b", "--texts", "c.txt")
    assert code == 2
    assert "--texts with --target" in said


@pytest.mark.parametrize(
    ("text", "layer", "words"), [("a", "7", "layer is 7; -2 to 1"), ("a " * 90, "0", "1 to 64 were")]
)
def test_a_picture_that_cannot_be_is_refused(
    call: Call, model_folder: Path, tmp_path: Path, text: str, layer: str, words: str
) -> None:
    png = tmp_path / "attention.png"
    code, _, said = call("inspect", "attention", str(model_folder), text, "--layer", layer, "--png", str(png))
    assert code == 2
    assert words in said
    assert not png.exists()


def test_few_shot_prints_a_row_for_each_number_of_shots(call: Call, model_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}:", "completion": str(i)}) + "\n" for i in range(9)))
    code, said, _ = call("few-shot", str(model_folder), str(path), "--shots", "0", "--shots", "3", "--max-rows", "8")
    assert code == 0
    rows = [line.split() for line in said.splitlines()[1:]]
    assert [row[:2] for row in rows if row] == [["0", "8"], ["3", "8"]]


def test_attention_of_an_encoder_and_across(call: Call, encoder_folder: Path, translator: Path, tmp_path: Path) -> None:
    png = tmp_path / "attention.png"
    for folder, more in ((encoder_folder, ()), (translator, ()), (translator, ("--target", "far away"))):
        code, _, said = call("inspect", "attention", str(folder), "the fox runs", *more, "--png", str(png))
        assert code == 0, said
        assert min(Image.open(png).size) > 200
        png.unlink()
    code, _, said = call("inspect", "attention", str(encoder_folder), "the fox", "--target", "x", "--png", str(png))
    assert code == 2
    assert "a target needs an encoder-decoder; model.kind is 'encoder'" in said


def test_shapes_of_other_kinds(call: Call, encoder_folder: Path, translator: Path) -> None:
    code, said, _ = call("inspect", "model", str(encoder_folder))
    assert code == 0
    assert "token_types.weight" in said
    assert "key-value cache" not in said
    code, said, _ = call("inspect", "model", str(translator))
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
