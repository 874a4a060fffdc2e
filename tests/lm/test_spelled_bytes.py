"""The bytes of each token, by hand in three kinds of vocabulary; for any text they add up to its bytes."""

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers

from lm.tokenizer import END, PAD, Tokenizer
from tests.examples import examples

SPECIALS = [PAD, END, "<unk>"]


def built(bpe: tokenizers.Tokenizer) -> Tokenizer:
    bpe.add_special_tokens(SPECIALS)
    return Tokenizer(bpe, pad=PAD, end=END, chat_template="")


@pytest.fixture(scope="module")
def sentencepiece() -> Tokenizer:
    """As in Llama 2: a space is ▁, one is put before the text, and rare characters are spelled in bytes."""
    pieces = [*SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256)), *"▁thedogü", "th", "the", "▁the"]
    merges = [("t", "h"), ("th", "e"), ("▁", "the")]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    bpe = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    bpe.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return built(bpe)


@pytest.fixture(scope="module")
def unigram() -> Tokenizer:
    """As in T5: characters are normalised first, and a run of unknown ones is one token."""
    pieces = [("<unk>", 0.0), ("▁", -2.0), *((letter, -4.0) for letter in "thedogfi"), ("▁the", -1.0), ("dog", -1.0)]
    bpe = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0))
    bpe.normalizer = normalizers.NFKC()
    bpe.pre_tokenizer = pre_tokenizers.Metaspace()
    bpe.decoder = decoders.Metaspace()
    return built(bpe)


@pytest.fixture(scope="module")
def composed() -> Tokenizer:
    """A byte-level vocabulary that composes accents and puts a space before the text."""
    alphabet = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bpe = tokenizers.Tokenizer(models.BPE(alphabet, []))
    bpe.normalizer = normalizers.NFC()
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    bpe.decoder = decoders.ByteLevel()
    return built(bpe)


def spelled(tokenizer: Tokenizer, text: str) -> list[tuple[str, int]]:
    """Returns the names of the tokens and their bytes."""
    (tokens,), (lengths,) = tokenizer.encode_plain([text]), tokenizer.spelled_bytes([text])
    return [(tokenizer.token_text(token), length) for token, length in zip(tokens, lengths, strict=True)]


def test_byte_level_tokens_that_end_inside_a_character(tokenizer: Tokenizer) -> None:
    # 月 and 小 have three bytes each, and neither occurred twice, so nothing merged their bytes.
    found = spelled(tokenizer, "月小 the")
    assert found[-1] == ("Ġthe", 4)
    assert [length for _, length in found] == [len(name) for name, _ in found]
    assert sum(length for _, length in found) == 3 + 3 + 4
    assert len(found) > 3
    assert spelled(tokenizer, END)[0] == ("<", 1)  # spelled out, like all text by people


def test_wordpiece_leaves_spaces_out(wordpiece: Tokenizer) -> None:
    assert spelled(wordpiece, "The  über dogs ☃! ") == [
        ("the", 3), ("uber", 2 + 5), ("dog", 1 + 3), ("##s", 1), ("[UNK]", 1 + 3), ("!", 1 + 1),
    ]  # fmt: skip


def test_sentencepiece_spells_rare_characters_in_bytes(sentencepiece: Tokenizer) -> None:
    assert spelled(sentencepiece, "the ü 山dog") == [
        ("▁the", 3), ("▁", 1), ("ü", 2), ("▁", 1), ("<0xE5>", 1), ("<0xB1>", 1), ("<0xB1>", 1), ("d", 1), ("o", 1),
        ("g", 1),
    ]  # fmt: skip
    # The space that is put before a text is not one of its bytes.
    assert spelled(sentencepiece, "dog") == [("▁", 0), ("d", 1), ("o", 1), ("g", 1)]


def test_unigram_counts_what_stood_there_before_it_was_normalised(unigram: Tokenizer) -> None:
    # The ligature ﬁ has three bytes, which f and i share.
    assert spelled(unigram, "the dog☃☃ﬁ") == [("▁the", 3), ("▁", 1), ("dog", 3), ("<unk>", 6), ("f", 1), ("i", 2)]


def test_a_byte_level_vocabulary_that_changes_the_text(composed: Tokenizer) -> None:
    assert spelled(composed, "dog") == [("Ġ", 0), ("d", 1), ("o", 1), ("g", 1)]
    # e with a combining accent has three bytes; composed it is two tokens, whose names have two.
    assert sum(length for _, length in spelled(composed, "de\u0301e\u0301")) == 1 + 3 + 3


@pytest.mark.parametrize("kind", ["tokenizer", "wordpiece", "sentencepiece", "unigram", "composed"])
def test_the_tokens_of_any_text_stand_for_all_of_it(kind: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)

    @examples(100)
    @given(text=st.text(st.sampled_from("the dogüﬁ山\u0301\t\x00🙂▁<|end|>"), max_size=30) | st.text(max_size=30))
    @example(text="")
    @example(text=" \x00 ")
    def stand_for_all_of_it(text: str) -> None:
        (tokens,), (lengths,) = tokenizer.encode_plain([text]), tokenizer.spelled_bytes([text])
        assert len(tokens) == len(lengths)
        assert all(length >= 0 for length in lengths)
        assert not tokens or sum(lengths) == len(text.encode())

    stand_for_all_of_it()
