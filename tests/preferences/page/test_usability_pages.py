"""A usability study on the pages: the forms in each labeler's order, the questionnaires, and what is stored."""

import html
import re
from dataclasses import replace

import pytest

from preferences import usability
from preferences.assignment import set_settings
from preferences.page.config import LabelCriterion, LabelingConfig, Screening
from preferences.page.study_config import StudyConfig
from preferences.questionnaire import LOAD, SUS
from preferences.records import Message, Task

PLAIN = LabelingConfig(asks_ratings=False, task_order="arrival")
STUDY = StudyConfig.model_validate(
    {
        "name": "criteria",
        "labelers": ["ann", "bob"],
        "tasks_per_condition": 2,
        "practice_tasks": 0,
        "conditions": [
            {"name": "ranks only", "batch": "study", "flags": [], "instructions": "Rank them."},
            {"name": "with a criterion", "batch": "study", "flags": [], "criteria": [{"name": "helpful"}]},
        ],
    }
)


def make_task(name):
    return Task(name, (Message("user", f"Say {name}"),), (f"{name} a", f"{name} b"), ("x", "y"))


@pytest.fixture
def study(world):
    world.add(*(make_task(f"t{number}") for number in range(4)), batch="study", num_labelers=2)
    world.add(make_task("ordinary"), batch="main", num_labelers=3)
    stored, forms = STUDY.study(PLAIN)
    with world.store.writing() as connection:
        usability.start(connection, stored, STUDY.labelers, world.clock())
    for form in forms:
        world.accounts.store_instructions(form.version, form.instructions, form.flags)
    return stored


def hidden(page):
    return dict(re.findall(r'type="hidden" name="(\w+)" value="([^"]*)"', page.text))


def judge(client, page):
    fields = hidden(page) | {"rank_0": "1", "rank_1": "2"}
    if 'name="criterion_0_0"' in page.text:
        fields |= {"criterion_0_0": "5", "criterion_0_1": "3"}
    return client.post("/task/answer", data=fields)


def said(page, **more):
    """A filled-in questionnaire: load 10, 15, ... and every statement 4."""
    fields = {f"load_{index}": str(10 + 5 * index) for index in range(len(LOAD))}
    return hidden(page) | fields | {f"sus_{index}": "4" for index in range(len(SUS))} | more


def test_a_labeler_goes_through_all_forms(world, visit, study):
    with world.store.reading() as connection:
        people = {one.labeler: one.conditions for one in usability.participants(connection, study.name)}
    assert sorted(people.values()) == [(0, 1), (1, 0)]
    name = next(name for name, order in people.items() if order == (0, 1))
    client = visit(name, PLAIN)
    page = client.get("/task")
    assert page.url.path == "/instructions"
    assert "Rank them." in page.text
    page = client.post("/instructions", data=hidden(page))
    assert ("Which response is best?" in page.text, "Say t" in page.text) == (True, True)
    assert 'name="criterion_0_0"' not in page.text
    assert "2 are left for you" in page.text
    page = judge(client, page)
    assert client.get("/usability").url.path == "/task"  # not before its tasks are done
    page = judge(client, page)
    assert (page.url.path, "form 1 of 2" in page.text) == ("/usability", True)
    assert "rather work with" not in page.text
    for text in (*(scale.question for scale in LOAD), *SUS):
        assert text in html.unescape(page.text)
    first = said(page, comment="  My\r\nname ")
    page = client.post("/usability", data=first)
    assert page.url.path == "/instructions"  # of the next form
    assert client.post("/usability", data=first).url.path == "/instructions"  # sent twice
    page = client.post("/instructions", data=hidden(page))
    assert 'name="criterion_0_0"' in page.text
    page = judge(client, judge(client, page))
    assert "Form 1: ranks only" in page.text
    page = client.post("/usability", data=said(page, preferred="0"))
    assert ("Thank you" in page.text, page.status_code) == (True, 200)

    with world.store.reading() as connection:
        one, other = usability.answers(connection, study.name)
        assert usability.stage_of(connection, name) is None
    assert (one.load, one.sus, one.comment) == ((10, 15, 20, 25, 30, 35), (4,) * 10, "My\nname")
    assert (one.condition, one.preferred) == (0, usability.NOT_ASKED)
    assert (other.condition, other.preferred) == (1, 0)
    versions = [judgment.instructions_version for judgment in world.store.judgments("study")]
    assert versions == [study.conditions[0].version] * 2 + [study.conditions[1].version] * 2
    page = client.get("/task")  # through: ordinary tasks, with the server's own form
    page = client.post("/instructions", data=hidden(page))
    assert ("Say ordinary" in page.text, 'name="flags_0"' in page.text) == (True, True)


