"""An OpenAI-compatible endpoint: retries, one request per question, and an API key that is not leaked."""

import threading
from pathlib import Path
from typing import Any

import pytest

from files import retries
from reward.endpoint import Answer, AnswerCache, Asker, Endpoint

KEY = "sk-very-secret"


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "FIRST_PAUSE_SECONDS", 0.01)


def endpoint_of(
    chat_server: Any, model: str, *, max_wait: float = 0.0, timeout: float = 5.0, name: str = "judge"
) -> Endpoint:
    return Endpoint.of(f"{chat_server.url}#{model}", name, timeout_seconds=timeout, max_wait_seconds=max_wait)


def request(text: str, max_tokens: int = 9) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": max_tokens, "seed": 5}


def ask(endpoint: Endpoint, text: str = "tell me more", max_tokens: int = 9) -> Answer:
    return endpoint.ask(request(text, max_tokens), threading.Event())


def test_an_answer_with_what_the_server_says_of_it(chat_server: Any) -> None:
    assert ask(endpoint_of(chat_server, "writer")) == Answer("tell me number 5.", True, 4)
    assert ask(endpoint_of(chat_server, "writer"), max_tokens=3).finished is False
    assert chat_server.bodies[0] == {"model": "writer", **request("tell me more")}
    assert chat_server.keys == ["", ""]


def test_try_later_is_tried_again_and_refusals_are_not(chat_server: Any) -> None:
    assert (
        ask(
            endpoint_of(chat_server, "flaky", max_wait=60),
            "<response 1>\na\n</response 1><response 2>\nb\n</response 2>",
        ).failure
        == ""
    )
    assert len(chat_server.bodies) == 2
    assert "status 503" in ask(endpoint_of(chat_server, "overloaded", max_wait=0.1)).failure
    num_sent = len(chat_server.bodies)
    assert num_sent >= 2 + 2
    assert "status 401" in ask(endpoint_of(chat_server, "forbidden", max_wait=60)).failure
    assert len(chat_server.bodies) == num_sent + 1
    assert "choices[0].message.content was expected" in ask(endpoint_of(chat_server, "odd", max_wait=0.1)).failure
    assert len(chat_server.bodies) >= num_sent + 3  # malformed, so it was asked again
    assert "no whole answer within 0.1 s" in ask(endpoint_of(chat_server, "slow", timeout=0.1)).failure
    nobody = Endpoint("http://127.0.0.1:1/v1", "m", 1.0, 0)
    assert "refused" in ask(nobody).failure


def test_the_key_is_sent_and_never_shown(chat_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEED_API_KEY", "sk-of-all")
    monkeypatch.setenv("HEED_API_KEY_MY_JUDGE", KEY)
    judge = endpoint_of(chat_server, "forbidden", name="my.judge")
    failure = ask(judge).failure
    assert (KEY in failure, "Bearer ***" in failure, KEY in repr(judge)) == (False, True, False)
    # The key appears nowhere else.
    assert "status 307" in ask(endpoint_of(chat_server, "moved", name="my.judge")).failure
    ask(endpoint_of(chat_server, "writer", name="other"))
    assert chat_server.keys == [f"Bearer {KEY}", f"Bearer {KEY}", "Bearer sk-of-all"]
    monkeypatch.setenv("HEED_API_KEY", "sk\nInjected: 1")
    with pytest.raises(ValueError, match="HEED_API_KEY must contain printable ASCII"):
        endpoint_of(chat_server, "writer")


@pytest.mark.parametrize("spec", ["http://h/v1", "ftp://h#m", "http:///v1#m", "http://h:port/v1#m", "http://h:1]#m"])
def test_specs_that_are_none(spec: str) -> None:
    with pytest.raises(ValueError, match=r"URL#MODEL was expected|not a URL"):
        Endpoint.of(spec, "x", timeout_seconds=1, max_wait_seconds=0)


def test_passwords_in_urls_are_refused_without_repeating_them() -> None:
    with pytest.raises(ValueError, match="put the key into HEED_API_KEY") as caught:
        Endpoint.of("https://me:secret@h.org/v1#m", "x", timeout_seconds=1, max_wait_seconds=0)
    assert "secret" not in str(caught.value)


def asker_of(tmp_path: Path, endpoint: Endpoint, max_failed_share: float = 0.5) -> Asker:
    return Asker(endpoint, tmp_path / "answers.sqlite", 4, max_failed_share)


def test_what_was_answered_is_not_asked_again(chat_server: Any, tmp_path: Path) -> None:
    asker = asker_of(tmp_path, endpoint_of(chat_server, "writer"))
    steps: list[tuple[int, int]] = []
    texts = ["a b", "c d", "a b", "e f"]
    first = asker.ask_all([request(text) for text in texts], lambda *step: steps.append(step))
    assert [answer.text for answer in first] == ["a b number 5.", "c d number 5.", "a b number 5.", "e f number 5."]
    assert len(chat_server.bodies) == 3  # equal requests are sent once
    assert steps[-1] == (4, 4)
    again = asker.ask_all([request(text) for text in ("e f", "g h")], lambda *_: None)
    assert again[0] == first[3]
    assert len(chat_server.bodies) == 4
    other = asker_of(tmp_path, endpoint_of(chat_server, "terse"))
    assert other.ask_all([request("a b")], lambda *_: None)[0].text == "a"


def test_failures_are_not_kept_and_too_many_end_it(chat_server: Any, tmp_path: Path) -> None:
    chat_server.fails = lambda body: body["messages"][0]["content"] in ("bad 0", "bad 1")
    texts = ["bad 0", "bad 1", *(f"good {n}" for n in range(6))]
    asked = [request(text) for text in texts]
    tolerant = asker_of(tmp_path, endpoint_of(chat_server, "writer", max_wait=0))
    assert [bool(answer.failure) for answer in tolerant.ask_all(asked, lambda *_: None)] == [True] * 2 + [False] * 6
    strict = asker_of(tmp_path, endpoint_of(chat_server, "writer", max_wait=0), max_failed_share=0.1)
    with pytest.raises(
        ValueError, match=r"requests to writer failed; at most 10% of 8 may fail. The first failure: .*status 503"
    ):
        strict.ask_all(asked, lambda *_: None)
    chat_server.fails = lambda _: False
    chat_server.bodies.clear()
    assert not any(answer.failure for answer in strict.ask_all(asked, lambda *_: None))
    assert {body["messages"][0]["content"] for body in chat_server.bodies} == {"bad 0", "bad 1"}


def test_nothing_but_failures_end_it_early(chat_server: Any, tmp_path: Path) -> None:
    dead = asker_of(tmp_path, endpoint_of(chat_server, "overloaded", max_wait=0), max_failed_share=0.9)
    with pytest.raises(ValueError, match="10 of the first 10 requests"):
        dead.ask_all([request(f"text {n}") for n in range(200)], lambda *_: None)
    assert len(chat_server.bodies) < 50


def test_a_file_that_holds_no_answers(tmp_path: Path) -> None:
    (tmp_path / "answers.sqlite").write_text("something else, long enough to be no database" * 9)
    with pytest.raises(ValueError, match=r"answers.sqlite: not a cache of endpoint answers"):
        AnswerCache(tmp_path / "answers.sqlite")
