"""The arena: turns, blinding, verdicts as labels, and that nothing is lost. Its policies are scripted."""

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from sqlalchemy.exc import OperationalError

from preferences.accounts import Account, Accounts
from preferences.arena_records import Conversations
from preferences.formats.published import BOTH_BAD as ARENA_FORMAT_BAD
from preferences.organizing import set_settings
from preferences.page import arena as arena_module
from preferences.page import arena_pages
from preferences.page.app import make_app
from preferences.page.arena import BOTH_BAD, CHOICES, Arena, ArenaPrompt, ArenaSetup, Given, LockstepTurn
from preferences.page.config import LabelingConfig, Screening
from preferences.page.site import COOKIE
from preferences.records import Answer, Message, Task
from preferences.statistics.summary import summary
from tests.preferences.page.arenas import SECRETS, ScriptedWriters
from tests.preferences.page.conftest import Running

CONFIG = LabelingConfig(flags=("wrong", "rude"))
PROMPTS = [ArenaPrompt(f"p{n}", (Message("system", "Be kind."), Message("user", f"Prompt {n}?"))) for n in range(2)]


@pytest.fixture
def writers() -> ScriptedWriters:
    return ScriptedWriters()


@pytest.fixture
def arena(world: Any, writers: ScriptedWriters) -> Iterator[Arena]:
    with ArenaSetup(writers, "arena", PROMPTS).opened(world.url, world.store, CONFIG) as opened:
        yield opened


@pytest.fixture
def person(world: Any, arena: Arena) -> Callable[[str], TestClient]:
    """A browser without JavaScript, signed in."""

    def sign_in(name: str) -> TestClient:
        client = TestClient(make_app(world.store, world.accounts, CONFIG, clock=world.clock, arena=arena))
        client.post("/sign-in", data={"name": name, "key": world.keys[name]})
        world.accounts.confirm_reading(name, CONFIG.version)
        return client

    return sign_in


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripted answers come whole, so nothing measures a pace."""
    monkeypatch.setattr(arena_module, "USUAL_PACE", 1e6)


def account(name: str) -> Account:
    return Account(name, "labeler", "admitted", CONFIG.version)


def csrf(page: str) -> str:
    return re.findall('name="csrf" value="([^"]+)"', page)[0]


def send(client: Any, path: str, **fields: Any) -> Any:
    """Sends a form with the session's token, and follows to the page that comes next."""
    token = csrf(client.get("/arena").text)
    return client.post(path, data={"csrf": token, **fields}, follow_redirects=True)


def begin(client: Any, question: str = "Why is the sky blue?") -> str:
    """Begins a conversation; returns its path."""
    path = send(client, "/arena", question=question).url.path
    assert path.startswith("/arena/")
    return str(path)


def shown_until_over(arena: Arena, handle: str) -> None:
    while arena.is_live(handle):
        time.sleep(0.01)


def finished(client: TestClient, arena: Arena, path: str) -> str:
    shown_until_over(arena, path.rpartition("/")[2])
    return str(client.get(path).text)


# ---- lockstep ----


class Ticks:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_both_sides_start_and_grow_together() -> None:
    ticks, ends = Ticks(), []
    turn = LockstepTurn("ann", ticks, ends.append)
    turn.wrote(0, "x" * 50)
    assert turn.look().texts == ("", "")  # the other has written nothing yet
    ticks.now = 1.0
    turn.wrote(1, "y" * 10)
    assert turn.look().texts == ("x" * 10, "y" * 10)
    turn.ended(0, "x" * 60, {})
    assert turn.look().texts == ("x" * 10, "y" * 10)
    assert not ends
    ticks.now = 2.0
    turn.wrote(1, "y" * 70)  # 50 more since 1.0
    assert turn.look().texts == ("x" * 60, "y" * 60)
    ticks.now = 2.1
    turn.ended(1, "y" * 300, {})
    assert [len(text) for text in turn.look().texts] == [60, 65]
    assert ends == [turn]
    assert not turn.look().is_over
    turn.is_stored = True
    ticks.now = 7.0
    assert turn.look().is_over
    assert turn.look().texts[1] == "y" * 300