def test_an_answer_is_changed_with_its_own_form(world, visit, study):
    with world.store.reading() as connection:
        people = {one.conditions: one.labeler for one in usability.participants(connection, study.name)}
    client = visit(people[1, 0], PLAIN)
    page = client.post("/instructions", data=hidden(client.get("/task")))
    page = judge(client, judge(client, page))
    page = client.post("/instructions", data=hidden(client.post("/usability", data=said(page))))
    assert 'name="criterion_0_0"' not in page.text
    handle = re.search(r'href="(/task\?task=[^"]+)"', client.get("/answers").text)[1]
    change = client.get(handle)
    assert 'name="criterion_0_0"' in change.text
    assert judge(client, change).status_code == 200
    last = world.store.judgments("study")[-1]
    assert (last.instructions_version, last.revision) == (study.conditions[1].version, 1)


def test_mistakes_are_named_and_nothing_is_lost(world, visit, study):
    client = visit("ann", PLAIN)
    page = client.post("/instructions", data=hidden(client.get("/task")))
    page = judge(client, judge(client, page))
    fields = said(page, comment="x" * 4_001)
    del fields["load_0"]
    page = client.post("/usability", data=fields | {"sus_9": "6", "load_3": "33"})
    assert page.status_code == 422
    for words in ("Not answered: Mental demand, Performance.", "Not answered: statement 10.", "4,001 characters"):
        assert words in page.text
    assert re.search(r'name="load_5" value="35"[^>]* checked', page.text)
    assert "x" * 4_001 in page.text
    with world.store.reading() as connection:
        assert usability.answers(connection, study.name) == ()
    other = visit("bob", PLAIN)
    assert other.post("/usability", data=said(page)).status_code == 403  # another session's form
    refused = client.post("/usability", data=said(page, condition="7"))
    assert refused.url.path == "/usability"


def test_the_last_questionnaire_asks_which_form_is_preferred(world, visit, study):
    client = visit("ann", PLAIN)
    page = client.get("/task")
    for _ in range(2):
        page = client.post("/instructions", data=hidden(page))
        page = judge(client, judge(client, page))
        fields = said(page)
        page = client.post("/usability", data=fields)
    assert (page.status_code, "Say which form you would rather work with" in page.text) == (422, True)
    assert client.post("/usability", data=fields | {"preferred": "none"}).status_code == 200
    with world.store.reading() as connection:
        assert usability.answers(connection, study.name)[-1].preferred == usability.NO_PREFERENCE


def test_others_get_none_of_the_studys_tasks(world, visit, study):
    world.join("cy")
    client = visit("cy", PLAIN)
    page = client.get("/task")
    assert "Say ordinary" in page.text
    assert "Nothing to judge" in judge(client, page).text
    assert client.get("/usability").url.path == "/task"
    lead = visit("eve", PLAIN, has_read=False)
    assert 'name="criterion_0_0"' not in lead.get("/lead/task?task=t0").text  # the form of the first condition
    with world.store.writing() as connection:
        usability.stop(connection, study.name, world.clock())
    assert "Say t0" in client.get("/task").text


