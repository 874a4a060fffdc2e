"""`heed complete` as a user calls it, against `transformers` and against enumeration."""

import io
import itertools
import math
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from heed.cli import main
from heed.commands.complete import probability
from lm.config import ModelConfig
from lm.encoder import EncoderDecoder, MaskedLanguageModel, SequenceClassifier
from lm.model import LanguageModel
from lm.source import RandomInit, load
from lm.tokenizer import Tokenizer
from lm.weights import load_any, save_model
from tests.lm import vocabularies
from tests.models import load_language_model

TEXT = "The quick fox"
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def complete(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs `heed complete` with arguments and something on standard input; returns what it prints."""

    def run(*arguments: object, typed: str = "") -> str:
        monkeypatch.setattr(sys, "argv", ["heed", "complete", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        with pytest.raises(SystemExit) as caught:
            main()
        said = capsys.readouterr()
        assert caught.value.code == 0, said.err
        return said.out

    return run


def next_logprobs(folder: Path, tokens: list[int]) -> torch.Tensor:
    """The log-probabilities [V] of the token after these, computed by `transformers`."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([tokens])).logits[0, -1].double(), dim=-1)


def blocks(said: str) -> list[tuple[str, str]]:
    """Title and text of each of several continuations."""
    titled = [block.split("\n", 1) for block in f"\n{said}".split("\n--- ")[1:]]
    return [(title, text) for title, text in titled]


def rows(said: str, part: str) -> list[tuple[int, float, float]]:
    """Id, log-probability and probability of each token of a part."""
    found = [line.split() for line in said.splitlines() if line.startswith(f"{part} ")]
    return [(int(number), float(logprob), float(chance)) for *_, number, logprob, chance in found]


def total(said: str, part: str) -> tuple[float, float]:
    (line,) = (line for line in said.splitlines() if line.startswith(f"{part}, all"))
    return float(line.split()[-2]), float(line.split()[-1])


def test_greedy_takes_the_likeliest_token_at_each_step(complete: Callable[..., str], model_folder: Path) -> None:
    tokenizer = Tokenizer.load(model_folder)
    text = tokenizer.encode_plain([TEXT])[0]
    written = list[int]()
    for _ in range(6):
        written.append(int(next_logprobs(model_folder, [tokenizer.start_id, *text, *written]).argmax()))
    asked = (model_folder, TEXT, "--max-new-tokens", 6)
    expected = tokenizer.decode([*text, *written])
    assert complete(*asked, "--greedy") == f"{expected}\n"
    assert complete(*asked, "--temperature", 0) == f"{expected}\n"
    assert complete(*asked, "--top-k", 1) == f"{expected}\n"
    assert complete(model_folder, "-", *asked[2:], "--greedy", typed=f"{TEXT}\n") == f"{expected}\n"
    assert complete(model_folder, *asked[2:], "--greedy", typed=f"{TEXT}\n") == f"{expected}\n"


def test_log_probabilities_are_those_of_transformers(complete: Callable[..., str], model_folder: Path) -> None:
    tokenizer = Tokenizer.load(model_folder)
    said = complete(model_folder, TEXT, "--logprobs", "--max-new-tokens", 4, "--seed", 3)
    text, written = rows(said, "text"), rows(said, "continuation")
    tokens = [tokenizer.start_id, *(number for number, _, _ in text + written)]
    assert tokens[1 : len(text) + 1] == tokenizer.encode_plain([TEXT])[0]
    assert len(written) in range(1, 5)
    for place, (number, logprob, chance) in enumerate(text + written):
        expected = float(next_logprobs(model_folder, tokens[: place + 1])[number])
        assert logprob == pytest.approx(expected, abs=2e-4)
        assert chance == pytest.approx(math.exp(expected), rel=1e-3)
    for part, listed in (("text", text), ("continuation", written), ("both", text + written)):
        logprob, chance = total(said, part)
        assert logprob == pytest.approx(sum(row[1] for row in listed), abs=1e-3)
        assert chance == pytest.approx(math.prod(row[2] for row in listed), rel=5e-3)
    alone = complete(model_folder, TEXT, "--logprobs", "--max-new-tokens", 0)
    assert rows(alone, "text") == text
    assert total(alone, "text") == total(said, "text")
    assert "continuation" not in alone


def test_a_probability_below_the_smallest_float() -> None:
    assert probability(math.log(0.25)) == "0.25"
    assert probability(-1000 * math.log(10) + math.log(2.5)) == "2.500e-1000"


def test_beam_search_finds_what_enumeration_finds(complete: Callable[..., str], model_folder: Path) -> None:
    """With a beam for every token, nothing is lost in two steps."""
    tokenizer, model = Tokenizer.load(model_folder), load_language_model(model_folder).eval()
    prompt = [tokenizer.start_id, *tokenizer.encode_plain([TEXT])[0]]
    num_tokens = model.config.vocab_size
    first = next_logprobs(model_folder, prompt)
    with torch.no_grad():
        after = model(torch.tensor([[*prompt, token] for token in range(num_tokens)]))[:, -1].double().log_softmax(-1)
    every = [(float(first[end]), [end]) for end in tokenizer.end_ids]
    for token in set(range(num_tokens)) - set(tokenizer.end_ids):
        every += [(float(first[token] + after[token, last]), [token, last]) for last in range(num_tokens)]
    ranked = sorted(every, key=lambda found: -found[0] / len(found[1]))
    found = blocks(complete(model_folder, TEXT, "--beams", num_tokens, "--max-new-tokens", 2))
    assert len(found) == num_tokens
    for (title, _), (logprob, response) in zip(found, ranked, strict=False):
        score, logprob_shown = (float(number) for number in re.findall(r"-?\d+\.\d+", title))
        assert score == pytest.approx(logprob / len(response), abs=2e-4)
        assert logprob_shown == pytest.approx(logprob, abs=2e-4)
    assert found[0][1] == tokenizer.decode([*prompt, *ranked[0][1]])


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        (("--top-k", 3), lambda p: len(p[:3])),
        (("--top-p", 0.6), lambda p: int((p.cumsum(0) - p < 0.6).sum())),
        (("--top-k", 20, "--top-p", 0.9), lambda p: int((p[:20].cumsum(0) - p[:20] < 0.9 * p[:20].sum()).sum())),
    ],
)
def test_tokens_are_drawn_as_often_as_they_are_likely(
    complete: Callable[..., str], model_folder: Path, options: tuple[object, ...], kept: Callable[[torch.Tensor], int]
) -> None:
    tokenizer, num_samples, temperature = Tokenizer.load(model_folder), 2_000, 0.6
    tokens = tokenizer.encode_plain([TEXT])[0]
    logprobs = next_logprobs(model_folder, [tokenizer.start_id, *tokens])
    chances, order = (logprobs / temperature).softmax(dim=-1).sort(descending=True)
    expected, num_kept = Counter[str](), kept(chances)
    assert 2 < num_kept < 60
    for token, chance in zip(order[:num_kept].tolist(), chances.tolist(), strict=False):
        expected[tokenizer.decode([*tokens, token])] += chance
    asked = (model_folder, TEXT, "--temperature", temperature, "--samples", num_samples, "--max-new-tokens", 1)
    found = Counter(text.removesuffix("\n") for _, text in blocks(complete(*asked, *options)))
    assert found.keys() <= expected.keys()
    for text, chance in expected.items():
        share = chance / sum(expected.values())
        assert abs(found[text] - num_samples * share) < 4.5 * math.sqrt(num_samples * share * (1 - share)) + 1


