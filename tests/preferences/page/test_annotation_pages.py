"""Criteria and edits on the page: as forms without JavaScript, by keyboard, and for the lead."""

import hashlib
import html
import json
import re

import pytest

from preferences.annotations import Annotations, CriterionRatings
from preferences.page.config import LabelCriterion, LabelingConfig
from preferences.page.forms import max_edit
from preferences.records import Message, Task

CONFIG = LabelingConfig(
    task_order="arrival",
    asks_ratings=False,
    flags=(),
    criteria=(LabelCriterion(name="helpful", question="Does it help?"), LabelCriterion(name="correct", kind="yes_no")),
    asks_edits=True,
)
TASK = Task(
    "t1", (Message("user", "Why?"),), ("It is **never** so.\nNever, I say.", "Because it is."), ("x", "y")
)  # fmt: skip


def hidden(page):
    return dict(re.findall(r'type="hidden" name="(\w+)" value="([^"]*)"', page.text))


def order_of(page):
    """The canonical index of the response at each position."""
    first = re.search(r'name="edit_0"[^>]*>\n(.*?)</textarea>', page.text, re.DOTALL)
    return (0, 1) if html.unescape(first[1]) == TASK.responses[0] else (1, 0)


def filled(page, *, edit="It is never so."):
    """A whole answer, as a browser without JavaScript sends it: every text field, with \\r\\n."""
    order = order_of(page)
    fields = hidden(page)
    for place, index in enumerate(order):
        text = (edit if index == 0 else TASK.responses[1]).replace("\n", "\r\n")
        own = {"rank": index + 1, "criterion_0": 7 - index, "criterion_1": 1 - index, "edit": text}
        fields |= {f"{name}_{place}": str(value) for name, value in own.items()}
    return fields


def test_a_form_without_javascript(world, visit):
    world.add(TASK)
    ann = visit("ann", CONFIG)
    page = ann.get("/task")
    assert "Helpful (1 to 7): Does it help?" in page.text
    assert 'aria-label="A: Correct: yes"' in page.text
    assert ann.post("/task/answer", data=filled(page)).status_code == 200
    assert len(re.findall('<details class="edit">', page.text)) == 2  # closed
    (judgment,) = world.store.judgments("main")
    criteria = (CriterionRatings("helpful", (7, 6)), CriterionRatings("correct", (1, 0)))
    assert judgment.annotations == Annotations(criteria, ("It is never so.", ""))
    assert judgment.ranks == (1, 2)

    # The lead reads it, and it is filled in for a change.
    lead = visit("eve", CONFIG, has_read=False)
    text = lead.get("/lead/task?task=t1").text
    assert "Better version of" in text
    assert "helpful A" in text
    change = ann.get(re.search(r'href="(/task\?task=[^"]+)"', ann.get("/answers").text)[1])
    place = order_of(page).index(0)
    assert f'name="edit_{place}"' in change.text
    checked = re.findall(r'name="(criterion_\d_\d)" value="(\d)"[^>]* checked', change.text)
    assert dict(checked) == {
        f"criterion_0_{place}": "7", f"criterion_1_{place}": "1",
        f"criterion_0_{1 - place}": "6", f"criterion_1_{1 - place}": "0",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"criterion_0_0": ""}, "Response A has no helpful."),
        ({"criterion_0_1": "8"}, "The helpful of response B is 8; it must be 1 to 7."),
        ({"criterion_1_1": "2"}, "The correct of response B is 2; it must be 0 to 1."),
        ({"edit_0": "x" * 20_001}, "Your version of response A has 20,001 characters"),
    ],
)
def test_mistakes_are_named_and_nothing_is_lost(world, visit, change, message):
    world.add(TASK)
    ann = visit("ann", CONFIG)
    fields = filled(ann.get("/task")) | change
    page = ann.post("/task/answer", data=fields)
    assert (page.status_code, message in html.unescape(page.text)) == (422, True), page.text
    if "edit_0" not in change:  # only the changed version is open, although browsers send other line breaks
        assert page.text.count('<details class="edit" open>') == 1
    assert world.store.judgments("main") == []


def test_responses_that_no_form_could_hold_are_not_offered_for_an_edit(world, visit):
    long = ("字" * 19_999, "b" * 20_001)
    world.add(Task("t1", (Message("user", "?"),), long, ("x", "y")))
    text = visit("ann", CONFIG).get("/task").text
    assert text.count("is too long to be edited here") == 1
    assert len(re.findall(r'name="edit_\d"', text)) == 1
    assert max_edit(["字" * 19_999] * 2) == 20_000
    assert max_edit(["字" * 19_999] * 3) == 0


def test_other_criteria_are_another_version_and_none_are_none():
    plain = LabelingConfig()
    changed = {CONFIG.model_copy(update={"asks_edits": False}).version, CONFIG.version, plain.version}
    assert len(changed) == 3
    content = json.dumps([plain.instructions, plain.flags, plain.asks_ratings])  # as before there were criteria
    assert plain.version == hashlib.sha256(content.encode()).hexdigest()[:12]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('criteria = [{ name = "a" }, { name = "a" }]', "criteria: the name 'a'; different names"),
        ('criteria = [{ name = "prompt" }]', "criteria: the name 'prompt'"),
        ('criteria = [{ name = "a", highest = 12 }]', "criteria.0.highest: Input should be less than or equal to 9"),
        ('criteria = [{ nam = "a" }]', "criteria.0.nam: unknown key; did you mean name?"),
        ('criteria = "helpful"', "criteria: a list was expected, found 'helpful'"),
        ('criteria = ["helpful"]', "criteria.0: a table was expected, found 'helpful'"),
    ],
)
def test_a_wrong_configuration_is_named(tmp_path, text, message):
    path = tmp_path / "label.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"label\.toml") as error:
        LabelingConfig.load(path)
    assert message in str(error.value)
