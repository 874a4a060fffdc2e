"""Reading rows: every accepted form, and errors that name file, line and field."""

import gzip
import json
import logging
from pathlib import Path
from typing import Any

import datasets
import pytest

from training.data import DataConfig, TextConfig, read_conversations, read_prompts, read_rows, read_texts


def jsonl(path: Path, *rows: Any) -> DataConfig:
    """Writes rows as JSON; a row that is a string is written unchanged."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return DataConfig(source=str(path))


def texts(data: DataConfig, field: str = "text") -> TextConfig:
    return TextConfig(source=data.source, field=field)


def say(*turns: tuple[str, str]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def test_jsonl_with_blank_lines_and_gzip(tmp_path: Path) -> None:
    data = jsonl(tmp_path / "a.jsonl", {"text": "one"}, "", {"text": "zwölf 山"})
    assert list(read_texts([texts(data)])) == ["one", "zwölf 山"]
    assert [where for where, _ in read_rows(data)] == [f"{tmp_path}/a.jsonl: line 1", f"{tmp_path}/a.jsonl: line 3"]
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    assert list(read_texts([TextConfig(source=str(packed)), texts(data)])) == ["one", "zwölf 山"] * 2


def test_parquet(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    rows = [{"body": "one", **say(("user", "q"), ("assistant", "a"))}, {"body": "two", **say(("assistant", "b"))}]
    datasets.Dataset.from_list(rows).to_parquet(path)
    data = DataConfig(source=str(path))
    assert list(read_texts([texts(data, "body")])) == ["one", "two"]
    assert [where for where, _ in read_rows(data)] == [f"{path}: row 1", f"{path}: row 2"]
    assert [messages for _, messages in read_conversations([data])] == [row["messages"] for row in rows]


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.txt.gz"])
def test_plain_text_gives_a_row_a_paragraph(tmp_path: Path, name: str) -> None:
    text = "One\nand one more.\n\nTwo.\n\n\nÜber drei.\n".encode()
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    found = [paragraph.strip() for paragraph in read_texts([TextConfig(source=str(tmp_path / name))])]
    assert found == ["One\nand one more.", "Two.", "Über drei."]


def test_max_rows(tmp_path: Path) -> None:
    data = jsonl(tmp_path / "a.jsonl", *({"text": str(i)} for i in range(5)))
    limits = {0: 5, 2: 2, 9: 5}
    for limit, expected in limits.items():
        assert len(list(read_rows(data.model_copy(update={"max_rows": limit})))) == expected
    parts = ({"max_rows": 2}, {"skip_rows": 2, "max_rows": 2}, {"skip_rows": 4}, {"skip_rows": 9})
    read = [[row["text"] for _, row in read_rows(data.model_copy(update=part))] for part in parts]
    assert read == [["0", "1"], ["2", "3"], ["4"], []]
    (tmp_path / "b.txt").write_text("a\n\nb\n\nc\n")
    assert len(list(read_rows(DataConfig(source=str(tmp_path / "b.txt"), max_rows=2)))) == 2


def test_rows_that_are_left_out_are_not_counted(tmp_path: Path) -> None:
    """Nor do they stop a stage. Rows that cannot be parsed are no rows, to skip_rows as to max_rows."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "0"}\nnot JSON\n{"prompt": "1"}\n{"prompt": 2}\n{"prompt": "3"}\n')
    whole, said = DataConfig(source=str(path), on_invalid="skip"), list[str]()
    parts = [whole.model_copy(update=part) for part in ({"max_rows": 2}, {"skip_rows": 2})]
    read = [[prompt.messages[0]["content"] for prompt in read_prompts(part, said.append)] for part in parts]
    assert read == [["0", "1"], ["3"]]
    assert [line for line in said if "invalid" in line] == [
        f"{path}: of 3 rows, 1 x invalid (skipped)",
        f"{path}: of 2 rows, 1 x invalid (skipped)",
    ]
    (prompt,) = read_prompts(DataConfig(source=str(path), skip_rows=3))
    assert prompt.messages[0]["content"] == "3"