def test_samples_repeat_with_their_seed(complete: Callable[..., str], model_folder: Path) -> None:
    asked = (model_folder, TEXT, "--samples", 3, "--max-new-tokens", 8)
    first = complete(*asked, "--seed", 1)
    assert complete(*asked, "--seed", 1) == first != complete(*asked, "--seed", 2)
    assert [title for title, _ in blocks(first)] == ["sample 1", "sample 2", "sample 3"]
    assert all(text.startswith(TEXT) for _, text in blocks(first))
    assert len({text for _, text in blocks(first)}) == 3


class Terminal(io.StringIO):
    """Standard output that says it is a terminal, and keeps what it had at each flush."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = list[str]()

    def isatty(self) -> bool:
        return True

    def flush(self) -> None:
        self.seen.append(self.getvalue())


def test_a_terminal_gets_the_text_as_it_is_sampled(
    complete: Callable[..., str], model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = (model_folder, TEXT, "--max-new-tokens", 12, "--top-k", 9)
    expected = complete(*asked)
    with monkeypatch.context() as patch:
        terminal = Terminal()
        patch.setattr(sys, "stdout", terminal)
        complete(*asked)
    assert terminal.getvalue() == expected
    growing = list(dict.fromkeys(terminal.seen))
    assert len(growing) > 3
    assert all(after.startswith(before) for before, after in itertools.pairwise(growing))
    assert not any(text.endswith("\ufffd") for text in growing[:-1])


def test_a_vocabulary_that_drops_the_first_space(
    complete: Callable[..., str], tmp_path: Path, tiny_config: ModelConfig
) -> None:
    """Llama 2's decoder strips a space before what it decodes; the continuation keeps its own."""
    tokenizer = vocabularies.ours("llama 2", "llama 2")
    config = tiny_config.model_copy(update={"vocab_size": tokenizer.vocab_size})
    model = load(RandomInit(lambda: LanguageModel(config), 3))
    save_model(tmp_path / "model", model, model.state_dict(), tokenizer)
    text = tokenizer.encode_plain(["The quick"])[0]
    logprobs = next_logprobs(tmp_path / "model", [tokenizer.start_id, *text])
    tokens = tokenizer.encode_plain(["The quick fox"])[0][len(text) :]
    assert logprobs.shape[0] > max(tokens)
    best = int(logprobs.argmax())
    said = complete(tmp_path / "model", "The quick", "--greedy", "--max-new-tokens", 1)
    assert said == f"The quick{tokenizer.decode([*text, best]).removeprefix('The quick')}\n"


