"""Tools of an MCP server, with the published package and a server in a process of its own."""

import asyncio
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pydantic import ValidationError

from cluster.processes import free_port
from files.retries import ServerError
from lm.tool_calls import AssistantMessage, ToolCall
from ppo.environments.environment import Reply
from ppo.environments.mcp import MCPTools

SERVER = (sys.executable, str(Path(__file__).with_name("mcp_server.py")))


def said(*calls: ToolCall) -> AssistantMessage:
    return AssistantMessage("", "", calls)


@contextmanager
def served() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A server that speaks HTTP, and its address. It is killed at the end."""
    port = free_port()
    with subprocess.Popen([*SERVER, str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            end = time.monotonic() + 60
            while time.monotonic() < end and process.poll() is None:
                with socket.socket() as probe:
                    if not probe.connect_ex(("127.0.0.1", port)):
                        break
                time.sleep(0.05)
            yield f"http://127.0.0.1:{port}/mcp", process
        finally:
            process.kill()


def test_one_server_is_named() -> None:
    for servers in ({}, {"command": SERVER, "url": "http://localhost/mcp"}):
        with pytest.raises(ValidationError, match="exactly one of command and url was expected"):
            MCPTools.model_validate(servers)


def test_the_servers_tools_are_called_and_every_conversation_has_a_session() -> None:
    pytest.importorskip("mcp", reason="the package mcp is not installed")
    environment = MCPTools(command=SERVER, deadline_seconds=60)
    environment.check([])
    (tool,) = environment.tools
    assert tool["function"]["name"] == "add"
    assert tool["function"]["description"].startswith("Add a number to the sum")
    assert tool["function"]["parameters"]["properties"]["number"]["type"] == "integer"

    for _ in range(2):  # the second conversation starts from 0 too
        episode = environment.open([], {}, 0)
        with asyncio.Runner() as runner:  # as conversations call episodes: one task per call
            assert runner.run(episode.begin()) == ()
            reply = runner.run(episode.reply(said(ToolCall("add", {"number": 2}), ToolCall("add", {"number": 3}))))
            assert [message["content"] for message in reply.messages] == ["the sum is 2", "the sum is 5"]
            assert [message["role"] for message in reply.messages] == ["tool", "tool"]
            wrong = said(
                ToolCall("add", {"number": -1}), ToolCall("add", {"number": "x"}), ToolCall("sub", {}),
                ToolCall("", {}, "a call is not JSON"),
            )  # fmt: skip
            contents = [message["content"] for message in runner.run(episode.reply(wrong)).messages]
            assert all(content.startswith("Error: ") for content in contents), contents
            assert "a number of at least 0 was expected" in contents[0]
            assert "sub" in contents[2]
            assert contents[3] == "Error: a call is not JSON"
            assert runner.run(episode.reply(said())) == Reply(is_over=True)
            runner.run(episode.close())


def test_a_server_that_does_not_start_is_named() -> None:
    pytest.importorskip("mcp", reason="the package mcp is not installed")
    dead = (sys.executable, "-c", "raise SystemExit(3)")
    with pytest.raises(ValueError, match=r"the tools of the MCP server .* cannot be listed"):
        MCPTools(command=dead, deadline_seconds=20).check([])


def test_a_server_behind_an_address_answers_until_it_is_killed() -> None:
    pytest.importorskip("mcp", reason="the package mcp is not installed")
    with served() as (url, process):
        environment = MCPTools(url=url, deadline_seconds=20, max_wait_seconds=0)
        environment.check([])
        episodes = [environment.open([], {}, seed) for seed in range(2)]
        with asyncio.Runner() as first, asyncio.Runner() as second:  # each episode has its own event loop
            runners = (first, second)
            for runner, episode in zip(runners, episodes, strict=True):
                assert runner.run(episode.begin()) == ()
            sums = [
                runner.run(episode.reply(said(ToolCall("add", {"number": 2})))).messages[0]["content"]
                for runner, episode in zip(runners, episodes, strict=True)
            ]
            assert sums == ["the sum is 2", "the sum is 4"]  # one process serves both
            process.kill()
            process.wait()
            for runner, episode in zip(runners, episodes, strict=True):
                with pytest.raises(ServerError, match=re.escape(url)) as failure:
                    runner.run(asyncio.wait_for(episode.reply(said(ToolCall("add", {"number": 2}))), 20))
                assert "no answer within" not in str(failure.value), "it must be noticed before the deadline"
                runner.run(asyncio.wait_for(episode.close(), 20))
    with pytest.raises(
        ValueError, match=r"the tools of the MCP server http://127.0.0.1:\d+/mcp cannot be listed: (?!unhandled)."
    ):
        MCPTools(url=url, deadline_seconds=19).check([])
