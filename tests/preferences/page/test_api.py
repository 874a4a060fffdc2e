"""The API does what the pages do, and withstands a fuzzer."""

import json
import re

import pytest
import schemathesis
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from preferences.page.api import STORABLE
from preferences.page.app import make_app
from preferences.page.config import LabelingConfig
from tests.examples import examples

CONFIG = LabelingConfig(flags=("rude",), task_order="arrival")
AS_DESCRIBED = (status_code_conformance, content_type_conformance, response_schema_conformance)


@pytest.fixture
def call(world):
    """Calls the API as somebody; returns status and body."""
    app = make_app(world.store, world.accounts, CONFIG, clock=world.clock)
    client = TestClient(app)
    tokens = {}

    def call(name, method, path, body=None):
        if name not in tokens:
            signed = client.post("/api/session", json={"name": name, "key": world.keys[name]})
            tokens[name] = signed.json()["token"]
        headers = {"Authorization": f"Bearer {tokens[name]}"}
        client.cookies.clear()
        answer = client.request(method, f"/api{path}", json=body, headers=headers)
        return answer.status_code, answer.json() if answer.content else None

    return call


def new_task(name, **fields):
    prompt = [{"role": "user", "content": f"Say {name}"}]
    return {"task_id": name, "prompt": prompt, "responses": ["a", "b"], "sources": ["x", "y"], **fields}


def test_a_single_response_is_rated_without_ranks(call):
    tasks = [new_task(name, responses=["a"], sources=["x"]) for name in ("t1", "t2")]
    assert call("eve", "POST", "/tasks", {"batch": "main", "tasks": tasks}) == (204, None)
    status, said = call("eve", "POST", "/tasks", {"batch": "main", "tasks": [new_task("t3")]})
    assert (status, "'t3': responses has 2 entries, but the tasks of batch 'main' have single" in said["detail"]) == (
        409,
        True,
    )
    assert call("ann", "POST", "/instructions/read")[0] == 204
    asked = call("ann", "POST", "/lease")[1]
    assert asked["responses"] == ["a"]
    answer = {"form": asked["form"], "ratings": [3], "flags": [["rude"]]}
    assert call("ann", "POST", "/answers", answer | {"ranks": [1, 2]})[0] == 409
    assert call("ann", "POST", "/answers", answer)[0] == 204
    assert call("ann", "POST", "/answers", answer | {"ranks": [1]})[0] == 204  # the same answer
    rows = call("eve", "GET", "/export/main?format=rankings")[1]["rows"]
    assert [(row["ranks"], row["ratings"], row["flags"]) for row in rows] == [([1], [3.0], [["rude"]])]
    assert call("eve", "GET", "/quality/main")[1]["is_single"]


def test_a_gold_task_with_a_single_response(call):
    gold = {"rating": [5, 7], "criteria": {"right": 1}, "flags": []}
    task = new_task("g1", responses=["a"], sources=["x"], gold=gold)
    for _ in range(2):  # a repeated request changes nothing
        assert call("eve", "POST", "/tasks", {"batch": "main", "tasks": [task]}) == (204, None)
    assert call("ann", "POST", "/instructions/read")[0] == 204
    asked = call("ann", "POST", "/lease")[1]
    assert call("ann", "POST", "/answers", {"form": asked["form"], "ratings": [6], "flags": [["rude"]]})[0] == 204
    (ann,) = call("eve", "GET", "/quality/main")[1]["labelers"]
    assert ann["gold_accuracy"]["mean"] == 0.5  # of the rating and the marks; nobody asked for the criterion
    (row,) = call("eve", "GET", "/export/main?format=heed")[1]["rows"]
    assert (row["gold_ranks"], json.loads(row["details"])) == ([1], {"gold": gold})
    for wrong, status, expected in (
        ({"responses": ["a", "b"], "sources": ["x", "y"]}, 409, "'g2': gold is for a single response"),
        ({"gold": {"criteria": {}}}, 409, "the right ratings and marks were expected"),
        ({"gold": {"rating": [7, 5]}}, 409, "the lowest and the highest that are right"),
        ({"gold": {"rating": "good"}}, 422, "rating"),
    ):
        status_and_body = call("eve", "POST", "/tasks", {"batch": "main", "tasks": [task | {"task_id": "g2"} | wrong]})
        assert (status_and_body[0], expected in str(status_and_body[1])) == (status, True), status_and_body