def test_a_gguf_file_is_read_like_its_folder(
    complete: Callable[..., str], model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(
        sys, "argv", ["heed", "export", "gguf", str(model_folder), str(tmp_path / "tiny.gguf"), "--type", "f32"]
    )
    with pytest.raises(SystemExit, match="0"):
        main()
    asked = (TEXT, "--greedy", "--max-new-tokens", 5, "--logprobs")
    complete(model_folder, TEXT, "--tokens")  # clears what the export printed
    assert complete(tmp_path / "tiny.gguf", *asked) == complete(model_folder, *asked)


# --- encoder-decoders ------------------------------------------------------------------------------------------------


@pytest.fixture
def translator(tmp_path: Path, masking_tokenizer: Tokenizer) -> Path:
    config = ModelConfig(
        kind="encoder-decoder", vocab_size=288, max_position_embeddings=24, hidden_size=16, num_hidden_layers=1,
        num_encoder_layers=1, num_attention_heads=2, num_key_value_heads=2, intermediate_size=16, mlp="gelu",
        mlp_bias=True, attention_bias="all", positions="learned", norm="layer", norm_place="post", embedding_norm=True,
    )  # fmt: skip
    model = load(RandomInit(lambda: EncoderDecoder(config), 4))
    save_model(tmp_path / "model", model, model.state_dict(), masking_tokenizer)
    return tmp_path / "model"


def test_an_encoder_decoder_writes_the_output_alone(complete: Callable[..., str], translator: Path) -> None:
    tokenizer, model = Tokenizer.load(translator), load_any(translator).eval()
    assert isinstance(model, EncoderDecoder)
    source = [tokenizer.start_id, *tokenizer.encode_plain([TEXT])[0], tokenizer.end_id]
    said = complete(translator, TEXT, "--greedy", "--max-new-tokens", 5, "--logprobs")
    written = rows(said, "output")
    before, sums = [tokenizer.end_id], 0.0
    for number, logprob, _ in written:
        with torch.no_grad():
            expected = model(torch.tensor([source]), torch.tensor([before]))[0, -1].log_softmax(-1)
        assert number == int(expected.argmax())
        assert logprob == pytest.approx(float(expected[number]), abs=2e-4)
        before, sums = [*before, number], sums + float(expected[number])
    assert total(said, "output")[0] == pytest.approx(sums, abs=1e-3)
    assert said.startswith(tokenizer.decode(before) + "\npart")
    beams = blocks(complete(translator, TEXT, "--beams", 2, "--max-new-tokens", 5))
    assert len(beams) == 2
    assert float(beams[0][0].split()[-1]) >= sums - 1e-3


# --- masks -----------------------------------------------------------------------------------------------------------

WORDS = ["the", "train", "peanut", "pulled", "into", "station", "house", "cat", "over", "s", "ing", "red"]
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, "##s", "##ing", "##ed", ".", ",", "!"]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT of random weights as `transformers` saves it, with whole words, continuations and punctuation."""
    folder = tmp_path_factory.mktemp("bert")
    (folder / "vocab.txt").write_text("\n".join(PIECES) + "\n")
    transformers.BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(5)
    config = transformers.BertConfig(
        vocab_size=len(PIECES), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=32, initializer_range=0.5,
    )  # fmt: skip
    transformers.BertForMaskedLM(config).save_pretrained(folder)
    return folder


def filled(said: str) -> list[tuple[int, str, float]]:
    """Mask, word and probability of each row."""
    found = [line.split() for line in said.splitlines()[1:]]
    return [(int(mask), word, float(chance)) for mask, word, _, chance in found]


@pytest.mark.parametrize("text", ["The [MASK] pulled into the station.", "[MASK] cat pulled the [MASK] into [MASK]!"])
def test_masks_of_bert_are_filled_as_transformers_fills_them(
    complete: Callable[..., str], bert: Path, text: str
) -> None:
    pipeline = transformers.pipeline("fill-mask", model=str(bert), top_k=len(PIECES), device="cpu")
    theirs = pipeline(text)
    masks = theirs if isinstance(theirs[0], list) else [theirs]
    expected = [
        (number, found["token_str"], pytest.approx(found["score"], rel=2e-3))
        for number, of_one in enumerate(masks, 1)
        for found in [found for found in of_one if found["token_str"] in WORDS][:5]
    ]
    assert len(expected) == 5 * len(masks)
    assert filled(complete(bert, text)) == expected


def test_masks_of_heeds_encoders(complete: Callable[..., str], encoder_folder: Path) -> None:
    """The space before a mask is the hidden word's own; tokens without one are not whole words there."""
    tokenizer, model = Tokenizer.load(encoder_folder), load_any(encoder_folder).eval()
    assert isinstance(model, MaskedLanguageModel)
    before, after = (tokenizer.encode_plain([part])[0] for part in ("The dog and", " in the bush"))
    tokens = [tokenizer.start_id, *before, tokenizer.mask_id, *after, tokenizer.end_id]
    with torch.no_grad():
        chances = model(torch.tensor([tokens]))[0, len(before) + 1].softmax(dim=-1)
    ranked = [(tokenizer.decode([token]), float(chances[token])) for token in chances.argsort(descending=True).tolist()]
    words = [(word[1:], chance) for word, chance in ranked if word[:1] == " " and word[1:].isalpha()][:5]
    assert words
    for mask in ("[MASK]", "<|mask|>"):
        found = filled(complete(encoder_folder, f"The dog and {mask} in the bush"))
        assert found == [(1, word, pytest.approx(chance, rel=2e-3)) for word, chance in words]


