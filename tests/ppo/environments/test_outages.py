"""Outages of the servers of environments: what is waited for, repeated or lost. Stand-ins take the places of the
packages openenv and mcp, so that these tests run without them.
"""

import asyncio
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from files import retries
from lm.tokenizer import Tokenizer
from lm.tool_calls import AssistantMessage, ToolCall
from ppo.environments import sessions
from ppo.environments.conversations import Conversations, Sampled
from ppo.environments.environment import Reply
from ppo.environments.mcp import MCPTools
from ppo.environments.openenv import OpenEnv
from tests.ppo.environments import mcp_stand_in
from tests.ppo.environments.test_conversations import ASKED, Scripted
from training.notices import speaking_through

URL = "http://127.0.0.1:9"
STAND_IN = (sys.executable, str(Path(mcp_stand_in.__file__)))


class ConnectionClosedError(Exception):
    """As that of the package websockets: not an OSError."""


@dataclass
class Server:
    """Counts letters, per session. A session that was opened before the last loss is gone."""

    num_refused: float = 0  # connections, before it accepts one again
    num_losses: int = 0
    num_silent: float = 0  # openings that get no answer
    offset: int = 0  # added to counts: a server that answers otherwise
    slow: str = ""  # a word that is never answered
    deadly: str = ""  # a word that loses the session
    lose_at: Callable[[str], bool] = lambda _word: False
    seen: list[str] = field(default_factory=list)

    def lose(self, *, num_refused: float = 0, num_silent: float = 0) -> None:
        self.num_losses, self.num_refused, self.num_silent = self.num_losses + 1, num_refused, num_silent


SERVER = Server()


class StandIn:
    """openenv.core.GenericEnvClient, connected to `SERVER`."""

    def __init__(self, url: str, **_: Any) -> None:
        self.url = url

    def sync(self) -> "StandIn":
        return self

    async def reset(self, **_: Any) -> Any:
        if SERVER.num_refused > 0:
            SERVER.num_refused -= 1
            raise ConnectionError(f"Failed to connect to {self.url}")
        if SERVER.num_silent > 0:
            SERVER.num_silent -= 1
            await asyncio.sleep(3600)
        self.since, self.count = SERVER.num_losses, 0
        return SimpleNamespace(observation={"text": ""})

    async def step(self, action: dict[str, str]) -> Any:
        word = action["word"]
        SERVER.seen.append(word)
        if SERVER.lose_at(word) and len(SERVER.seen) == SERVER.seen.index(word) + 1:
            SERVER.lose(num_refused=6)
        if word == SERVER.deadly:
            SERVER.lose()
        if self.since != SERVER.num_losses:
            raise ConnectionClosedError("no close frame received or sent")
        if word == SERVER.slow:
            await asyncio.sleep(3600)
        self.count += len(word)
        text = f"the count is {self.count + SERVER.offset}"
        return SimpleNamespace(observation={"text": text}, reward=len(word), done=word == "end")

    async def close(self) -> None:
        if self.since != SERVER.num_losses:
            raise ConnectionClosedError("no close frame received or sent")


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    package, core = ModuleType("openenv"), ModuleType("openenv.core")
    core.GenericEnvClient = StandIn  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "openenv", package)
    monkeypatch.setitem(sys.modules, "openenv.core", core)
    monkeypatch.setitem(sys.modules, "mcp", mcp_stand_in)
    monkeypatch.setattr(retries, "QUIET_SECONDS", 0.0)
    monkeypatch.delenv("RANK", raising=False)  # an engine of another test may have named this process's only rank
    monkeypatch.setattr(retries, "FIRST_PAUSE_SECONDS", 0.02)
    monkeypatch.setattr(sessions, "GRACE_SECONDS", 0.0)
    retries._server.cache_clear()


def held(tokenizer: Tokenizer, server: Server, turns: list[str], **limits: float) -> tuple[Sampled, list[str]]:
    """A conversation with the server, and what was said aloud meanwhile."""
    global SERVER
    SERVER, chatty, notices = server, tokenizer.with_template("chat"), list[str]()
    settings = {"url": URL, "action_field": "word", "observation_field": "text", "deadline_seconds": 0.5, **limits}
    talks = Conversations(
        OpenEnv.model_validate(settings), chatty, Scripted(chatty, turns),  # type: ignore[arg-type]
        max_new_tokens=90, max_prompt_tokens=60, temperature=0.5,
    )  # fmt: skip
    with speaking_through(notices.append):
        return talks.sample([chatty.encode_prompt(ASKED)], [ASKED], [{}], [7]), notices


def test_a_server_that_comes_back_costs_only_time(tokenizer: Tokenizer) -> None:
    """It refuses connections for longer than a reply may take, and has forgotten the conversation."""
    turns = ["the", "fox", "end"]
    calm, nothing = held(tokenizer, Server(), turns)
    disturbed, notices = held(tokenizer, Server(lose_at=lambda word: word == "fox"), turns)
    assert (calm.failure, disturbed.failure, nothing) == ("", "", [])
    assert disturbed.seconds > 0.02 * (2**6 - 1) > 0.5
    assert SERVER.seen == ["the", "fox", "the", "fox", "end"]
    (one,), (other,) = calm.conversations, disturbed.conversations
    assert (other.tokens, other.logprobs, other.rewards) == (one.tokens, one.logprobs, one.rewards)
    assert sum(other.rewards) == 9.0
    assert notices == [f"waiting up to 600 s for {URL}: ConnectionClosedError: no close frame received or sent"]


