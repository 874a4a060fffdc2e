"""Rows as tokens with targets: marks, words and answers in the right places, windows, and rows that are too long."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from classify.config import ClassifyConfig
from classify.examples import (
    BEGINS,
    ENDS,
    Encoder,
    Examples,
    PackedExamples,
    best_windows,
    context_windows,
    encode_words,
    example_lengths,
)
from classify.rows import LabelledText, Question, TaggedWords
from lm.tokenizer import Tokenizer
from stages.sizes import RowSample
from tests.classify.conftest import config_for, write_tokens
from tests.examples import examples
from training.tokens import FITS, SKIPPED, TRUNCATED


def encoder(tokenizer: Tokenizer, task: str, labels: tuple[str, ...] = (), **changes: Any) -> Encoder:
    values = {
        "task": task, "data": [{"source": "a"}], "heldout": [{"source": "b"}], "seq_len": 16, "doc_stride": 3,
        "max_question_tokens": 6,
    }  # fmt: skip
    return Encoder(tokenizer, ClassifyConfig.model_validate(values | changes), labels)


def test_a_pair_has_token_types(words_tokenizer: Tokenizer) -> None:
    (example,), fate = encoder(words_tokenizer, "sequence", ("no", "yes")).encode(
        "a", LabelledText(("red", "kite"), "yes")
    )
    (one,), (two,) = (words_tokenizer.encode_plain([text]) for text in ("red", "kite"))
    end = words_tokenizer.end_id
    assert example.tokens == [words_tokenizer.start_id, *one, end, *two, end]
    assert fate == FITS
    assert example.targets == [1, *[-1] * (len(example.tokens) - 1)]
    assert example.token_types == [0] * (len(one) + 2) + [1] * (len(two) + 1)
    second = [token for token, kind in zip(example.tokens, example.token_types, strict=True) if kind]
    assert words_tokenizer.decode(second) == "kite"
    assert second[-1] == end


def test_a_label_that_training_lacks_is_refused(words_tokenizer: Tokenizer) -> None:
    with pytest.raises(
        ValueError, match=r"b.jsonl: line 3: label 'maybe', which no row of classify.data has; one of no, yes"
    ):
        encoder(words_tokenizer, "sequence", ("no", "yes")).encode("b.jsonl: line 3", LabelledText(("x",), "maybe"))
    values = {"task": "sequence", "labels": ("no", "yes"), "data": [{"source": "a"}], "heldout": [{"source": "b"}]}
    named = Encoder(words_tokenizer, ClassifyConfig.model_validate(values), ("no", "yes"))
    with pytest.raises(ValueError, match=r"line 3: label 'maybe', which classify.labels does not have; one of no, yes"):
        named.encode("b.jsonl: line 3", LabelledText(("x",), "maybe"))
    many = tuple(map(str, range(99)))
    with pytest.raises(ValueError, match=r"one of 0, 1, .* 19, \.\.\. was expected"):
        encoder(words_tokenizer, "sequence", many).encode("b.jsonl: line 3", LabelledText(("x",), "maybe"))


def test_each_words_first_token_has_its_tag(words_tokenizer: Tokenizer) -> None:
    words = ("Mia", "山山x", "red", "kite", ".")
    tags = ("B-X", "O", "B-Y", "I-Y", "O")
    labels = ("O", "B-X", "I-X", "B-Y", "I-Y")
    (example,), _ = encoder(words_tokenizer, "token", labels, seq_len=40).encode("a", TaggedWords(words, tags))
    places = [place for place, target in enumerate(example.targets) if target >= 0]
    assert [labels[example.targets[place]] for place in places] == list(tags)
    for place, following, word in zip(places, [*places[1:], len(example.tokens) - 1], words, strict=True):
        assert words_tokenizer.decode(example.tokens[place:following]).strip() == word
    tokens, firsts = encode_words(words_tokenizer, words)
    assert [place + 1 for place in firsts] == places
    assert example.tokens[1:-1] == tokens


QUESTION, CONTEXT = "What color?", "Mia has a red kite. Tom likes the blue cake very very much. Where is it?"


@pytest.mark.parametrize("answer", ["red kite", "Mia", "it?", "blue", "Tom likes the blue cake very very much"])
def test_the_targets_spell_the_answer_in_every_window_that_has_it(words_tokenizer: Tokenizer, answer: str) -> None:
    row = Question("q", QUESTION, CONTEXT, ((answer, CONTEXT.index(answer)),))
    examples, _ = encoder(words_tokenizer, "span", seq_len=64, doc_stride=8, max_question_tokens=12).encode("a", row)
    whole = 0
    for example in examples:
        (first,), (last,) = (
            [place for place, target in enumerate(example.targets) if target & bit] for bit in (BEGINS, ENDS)
        )
        if (first, last) != (0, 0):
            whole += 1
            places = example.gold["places"]
            before = example.gold["before"]
            assert CONTEXT[places[first - before][0] : places[last - before][1]] == answer
            assert example.token_types[first] == example.token_types[last] == 1
    assert whole >= 1


def test_a_question_without_an_answer_points_at_the_first_token(words_tokenizer: Tokenizer) -> None:
    examples, _ = encoder(words_tokenizer, "span").encode("a", Question("q", "What?", CONTEXT, ()))
    assert len(examples) > 2
    for example in examples:
        assert len(example.tokens) <= 16
        assert example.targets == [BEGINS | ENDS, *[0] * (len(example.tokens) - 1)]


@examples(100)
@given(st.integers(0, 60), st.integers(1, 12), st.integers(1, 12))
def test_windows_cover_a_text_and_each_token_is_best_in_the_one_that_shows_most(
    length: int, room: int, stride: int
) -> None:
    """Against BERT's own two loops (`_check_is_max_context`)."""
    windows = context_windows(length, room, min(stride, room))
    assert [token for token in range(length) if not any(token in window for window in windows)] == []
    assert all(len(window) <= room for window in windows)
    best = best_windows(windows, length)
    for token in range(length):
        best_score, best_index = -1.0, -1
        for index, window in enumerate(windows):
            if not window.start <= token <= window.stop - 1:
                continue
            score = min(token - window.start, window.stop - 1 - token) + 0.01 * len(window)
            if score > best_score:
                best_score, best_index = score, index
        assert best[token] == best_index