def test_a_mask_inside_a_word_takes_the_pieces_that_continue_it(complete: Callable[..., str], bert: Path) -> None:
    theirs = transformers.pipeline("fill-mask", model=str(bert), top_k=len(PIECES), device="cpu")(
        "the cat[MASK] pulled"
    )
    pieces = [found["token_str"] for found in theirs if found["token_str"].startswith("##")]
    assert len(pieces) == 3
    assert [word for _, word, _ in filled(complete(bert, "the cat[MASK] pulled"))] == [piece[2:] for piece in pieces]


def test_without_a_word_that_fits_other_tokens_are_shown(complete: Callable[..., str], bert: Path) -> None:
    """The vocabulary lacks `ca` and every word that begins with it."""
    found = filled(complete(bert, "the ca[MASK] pulled"))
    assert len(found) == 5
    assert {word for _, word, _ in found} <= {*WORDS, "ed"}


# --- tokens ----------------------------------------------------------------------------------------------------------


def test_tokens_of_bytes_and_emoji(complete: Callable[..., str], model_folder: Path, tmp_path: Path) -> None:
    """No weights are read: the folder has none."""
    Tokenizer.load(model_folder).save(tmp_path / "tokenizer")
    text = "The fox <|end|>\n🦊"
    said = complete(tmp_path / "tokenizer", text, "--tokens")
    header, start, *pieces, summary = said.splitlines()
    assert header.split() == ["id", "token"]
    assert start.split() == ["1", "<|end|>", "(special)"]
    shown = [eval(line.split(maxsplit=1)[1]) for line in pieces]
    assert b"".join(piece.encode() if isinstance(piece, str) else piece for piece in shown) == text.encode()
    assert shown[-4:] == [b"\xf0", b"\x9f", b"\xa6", b"\x8a"]
    assert "special" not in "".join(pieces)  # a name in the text is text
    assert [int(line.split()[0]) for line in pieces] == Tokenizer.load(model_folder).encode_plain([text])[0]
    num_tokens = len(pieces)
    assert summary == (
        f"{num_tokens} tokens of text and 1 around it; 4 words, 17 characters, 20 bytes:"
        f" {num_tokens / 4:.2f} per word, {num_tokens / 17:.2f} per character"
    )


