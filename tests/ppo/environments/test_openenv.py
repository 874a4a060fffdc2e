"""OpenEnv, with the published package and its server in a process of its own."""

import asyncio
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.processes import free_port
from files.retries import ServerError
from lm.tool_calls import AssistantMessage, ToolCall
from ppo.environments.environment import Episode, Reply
from ppo.environments.openenv import OpenEnv

SECONDS = 30.0


def said(text: str = "", *calls: ToolCall) -> AssistantMessage:
    return AssistantMessage(text, text, calls)


@contextmanager
def running(kind: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    pytest.importorskip("openenv", reason="the package openenv is not installed")
    port = str(free_port())
    server = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("openenv_server.py")), kind, port], stderr=subprocess.DEVNULL
    )
    try:
        url, end = f"http://127.0.0.1:{port}", time.monotonic() + 60
        while time.monotonic() < end and server.poll() is None:
            try:
                httpx.get(f"{url}/schema")
                break
            except httpx.HTTPError:
                time.sleep(0.1)
        yield url, server
    finally:
        server.kill()
        server.wait()


@pytest.fixture(scope="module")
def counting() -> Iterator[str]:
    with running("count") as (url, _):
        yield url


@contextmanager
def opened(environment: OpenEnv, **row: Any) -> Iterator[tuple[Episode, Callable[..., Any]]]:
    """An episode, and what runs its calls as conversations do: one task per call, in one loop."""
    episode = environment.open([], row, 2**40 + 7)
    with asyncio.Runner() as runner:
        yield episode, runner.run
        runner.run(episode.close())


def test_a_turns_text_is_an_action_and_steps_give_rewards(counting: str) -> None:
    environment = OpenEnv(
        url=counting, action_field="word", observation_field="text", reset_fields=("start",), deadline_seconds=SECONDS
    )
    environment.check([])
    assert environment.tools == ()
    with opened(environment, start=5) as (first, run), opened(environment, start=0) as (second, run_second):
        assert run(first.begin()) == [{"role": "user", "content": "the count is 5"}]
        assert run_second(second.begin()) == [{"role": "user", "content": "the count is 0"}]
        assert run(first.reply(said("four"))) == Reply([{"role": "user", "content": "the count is 9"}], 4.0)
        assert run_second(second.reply(said("six"))) == Reply([{"role": "user", "content": "the count is 3"}], 3.0)
        assert run(first.reply(said("end"))) == Reply([{"role": "user", "content": "over"}], 1.0, is_over=True)
        assert run(first.score()) == 0


def test_the_seed_reaches_the_server_and_the_whole_observation_is_json(counting: str) -> None:
    environment = OpenEnv(url=counting, action_field="word", deadline_seconds=SECONDS)
    with opened(environment) as (episode, run):
        assert run(episode.begin()) == [{"role": "user", "content": '{"text": "the count is 0", "count": 0}'}]
        reply = run(episode.reply(said("seed")))
        assert reply.messages[0]["content"] == f'{{"text": "{(2**40 + 7) % 2**31}", "count": 0}}'


def test_a_tools_arguments_are_an_action(counting: str) -> None:
    environment = OpenEnv(url=counting, observation_field="count", deadline_seconds=SECONDS)
    environment.check([])
    (tool,) = environment.tools
    assert tool["function"]["name"] == "act"
    assert list(tool["function"]["parameters"]["properties"]) == ["word"]
    with opened(environment) as (episode, run):
        run(episode.begin())
        calls = [
            ToolCall("act", {"word": "four"}), ToolCall("act", {"word": 3}), ToolCall("go", {}),
            ToolCall("", {}, "a call is not JSON"), ToolCall("act", {"word": "end"}), ToolCall("act", {"word": "late"}),
        ]  # fmt: skip
        reply = run(episode.reply(said("", *calls)))
        assert [message["content"] for message in reply.messages] == [
            "4", "Error: this is not an action of the environment", "Error: there is no tool 'go'",
            "Error: a call is not JSON", "4", "Error: the episode is over",
        ]  # fmt: skip
        assert (reply.reward, reply.is_over) == (5.0, True)
    with opened(environment) as (episode, run):
        run(episode.begin())
        assert run(episode.reply(said("I am done."))) == Reply([], is_over=True)
        assert run(episode.score()) == 0  # the policy ended it, so that no reward is what it earned