@pytest.mark.parametrize("fast", [0, 1])
def test_what_is_shown_does_not_depend_on_which_side_is_fast(fast: int) -> None:
    """The same lengths at the same moments, whether the fast policy is on side 0 or 1, and the longer answer or not."""
    shown = []
    for fast_length, slow_length in ((400, 100), (100, 400)):
        ticks = Ticks()
        turn = LockstepTurn("ann", ticks, lambda _: None)
        for tick in range(1, 101):
            ticks.now = tick / 10
            for side, pace, length in ((fast, 40, fast_length), (1 - fast, 4, slow_length)):
                (turn.ended if tick * pace >= length else turn.wrote)(
                    side, "x" * min(length, tick * pace), *([{}] if tick * pace >= length else [])
                )
            shown.append(max(map(len, turn.look().texts)))
    num = len(shown) // 2
    first, second = shown[:num], shown[num:]
    assert max(abs(one - other) for one, other in zip(first, second, strict=True)) <= 8  # two ticks of the slow one


def test_the_first_failure_ends_a_turn_once() -> None:
    ends: list[LockstepTurn] = []
    turn = LockstepTurn("ann", time.monotonic, ends.append)
    turn.failed("No answer.")
    turn.failed("Another.")
    assert (turn.look().failure, turn.look().is_over, len(ends)) == ("No answer.", True, 1)


# ---- conversations ----


def test_a_turn_shows_two_answers_and_no_names(person: Any, arena: Arena, writers: ScriptedWriters) -> None:
    ann = person("ann")
    assert ann.get("/").url.path == "/arena"
    path = begin(ann)
    page = finished(ann, arena, path)
    assert "<em>first</em>" in page
    assert "Answer A" in page
    assert "Answer B" in page
    headers = " ".join(f"{name}: {value}" for name, value in ann.get(path).headers.items())
    for secret in SECRETS:
        assert secret.lower() not in (page + headers).lower()
    assert "connect-src 'self'" in headers
    assert [one.messages for one in writers.asked] == [(Message("user", "Why is the sky blue?"),)] * 2


def test_sides_are_drawn_for_each_conversation(arena: Arena) -> None:
    orders = {arena.conversation(account(f"p{n}"), arena.begin(account(f"p{n}"), "?")).policy_of for n in range(40)}
    assert orders == {(0, 1), (1, 0)}


def test_each_continues_its_own_answer_or_both_the_chosen_one(person: Any, arena: Arena, writers: Any) -> None:
    ann = person("ann")
    path = begin(ann, "One?")
    finished(ann, arena, path)
    assert send(ann, f"{path}/ask", turn=1, question="Two?", continues="own").status_code == 200
    finished(ann, arena, path)
    first, second = writers.of(0).messages, writers.of(1).messages
    assert [one.content for one in first] == ["One?", writers.answers[0], "Two?"]
    assert [one.content for one in second] == ["One?", writers.answers[1], "Two?"]
    conversation = arena.conversation(account("ann"), path.rpartition("/")[2])
    send(ann, f"{path}/ask", turn=2, question="Three?", continues="b")
    page = finished(ann, arena, path)
    chosen = writers.answers[conversation.policy_of[1]]
    assert writers.of(0).messages == writers.of(1).messages
    assert [one.content for one in writers.of(0).messages] == ["One?", chosen, "Two?", chosen, "Three?"]
    assert "after answer B" in page
    assert "each continues its own answer" in page


def test_a_prompt_from_the_list_comes_once(person: Any, arena: Arena, writers: Any) -> None:
    ann = person("ann")
    for _ in PROMPTS:
        finished(ann, arena, send(ann, "/arena", take="1").url.path)
    assert {one.messages for one in writers.asked} == {prompt.messages for prompt in PROMPTS}
    assert "Take a prompt" not in ann.get("/arena").text
    assert "You have had all prompts" in send(ann, "/arena", take="1").text


