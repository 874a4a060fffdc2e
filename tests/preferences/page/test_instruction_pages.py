"""Instructions: the quiz with feedback, what is new in a version, and long conversations on the task's page."""

import re

import pytest

from preferences.page.config import LabelingConfig, QuizQuestion
from preferences.page.instruction_pages import Feedback, Line, changes, retry
from preferences.records import Message, Task

QUIZ = (
    QuizQuestion(
        question="Two responses are equally good?", choices=("Skip", "Same rank"), answer="Same rank",
        explanation="Ties are allowed.",
    ),
    QuizQuestion(question="Is long better?", choices=("yes", "no"), answer="no", explanation="Length does not count."),
)  # fmt: skip
CONFIG = LabelingConfig(asks_ratings=False, task_order="arrival", instructions="Rank.\n\nTies are fine.", quiz=QUIZ)
TASK = Task("t1", (Message("user", "Say it"),), ("one response", "another"), ("x", "y"))


def hidden(page):
    return dict(re.findall(r'type="hidden" name="(\w+)" value="([^"]*)"', page.text))


def test_tasks_come_after_the_quiz_with_feedback_on_each_try(world, visit):
    world.add(TASK)
    ann = visit("ann", CONFIG, has_read=False)
    page = ann.get("/task")
    assert (page.url.path, "Ties are allowed." in page.text) == ("/instructions", False)
    fields = hidden(page)
    page = ann.post("/instructions", data=fields | {"quiz_0": "Skip"})
    assert (page.status_code, "Answer every question." in page.text) == (422, True)
    page = ann.post("/instructions", data=fields | {"quiz_0": "Same rank", "quiz_1": "yes"})
    assert page.status_code == 422
    assert "1 of 2 answers is right. Read the explanation and answer the other again." in page.text
    assert "<strong>Right.</strong> Ties are allowed." in page.text
    assert "<strong>Not right.</strong> Length does not count." in page.text
    assert re.findall(r'value="([^"]*)" checked', page.text) == ["Same rank", "yes"]
    assert ann.get("/task").url.path == "/instructions"
    page = ann.post("/instructions", data=fields | {"quiz_0": "Same rank", "quiz_1": "no"})
    assert (page.status_code, "All of it is right." in page.text) == (200, True)
    assert "one response" in ann.get("/task").text
    tries = [event.subject for event in world.accounts.audit_log() if event.action == "took the quiz"]
    assert tries == [f"version {CONFIG.version}: {num} of 2 right" for num in (2, 1)]
    # Leads read the instructions without it, and another quiz is another version.
    assert "quiz_0" not in visit("eve", CONFIG, has_read=False).get("/instructions").text
    other = CONFIG.model_copy(update={"quiz": QUIZ[:1]})
    assert visit("ann", other, has_read=False).get("/task").url.path == "/instructions"


def test_the_quiz_by_the_api(world, visit):
    world.add(TASK)
    client = visit("ann", CONFIG, has_read=False)
    head = {"Authorization": f"Bearer {world.accounts.open_session('ann')}"}

    def post(path, body=None):
        return client.post(f"/api/instructions/{path}", json=body, headers=head)

    quiz = client.get("/api/instructions", headers=head).json()["quiz"]
    assert quiz[1] == {"question": "Is long better?", "choices": ["yes", "no"]}
    assert post("read").status_code == 403
    assert post("quiz", {"answers": ["no"]}).status_code == 409
    found = post("quiz", {"answers": ["Same rank", "yes"]}).json()
    assert found[1] == {"chosen": "yes", "is_right": False, "explanation": "Length does not count."}
    assert client.post("/api/lease", headers=head).json() == {"waiting": "instructions"}
    assert all(one["is_right"] for one in post("quiz", {"answers": ["Same rank", "no"]}).json())
    assert "form" in client.post("/api/lease", headers=head).json()


def test_what_is_new_is_shown_first(world, visit):
    world.add(TASK)
    plain = CONFIG.model_copy(update={"quiz": ()})
    visit("ann", plain)
    newer = plain.model_copy(update={"instructions": "Rank.\n\nTies are <b>rare</b>.\nLength does not count."})
    page = visit("ann", newer, has_read=False).get("/instructions")
    assert "What is new since you read them" in page.text
    assert '<del><span class="unseen">Removed: </span>Ties are fine.</del>' in page.text
    assert '<ins><span class="unseen">Added: </span>Ties are &lt;b&gt;rare&lt;/b&gt;.</ins>' in page.text
    assert "What is new" not in visit("bob", newer, has_read=False).get("/instructions").text  # who reads it first
    marks = plain.model_copy(update={"flags": ("rude",)})
    assert "The text is the same." in visit("ann", marks, has_read=False).get("/instructions").text


@pytest.mark.parametrize(
    ("tries", "words"),
    [
        ([(False, "")], "Your answer is not right. Read the instructions and answer again."),
        ([(False, "Ties count.")], "Your answer is not right. Read the explanation and answer again."),
        ([(False, "")] * 3, "None of your 3 answers is right. Read the instructions and answer again."),
        (
            [(True, "a"), (False, ""), (False, "")],
            "1 of 3 answers is right. Read the instructions and answer the others",
        ),
        (
            [(True, ""), (True, ""), (False, "a")],
            "2 of 3 answers are right. Read the explanation and answer the other ",
        ),
    ],
)
def test_a_try_that_is_not_all_right_says_what_to_read(tries, words):
    assert retry([Feedback("x", *one) for one in tries]).startswith(words)


def test_changes_leave_out_what_is_the_same():
    before = "\n".join("abcdefghij")
    after = before.replace("b", "B").replace("i\n", "")
    assert changes(before, before) == []
    assert changes(before, after) == [
        Line("kept", "a"), Line("removed", "b"), Line("added", "B"), Line("kept", "c"),
        Line("kept", "h", is_after_gap=True), Line("removed", "i"), Line("kept", "j"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "question",
    ['choices = ["a", "b"], answer = "c"', 'choices = ["a", "a"], answer = "a"', 'choices = ["a"], answer = "a"'],
)
def test_a_question_without_a_right_choice_is_refused(tmp_path, question):
    path = tmp_path / "label.toml"
    path.write_text(f'quiz = [{{ question = "Why?", {question} }}]')
    with pytest.raises(ValueError, match=r"label\.toml: quiz\.0"):
        LabelingConfig.load(path)


def test_a_long_conversation_is_folded_but_for_its_last_turns(world, visit):
    turns = [Message(("user", "assistant")[number % 2], f"word{number}") for number in range(9)]
    world.add(Task("t1", tuple(turns), ("a", "b"), ("x", "y")), Task("t2", tuple(turns[:5]), ("a", "b"), ("x", "y")))
    plain = CONFIG.model_copy(update={"quiz": ()})
    ann = visit("ann", plain)
    text = ann.get("/task").text
    folded, last = re.search(r'id="earlier">(.*?)</details>\s*<div class="message \w+">(.*)', text, re.DOTALL).groups()
    assert "5 earlier turns" in folded
    assert [f"word{number}" in last for number in range(9)] == [False] * 5 + [True] * 4
    assert '<span class="turn-number">turn 9 of 9</span>' in last
    page = ann.get("/task")
    ann.post("/task/skip", data=hidden(page) | {"reason": "x"})
    assert 'id="earlier"' not in ann.get("/task").text
