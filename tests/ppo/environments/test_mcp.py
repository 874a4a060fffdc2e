"""Tools of an MCP server, with the published package and a server in a process of its own."""

import asyncio
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from lm.tool_calls import AssistantMessage, ToolCall
from ppo.environments.environment import Reply
from ppo.environments.mcp import MCPTools

SERVER = (sys.executable, str(Path(__file__).with_name("mcp_server.py")))


def said(*calls: ToolCall) -> AssistantMessage:
    return AssistantMessage("", "", calls)


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
