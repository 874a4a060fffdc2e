"""Ratings of each turn and calls of tools on the page: as forms without JavaScript, in the API, and for the lead."""

import html
import json
import re

import pytest

from preferences.annotations import TurnRating
from preferences.page.config import LabelCriterion, LabelingConfig
from preferences.records import Message, Task
from tests.preferences.test_turns import PROMPT, TASK, TURNS

CONFIG = LabelingConfig(
    task_order="arrival",
    asks_ratings=False,
    flags=(),
    criteria=(
        LabelCriterion(name="polite", highest=3),
        LabelCriterion(name="right", kind="yes_no", question="Is it right?", each_turn=True),
    ),
)
EASY = LabelingConfig(asks_ratings=False, flags=(), criteria=(LabelCriterion(name="right", each_turn=True),))


def hidden(page):
    return dict(re.findall(r'type="hidden" name="(\w+)" value="([^"]*)"', page.text))


def filled(page, **changes):
    ranks = {f"rank_{place}": "1" for place in range(2)}
    criteria = {f"criterion_{number}_{place}": "1" for number in range(2) for place in range(2)}
    turns = {"turn_1_2": "1", "turn_1_4": "0"}
    return hidden(page) | ranks | criteria | turns | changes


def test_each_turn_is_rated_without_javascript_and_the_lead_sees_it(world, visit):
    world.add(TASK)
    ann = visit("ann", CONFIG)
    page = ann.get("/task")
    # The ratings stand next to their turns, outside of the form that they belong to.
    names = re.findall(r'<input type="radio" form="answer" name="(turn_\d_\d)" value="(\d)"', page.text)
    assert names == [("turn_1_2", "1"), ("turn_1_2", "0"), ("turn_1_4", "1"), ("turn_1_4", "0")]
    assert 'aria-label="Turn 3: Right: Is it right?: yes"' in page.text
    assert ann.post("/task/answer", data=filled(page)).status_code == 200
    (judgment,) = world.store.judgments("main")
    assert judgment.annotations.turns == (TurnRating(2, "right", 1), TurnRating(4, "right", 0))

    lead = visit("eve", CONFIG, has_read=False)
    assert "turn 3: right 1<br>turn 5: right 0" in lead.get("/lead/search?kind=any").text
    assert "turn 3: right 1<br>turn 5: right 0" in lead.get("/lead/task?task=t1").text
    quality = re.sub(r"<[^>]*>|\s+", " ", lead.get("/lead/quality").text)
    assert re.search(r"Earlier turns.*right +2 +0\.50", quality), quality

    # The form is filled in for a change, which keeps the old answer as a revision.
    change = ann.get(re.search(r'href="(/task\?task=[^"]+)"', ann.get("/answers").text)[1])
    checked = re.findall(r'name="(turn_\d_\d)" value="(\d)"[^>]* checked', change.text)
    assert dict(checked) == {"turn_1_2": "1", "turn_1_4": "0"}
    ann.post("/task/answer", data=filled(change, turn_1_4="1"))
    assert [one.annotations.turn_ratings_by("right") for one in world.store.judgments("main")] == [
        {2: 1, 4: 0},
        {2: 1, 4: 1},
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"turn_1_2": ""}, "Turn 3 has no right."),
        ({"turn_1_2": "", "turn_1_4": ""}, "Turns 3, 5 have no right."),
        ({"turn_1_4": "2"}, "The right of turn 5 is 2; it must be 0 to 1."),
    ],
)
def test_a_missing_rating_is_named_and_nothing_is_lost(world, visit, change, message):
    world.add(TASK)
    ann = visit("ann", CONFIG)
    page = ann.post("/task/answer", data=filled(ann.get("/task")) | change)
    assert (page.status_code, message in html.unescape(page.text)) == (422, True)
    given = {name for name, value in {"turn_1_2": "1", "turn_1_4": "0", **change}.items() if value in ("0", "1")}
    assert set(re.findall(r'name="(turn_\d_\d)"[^>]* checked', page.text)) == given
    assert world.store.judgments("main") == []


def test_a_prompt_without_earlier_turns_asks_for_none(world, visit):
    world.add(Task("t1", (Message("user", "Why?"),), ("a", "b"), ("x", "y")))
    ann = visit("ann", CONFIG)
    page = ann.get("/task")
    assert "turn_1" not in page.text
    ranks = {name: value for name, value in filled(page).items() if not name.startswith("turn")}
    assert ann.post("/task/answer", data=ranks).status_code == 200
    assert world.store.judgments("main")[0].annotations.turns == ()