def test_the_tools_of_a_server_are_called() -> None:
    with running("tool") as (url, _):
        environment = OpenEnv(url=url, deadline_seconds=SECONDS)
        environment.check([])
        (tool,) = environment.tools
        assert tool["function"]["name"] == "add"
        assert tool["function"]["parameters"]["properties"]["number"]["type"] == "integer"
        with opened(environment) as (episode, run):
            assert run(episode.begin()) == ()  # its observation is empty
            calls = [ToolCall("add", {"number": number}) for number in (2, 3, -1)]
            contents = [message["content"] for message in run(episode.reply(said("", *calls))).messages]
            assert [json.loads(content)["result"]["data"] for content in contents[:2]] == [
                "the sum is 2",
                "the sum is 5",
            ]
            assert "a number of at least 0 was expected" in contents[2]
        shown = environment.model_copy(update={"observation_field": "result"})
        with opened(shown) as (episode, run):
            run(episode.begin())
            reply = run(episode.reply(said("", ToolCall("add", {"number": 2}))))
            assert reply == Reply([{"role": "tool", "name": "add", "content": "the sum is 2"}])


def test_what_fails_loses_the_conversation(counting: str) -> None:
    environment = OpenEnv(url=counting, action_field="word", observation_field="text", deadline_seconds=SECONDS)
    with opened(environment) as (episode, run):
        run(episode.begin())
        with pytest.raises(RuntimeError, match="the disk is full"):
            run(episode.reply(said("fail")))
    with opened(environment) as (episode, run):
        run(episode.begin())
        assert run(episode.reply(said("quiet"))).is_over
        assert math.isnan(run(episode.score()))  # over without a reward
    with running("count") as (url, server):
        gone = environment.model_copy(update={"url": url, "max_wait_seconds": 0})
        with opened(gone) as (episode, run):
            run(episode.begin())
            server.kill()
            server.wait()
            with pytest.raises(ServerError, match="close"):
                run(episode.reply(said("four")))
        with opened(gone) as (episode, run), pytest.raises(ServerError, match="Failed to connect"):
            run(episode.begin())


def test_mistakes_are_named_before_a_run(counting: str) -> None:
    with pytest.raises(ValueError, match="action_field is 'text'; word was expected"):
        OpenEnv(url=counting, action_field="text", deadline_seconds=SECONDS).check([])
    with pytest.raises(ValueError, match=r"ppo\.environment\.url: http://127\.0\.0\.1:9 does not answer"):
        OpenEnv(url="http://127.0.0.1:9", action_field="word").check([])
    with pytest.raises(ValueError, match=r"observation_field is 'texts'; .* or text or count was expected"):
        OpenEnv(url=counting, observation_field="texts", deadline_seconds=SECONDS).check([])


def test_rows_keep_what_the_reset_gets() -> None:
    fields = OpenEnv(url="http://127.0.0.1:9", reset_fields=("task",)).row_fields
    assert fields.of("prompts.jsonl:1", {"task": "sort", "other": 1}) == {"task": "sort"}
    with pytest.raises(ValueError, match=r"prompts\.jsonl:1: field 'task', of ppo\.environment\.reset_fields"):
        fields.of("prompts.jsonl:1", {})


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openenv", None)
    monkeypatch.setitem(sys.modules, "openenv.core", None)
    with pytest.raises(ValueError, match="the package openenv is not installed"):
        OpenEnv(url="http://127.0.0.1:9").check([])