def test_nobody_sees_another_persons_conversation(person: Any) -> None:
    path = begin(person("ann"))
    bob = person("bob")
    for method, own in (("get", path), ("get", f"{path}/events")):
        assert getattr(bob, method)(own).status_code == 403
    for own in ("ask", "again", "verdict", "stop"):
        assert send(bob, f"{path}/{own}", turn=1, question="?", continues="own").status_code == 403
    assert path not in bob.get("/arena").text


def test_a_person_has_one_running_turn_and_keeps_what_they_typed(person: Any, writers: Any) -> None:
    writers.is_waiting = True
    ann = person("ann")
    path = begin(ann)
    refused = send(ann, "/arena", question="Another <question>?")
    assert refused.status_code == 422
    assert "A turn of yours is still being written" in refused.text
    assert "Another &lt;question&gt;?" in refused.text
    begin(person("bob"))  # others are not held up
    send(ann, f"{path}/stop")
    assert writers.stopped == [writers.asked[0].key]
    assert "This turn is unfinished" in ann.get(path).text
    begin(ann, "Another?")


def test_without_javascript_the_page_reloads_until_both_are_there(person: Any, arena: Arena, writers: Any) -> None:
    writers.is_waiting = True
    ann = person("ann")
    path = begin(ann)
    for asked in list(writers.asked):
        page = ann.get(path).text
        assert '<noscript><meta http-equiv="refresh"' in page
        assert "Save the verdict" not in page
        asked.end("Because.")
    page = finished(ann, arena, path)
    assert "refresh" not in page
    assert page.count("Because.") >= 2


def test_a_stream_of_events_shows_both_at_once(person: Any, arena: Arena, writers: Any) -> None:
    writers.is_waiting = True
    ann = person("ann")
    path = begin(ann)
    writers.of(0).write("abc")
    writers.of(1).end("12")
    writers.of(0).end("abcd")
    with ann.stream("GET", f"{path}/events") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-2:] == ["event: over", "data:"]
    sides = arena.conversation(account("ann"), path.rpartition("/")[2]).policy_of
    assert sorted(json.loads(lines[-3].removeprefix("data: "))) == ["12", "abcd"]
    assert json.loads(lines[-3].removeprefix("data: "))[sides.index(0)] == "abcd"


@pytest.fixture
def watching(world: Any, arena: Arena, person: Any) -> Iterator[Callable[[str], httpx.Client]]:
    """A person's browser at a server of its own, whose streams can stay open."""

    def with_arena(_app: Any) -> Any:
        return make_app(world.store, world.accounts, CONFIG, clock=world.clock, arena=arena)

    with Running(world.url, CONFIG, around=with_arena) as running, ExitStack() as closing:

        def sign_in(name: str) -> httpx.Client:
            cookies = {COOKIE: person(name).cookies[COOKIE]}
            return closing.enter_context(httpx.Client(base_url=running.address, cookies=cookies))

        yield sign_in


def opened(client: httpx.Client, path: str) -> httpx.Response:
    answer = client.send(client.build_request("GET", f"{path}/events"), stream=True)
    if answer.status_code != 200:
        answer.read()  # else its connection stays open too
    return answer


def test_streams_of_one_person_lock_nobody_out(watching: Any, person: Any, writers: Any) -> None:
    writers.is_waiting = True
    path, ann, bob = begin(person("ann")), watching("ann"), watching("bob")
    streams = [opened(ann, path) for _ in range(200)]
    assert [one.status_code for one in streams] == [200] * 4 + [429] * 196
    assert streams[4].headers["Retry-After"] == "2"
    assert bob.get("/arena").status_code == 200
    assert ann.get(path).status_code == 200
    own = opened(bob, begin(person("bob")))
    assert own.status_code == 200
    for asked in writers.asked:
        asked.end("Because.")
    for one in (*streams[:4], own):
        assert one.read().endswith(b"event: over\ndata:\n\n")
    again = opened(ann, path)  # those that have ended do not count
    assert again.status_code == 200