def test_lines_between_two_parts_of_a_file_count_in_the_second_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "0"}\nnot JSON\n{"prompt": "1"}\nnor this\n{"prompt": "2"}\n{"prompt": 3}\n')
    whole, said = DataConfig(source=str(path), on_invalid="skip"), list[str]()
    for part in ({"max_rows": 2}, {"skip_rows": 2}):
        read_prompts(whole.model_copy(update=part), said.append)
    assert said == [
        f"{path}: 2 prompts, prompt",
        f"{path}: of 3 rows, 1 x invalid (skipped)",
        f"{path}: line 2: not JSON: Expecting value at column 1",
        f"{path}: 1 prompt, prompt",
        f"{path}: of 3 rows, 2 x invalid (skipped)",
        f"{path}: line 4: not JSON: Expecting value at column 1",
        f"{path}: line 6: field 'prompt' is int; a text or a list of messages was expected",
    ]
    assert len(read_prompts(DataConfig(source=str(path), max_rows=1))) == 1, "the line after the last row is not read"


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ('{"text": 1,, }', "not JSON: .* at column 12"),
        ("[1, 2]", "list found; a JSON object was expected"),
        ({"body": "x"}, r"field 'text' is missing; found \['body'\]"),
        ({"text": 3}, "field 'text' is int; a string was expected"),
        ({"text": None}, "field 'text' is null; a string was expected"),
        ({"text": "  \n"}, "field 'text' is empty; text was expected"),
    ],
)
def test_a_bad_text_is_named_by_file_line_and_field(tmp_path: Path, row: Any, words: str) -> None:
    data = jsonl(tmp_path / "bad.jsonl", {"text": "fine"}, row)
    with pytest.raises(ValueError, match=rf"bad\.jsonl: line 2: {words}"):
        list(read_texts([texts(data)]))


@pytest.mark.parametrize("name", ["latin.jsonl", "latin.jsonl.gz"])
def test_bytes_that_are_not_utf8_are_named_by_file(tmp_path: Path, name: str) -> None:
    line = '{"text": "\xfcber"}\n'.encode("latin-1")
    (tmp_path / name).write_bytes(gzip.compress(line) if name.endswith(".gz") else line)
    with pytest.raises(ValueError, match=name):
        list(read_texts([TextConfig(source=str(tmp_path / name))]))


def test_a_gz_file_that_is_not_gzip_or_cut_short_is_named(tmp_path: Path) -> None:
    rows = b'{"text": "x"}\n' * 50
    for content in (rows, gzip.compress(rows)[:-12]):
        (tmp_path / "odd.jsonl.gz").write_bytes(content)
        with pytest.raises(ValueError, match=r"odd\.jsonl\.gz"):
            list(read_texts([TextConfig(source=str(tmp_path / "odd.jsonl.gz"))]))


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"messages": []}, "field 'messages' is list; a non-empty list was expected"),
        ({"messages": "hello"}, "field 'messages' is str"),
        ({"messages": ["hello"]}, r"field 'messages\[0\].role': system, user, assistant or tool was"),
        (say(("user", "q"), ("robot", "a")), r"field 'messages\[1\].role' is 'robot'; system, user, assistant or tool"),
        (say(("user", " "), ("assistant", "a")), r"field 'messages\[0\].content' is empty"),
        ({"messages": [{"role": "assistant"}]}, r"messages\[0\]: field 'content' is missing"),
        (
            {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "weight": 0}]},
            r"field 'messages\[1\].weight' is 0; SFT weighs all answers of the assistant alike",
        ),
        (say(("assistant", "a"), ("user", "q")), r"field 'messages\[1\].role' is 'user'; .* the assistant's"),
        ({"prompt": "q"}, "field 'completion' is missing"),
        ({"prompt": "q", "completion": 4}, "field 'completion' is int"),
    ],
)
def test_a_bad_demonstration_is_named_by_file_line_and_field(tmp_path: Path, row: Any, words: str) -> None:
    good = say(("user", "q"), ("assistant", "a")) if "messages" in row else {"prompt": "q", "completion": "a"}
    data = jsonl(tmp_path / "demos.jsonl", good, row)
    with pytest.raises(ValueError, match=rf"demos\.jsonl: line 2: {words}"):
        list(read_conversations([data]))


def test_a_text_where_none_is_taken_does_not_decide_the_format(tmp_path: Path) -> None:
    rows = [say(("user", f"q{n}"), ("assistant", "a")) for n in range(9)]
    data, heard = jsonl(tmp_path / "d.jsonl", {"text": "header"}, *rows), list[str]()
    skipping = data.model_copy(update={"on_invalid": "skip"})
    assert [turns for _, turns in read_conversations([skipping], heard.append)] == [row["messages"] for row in rows]
    assert heard == [
        f"{data.source}: 9 conversations, messages",
        f"{data.source}: of 10 rows, 1 x invalid (skipped)",
        f"{data.source}: line 1: field 'text' holds a plain text; a prompt and a response were expected",
    ]
    with pytest.raises(ValueError, match="line 1: field 'text' holds a plain text; a prompt and a response"):
        list(read_conversations([data]))