def test_calls_and_results_are_shown_with_all_their_characters(world, visit):
    long = "<b>row</b> 1\n" * 100
    code = {"function": {"name": "run", "arguments": {"code": "print(1)\nprint('<i>')", "tries": 2}}, "id": "c9"}
    prompt = (
        *PROMPT[:-1],
        Message("user", "Run it."),
        Message.of({"role": "assistant", "content": "", "tool_calls": [{"type": "function", **code}]}),
        Message.of({"role": "tool", "content": long, "tool_call_id": "c9"}),
    )
    world.add(Task("t1", prompt, ("a", "b"), ("x", "y")))
    text = visit("ann", CONFIG).get("/task").text
    assert "Calls <code>search</code>" in text
    assert '<dt>query</dt><dd class="raw" dir="auto">&#34;Dante&#39;s death&#34;</dd>' in text.replace(
        "&quot;", "&#34;"
    ).replace("&#x27;", "&#39;")
    assert html.unescape(re.search(r"<dt>code</dt><dd[^>]*>(.*?)</dd>", text, re.DOTALL)[1]) == "print(1)\nprint('<i>')"
    assert "Result of <code>search</code>" in text
    assert "Result of <code>run</code>" in text
    assert "(1,300 characters)" in text
    assert "<b>row</b>" not in text
    assert text.count("&lt;b&gt;row&lt;/b&gt; 1\n") >= 100
    assert "Tools that the assistant may call: search" in text


def test_programs_rate_turns_and_add_conversations_with_tools(world, visit):
    lead = visit("eve", EASY, has_read=False)
    token = lead.post("/api/session", json={"name": "eve", "key": world.keys["eve"]}).json()["token"]
    task = {"task_id": "t1", "prompt": TURNS, "responses": list(TASK.responses), "sources": ["x", "y"]}
    headers = {"Authorization": f"Bearer {token}"}
    wrong = {**task, "prompt": [TURNS[1], {"role": "tool", "content": "1"}]}
    refused = lead.post("/api/tasks", json={"batch": "main", "tasks": [wrong]}, headers=headers)
    assert (refused.status_code, "prompt[1].role" in refused.text) == (409, True), refused.text
    nested = []
    for _ in range(250):
        nested = [nested]
    deep = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": nested}}}]}
    refused = lead.post("/api/tasks", json={"batch": "main", "tasks": [{**task, "prompt": [deep]}]}, headers=headers)
    assert (refused.status_code, "nested more than 200 levels" in refused.text) == (409, True), refused.text
    added = lead.post("/api/tasks", json={"batch": "main", "tasks": [task]}, headers=headers)
    assert added.status_code == 204, added.text
    assert world.store.tasks("main")[0].task.prompt == PROMPT

    ann = visit("ann", EASY)
    token = ann.post("/api/session", json={"name": "ann", "key": world.keys["ann"]}).json()["token"]
    headers = {"Authorization": f"Bearer {token}"}
    leased = ann.post("/api/lease", headers=headers).json()
    assert leased["prompt"] == TURNS
    said = {"form": leased["form"], "ranks": [1, 2], "criteria": {"right": [7, 1]}}
    for turns, status, words in (
        ({}, 409, "0 ratings of earlier turns were given; one per turn of the assistant (it has 2) by right"),
        ({"right": [1]}, 409, "right has 1 ratings; 2 were expected"),
        ({"right": [1, 8]}, 422, "right: only 1, 2"),
        ({"kind": [1, 1]}, 422, "ratings by right expected"),
    ):
        refused = ann.post("/api/answers", json={**said, "turns": turns}, headers=headers)
        assert (refused.status_code, words in refused.text) == (status, True), refused.text
    assert ann.post("/api/answers", json={**said, "turns": {"right": [7, 2]}}, headers=headers).status_code == 204
    assert world.store.judgments("main")[0].annotations.turn_ratings_by("right") == {2: 7, 4: 2}


def test_the_next_version_depends_on_it_and_others_stay():
    without = LabelCriterion(name="right")
    versions = {LabelingConfig(criteria=(one,)).version for one in (without, EASY.criteria[0])}
    assert len(versions) == 2
    as_before = LabelingConfig(instructions="Rank them.", criteria=(without,))
    assert as_before.version == "f5f50c9467fc"  # as before there was `each_turn`


def test_a_lead_downloads_the_labels_of_turns_by_the_criterion_that_they_choose(world, visit):
    criteria = tuple(LabelCriterion(name=name, kind="yes_no", each_turn=True) for name in ("right", "brief"))
    config = LabelingConfig(asks_ratings=False, flags=(), task_order="arrival", criteria=criteria)
    world.add(TASK)
    ann = visit("ann", config)
    both = {f"turn_0_{turn}": "1" for turn in (2, 4)}
    ann.post("/task/answer", data=filled(ann.get("/task"), **both))
    lead = visit("eve", config, has_read=False)
    progress = lead.get("/lead").text
    address = re.search(r'href="(/lead/export\?[^"]*format=turns[^"]*)"', progress)[1].replace("&amp;", "&")
    page = lead.get(address)
    assert "Labelers rated turns by several criteria" in page.text
    assert re.findall(r"<option[^>]*>(\w+)", page.text) == ["brief", "right"]
    assert "/lead/export/rows" not in page.text
    page = lead.get(f"{address}&criterion=brief")
    (rows,) = re.findall(r'href="(/lead/export/rows[^"]*)"', page.text)
    found = [json.loads(line)["labels"] for line in lead.get(rows.replace("&amp;", "&")).text.splitlines()]
    assert found == [[True, False, True], [None, None, True]]
    # One criterion needs no choice.
    assert "2 rows" in lead.get("/lead/export?batch=main&format=criteria").text