def test_a_server_that_is_away_or_silent_at_the_start_is_waited_for(tokenizer: Tokenizer) -> None:
    found, notices = held(tokenizer, Server(num_refused=3, num_silent=2), ["the", "end"])
    assert (found.failure, sum(found.conversations[0].rewards)) == ("", 6.0)
    assert notices == [f"waiting up to 600 s for {URL}: ConnectionError: Failed to connect to {URL}"]


def test_a_frozen_server_is_waited_for_but_not_a_slow_call(tokenizer: Tokenizer) -> None:
    frozen, _ = held(tokenizer, Server(slow="fox"), ["the", "fox"])
    assert frozen.conversations[0].dialogue.failure == "deadline"
    assert f"{URL}: no answer within 0.5 seconds" in frozen.failure
    assert SERVER.seen == ["the", "fox"]  # the server opened a session at once, so nothing was repeated

    server = Server(slow="fox")

    def freeze(_word: str) -> bool:  # until the session is opened again and its first word repeated
        server.num_silent = int(server.seen == ["the", "fox"])
        server.slow = "" if server.seen.count("the") == 2 else "fox"
        return False

    server.lose_at = freeze
    found, _ = held(tokenizer, server, ["the", "fox", "end"])
    assert (found.failure, sum(found.conversations[0].rewards)) == ("", 9.0)
    assert server.seen == ["the", "fox", "the", "fox", "end"]


def test_a_conversation_that_cannot_be_continued_is_lost(tokenizer: Tokenizer) -> None:
    server = Server()
    server.lose_at = lambda word: word == "fox" and not setattr(server, "offset", 1)
    found, _ = held(tokenizer, server, ["the", "fox", "end"])
    assert found.conversations[0].dialogue.failure == "error"
    assert f"{URL} lost the conversation; asked again, it answers otherwise" in found.failure

    found, _ = held(tokenizer, Server(deadly="fox"), ["the", "fox"])
    assert found.conversations[0].dialogue.failure == "error"
    assert f"{URL}: 3 sessions were lost at the same turn" in found.failure
    assert SERVER.seen == ["the", "fox"] * 3


def test_an_outage_that_lasts_is_named(tokenizer: Tokenizer) -> None:
    found, _ = held(tokenizer, Server(num_refused=float("inf")), ["the"], max_wait_seconds=1.2)
    assert found.conversations[0].dialogue.failure == "error"
    said = rf"ServerError: {URL}: ConnectionError: Failed to connect to {URL}; no proper answer for 1 s"
    assert re.search(said, found.failure), found.failure


def test_a_server_that_drips_meets_the_limit_of_the_whole_answer() -> None:
    """Each byte comes in time, so that no silence is too long."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        over = threading.Event()

        def drip() -> None:
            with listener.accept()[0] as connection:
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
                while not over.wait(0.05):
                    connection.sendall(b" ")

        thread = threading.Thread(target=drip)
        thread.start()
        url, started = f"http://127.0.0.1:{listener.getsockname()[1]}", time.monotonic()
        with pytest.raises(ValueError, match=rf"{url} does not answer .*'no answer within 0\.4 seconds'"):
            OpenEnv(url=url, action_field="word", deadline_seconds=0.4).check([])
        over.set()
        thread.join()
        assert time.monotonic() - started < 20


def said(*numbers: int) -> AssistantMessage:
    return AssistantMessage("", "", [ToolCall("add", {"number": number}) for number in numbers])


def test_an_mcp_process_that_is_killed_is_started_again() -> None:
    environment = MCPTools(command=STAND_IN, deadline_seconds=60)
    episode = environment.open([], {}, 0)
    with asyncio.Runner() as runner:
        runner.run(episode.begin())
        runner.run(episode.reply(said(2, 3)))
        (killed,) = children()
        os.kill(killed, signal.SIGKILL)
        reply = runner.run(episode.reply(said(4)))
        assert reply == Reply([{"role": "tool", "name": "add", "content": "the sum is 9"}])
        (other,) = children()
        assert other != killed
        runner.run(episode.close())
    assert children() == []


def test_a_session_that_the_server_no_longer_knows_is_not_the_policys_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    """A status 404 reaches the client's user as an error of the call, like an unknown tool."""

    async def forgotten(*_: object) -> str:
        raise mcp_stand_in.MCPError(-32600, "Session terminated")

    episode = MCPTools(command=STAND_IN, deadline_seconds=60, max_wait_seconds=0).open([], {}, 0)
    with asyncio.Runner() as runner:
        runner.run(episode.begin())
        monkeypatch.setattr(mcp_stand_in.Client, "call_tool", forgotten)
        with pytest.raises(retries.ServerError, match="Session terminated"):
            runner.run(episode.reply(said(2)))
        runner.run(episode.close())


def children() -> list[int]:
    """Processes of stand-ins that this process started and that have not ended."""
    found = list[int]()
    for listed in Path("/proc/self/task").glob("*/children"):
        found += [int(word) for word in listed.read_text().split()]
    return [pid for pid in found if STAND_IN[1] in Path(f"/proc/{pid}/cmdline").read_text()]