def elsewhere(world: Any) -> None:
    accounts = Accounts(world.url, clock=world.clock)  # as in another process, which this one does not hear of
    accounts.set_state("ann", "closed")
    accounts.close()


@pytest.mark.parametrize(
    ("ending", "ping_seconds"),
    [
        (lambda world, _: world.accounts.set_state("ann", "closed"), 1e6),
        (lambda world, _: world.join("ann"), 1e6),  # a new key
        (lambda world, _: world.accounts.erase("ann"), 1e6),
        (lambda _, ann: ann.post("/sign-out", data={"csrf": csrf(ann.get("/arena").text)}), 1e6),
        (lambda world, _: elsewhere(world), 0.0),
    ],
    ids=["closed", "new key", "erased", "signed out", "closed elsewhere"],
)
def test_a_stream_ends_with_its_session(
    world: Any, watching: Any, arena: Arena, writers: Any, monkeypatch: Any, ending: Any, ping_seconds: float
) -> None:
    monkeypatch.setattr(arena_pages, "PING_SECONDS", ping_seconds)
    writers.is_waiting = True
    ann = watching("ann")
    path = begin(ann)
    lines = opened(ann, path).iter_lines()
    writers.of(0).write("abc")
    writers.of(1).write("abc")
    assert 'data: ["abc", "abc"]' in lines
    ending(world, ann)
    assert "event: over" in lines
    assert arena.is_live(path.rpartition("/")[2])
    assert ann.get(f"{path}/events").status_code == 303


def test_an_answer_that_fails_names_no_side_and_can_be_sampled_again(person: Any, arena: Arena, writers: Any) -> None:
    pages = []
    for failing in (0, 1):
        writers.is_waiting = True
        name = ("ann", "bob")[failing]
        client = person(name)
        path = begin(client)
        writers.of(1 - failing).write("Something.")
        writers.of(failing).to.failed(arena_module.NO_ANSWER)
        page = client.get(path).text
        assert "One of the two answers could not be sampled" in page
        assert "Sample it again" in page
        pages.append(re.sub(f"{name}|{path}|csrf. value=.[^>]+|mailto", "", page))
        writers.is_waiting = False
        send(client, f"{path}/again")
        assert "Save the verdict" in finished(client, arena, path)
    assert pages[0].replace(" ", "") == pages[1].replace(" ", "")


def test_a_turn_that_nobody_waits_for_is_stopped(person: Any, writers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "UNSEEN_SECONDS", 0.05)
    writers.is_waiting = True
    ann = person("ann")
    path = begin(ann)
    while not writers.stopped:
        time.sleep(0.05)
    assert "Sample it again" in ann.get(path).text