@pytest.mark.usefixtures("study")
def test_new_labelers_are_screened_before_a_study(world, visit):
    world.add(replace(make_task("gold"), gold_ranks=(1, 2)), batch="gold", num_labelers=9)
    config = PLAIN.model_copy(update={"screening": Screening(batch="gold", min_tasks=1, min_accuracy=0.01)})
    client = visit("ann", config)
    page = client.get("/task")
    assert "Say gold" in page.text
    lease = world.store.reopened("ann", "gold")
    ranks = {f"rank_{place}": str(index + 1) for place, index in enumerate(lease.order)}
    page = client.post("/task/answer", data=hidden(page) | ranks)
    assert page.url.path == "/instructions"


def test_by_the_api(world, study):
    from fastapi.testclient import TestClient

    from preferences.page.app import make_app

    client = TestClient(make_app(world.store, world.accounts, PLAIN, clock=world.clock))
    head = {"Authorization": f"Bearer {world.accounts.open_session('ann')}"}
    assert client.post("/api/lease", headers=head).json() == {"waiting": "instructions"}
    said_first = client.get("/api/instructions", headers=head).json()
    assert said_first["version"] in {one.version for one in study.conditions}
    client.post("/api/instructions/read", headers=head)
    for _ in range(2):
        task = client.post("/api/lease", headers=head).json()
        body = {"form": task["form"], "ranks": [1, 2]}
        if task["criteria"]:
            assert client.post("/api/answers", json=body, headers=head).status_code == 422
            body["criteria"] = {"helpful": [1, 7]}
        assert client.post("/api/answers", json=body, headers=head).status_code == 204
        assert client.get("/api/usability", headers=head).status_code in (200, 404)
    assert client.post("/api/lease", headers=head).json() == {"waiting": "questionnaire"}
    asked = client.get("/api/usability", headers=head).json()
    assert ([scale["name"] for scale in asked["load"]], asked["sus"]) == ([scale.name for scale in LOAD], list(SUS))
    assert (asked["place"], asked["asks_which_is_preferred"]) == (1, {})
    body = {"condition": asked["condition"], "load": [5, 10, 15, 20, 25, 30], "sus": [3] * 10, "comment": "ok"}
    assert client.post("/api/usability", json=body | {"load": [1] * 6}, headers=head).status_code == 422
    assert client.post("/api/usability", json=body | {"preferred": 1}, headers=head).status_code == 409
    for _ in range(2):
        assert client.post("/api/usability", json=body, headers=head).status_code == 204
    next_one = body | {"condition": 1 - asked["condition"]}
    assert client.post("/api/usability", json=next_one, headers=head).status_code == 409  # not due yet
    assert client.get("/api/usability", headers=head).status_code == 404
    assert client.get("/api/usability/criteria", headers=head).status_code == 403
    lead = {"Authorization": f"Bearer {world.accounts.open_session('eve')}"}
    found = client.get("/api/usability/criteria", headers=lead).json()
    assert found["measures"][0]["by_condition"][asked["condition"]]["interval"]["mean"] == 17.5
    assert client.get("/api/usability/none", headers=lead).status_code == 404
    assert client.get("/api/usability").status_code == 401


@pytest.mark.usefixtures("study")
def test_a_lead_reads_the_results(visit):
    lead = visit("eve", PLAIN, has_read=False)
    assert "0 of 2 labelers have finished" in lead.get("/lead/usability").text
    for name in ("ann", "bob"):
        client = visit(name, PLAIN)
        page = client.get("/task")
        for _ in range(2):
            page = client.post("/instructions", data=hidden(page))
            page = judge(client, judge(client, page))
            page = client.post("/usability", data=said(page, preferred="0", comment="<b>fine</b>"))
    page = lead.get("/lead/usability")
    assert "2 of 2 labelers have finished all forms. The study is running." in page.text
    assert "2 labelers: an interval needs at least 3" in page.text
    assert page.text.count("&lt;b&gt;fine&lt;/b&gt;") == 4
    assert "ann" not in page.text.replace("annot", "")
    unknown = lead.get("/lead/usability?study=other")
    assert (unknown.status_code, "<h1>Not possible</h1>" in unknown.text) == (409, True)
    assert client.get("/lead/usability").status_code == 403
    assert "/lead/usability" in lead.get("/lead/quality").text


