"""Saved answers: which item a row answers, by id, by text and in every layout of published files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evaluation.evaluate.saved import SavedAnswers, SavedModel
from evaluation.suites.ifeval import SUITE as IFEVAL
from evaluation.suites.suite import Item, Request, Tools

RED, BLUE = "Is red a colour?", "Is blue a colour?"
Open = Callable[..., SavedModel]


def item(item_id: str, *texts: str) -> Item:
    """Returns an item that asks the texts, the user's and the assistant's in turn."""
    roles = ("user", "assistant") * len(texts)
    return Item(item_id, tuple({"role": role, "content": text} for role, text in zip(roles, texts, strict=False)))


ITEMS = [item("q0", RED), item("q1", BLUE)]


@pytest.fixture
def opened(tmp_path: Path) -> Open:
    """Returns a file of rows as a model of a suite with these items."""

    def of_rows(*rows: dict[str, Any], items: list[Item] = ITEMS) -> SavedModel:
        (tmp_path / "saved.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return SavedAnswers.open("old", str(tmp_path / "saved.jsonl")).of_items("colours", items)

    return of_rows


def said(model: SavedModel, *items: Item) -> list[str]:
    answers = model.answer([Request(one.messages, item_id=one.item_id) for one in items])
    return [answer.failure or answer.text for answer in answers]


def test_an_id_that_contradicts_the_question_is_refused(opened: Open) -> None:
    with pytest.raises(ValueError, match=r"saved.jsonl: line 2: field 'item_id' is 'q0', but the row asks something"):
        opened({"item_id": "q1", "output": "yes"}, {"item_id": "q0", "prompt": BLUE, "output": "no"})
    with pytest.raises(ValueError, match=r"line 1: field 'item_id' is 'q0', .* this item, 'Is red a colour\?'"):
        opened({"item_id": "q0", "prompt": "Is green one?", "output": "no"})


def test_a_field_id_may_number_the_rows_so_the_question_overrules_it(opened: Open) -> None:
    items = [item("0", RED), item("1", BLUE)]
    model = opened({"id": 0, "prompt": BLUE, "output": "blue"}, {"id": 1, "prompt": RED, "output": "red"}, items=items)
    assert said(model, *items) == ["red", "blue"]
    assert said(opened({"id": 1, "output": "blue"}, items=items), items[1]) == ["blue"]


def test_a_question_may_be_saved_with_what_was_sent_around_it(opened: Open) -> None:
    assert said(opened({"item_id": "q0", "prompt": f"Think.\n\n{RED} Answer:", "output": "yes"}), ITEMS[0]) == ["yes"]


def test_an_unknown_id_leaves_the_question_to_decide(opened: Open) -> None:
    assert said(opened({"uid": "u77", "prompt": BLUE, "output": "yes"}), *ITEMS) == [
        "the file has no answer to item 'q0'",
        "yes",
    ]


def test_an_item_without_a_row_gets_no_other_items_answer(opened: Open) -> None:
    same = [item("q0", RED), item("q1", RED)]
    by_id = opened({"item_id": "q0", "output": "yes"}, items=same)
    assert said(by_id, *same) == ["yes", "the file has no answer to item 'q1'"]
    by_text = opened({"prompt": RED, "output": "yes"}, items=same)
    assert said(by_text, *same) == ["yes", "yes"]
    both = opened({"item_id": "q0", "output": "yes"}, {"item_id": "q1", "output": "no"}, items=same)
    (answer,) = both.answer([Request(same[0].messages)])  # a suite that asks without an id
    assert answer.failure == "the file has different answers to items that ask the same, q0, q1"
    with pytest.raises(ValueError, match=r"line 2: item 'q0' is already answered in .*line 1"):
        opened({"item_id": "q0", "output": "yes"}, {"prompt": RED, "output": "no"}, items=same)


def test_rows_that_answer_no_item_are_kept_in_view(opened: Open, tmp_path: Path) -> None:
    model = opened({"item_id": "q7", "output": "a"}, {"item_id": "q0", "output": "b"}, {"prompt": "?", "output": "c"})
    assert list(model.unused) == [f"{tmp_path / 'saved.jsonl'}: line {line}" for line in (1, 3)]


def test_arena_hards_present_layout(opened: Open) -> None:
    """Conversations whose last message is the answer, as {"answer": text} within `content`; also of several turns."""

    def row(*turns: Any, **more: str) -> dict[str, Any]:
        roles = ("user", "assistant") * len(turns)
        return {"messages": [{"role": r, "content": t} for r, t in zip(roles, turns, strict=False)], **more}

    two = item("q2", "Name a colour.", "Red.", "Another one.")
    items = [*ITEMS, two]
    model = opened(
        row(RED, {"answer": "yes, red"}, uid="q0", ans_id="x7", model="old"),
        row(BLUE, "yes, blue", "Sure?", {"answer": "sure"}, model="old"),
        row("Name a colour.", "Red.", "Another one.", "Green.", uid="q2", model="old"),
        items=items,
    )
    assert said(model, *items) == ["yes, red", "yes, blue", "Green."]
    later = [*ITEMS[1].messages, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "Sure?"}]
    (answer,) = model.answer([Request(tuple(later), item_id="q1")])
    assert answer.text == "sure"
    with pytest.raises(ValueError, match=r"line 1: messages\[1\]: field 'content' is null"):
        opened(row(RED, {"text": "no answer"}))
    with pytest.raises(ValueError, match=r"line 1: field 'messages\[0\].role': system, user or assistant was expected"):
        opened({"messages": [RED, {"role": "assistant", "content": "yes"}]})


def test_ifevals_answers_by_key_are_found_without_the_first_instruction(tmp_path: Path) -> None:
    """--max-items may leave out the first instruction of a prompt."""
    kinds = ["punctuation:no_comma", "detectable_format:json_format"]
    prompts = [{"key": 7, "prompt": "No commas.", "instruction_id_list": kinds, "kwargs": [{}, {}]}]
    (tmp_path / "rows.jsonl").write_text(json.dumps(prompts[0]) + "\n")
    (tmp_path / "saved.jsonl").write_text(json.dumps({"key": 7, "response": "[1]"}) + "\n")
    second = IFEVAL.read(str(tmp_path / "rows.jsonl"))[1:]
    model = SavedAnswers.open("old", str(tmp_path / "saved.jsonl")).of_items("ifeval", second)
    (scored,) = IFEVAL.score(model, second, Tools())
    assert (scored.item_id, scored.values["instruction_strict"], scored.answer) == ("7:2", 1.0, "[1]")