def test_answers_reach_the_store_after_it_was_away(person: Any, arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    real, tries = arena.conversations.finish, []

    def fails_once(*arguments: Any) -> None:
        tries.append(arguments)
        if len(tries) == 1:
            raise OperationalError("insert", {}, Exception("disk full"))
        real(*arguments)

    monkeypatch.setattr(arena.conversations, "finish", fails_once)
    ann = person("ann")
    assert "Save the verdict" in finished(ann, arena, begin(ann))
    assert len(tries) >= 2


def test_a_restart_keeps_the_conversation_and_marks_the_unfinished_turn(world: Any, writers: ScriptedWriters) -> None:
    ann = account("ann")
    with ArenaSetup(writers, "arena").opened(world.url, world.store, CONFIG) as before:
        handle = before.begin(ann, "One?")
        shown_until_over(before, handle)
        writers.is_waiting = True
        before.ask(ann, handle, 1, "Two?", "own")
    writers.is_waiting = False
    with ArenaSetup(writers, "arena").opened(world.url, world.store, CONFIG) as after:
        kept = after.conversation(ann, handle)
        assert [(turn.question, turn.is_finished) for turn in kept.turns] == [("One?", True), ("Two?", False)]
        with pytest.raises(ValueError, match="unfinished"):
            after.judge(ann, kept, 1, Given("a"))
        with pytest.raises(ValueError, match="unfinished"):
            after.ask(ann, handle, 2, "Three?", "own")
        after.again(ann, handle)
        shown_until_over(after, handle)
        assert all(turn.is_finished for turn in after.conversation(ann, handle).turns)
        assert [one.messages for one in writers.asked[2:4]] == [one.messages for one in writers.asked[4:6]]


def test_other_policies_do_not_continue_a_conversation(world: Any, writers: ScriptedWriters) -> None:
    with ArenaSetup(writers, "arena").opened(world.url, world.store, CONFIG) as before:
        handle = before.begin(account("ann"), "One?")
        shown_until_over(before, handle)
    others = replace(writers, identities=("x", "y"))
    opened = ArenaSetup(others, "arena").opened(world.url, world.store, CONFIG)
    with opened as after, pytest.raises(ValueError, match="with other policies"):
        after.ask(account("ann"), handle, 1, "Two?", "own")


# ---- verdicts ----


def judged(arena: Arena, choice: str, name: str = "ann", **given: Any) -> Any:
    who = account(name)
    handle = arena.begin(who, f"Question of {name}, {choice}?")
    shown_until_over(arena, handle)
    conversation = arena.conversation(who, handle)
    arena.judge(who, conversation, 0, Given(choice, **given))
    return conversation


@pytest.mark.parametrize("choice", CHOICES)
def test_a_verdict_is_a_task_with_ranks_and_marks(world: Any, arena: Arena, writers: Any, choice: str) -> None:
    conversation = judged(arena, choice, marks=(("wrong",), ()), note="because")
    (stored,) = world.store.tasks("arena")
    (judgment,) = world.store.judgments("arena")
    task, order = stored.task, conversation.policy_of
    assert task.responses == writers.answers
    assert task.sources == SECRETS
    assert [one["name"] for one in task.details["sampled"]] == list(SECRETS)
    assert (task.details["from"], task.details["conversation"]) == ("arena", conversation.handle)
    assert judgment.shown_order == order
    assert judgment.labeler == "ann"
    assert judgment.note == "because"
    assert tuple(judgment.ranks[index] for index in order) == CHOICES[choice].ranks
    marks = tuple(judgment.flags[index] for index in order)
    assert marks == ((*CHOICES[choice].marks[0], "wrong"), CHOICES[choice].marks[1])
    assert stored.num_labelers == 1
    assert world.store.progress("arena").num_open == 0
    assert arena.given(account("ann"), conversation, 0) == Given(choice, (("wrong",), ()), "because", 1)


def test_verdicts_feed_rankings_and_statistics(world: Any, arena: Arena) -> None:
    for name, choice in (("ann", "a"), ("bob", "tie"), ("cem", "bad"), ("dia", "b-much")):
        judged(arena, choice, name)
    rankings = world.store.rankings("arena")
    assert sorted(ranking.ranks for ranking in rankings if ranking.ranks != (1, 1)) != []
    assert len(rankings) == 4
    stored, judgments = world.store.tasks("arena"), world.store.judgments("arena")
    report = summary([one.task for one in stored], judgments)
    assert report.num_answers == 4
    assert sorted(ranking.flags for ranking in rankings if ranking.ranks == (1, 1)) == [(), ((BOTH_BAD,), (BOTH_BAD,))]
    assert BOTH_BAD == ARENA_FORMAT_BAD


def test_a_verdict_can_be_changed_and_sent_twice(world: Any, arena: Arena) -> None:
    conversation = judged(arena, "a")
    arena.judge(account("ann"), conversation, 0, Given("a"))  # the same form again
    arena.judge(account("ann"), conversation, 0, Given("bad", revision=1))
    with pytest.raises(ValueError, match="differs from the stored"):
        arena.judge(account("ann"), conversation, 0, Given("b", revision=1))
    assert [act.revision for act in world.store.judgments("arena")] == [0, 1]
    assert arena.given(account("ann"), conversation, 0).choice == "bad"
    (ranking,) = world.store.rankings("arena")
    assert ranking.ranks == (1, 1)


def test_a_verdict_taken_back_on_the_label_pages_is_given_again_there(person: Any, arena: Arena) -> None:
    conversation = judged(arena, "b")
    ann = person("ann")
    page = ann.get("/answers").text
    handle = re.findall('name="task" value="([^"]+)"', page)[0]
    again = ann.post("/answers/undo", data={"csrf": csrf(page), "task": handle, "revision": "1"})
    shown = re.findall(
        r'id="response-\d">Response (.)</h3>.*?<div class="text" dir="auto">(.*?)</div>', again.text, re.S
    )
    answers = [conversation.turns[0].responses[policy] for policy in conversation.policy_of]
    assert [("first" in text) for _, text in shown] == [("first" in answer) for answer in answers]
    assert arena.given(account("ann"), conversation, 0) == Given(revision=2)


def test_a_voided_verdict_shows_the_conversation_to_nobody_else(world: Any, arena: Arena) -> None:
    judged(arena, "b")
    (verdict,) = world.store.judgments("arena")
    world.store.void(verdict.task_id, "ann", 0, "a test", by="lead", client="test")
    assert world.store.rankings("arena") == []
    assert world.store.lease("bo", seconds=60, batch="arena") is None


def test_dialogues_are_compared_in_a_batch_of_their_own(world: Any, arena: Arena, writers: Any) -> None:
    who = account("ann")
    handle = arena.begin(who, "One?")
    shown_until_over(arena, handle)
    arena.ask(who, handle, 1, "Two?", "own")
    shown_until_over(arena, handle)
    arena.judge(who, arena.conversation(who, handle), 1, Given("a"))
    assert world.store.batches() == ["arena-dialogues"]
    (stored,) = world.store.tasks("arena-dialogues")
    first, second = writers.answers
    assert stored.task.prompt == (Message("user", "One?"),)
    assert stored.task.responses[0] == f"{first}\n\n**User:** Two?\n\n**Assistant:** {first}"
    assert stored.task.details["answers"] == [first, second]
    assert stored.task.details["contexts"][1] == [["user", "One?"], ["assistant", second], ["user", "Two?"]]


def test_wrong_verdicts_say_what_is_missing_and_keep_the_form(person: Any, arena: Arena, world: Any) -> None:
    ann = person("ann")
    path = begin(ann)
    finished(ann, arena, path)
    fields = {"turn": 0, "revision": 0, "note": "my <reason>", "flags_a": "wrong"}
    for wrong, sentence in (
        ({}, "Say which answer is better."),
        ({"choice": "c"}, "Say which answer is better."),
        ({"choice": "a", "flags_a": "unheard of"}, "is not one of the marks"),
        ({"choice": "a", "note": "x" * 5_000}, "at most 4000 are allowed"),
    ):
        page = send(ann, f"{path}/verdict", **(fields | wrong))
        assert page.status_code == 422
        assert sentence in page.text
    assert '<details class="why">' in send(ann, f"{path}/verdict", turn=0, revision=0).text  # not opened for nothing
    page = send(ann, f"{path}/verdict", **fields)
    assert '<details class="why" open>' in page.text
    assert "my &lt;reason&gt;" in page.text
    assert 'value="wrong" checked' in page.text
    assert not world.store.batches()
    page = send(ann, f"{path}/verdict", **fields, choice="a-much")
    assert "A is much better</strong>. Saved." in page.text


def test_an_answer_that_was_cut_off_says_so(person: Any, arena: Arena, writers: ScriptedWriters) -> None:
    writers.answers = ("A whole answer.", "An answer that…")
    ann = person("ann")
    page = finished(ann, arena, begin(ann))
    assert page.count("Cut off here") == 1
    assert page.index("An answer that…") < page.index("Cut off here") < page.index("An answer that…") + 600


def test_a_store_that_is_away_loses_nothing(person: Any, arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    ann = person("ann")
    path = begin(ann)
    finished(ann, arena, path)

    def away(*_: Any) -> None:
        raise OperationalError("insert", {}, Exception("disk full"))

    monkeypatch.setattr(arena.store, "import_all", away)
    page = send(ann, f"{path}/verdict", turn=0, revision=0, choice="b", note="a long reason")
    assert page.status_code == 503
    assert "a long reason" in page.text
    assert "B is better" in page.text
    assert 'action="' + path + '/verdict"' in page.text
    monkeypatch.undo()
    values = dict(re.findall('type="hidden" name="([^"]+)" value="([^"]*)"', page.text))
    assert "B is better</strong>" in ann.post(f"{path}/verdict", data=values).text


def test_a_form_of_another_session_is_refused_with_what_was_typed(person: Any) -> None:
    ann = person("ann")
    path = begin(ann)
    page = ann.post(f"{path}/ask", data={"csrf": "x", "question": "My question", "turn": 1, "continues": "own"})
    assert page.status_code == 403
    assert "My question" in page.text


def test_an_erased_person_leaves_judged_turns_under_a_pseudonym(world: Any, arena: Arena) -> None:
    conversation = judged(arena, "a")
    held = world.accounts.held_about("ann")
    assert [one["turns"][0]["question"] for one in held["conversations"]] == ["Question of ann, a?"]
    world.accounts.erase("ann", by="eve")
    opened = Conversations(world.url)
    assert opened.get("ann", conversation.handle) is None
    opened.close()
    (judgment,) = world.store.judgments("arena")
    assert judgment.labeler.startswith("labeler-")


def test_nothing_is_asked_before_the_instructions_are_read(
    world: Any, arena: Arena, person: Callable[[str], TestClient]
) -> None:
    ann = person("ann")
    world.accounts.confirm_reading("ann", "an older version")
    page = ann.get("/arena")
    assert page.url.path == "/instructions"
    page = ann.post("/arena", data={"csrf": csrf(page.text), "question": "Why is the sky blue?"})
    assert (page.status_code, "Why is the sky blue?" in page.text) == (403, True)  # to copy it
    assert arena.conversations.latest("ann", 1) == []


def test_who_has_read_the_instructions_comes_back_to_the_arena(
    world: Any, writers: ScriptedWriters, person: Callable[[str], TestClient]
) -> None:
    config = CONFIG.model_copy(update={"instructions": "Be fair."})
    person("ann")
    with ArenaSetup(writers, "arena").opened(world.url, world.store, config) as opened:
        ann = TestClient(make_app(world.store, world.accounts, config, clock=world.clock, arena=opened))
        ann.post("/sign-in", data={"name": "ann", "key": world.keys["ann"]})
        page = ann.post("/instructions", data={"csrf": csrf(ann.get("/arena").text)})
        assert page.url.path == "/arena"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda world: world.accounts.set_assignment("ann", (), 1, by="eve"),
            "as many answers as you may give per day",
        ),
        (lambda world: close(world, is_closed=True), "The labeling lead has closed the arena."),
        (lambda world: close(world, requires='["spanish"]'), "for people with other languages or skills"),
    ],
)
def test_who_gets_no_tasks_gives_no_verdicts_but_may_change_one(
    world: Any, arena: Arena, person: Callable[[str], TestClient], change: Callable[[Any], None], said: str
) -> None:
    ann, path = person("ann"), ""
    paths = [begin(ann, "One?"), ""]
    finished(ann, arena, paths[0])
    assert send(ann, f"{paths[0]}/verdict", turn=0, choice="a", revision=0).status_code == 200
    paths[1] = begin(ann, "Two?")
    finished(ann, arena, paths[1])
    change(world)
    for path in ("/arena", *paths):
        page = ann.get(path).text
        assert said in page
        assert "Ask both" not in page
    assert "Which answer is better?" not in page  # on a turn without a verdict
    refused = (
        ("/arena", {"question": "Three?"}),
        (f"{paths[1]}/ask", {"turn": 1, "question": "Three?", "continues": "a"}),
        (f"{paths[1]}/verdict", {"turn": 0, "choice": "b", "revision": 0, "note": "Three?"}),
    )
    for path, fields in refused:
        page = send_from(ann, paths[0], path, **fields)
        assert (page.status_code, said in page.text, "Three?" in page.text) == (403, True, True)  # to copy it
    assert send(ann, f"{paths[0]}/verdict", turn=0, choice="b", revision=1).status_code == 200
    answers = [(one.labeler, one.ranks) for one in world.store.rankings("arena")]
    assert len(answers) == 1
    assert [event.revision for event in world.store.judgments("arena")] == [0, 1]
    eve = TestClient(make_app(world.store, world.accounts, CONFIG, clock=world.clock, arena=arena))
    eve.post("/sign-in", data={"name": "eve", "key": world.keys["eve"]})
    begin(eve)  # leads have no quota