def test_tokens_of_bert(complete: Callable[..., str], bert: Path) -> None:
    said = complete(bert, "The trains [MASK]!", "--tokens").splitlines()
    assert [line.split(maxsplit=1)[1].strip() for line in said[1:-1]] == [
        "[CLS] (special)", "'the'", "'train'", "'##s'", "[MASK] (special)", "'!'", "[SEP] (special)"
    ]  # fmt: skip


def test_bytes_that_sentencepiece_names(complete: Callable[..., str], tmp_path: Path) -> None:
    vocabularies.ours("llama 2", "llama 2").save(tmp_path / "tokenizer")
    said = complete(tmp_path / "tokenizer", "The fox 🦊", "--tokens").splitlines()
    shown = [eval(line.split(maxsplit=1)[1]) for line in said[2:-1]]
    whole = b"".join(piece.encode() if isinstance(piece, str) else piece for piece in shown)
    assert whole.decode().strip() == "The fox 🦊"
    assert shown[-4:] == [b"\xf0", b"\x9f", b"\xa6", b"\x8a"]


# --- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--greedy", "--temperature", "1"], "--greedy with --temperature: one way to choose tokens was expected"),
        (["--beams", "3", "--top-p", "0.9"], "--beams with --top-p: one way to choose tokens was expected"),
        (["--greedy", "--beams", "3"], "--greedy with --beams: one way to choose tokens was expected"),
        (["--temperature", "0", "--top-k", "5"], "--temperature 0, --top-k 5, --top-p 1: a temperature and a --top-p"),
        (["--top-p", "0"], "--temperature 1, --top-k 0, --top-p 0: a temperature and a --top-p above 0 were expected"),
        (["--greedy", "--samples", "2"], "--samples 2 with --greedy: samples that differ were expected"),
        (["--beams", "2", "--samples", "2"], "--samples 2 with --beams: samples that differ were expected"),
        (["--temperature", "0", "--samples", "2"], "--samples 2 with --temperature 0: samples that differ were"),
        (
            ["--greedy", "--seed", "3"],
            "--seed with --greedy, which draws nothing: sampling, or no --seed, was expected",
        ),
        (["--beams", "2", "--seed", "3"], "--seed with --beams, which draws nothing"),
        (["--temperature", "0", "--seed", "3"], "--seed with --temperature 0, which draws nothing"),
        (["--max-new-tokens", "0"], "--max-new-tokens 0 writes nothing; only --logprobs was expected with it"),
        (["--max-new-tokens", "0", "--logprobs", "--greedy"], "only --logprobs was expected with it"),
        (["--tokens", "--greedy", "--seed", "3"], "--tokens with --greedy, --seed: --tokens alone was expected"),
    ],
)
def test_options_that_exclude_each_other(
    refused: Callable[..., str], model_folder: Path, options: list[str], said: str
) -> None:
    assert said in refused("complete", str(model_folder), TEXT, *options)


