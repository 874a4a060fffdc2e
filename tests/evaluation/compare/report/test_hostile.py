"""Texts that try to break out of the page, and malformed folders."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from evaluation.compare.report.page import write_comparison_report
from evaluation.verdicts import Response, Verdict, read_responses, read_verdicts, write_rows

MakeFolder = Callable[..., Path]
ReadPage = Callable[[str], Any]

HOSTILE = "</script><script>alert(1)</script><!-- <img src=https://evil.example/x onerror=alert(2)> \"' \u2028 \u202e"


def spoil(folder: Path, file: str, change: Callable[[list[dict[str, Any]]], Any]) -> None:
    """Change the objects of a JSONL or JSON file."""
    path = folder / file
    lines = path.read_text(encoding="utf-8").splitlines() if file.endswith("jsonl") else [path.read_text()]
    rows = [json.loads(line) for line in lines]
    change(rows)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.mark.parametrize("name", ["two_policies", "four_policies"])
def test_the_page_is_sound_and_loads_nothing(name: str, request: pytest.FixtureRequest, read_page: ReadPage) -> None:
    page = (request.getfixturevalue(name) / "report.html").read_text(encoding="utf-8")
    found = read_page(page)
    assert found.open == []
    assert found.tags.count("script") == 1
    assert not {"img", "link", "iframe", "object", "image", "base"} & set(found.tags)
    assert len(found.ids) == len(set(found.ids))
    assert set(found.references) <= set(found.ids)
    script_free = re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)
    assert not re.search(r"https?://|@import|url\((?!#)", re.sub(r">[^<]*<", "><", script_free))
    assert found.tags.count("table") == found.tags.count("caption")
    assert not re.search(r">\s*(nan|NaN|None|inf|-inf)\b", page)


def test_hostile_text_is_escaped_wherever_it_stands(make_folder: MakeFolder, read_page: ReadPage) -> None:
    folder = make_folder(policies={"sft": 0.0, HOSTILE: 1.0}, judges={HOSTILE: ["a", HOSTILE + "b"]}, num_prompts=6)

    def hostile_prompts(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            row["messages"] = [{"role": "system", "content": HOSTILE}, {"role": "user", "content": HOSTILE * 40}]
            row["category"] = HOSTILE

    spoil(folder, "prompts.jsonl", hostile_prompts)
    spoil(folder, "compare.json", lambda rows: rows[0].update({HOSTILE: [HOSTILE, {"a": HOSTILE}]}))
    spoil_all = {"category": HOSTILE}
    verdicts = [replace(row, **spoil_all) for row in read_verdicts(folder / "verdicts.parquet")]
    verdicts[0] = replace(verdicts[0], preference_a=math.nan, failure=HOSTILE)
    write_rows(folder / "verdicts.parquet", verdicts)
    texts = [HOSTILE * 60, "a\x00b\x1b[31m\uffff", "", HOSTILE]
    responses = read_responses(folder / "responses.parquet")
    write_rows(
        folder / "responses.parquet", [replace(row, text=texts[place % 4]) for place, row in enumerate(responses)]
    )
    (folder / "measures.json").write_text(json.dumps({"policies": {"sft": {HOSTILE: HOSTILE}}, HOSTILE: HOSTILE}))
    report = write_comparison_report(folder)
    page = (folder / "report.html").read_text(encoding="utf-8")
    found = read_page(page)
    assert found.open == []
    assert found.comments == []
    assert (found.tags.count("script"), found.tags.count("img")) == (1, 0)
    assert "&lt;/script&gt;&lt;script&gt;alert(1)&lt;/script&gt;&lt;!--" in page
    assert "a\ufffdb\ufffd[31m\ufffd" in page
    assert report["summary"]["failures"][0]["failure"] == HOSTILE
    # A text that changes the direction of writing ends with its own element.
    assert re.search(r'<div class="text" dir="auto">[^<]*\u202e', page)


def test_prompt_ids_of_any_kind_have_an_anchor(make_folder: MakeFolder, read_page: ReadPage) -> None:
    folder = make_folder(num_prompts=3)
    ids = ["a b/ü%", "<x>", "a\u202e</script>"]

    def rename(rows: list[dict[str, Any]]) -> None:
        for row, prompt_id in zip(rows, ids, strict=True):
            row["prompt_id"] = prompt_id

    spoil(folder, "prompts.jsonl", rename)
    write_rows(folder / "responses.parquet", [Response(name, "<x>", 0, "yes") for name in ("sft", "ppo")])
    write_rows(folder / "verdicts.parquet", [Verdict("<x>", "sft", "ppo", 0, 0, "gold", "gold", 0.0)])
    write_comparison_report(folder)
    found = read_page((folder / "report.html").read_text(encoding="utf-8"))
    anchors = [name for name in found.ids if name.startswith("prompt-")]
    assert anchors == ["prompt-a%20b%2F%C3%BC%25", "prompt-%3Cx%3E", "prompt-a%E2%80%AE%3C%2Fscript%3E"]
    assert set(anchors) <= set(found.references)


def test_empty_and_missing_responses_say_so(make_folder: MakeFolder) -> None:
    folder = make_folder(num_prompts=4, ties=0.0)
    rows = read_responses(folder / "responses.parquet")
    verdicts = [row for row in read_verdicts(folder / "verdicts.parquet") if row.prompt_id != rows[-1].prompt_id]
    write_rows(folder / "verdicts.parquet", verdicts)
    write_rows(folder / "responses.parquet", [replace(rows[0], text=""), *rows[1:-1]])
    write_comparison_report(folder)
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert page.count("(an empty response)") == page.count("(no response)") == 1
    assert page.count("No verdict on this prompt.") == 1


def _without(field: str) -> Callable[[list[dict[str, Any]]], Any]:
    return lambda rows: rows[1 if len(rows) > 1 else 0].pop(field)


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("compare.json", _without("seed"), r"compare\.json: field 'seed' is missing"),
        ("compare.json", _without("policies"), r"compare\.json: field 'policies' is missing"),
        ("compare.json", lambda rows: rows[0].update(policies=["sft"] * 2), r"compare\.json: field 'policies' is sft,"),
        ("compare.json", lambda rows: rows[0].update(seed="x"), r"compare\.json: field 'seed' is 'x'"),
        ("compare.json", lambda rows: rows[0].update(policies=["sft"]), r"responses\.parquet: row 2: policy 'ppo'"),
        ("prompts.jsonl", _without("prompt_id"), r"prompts\.jsonl: line 2: field 'prompt_id' is missing"),
        ("prompts.jsonl", _without("messages"), r"prompts\.jsonl: line 2: field 'messages'"),
        ("prompts.jsonl", lambda rows: rows.append(rows[0]), r"prompts\.jsonl: line 4: prompt_id 'p-0000' occurs"),
        ("prompts.jsonl", lambda rows: rows.pop(), r"responses\.parquet: row 5: prompt 'p-0002' is not in prompts"),
        ("prompts.jsonl", lambda rows: rows.clear(), r"prompts\.jsonl: no prompts"),
    ],
)  # fmt: skip
def test_settings_and_prompts_that_are_wrong(
    make_folder: MakeFolder, file: str, change: Callable[[list[dict[str, Any]]], Any], message: str
) -> None:
    folder = make_folder(num_prompts=3)
    spoil(folder, file, change)
    with pytest.raises(ValueError, match=message):
        write_comparison_report(folder)
    assert not (folder / "report.html").exists()


@pytest.mark.parametrize("file", ["compare.json", "prompts.jsonl", "responses.parquet", "verdicts.parquet"])
def test_missing_and_broken_files_are_named(make_folder: MakeFolder, file: str) -> None:
    folder = make_folder(num_prompts=3)
    (folder / file).write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=re.escape(str(folder / file))):
        write_comparison_report(folder)
    (folder / file).unlink()
    with pytest.raises(ValueError, match=re.escape(f"{folder / file}: no such file")):
        write_comparison_report(folder)


def test_rows_that_contradict_each_other_are_named(make_folder: MakeFolder) -> None:
    folder = make_folder(num_prompts=3)
    responses, verdicts = read_responses(folder / "responses.parquet"), read_verdicts(folder / "verdicts.parquet")
    write_rows(folder / "responses.parquet", [*responses, responses[0]])
    with pytest.raises(ValueError, match=r"responses\.parquet: row 7: response 0 of 'sft' to prompt 'p-0000' occurs"):
        write_comparison_report(folder)
    write_rows(folder / "responses.parquet", responses[:-1])
    with pytest.raises(ValueError, match=r"verdicts\.parquet: row 5: it is of response 0 of 'ppo' to prompt 'p-0002'"):
        write_comparison_report(folder)
    write_rows(folder / "responses.parquet", responses)
    write_rows(folder / "verdicts.parquet", [verdicts[0], *verdicts])
    with pytest.raises(ValueError, match=r"verdicts\.parquet: verdict 1 \(from 0\), prompt 'p-0000'.* given twice"):
        write_comparison_report(folder)
    table = parquet.read_table(folder / "verdicts.parquet").slice(1)
    shares = pyarrow.array([0.5, 1.5, *[0.5] * (len(verdicts) - 2)])
    parquet.write_table(table.set_column(7, "preference_a", shares), folder / "verdicts.parquet")
    with pytest.raises(ValueError, match=r"verdicts\.parquet: row 2: prompt 'p-0000': preference_a is 1\.5"):
        write_comparison_report(folder)
    table = pyarrow.table({"prompt_id": ["p-0000"]})
    parquet.write_table(table, folder / "verdicts.parquet")
    with pytest.raises(ValueError, match=r"verdicts\.parquet: found columns prompt_id"):
        write_comparison_report(folder)
    write_rows(folder / "verdicts.parquet", verdicts)
    (folder / "measures.json").write_text("[]")
    with pytest.raises(ValueError, match=r"measures\.json: a JSON object was expected"):
        write_comparison_report(folder)