def close(world: Any, **values: Any) -> None:
    with world.store.writing() as connection:
        set_settings(connection, "arena", **values)


def send_from(client: TestClient, form: str, path: str, **fields: Any) -> Any:
    """Sends fields with the token of a form on another page, as from a window that was opened before."""
    return client.post(path, data={"csrf": csrf(client.get(form).text), **fields})


def test_a_quota_ends_at_midnight(
    world: Any, arena: Arena, person: Callable[[str], TestClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena, "_clock", world.clock)
    ann = person("ann")
    world.accounts.set_assignment("ann", (), 1, by="eve")
    first = begin(ann)
    finished(ann, arena, first)
    send(ann, f"{first}/verdict", turn=0, choice="a", revision=0)
    assert "Ask both" not in ann.get("/arena").text
    world.clock.now += 86_400
    assert "Ask both" in person("ann").get("/arena").text


def test_new_labelers_judge_the_gold_tasks_before_they_talk(world: Any, writers: ScriptedWriters) -> None:
    config = CONFIG.model_copy(update={"screening": Screening(batch="gold", min_tasks=1, min_accuracy=0.5)})
    gold = Task("g", (Message("user", "2 + 2?"),), ("4", "5"), ("x", "y"), gold_ranks=(1, 2))
    world.store.add_tasks([gold], batch="gold", num_labelers=9)
    with ArenaSetup(writers, "arena").opened(world.url, world.store, config) as opened:
        ann = TestClient(make_app(world.store, world.accounts, config, clock=world.clock, arena=opened))
        ann.post("/sign-in", data={"name": "ann", "key": world.keys["ann"]})
        world.accounts.confirm_reading("ann", config.version)
        page = ann.get("/")
        assert page.url.path == "/task"
        home = ann.get("/arena").text
        assert "judge your first tasks on the page Label" in home
        assert "Ask both" not in home
        assert send_from(ann, "/arena", "/arena", question="Why?").status_code == 403
        opened_task = world.store.lease("ann", seconds=60, batch="gold")
        world.store.submit(opened_task, right(opened_task), client="test", instructions_version=config.version)
        ann.get("/task")  # admits them, after the last of the gold tasks
        assert "Ask both" in ann.get("/arena").text
        assert ann.get("/").url.path == "/arena"


def right(lease: Any) -> Answer:
    return Answer(tuple(1 if text == "4" else 2 for text in lease.shown.responses), milliseconds=1000)


def test_the_list_of_prompts_ends_also_after_many_conversations(
    person: Callable[[str], TestClient], arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena_pages, "NUM_CONVERSATIONS", 1)
    ann = person("ann")
    for _ in PROMPTS:
        assert "Take a prompt" in ann.get("/arena").text
        finished(ann, arena, str(send(ann, "/arena", take="1").url.path))
    assert "Take a prompt" not in ann.get("/arena").text