def test_texts_that_do_not_fit(refused: Callable[..., str], model_folder: Path, encoder_folder: Path) -> None:
    assert "TEXT is empty; at least one character was expected" in refused("complete", str(model_folder), "")
    long = "x!" * 48  # 96 tokens, as many as the context has
    said = refused("complete", str(model_folder), long)
    assert f"TEXT has 96 tokens, and {model_folder} reads at most 94" in said
    said = refused("complete", str(model_folder), long, "--logprobs", "--max-new-tokens", "0")
    assert "TEXT has 96 tokens" in said
    assert "reads at most 95" in said
    said = refused("complete", str(encoder_folder), f"{long} [MASK]")
    assert "TEXT has 97 tokens" in said
    assert "reads at most 62" in said


def test_a_length_beyond_the_context_is_reduced(
    complete: Callable[..., str],
    model_folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = "x!" * 47
    shown = complete(model_folder, text, "--logprobs", "--seed", 1)
    assert len(rows(shown, "continuation")) == 1
    monkeypatch.setattr(sys, "argv", ["heed", "complete", str(model_folder), text])
    with pytest.raises(SystemExit, match="0"):
        main()
    assert "--max-new-tokens 128 is reduced to 1, the rest of the context" in capsys.readouterr().err


def test_models_that_cannot_do_what_is_asked(
    refused: Callable[..., str], encoder_folder: Path, translator: Path, tmp_path: Path, masking_tokenizer: Tokenizer,
    tokenizer: Tokenizer,
) -> None:  # fmt: skip
    asked = ("complete", str(encoder_folder))
    assert f"--greedy, --max-new-tokens: {encoder_folder} is an encoder, which fills in [MASK]" in refused(
        *asked, "The [MASK].", "--greedy", "--max-new-tokens", "3"
    )
    assert "[MASK] or <|mask|> was expected in place of each hidden word" in refused(*asked, "The <mask> sleeps.")
    assert "is an encoder-decoder, which gives a probability to its output" in refused(
        "complete", str(translator), TEXT, "--logprobs", "--max-new-tokens", "0"
    )
    encoder = load_any(encoder_folder)
    assert isinstance(encoder, MaskedLanguageModel)
    without_mask = tmp_path / "without-mask"
    save_model(without_mask, encoder, encoder.state_dict(), tokenizer)
    assert "mask_token is missing" in refused("complete", str(without_mask), "The [MASK] sleeps.")
    classifier = load(RandomInit(lambda: SequenceClassifier(encoder.config, ["score"]), 1))
    save_model(tmp_path / "scores", classifier, classifier.state_dict(), masking_tokenizer)
    assert f"{tmp_path / 'scores'} scores or labels texts; a decoder" in refused(
        "complete", str(tmp_path / "scores"), TEXT
    )


def test_folders_of_runs_lead_to_their_models(refused: Callable[..., str], model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "sft").mkdir()
    (tmp_path / "sft" / "model").symlink_to(model_folder)
    assert f"its model is {tmp_path}/sft/model" in refused("complete", str(tmp_path / "sft"), TEXT)
    assert "its models are" in refused("complete", str(tmp_path), TEXT, "--tokens")
    assert "no such folder" in refused("complete", str(tmp_path / "nothing"), TEXT)


def test_an_adapter_leads_to_the_model_it_is_merged_into(
    refused: Callable[..., str], model_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    (tmp_path / "model").symlink_to(model_folder)
    said = refused("complete", str(tmp_path / "adapter"), TEXT)
    assert f"it is an adapter, not a model. {tmp_path / 'model'} is the model that it is merged into" in said


def test_text_that_is_no_unicode(
    refused: Callable[..., str], model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("a \udcff b"))  # how Python reads a byte that is not UTF-8
    assert "byte 0xFF, which is not UTF-8" in refused("complete", str(model_folder), "--greedy")
