"""The formats of labelled data, and every mistake in them as one line that names file, line and field."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from classify.config import ClassifyConfig, ClassifyData
from classify.rows import LabelledText, Question, TaggedWords, iob2, read_labelled
from tests.rows import jsonl
from training.data import SourceRows


def read(task: Any, path: Path, labels: tuple[str, ...] = (), **settings: Any) -> list[Any]:
    data = ClassifyData(source=str(path), **settings)
    return [row for _, row in read_labelled(task, labels, (data,), [], [])]


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text(jsonl(rows), encoding="utf-8")
    return path


def test_texts_and_pairs(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": "x", "label": 1}, {"text": "y", "text_pair": "z", "label": "no"}])
    assert read("sequence", path) == [LabelledText(("x",), "1"), LabelledText(("y", "z"), "no")]
    other = write(tmp_path / "b.jsonl", [{"review": "x", "sentiment": 1}])
    fields = {"text_field": "review", "label_field": "sentiment"}
    assert read("sequence", other, ("bad", "good"), **fields) == [LabelledText(("x",), "good")]


CONLL = """-DOCSTART- -X- -X- O

Mia NNP B-NP I-PER
Lee NNP I-NP I-PER
Tom NNP I-NP B-PER
ran VBD B-VP O

Oslo NNP B-NP I-LOC
"""


@pytest.mark.parametrize("zipped", [False, True])
def test_columns_of_conll_in_either_scheme(tmp_path: Path, zipped: bool) -> None:
    path = tmp_path / ("eng.conll.gz" if zipped else "eng.txt")
    path.write_bytes(gzip.compress(CONLL.encode()) if zipped else CONLL.encode())
    found = read("token", path, tags="iob1")
    tags = ("B-PER", "I-PER", "B-PER", "O")
    assert found == [TaggedWords(("Mia", "Lee", "Tom", "ran"), tags), TaggedWords(("Oslo",), ("B-LOC",))]
    assert read("token", path, tags="iob1", skip_rows=1) == found[1:]
    assert read("token", path, tags="iob1", max_rows=1) == found[:1]
    with pytest.raises(ValueError, match=r"line 3: the tag is 'I-PER' after O; in IOB2 an entity opens with B-PER"):
        read("token", path)


def test_rows_of_words_with_numbered_tags(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"tokens": ["Mia", "ran"], "ner_tags": [1, 0]}])
    assert read("token", path, ("O", "B-PER"), label_field="ner_tags") == [TaggedWords(("Mia", "ran"), ("B-PER", "O"))]


SQUAD = {
    "version": "v2.0",
    "data": [{"title": "t", "paragraphs": [{"context": "Mia has a kite.", "qas": [
        {"id": "q1", "question": "What?", "answers": [{"text": "a kite", "answer_start": 8}], "is_impossible": False},
        {"id": "q2", "question": "Where?", "answers": [], "plausible_answers": [], "is_impossible": True},
    ]}]}],
}  # fmt: skip


def test_squads_own_file_and_its_rows_on_the_hub(tmp_path: Path) -> None:
    path = tmp_path / "dev.json"
    path.write_text(json.dumps(SQUAD))
    expected = [
        Question("q1", "What?", "Mia has a kite.", (("a kite", 8),)), Question("q2", "Where?", "Mia has a kite.", ())
    ]  # fmt: skip
    assert read("span", path) == expected
    rows = [
        {"id": q.question_id, "question": q.question, "context": q.context,
         "answers": {"text": [text for text, _ in q.answers], "answer_start": [start for _, start in q.answers]}}
        for q in expected
    ]  # fmt: skip
    assert read("span", write(tmp_path / "rows.jsonl", rows)) == expected
    assert read("span", write(tmp_path / "rows.json", rows[:1])) == expected[:1]  # one object, but not SQuAD's


@pytest.mark.parametrize(
    ("task", "row", "message"),
    [
        ("sequence", {"text": "x"}, r"rows.jsonl: line 1: field 'label' is missing"),
        ("sequence", {"text": " ", "label": "a"}, r"line 1: field 'text' is empty"),
        ("sequence", {"text": "x", "label": ""}, r"line 1: field 'label' is ''; a label was expected"),
        ("sequence", {"text": "x", "label": 1.5}, r"line 1: field 'label' is float"),
        ("token", {"tokens": ["a"], "tags": ["X"]}, r"line 1: field 'tags\[0\]' is 'X'; O, B-TYPE or I-TYPE"),
        ("token", {"tokens": ["a"], "tags": ["B-"]}, r"line 1: field 'tags\[0\]' is 'B-'; O, B-TYPE or I-TYPE"),
        ("token", {"tokens": ["a", "b"], "tags": ["B-X", "I-Y"]}, r"'tags\[1\]' is 'I-Y' after an entity of type X"),
        ("token", {"tokens": ["a"], "tags": []}, r"field 'tags' has 0 entries and 'tokens' 1"),
        ("token", {"tokens": ["a", 3], "tags": ["O", "O"]}, r"field 'tokens\[1\]' is 3; a word was expected"),
        ("span", {"context": "ab", "question": "?", "answers": [{"text": "b", "answer_start": 0}]},
         r"line 1: field 'answers\[0\]': answer_start is 0, where the context has 'a'; the place of 'b'"),
        ("span", {"context": "ab", "question": "?", "answers": [{"text": "b"}]}, r"'answer_start' is missing"),
        ("span", {"context": "ab", "question": "?", "answers": "b"}, r"field 'answers' is str; a list was expected"),
        ("span", {"context": "ab", "question": "?", "answers": [], "is_impossible": False}, r"an answer was expected"),
        ("span", {"id": 7, "context": "ab", "question": "?", "is_impossible": True,
                  "answers": [{"text": "b", "answer_start": 1}]}, r"question '7': field 'is_impossible' is true"),
    ],
)  # fmt: skip
def test_mistakes_name_file_line_and_field(tmp_path: Path, task: str, row: dict[str, Any], message: str) -> None:
    path = write(tmp_path / "rows.jsonl", [row])
    with pytest.raises(ValueError, match=message) as caught:
        read(task, path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_word_without_a_tag_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "a.conll"
    path.write_text("Mia B-PER\nran\n\nTom B-PER\n")
    with pytest.raises(ValueError, match=r"a.conll: line 2: the tag is ''; O, B-TYPE or I-TYPE was expected"):
        read("token", path)
    counted: list[SourceRows] = []
    data = ClassifyData(source=str(path), on_invalid="skip")
    assert [row.words for _, row in read_labelled("token", (), (data,), counted, [])] == [("Tom",)]
    assert counted[0].unusual == {"invalid (skipped)": 1}


def test_iob1_opens_with_b_only_after_its_own_type() -> None:
    assert list(iob2(["I-X", "B-X", "O", "I-Y", "I-X"], "iob1", "abcde")) == ["B-X", "B-X", "O", "B-Y", "B-X"]
    with pytest.raises(ValueError, match=r"b is 'B-X', but no entity of type X comes before it"):
        list(iob2(["O", "B-X"], "iob1", "ab"))


def test_windows_that_would_leave_a_gap_are_refused() -> None:
    values = {"task": "span", "data": [{"source": "a"}], "heldout": [{"source": "b"}]}
    with pytest.raises(ValueError, match=r"doc_stride is 128, but a window of seq_len = 128 .* has room for 61"):
        ClassifyConfig.model_validate(values | {"seq_len": 128})
    assert ClassifyConfig.model_validate(values).doc_stride == 128


@pytest.mark.parametrize(("name", "num_rows"), [("sentence_polarity.jsonl", 7996), ("movie_reviews.jsonl.gz", 2000)])
def test_published_sentiment_is_read(name: str, num_rows: int) -> None:
    path = Path(__file__).parents[3] / "shared" / "data" / name
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    found = read("sequence", path, label_field="sentiment")
    assert len(found) == num_rows
    assert {row.label for row in found} == {"negative", "positive"}


def test_bad_utf8_names_file_and_line(tmp_path: Path) -> None:
    squad, columns = tmp_path / "dev.json", tmp_path / "a.conll"
    squad.write_bytes(json.dumps(SQUAD, indent=1).encode().replace(b"a kite.", b"a kit\xe9."))
    line = 1 + squad.read_bytes().split(b"\xe9")[0].count(b"\n")
    with pytest.raises(ValueError, match=rf"dev.json: line {line}: not UTF-8: invalid continuation byte"):
        read("span", squad)
    columns.write_bytes(b"Mia B-PER\nJos\xe9 B-PER\n")
    with pytest.raises(ValueError, match=r"a.conll: line 2: not UTF-8: invalid continuation byte"):
        read("token", columns)


def test_a_cut_gzip_file_is_one_line(tmp_path: Path) -> None:
    whole = gzip.compress((CONLL * 50).encode())
    for name in ("a.conll.gz", "dev.json.gz"):
        (tmp_path / name).write_bytes(whole[: len(whole) // 2])
        with pytest.raises(ValueError, match=rf"{name}.*cannot be read: Compressed file ended"):
            read("token" if "conll" in name else "span", tmp_path / name)


def test_a_word_may_contain_a_no_break_space(tmp_path: Path) -> None:
    path = tmp_path / "a.conll"
    path.write_text("10\u00a0000\tNUM  O\r\nParis NNP B-LOC \n", encoding="utf-8")
    assert read("token", path) == [TaggedWords(("10\u00a0000", "Paris"), ("O", "B-LOC"))]


@pytest.mark.parametrize(
    ("task", "labels", "message"),
    [
        ("sequence", ["a", "a"], r"labels is \['a', 'a'\]; at least two distinct names were expected"),
        ("sequence", ["a"], r"labels is \['a'\]; at least two distinct names"),
        ("sequence", ["a", ""], r"at least two distinct names"),
        ("token", ["O", "PER"], r"labels has 'PER'; O, B-TYPE or I-TYPE was expected"),
        ("token", ["B-PER", "I-PER"], r"labels is \['B-PER', 'I-PER'\]; O, for words in no entity, is missing"),
    ],
)
def test_labels_are_checked(task: str, labels: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ClassifyConfig.model_validate(
            {"task": task, "data": [{"source": "a"}], "heldout": [{"source": "b"}], "labels": labels}
        )


def test_windows_of_questions_have_berts_room_by_default() -> None:
    values = {"data": [{"source": "a"}], "heldout": [{"source": "b"}]}
    spans, texts = (ClassifyConfig.model_validate({**values, "task": task}) for task in ("span", "sequence"))
    assert (spans.seq_len, texts.seq_len) == (384, 128)
    assert ClassifyConfig.model_validate(spans.model_dump()) == spans