def test_a_header_in_another_format_does_not_leave_out_the_rows(tmp_path: Path) -> None:
    rows = [say(("user", f"q{n}"), ("assistant", "a")) for n in range(9)]
    data = jsonl(tmp_path / "d.jsonl", {"text": "header"}, *rows).model_copy(update={"on_invalid": "skip"})
    words = (
        r"d\.jsonl: line 1 is plain text, but 9 of 10 rows have another format: name the one to read, such as format ="
        " 'messages', or split the file"
    )
    with pytest.raises(ValueError, match=words):
        list(read_conversations([data], takes_texts=True))
    with pytest.raises(ValueError, match=words):
        read_prompts(data)
    named = data.model_copy(update={"format": "messages"})
    assert len(list(read_conversations([named], takes_texts=True))) == len(read_prompts(named)) == 9
    few = jsonl(tmp_path / "few.jsonl", rows[0], {"text": "odd"}, rows[1]).model_copy(update={"on_invalid": "skip"})
    assert len(list(read_conversations([few], takes_texts=True))) == 2


def test_prompts(tmp_path: Path) -> None:
    named = {"prompt": "one", "prompt_id": "x7", "kind": "list"}
    data = jsonl(tmp_path / "p.jsonl", named, {"prompt": "two"}, {"prompt": "3"})
    prompts = read_prompts(data)
    assert [(prompt.prompt_id, prompt.kind) for prompt in prompts] == [("x7", "list"), ("1", ""), ("2", "")]
    assert [prompt.messages[-1]["content"] for prompt in prompts] == ["one", "two", "3"]


def test_rows_with_the_id_and_prompt_of_an_earlier_one_are_left_out(tmp_path: Path) -> None:
    """As in preference data with several pairs per prompt."""
    pairs = [{"prompt": f"q{i % 2}", "prompt_id": f"p{i % 2}", "chosen": f"a{i}", "rejected": "b"} for i in range(5)]
    heard: list[str] = []
    data = jsonl(tmp_path / "pairs.jsonl", *pairs)
    assert [prompt.prompt_id for prompt in read_prompts(data, heard.append)] == ["p0", "p1"]
    assert heard[0] == f"{data.source}: 2 prompts, prompt"
    assert heard[1] == f"{data.source}: of 5 rows, 3 x seen before (left out)"


def test_a_prompt_refused_for_its_id_is_in_no_other_count(tmp_path: Path) -> None:
    rows = [
        say(("user", "x")) | {"prompt_id": "p"},
        say(("user", "y"), ("assistant", "a")) | {"prompt_id": "p"},
        say(("user", "y")) | {"prompt_id": "q"},
    ]
    data, said = jsonl(tmp_path / "p.jsonl", *rows).model_copy(update={"on_invalid": "skip"}), list[str]()
    assert [prompt.prompt_id for prompt in read_prompts(data, said.append)] == ["p", "q"]
    assert said == [
        f"{data.source}: 2 prompts, messages",
        f"{data.source}: of 3 rows, 1 x invalid (skipped)",
        f"{data.source}: line 2: prompt_id 'p' is also that of a different prompt, {data.source}: line 1;"
        " a prompt_id of its own was expected",
    ]


def test_bad_prompts(tmp_path: Path) -> None:
    twice = jsonl(tmp_path / "twice.jsonl", *({"prompt": f"q{i}", "prompt_id": i % 2} for i in (1, 2, 3)))
    with pytest.raises(
        ValueError,
        match=r"twice\.jsonl: line 3: prompt_id '1' is also that of a different prompt, .*twice\.jsonl: line 1",
    ):
        read_prompts(twice)
    heard: list[str] = []
    assert len(read_prompts(twice.model_copy(update={"on_invalid": "skip"}), heard.append)) == 2
    assert heard[:2] == [f"{twice.source}: 2 prompts, prompt", f"{twice.source}: of 3 rows, 1 x invalid (skipped)"]
    wrong_end = jsonl(tmp_path / "end.jsonl", say(("user", "q"), ("system", "a")))
    with pytest.raises(ValueError, match=r"field 'messages\[1\].role' is 'system'; .* the user's"):
        read_prompts(wrong_end)
    with pytest.raises(ValueError, match=r"none\.jsonl: no prompts; at least one was expected"):
        read_prompts(jsonl(tmp_path / "none.jsonl"))


def test_a_missing_file_and_an_unknown_suffix_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gone\.jsonl: no such file"):
        list(read_rows(DataConfig(source=str(tmp_path / "gone.jsonl"))))
    with pytest.raises(ValueError, match=r"gone\.txt\.gz: no such file"):
        list(read_rows(DataConfig(source=str(tmp_path / "gone.txt.gz"))))
    (tmp_path / "a.xls").write_text("text\nhello\n")
    with pytest.raises(ValueError, match=r"a\.xls: suffix '\.xls'; one of .*'\.jsonl'.* or a hub id was expected"):
        list(read_rows(DataConfig(source=str(tmp_path / "a.xls"))))


def test_a_hub_id_that_cannot_be_reached_is_named() -> None:
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    with pytest.raises(ValueError, match=r"source 'heed-tests/absent' is neither a local file .*split 'validation'"):
        list(read_rows(DataConfig(source="heed-tests/absent", split="validation")))