def test_a_batch_from_tasks_to_labels(call, world):
    tasks = [new_task("t1", num_labelers=2, warning="blood"), new_task("t2")]
    assert call("eve", "POST", "/tasks", {"batch": "main", "tasks": tasks}) == (204, None)
    assert call("ann", "POST", "/lease") == (200, {"waiting": "instructions"})
    version = call("ann", "GET", "/instructions")[1]["version"]
    assert version == CONFIG.version
    assert call("ann", "POST", "/instructions/read")[0] == 204
    status, asked = call("ann", "POST", "/lease")
    assert (status, asked["prompt"][0]["content"], sorted(asked["responses"])) == (200, "Say t1", ["a", "b"])
    assert "t1" not in asked["form"].values()
    assert asked["warning"] == "blood"
    assert call("ann", "POST", "/reveals", {"form": asked["form"]})[0] == 204
    answer = {"form": asked["form"], "ranks": [2, 1], "ratings": [3, 6.5], "flags": [["rude"], []]}
    assert call("ann", "POST", "/answers", answer)[0] == 204
    assert call("ann", "POST", "/answers", answer)[0] == 204
    assert call("ann", "POST", "/answers", answer | {"ranks": [1, 2]})[0] == 409
    asked = call("ann", "POST", "/lease")[1]
    assert call("ann", "POST", "/skips", {"form": asked["form"], "reason": "unclear"})[0] == 204
    assert call("ann", "POST", "/lease") == (200, {"waiting": "nothing open"})
    told = call("ann", "GET", "/history")[1]
    assert [("task_id" in act, act["task"] == answer["form"]["task"]) for act in told] == [
        (False, False),
        (False, True),
    ]
    assert call("ann", "POST", "/undos", {"task": told[1]["task"], "revision": 1})[0] == 204
    assert [(act["kind"], act["is_current"]) for act in call("ann", "GET", "/history")[1]] == [
        ("undo", False), ("skip", True), ("answer", False),
    ]  # fmt: skip
    asked = call("ann", "POST", "/lease")[1]
    assert call("ann", "POST", "/answers", answer | {"form": asked["form"]})[0] == 204
    over = call("eve", "POST", "/reopened/t1")[1]
    assert call("eve", "POST", "/answers", answer | {"form": over["form"], "ranks": [1, 1]})[0] == 204
    kinds = [act["kind"] for act in call("eve", "GET", "/judgments/main")[1]]
    assert kinds == ["answer", "skip", "undo", "answer", "adjudication"]
    assert call("eve", "GET", "/batches")[1][0]["num_judgments"] == 1
    report = call("eve", "GET", "/quality/main")[1]
    assert (report["num_answers"], report["num_adjudications"]) == (1, 1)
    assert report["labelers"][0]["labeler"] == "ann"
    # Exports have pseudonyms. The adjudicated answer of somebody who is erased stays.
    known = world.accounts.pseudonyms()
    for path in ("/judgments/main", "/export/main?format=heed"):
        assert known["ann"] in str(call("eve", "GET", path)[1])
        assert "'ann'" not in str(call("eve", "GET", path)[1])
    assert call("eve", "GET", "/judgments/main?names=true")[1][0]["labeler"] == "ann"
    assert world.accounts.erase("ann", by="eve") == known["ann"]
    assert call("ann", "POST", "/lease")[0] == 401
    assert {one["labeler"] for one in call("eve", "GET", "/quality/main")[1]["labelers"]} == {"eve", known["ann"]}


def test_a_lead_voids_a_judgment(call, world):
    call("eve", "POST", "/tasks", {"batch": "main", "tasks": [new_task("t1")]})
    call("ann", "POST", "/instructions/read")
    form = call("ann", "POST", "/lease")[1]["form"]
    assert call("ann", "POST", "/answers", {"form": form, "ranks": [1, 2], "ratings": [3, 4]})[0] == 204
    (judgment,) = call("eve", "GET", "/judgments/main")[1]
    void = {name: judgment[name] for name in ("task_id", "labeler", "revision")} | {"reason": "a script answered"}
    assert call("ann", "POST", "/voids", void)[0] == 403
    assert call("eve", "POST", "/voids", void | {"reason": ""})[0] == 422
    assert call("eve", "POST", "/voids", void | {"revision": 3})[0] == 409
    for _ in range(2):  # sent twice, it is stored once
        assert call("eve", "POST", "/voids", void)[0] == 204
    assert [one["kind"] for one in call("eve", "GET", "/judgments/main")[1]] == ["answer", "void"]
    assert call("eve", "GET", "/export/main?format=rankings")[1]["rows"] == []
    assert call("eve", "GET", "/batches")[1][0]["num_judgments"] == 0
    events = [(one.actor, one.action, one.subject) for one in world.accounts.audit_log()]
    assert events.count(("eve", "voided the judgment on task 't1' of", "ann")) == 1
    assert call("ann", "POST", "/lease")[1]["form"]["revision"] == 2


