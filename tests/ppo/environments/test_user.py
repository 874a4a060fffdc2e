"""A user whom a model behind an endpoint plays: what the endpoint is asked, and what its answers become."""

import asyncio
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from files import retries
from lm.tokenizer import Tokenizer
from lm.tool_calls import read_tool_calls
from ppo.environments import sessions
from ppo.environments.conversations import Conversations
from ppo.environments.environment import Reply
from ppo.environments.user import SimulatedUser
from tests.ppo.environments.test_conversations import Scripted
from tests.serving import serving


class Simulator(ThreadingHTTPServer):
    """Answers the n-th request with the n-th of `answers`: a text, or a status and a body."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: list[Any] = []
        self.requests: list[tuple[str, dict[str, Any]]] = []


class Handler(BaseHTTPRequestHandler):
    server: Simulator

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = self.server.answers[len(self.server.requests)]
        self.server.requests.append((self.path, asked))
        status, body = (200, {"choices": [{"message": {"content": answer}}]}) if isinstance(answer, str) else answer
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_args: object) -> None:
        pass


@pytest.fixture
def simulator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Simulator]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with serving(Simulator()) as server:
        yield server


def user_at(simulator: Simulator, **limits: float) -> SimulatedUser:
    url = f"http://127.0.0.1:{simulator.server_address[1]}/v1"
    return SimulatedUser.model_validate({"url": url, "model": "m", "instructions": "Be a user.", **limits})


def test_the_simulator_sees_the_conversation_from_the_users_side(simulator: Simulator) -> None:
    simulator.answers = ["I want tea.", "Thanks. ###STOP###"]
    prompt = [{"role": "system", "content": "Serve."}, {"role": "user", "content": "Hello"}]
    episode = user_at(simulator).open(prompt, {"user": "You want tea."}, 5)
    first, second = (asyncio.run(episode.reply(read_tool_calls(text))) for text in ("What?", "Here it is."))
    assert first == Reply([{"role": "user", "content": "I want tea."}])
    assert second == Reply(is_over=True)
    (path, asked), (_, later) = simulator.requests
    assert path == "/v1/chat/completions"
    told, *said = later["messages"]
    assert told["role"] == "system"
    assert told["content"] == "Be a user.\n\nYou want tea.\n\nWrite ###STOP### when the conversation is over."
    assert [(message["role"], message["content"]) for message in said] == [
        ("assistant", "Hello"), ("user", "What?"), ("assistant", "I want tea."), ("user", "Here it is."),
    ]  # fmt: skip
    assert (asked["model"], asked["max_tokens"]) == ("m", 128)
    assert asked["seed"] != later["seed"]


@pytest.mark.parametrize(
    ("answer", "failure"),
    [
        ((404, {"error": "no such model"}), r": status 404 \(.*\): .*no such model"),
        ((200, {"choices": []}), r": '.*' was answered; choices\[0\].message.content was expected"),
        ((200, {"choices": [{}]}), r": '.*' was answered; choices\[0\].message.content was expected"),
    ],
)
def test_an_endpoint_that_does_not_answer_is_named(simulator: Simulator, answer: Any, failure: str) -> None:
    simulator.answers = [answer]
    episode = user_at(simulator, max_wait_seconds=0.0).open([{"role": "user", "content": "Hello"}], {}, 5)
    with pytest.raises(RuntimeError, match=rf"127\.0\.0\.1:\d+/v1/chat/completions{failure}"):
        asyncio.run(episode.reply(read_tool_calls("What?")))


def test_an_outage_of_the_endpoint_is_waited_for_beyond_the_deadline(
    simulator: Simulator, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "QUIET_SECONDS", 0.0)
    monkeypatch.setattr(retries, "FIRST_PAUSE_SECONDS", 0.1)
    monkeypatch.setattr(sessions, "GRACE_SECONDS", 0.0)
    simulator.answers = [(503, {})] * 6 + ["Thanks. ###STOP###"]
    chatty, asked = tokenizer.with_template("chat"), [{"role": "user", "content": "the fox"}]
    talks = Conversations(
        user_at(simulator, deadline_seconds=3.0), chatty,
        Scripted(chatty, ["Here."]),  # type: ignore[arg-type]
        max_new_tokens=60, max_prompt_tokens=60, temperature=0.5,
    )  # fmt: skip
    found = talks.sample([chatty.encode_prompt(asked)], [asked], [{}], [7])
    assert found.failure == ""
    assert found.seconds > 0.1 * (2**6 - 1) > 3.0  # the pauses of six failures


def test_what_a_user_wants_is_a_text_of_the_row() -> None:
    fields = SimulatedUser(url="http://127.0.0.1/v1", model="m").row_fields
    assert fields.of("a.jsonl: line 1", {"user": "Tea.", "id": 3}) == {"user": "Tea."}
    assert fields.of("a.jsonl: line 1", {"id": 3}) == {}
    with pytest.raises(ValueError, match=r"a\.jsonl: line 2: field 'user' is int; a text"):
        fields.of("a.jsonl: line 2", {"user": 3})