def test_only_the_forms_own_turns_are_rated(world, visit):
    """The server's form rates turns, and one condition's does; the other must neither ask nor expect them."""
    turns = (Message("user", "Say it"), Message("assistant", "it"), Message("user", "Again"))
    for number in range(2):
        world.add(replace(make_task(f"t{number}"), prompt=turns), batch="study", num_labelers=2)
    base = LabelingConfig(asks_ratings=False, criteria=(LabelCriterion(name="right", each_turn=True),))
    conditions = [
        {"name": "responses", "batch": "study", "criteria": []},
        {"name": "turns", "batch": "study", "criteria": [{"name": "polite", "each_turn": True}]},
    ]
    stored, _ = StudyConfig(
        name="turns", labelers=("ann", "bob"), tasks_per_condition=1, practice_tasks=0, conditions=conditions
    ).study(base)
    with world.store.writing() as connection:
        usability.start(connection, stored, ("ann", "bob"), world.clock())
    client = visit("ann", base)
    for place in range(2):
        page = client.post("/instructions", data=hidden(client.get("/instructions")))
        fields = hidden(page) | {"rank_0": "1", "rank_1": "2"}
        if "turn_0_1" in page.text:
            fields |= {"turn_0_1": "5", "criterion_0_0": "5", "criterion_0_1": "3"}
        page = client.post("/task/answer", data=fields)
        assert (page.url.path, page.status_code) == ("/usability", 200), page.text
        client.post("/usability", data=said(page, preferred="none") if place else said(page))
    rated = [[(one.name, one.turn) for one in answer.annotations.turns] for answer in world.store.judgments("study")]
    assert sorted(rated) == [[], [("polite", 1)]]


@pytest.mark.usefixtures("study")
def test_a_batch_that_is_closed_for_a_while_ends_no_form(world, visit):
    client = visit("ann", PLAIN)
    page = client.post("/instructions", data=hidden(client.get("/instructions")))
    with world.store.writing() as connection:
        set_settings(connection, "study", is_closed=True)
    page = judge(client, page)
    assert (page.url.path, "closed all batches" in page.text) == ("/task", True)
    assert client.get("/usability").url.path == "/task"
    with world.store.writing() as connection:
        set_settings(connection, "study", is_closed=False)
    assert "Which response is best?" in client.get("/task").text


def test_tasks_of_a_study_come_in_random_order(world, visit):
    """Even if others arrive in order: a form that always came with the first tasks would be judged with them."""
    names = [f"t{number}" for number in range(30)]
    world.add(*map(make_task, names), batch="study", num_labelers=2)
    study = STUDY.model_copy(update={"tasks_per_condition": 15})
    with world.store.writing() as connection:
        usability.start(connection, study.study(PLAIN)[0], study.labelers, world.clock())
    client = visit("ann", PLAIN)
    page = client.post("/instructions", data=hidden(client.get("/instructions")))
    for _ in range(6):
        page = judge(client, page)
    judged = [judgment.task_id for judgment in world.store.judgments("study")]
    assert (len(judged), judged == names[:6]) == (6, False)


def test_whoever_had_a_task_before_the_study_answers_the_form_that_they_saw(world, visit):
    world.join("cy")
    world.add(*(make_task(f"t{number}") for number in range(4)), batch="study", num_labelers=3)
    client = visit("cy", PLAIN)
    page = client.get("/task")
    asked = STUDY.model_copy(update={"conditions": STUDY.conditions[::-1]})  # first the form with a criterion
    with world.store.writing() as connection:
        usability.start(connection, asked.study(PLAIN)[0], asked.labelers, world.clock())
    assert judge(client, page).status_code == 200
    (judgment,) = world.store.judgments("study")
    assert (judgment.labeler, judgment.instructions_version) == ("cy", PLAIN.version)
    assert "My answers" in client.get("/answers").text
    lead = visit("eve", PLAIN, has_read=False)
    assert 'name="criterion_0_0"' in lead.get("/lead/task?task=t3").text