def test_rows_that_are_too_long(words_tokenizer: Tokenizer) -> None:
    text, labels = LabelledText(("red " * 30, "blue"), "a"), ("a", "b")
    with pytest.raises(
        ValueError, match=r"x.jsonl: line 2: the text has \d+ tokens; classify.seq_len = 16 leaves room for 13"
    ):
        encoder(words_tokenizer, "sequence", labels).encode("x.jsonl: line 2", text)
    assert encoder(words_tokenizer, "sequence", labels, on_overlong="skip").encode("a", text) == ((), SKIPPED)
    (cut,), fate = encoder(words_tokenizer, "sequence", labels, on_overlong="truncate").encode("a", text)
    assert (len(cut.tokens), fate) == (16, TRUNCATED)
    assert words_tokenizer.decode([t for t, kind in zip(cut.tokens, cut.token_types, strict=True) if kind]) == "blue"
    sentence = TaggedWords(("red",) * 40, ("O",) * 39 + ("B-X",))
    (cut,), fate = encoder(words_tokenizer, "token", ("O", "B-X"), on_overlong="truncate").encode("a", sentence)
    assert (len(cut.tokens), fate, len(cut.gold["words"])) == (16, TRUNCATED, 40)
    assert len(cut.gold["read"]) < 40  # the others count as outside
    asked = Question("q", "What " * 20, "Mia", ())
    with pytest.raises(ValueError, match=r"the question has \d+ tokens; classify.max_question_tokens = 6"):
        encoder(words_tokenizer, "span").encode("a", asked)
    assert encoder(words_tokenizer, "span", on_overlong="truncate").encode("a", asked)[1] == TRUNCATED


def test_packed_rows_hold_every_example_with_its_types_and_targets(tmp_path: Path, bert_folder: Path) -> None:
    texts = [{"text": "red kite " * n, "text_pair": "blue " * (3 - n % 3), "label": n % 2} for n in range(1, 6)]
    config = config_for(tmp_path, "sequence", texts)
    examples = Examples.read(write_tokens(tmp_path, config, bert_folder, ("0", "1")).training)
    rows = np.array([3, 0, 4])
    packed = PackedExamples.of(examples, rows, torch.device("cpu"))
    for number, row in enumerate(rows):
        start, end = (int(examples.ends[row - 1]) if row else 0), int(examples.ends[row])
        mine = packed.real_BT & (packed.example_BT == number)
        assert packed.tokens_BT[mine].tolist() == examples.tokens[start:end].tolist()
        assert packed.token_types_BT[mine].tolist() == examples.token_types[start:end].tolist()
        assert packed.targets_BT[mine].tolist() == examples.targets[start:end].tolist()
        assert packed.place_BT[mine].tolist() == list(range(end - start))
    assert (packed.targets_BT[~packed.real_BT] == -1).all()


def test_a_plan_counts_windows(words_tokenizer: Tokenizer, tmp_path: Path) -> None:
    """The lengths are those of the examples that training reads, also from a sample of the rows."""
    contexts = ["Mia has a kite.", "Tom likes the red kite. " * 6]
    rows = [
        {"id": str(n), "question": "What?", "context": contexts[n % 2], "answers": {"text": [], "answer_start": []}}
        for n in range(6)
    ]
    config = config_for(tmp_path, "span", rows, seq_len=24, max_question_tokens=8)
    (tmp_path / "model").mkdir()
    words_tokenizer.save(tmp_path / "model")
    examples = Examples.read(write_tokens(tmp_path, config, tmp_path / "model", ()).training)
    every = np.arange(len(examples))
    assert len(examples) > 2 * len(rows)
    lengths = example_lengths(words_tokenizer, config, ())
    assert lengths.num_rows == len(examples)
    assert lengths.mean == pytest.approx(examples.lengths_of(every).mean())
    assert lengths.longest == examples.lengths_of(every).max()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RowSample.__init__, "__defaults__", (1,))
        sampled = example_lengths(words_tokenizer, config, ())
    assert sampled.num_measured < len(examples)
    assert sampled.num_rows == pytest.approx(len(examples), rel=0.8)