def test_an_export_counts_what_it_leaves_out(call):
    tasks = [new_task("t1"), new_task("g1", gold_ranks=[1, 2]), new_task("t2")]
    call("eve", "POST", "/tasks", {"batch": "main", "tasks": tasks})
    call("ann", "POST", "/instructions/read")
    for ranks in ([1, 2], [1, 2], [1, 1]):
        asked = call("ann", "POST", "/lease")[1]
        call("ann", "POST", "/answers", {"form": asked["form"], "ranks": ranks, "ratings": [3, 4]})
    status, found = call("eve", "GET", "/export/main?format=trl")
    assert (status, len(found["rows"])) == (200, 1)
    assert found["left_out"] == {"tie": 1, "gold task": 1}
    assert [act["why_excluded"] for act in call("eve", "GET", "/judgments/main")[1]] == ["", "gold task", ""]
    assert len(call("eve", "GET", "/export/main?format=heed")[1]["rows"]) == 3
    assert call("eve", "GET", "/export/main?format=nothing")[0] == 409
    assert call("ann", "GET", "/export/main?format=trl")[0] == 403


def test_refusals_come_with_reasons(call):
    assert call("eve", "POST", "/tasks", {"batch": "main", "tasks": [new_task("t1")]})[0] == 204
    call("ann", "POST", "/instructions/read")
    asked = call("ann", "POST", "/lease")[1]
    answer = {"form": asked["form"], "ranks": [2, 1], "ratings": [3, 6]}
    for changed, status in (
        ({"ranks": [1]}, 409), ({"ranks": [1, 2, 3]}, 409), ({"ranks": [1, 0]}, 422), ({"ranks": ["1", "2"]}, 422),
        ({"ratings": []}, 422), ({"ratings": [1, 9]}, 422), ({"flags": [["odd"], []]}, 422), ({"more": 1}, 422),
        ({"form": asked["form"] | {"task": "t2"}}, 403), ({"form": asked["form"] | {"seal": "x"}}, 403),
    ):  # fmt: skip
        assert call("ann", "POST", "/answers", answer | changed)[0] == status, changed
    assert call("ann", "GET", "/judgments/main")[0] == 403
    assert call("eve", "POST", "/lease")[0] == 403
    status, body = call("eve", "POST", "/tasks", {"batch": "main", "tasks": [new_task("t1", num_labelers=3)]})
    assert (status, "num_labelers is 3" in body["detail"]) == (409, True)
    assert call("eve", "GET", "/quality/nothing")[0] == 404


def test_a_token_is_needed(world):
    client = TestClient(make_app(world.store, world.accounts, CONFIG))
    described = client.get("/api/openapi.json").json()
    for path, methods in described["paths"].items():
        for method in methods:
            if path != "/api/session":
                answer = client.request(method, path, json={})
                assert answer.status_code in (401, 422), (method, path)
                assert client.request(method, path, headers={"Authorization": "Bearer x"}).status_code in (401, 422)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [pytest.param("ann", marks=pytest.mark.nightly), "eve"])
def test_a_fuzzer_finds_no_server_error(world, name):
    """Fuzzes the API from its description as each role: no reply is a 5xx, and all are as described."""
    app = make_app(world.store, world.accounts, CONFIG)
    token = world.accounts.open_session(name)
    # hypothesis takes seconds for each text from a class of a million characters; by default it makes no surrogates.
    described = json.dumps(app.openapi()).replace(json.dumps(STORABLE), json.dumps("^[^\\x00]*$"))
    app.openapi_schema = json.loads(described)
    schema = schemathesis.openapi.from_asgi("/api/openapi.json", app)
    tried = []

    for operation in schema.get_all_operations():
        if operation.ok().path == "/api/session/end":
            continue  # it would end the session that all others use

        @examples(15, derandomize=True, suppress_health_check=list(HealthCheck))
        @given(case=operation.ok().as_strategy())
        def check(case):
            answer = case.call(headers={"Authorization": f"Bearer {token}"})
            tried.append((case.path, answer.status_code))
            # What the description allows may contradict the store (409) or the role (403), but is never invalid.
            assert answer.status_code < 500, (case.as_curl_command(), answer.text)
            assert answer.status_code not in (400, 422), (case.as_curl_command(), answer.text)
            case.validate_response(answer, checks=AS_DESCRIBED)

        check()
    assert len({path for path, _ in tried}) > 12
    assert {status for _, status in tried} >= ({200, 409} if name == "eve" else {200, 403})


def test_the_description_says_what_the_configuration_asks_for(world):
    def answer_of(**fields):
        client = TestClient(make_app(world.store, world.accounts, LabelingConfig(**fields)))
        return client.get("/api/openapi.json").json()["components"]["schemas"]["AnswerBody"]

    asked = answer_of(flags=("rude",))
    assert "ratings" in asked["required"]
    assert asked["properties"]["ratings"]["minItems"] == 1
    assert asked["properties"]["flags"]["items"]["items"]["enum"] == ["rude"]
    pattern = asked["properties"]["note"]["pattern"]
    for text, is_storable in (("", True), ("a\nb \U0010ffff", True), ("a\0", False), ("\ud800", False)):
        assert bool(re.search(pattern, text)) == is_storable
    plain = answer_of(flags=(), asks_ratings=False)
    assert "ratings" not in plain["required"]
    assert plain["properties"]["ratings"]["maxItems"] == 0
    assert plain["properties"]["flags"]["items"]["maxItems"] == 0
