"""`python -m benchmarks.attention` as a user calls it. tests/lm/test_inspection.py has the weights and the measures."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from PIL import Image
from typer.testing import CliRunner

from benchmarks import attention
from lm.config import ModelConfig
from lm.encoder import EncoderDecoder
from lm.source import RandomInit, load
from lm.tokenizer import Tokenizer
from lm.weights import save_model

Draw = Callable[..., str]


@pytest.fixture
def draw() -> Draw:
    """Runs the program with arguments. Returns what it prints."""
    app = typer.Typer()
    app.command()(attention.main)

    def run(*arguments: str) -> str:
        result = CliRunner().invoke(app, arguments, catch_exceptions=False)
        assert result.exit_code == 0
        return result.output

    return run


def test_attention_as_a_picture(draw: Draw, model_folder: Path, tmp_path: Path) -> None:
    png = tmp_path / "pictures" / "attention.png"
    draw(str(model_folder), "the fox runs", "--layer", "0", "--png", str(png))
    picture = Image.open(png).convert("L")
    assert min(picture.size) > 300
    # The first word attends to itself alone: there is black. What is masked, and the page, is white.
    assert picture.getextrema() == (0, 255)


def test_heads_are_listed_by_their_attention_to_the_preceding_token(
    draw: Draw, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": f"the fox {word} " * 40}) + "\n" for word in ("runs", "sits")))
    png = str(tmp_path / "attention.png")
    measured = []
    for num_texts, more in ((100, ()), (100, ("--texts", str(texts))), (1, ("--texts", str(texts)))):
        monkeypatch.setattr(attention, "NUM_TEXTS", num_texts)
        said = draw(str(model_folder), "the fox runs", *more, "--png", png)
        head, *rows = [line for line in said.splitlines() if line.strip() and line.split()[0] in "layer 0 1"]
        assert head.split()[:3] == ["layer", "head", "preceding"]
        assert {tuple(row.split()[:2]) for row in rows} == {(f"{i}", f"{j}") for i in range(2) for j in range(4)}
        preceding = [float(row.split()[2]) for row in rows]
        assert preceding == sorted(preceding, reverse=True)
        measured.append(rows)
    assert measured[0] != measured[1] != measured[2]
    assert "heads are not measured: no text has three tokens" in draw(str(model_folder), "a", "--png", png)


def test_long_texts_are_cut(draw: Draw, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of a text of 32,000 tokens would not fit in memory."""
    monkeypatch.setattr(attention, "MAX_MEASURED_TOKENS", 8)
    said = []
    for name, text in (("long", "abcdefgh and so on"), ("short", "abcdefgh")):
        (tmp_path / f"{name}.txt").write_text(text)
        options = ("--texts", str(tmp_path / f"{name}.txt"), "--png", str(tmp_path / "attention.png"))
        said.append(draw(str(model_folder), "the fox runs", *options))
    assert len(Tokenizer.load(model_folder).encode_plain(["abcdefgh"])[0]) == 8
    assert said[0] == said[1] != ""


def test_heads_are_not_measured_across_texts(draw: Draw, translator: Path) -> None:
    with pytest.raises(ValueError, match="--texts with --target"):
        draw(str(translator), "a", "--target", "b", "--texts", "c.txt")


@pytest.mark.parametrize(
    ("text", "layer", "words"), [("a", "7", "layer is 7; -2 to 1"), ("a " * 90, "0", "1 to 64 were")]
)
def test_a_picture_that_cannot_be_is_refused(
    draw: Draw, model_folder: Path, tmp_path: Path, text: str, layer: str, words: str
) -> None:
    png = tmp_path / "attention.png"
    with pytest.raises(ValueError, match=words):
        draw(str(model_folder), text, "--layer", layer, "--png", str(png))
    assert not png.exists()


def test_attention_of_an_encoder_and_across(draw: Draw, encoder_folder: Path, translator: Path, tmp_path: Path) -> None:
    png = tmp_path / "attention.png"
    for folder, more in ((encoder_folder, ()), (translator, ()), (translator, ("--target", "far away"))):
        draw(str(folder), "the fox runs", *more, "--png", str(png))
        assert min(Image.open(png).size) > 200
        png.unlink()
    with pytest.raises(ValueError, match=r"a target needs an encoder-decoder; model\.kind is 'encoder'"):
        draw(str(encoder_folder), "the fox", "--target", "x", "--png", str(png))


@pytest.fixture
def translator(tmp_path: Path, masking_tokenizer: Tokenizer) -> Path:
    config = ModelConfig(
        kind="encoder-decoder", vocab_size=288, max_position_embeddings=64, hidden_size=16, num_hidden_layers=1,
        num_encoder_layers=1, num_attention_heads=2, num_key_value_heads=2, intermediate_size=24,
    )  # fmt: skip
    model = load(RandomInit(lambda: EncoderDecoder(config), 1))
    save_model(tmp_path / "translator", model, model.state_dict(), masking_tokenizer)
    return tmp_path / "translator"
