"""Environments of OpenEnv, which run behind a server that gives rewards (github.com/meta-pytorch/OpenEnv).

A turn of the policy is one action, or one per tool call. Each conversation has a connection of its own, to which the
server gives an environment of its own. Needs the package `openenv`, whose client is used.
"""

import json
import math
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any, Literal

from pydantic import ConfigDict, Field

from files.rows import Row
from lm.tokenizer import Messages
from lm.tool_calls import AssistantMessage, ToolCall
from ppo.environments.environment import DeadlineError, Episode, Reply, ServedEnvironment, ServedEpisode, run_within
from training.data import RowFields, named_fields

ACT = "act"  # the tool whose arguments are an action


class OpenEnv(ServedEnvironment):
    """An environment behind an OpenEnv server. The rewards of its steps are the turns' rewards."""

    model_config = ConfigDict(title="Environment openenv")

    kind: Literal["openenv"] = Field(default="openenv", description="The kind of this table.")
    url: str = Field(pattern=r"^https?://.+[^/]$", description='Address of the server, such as "http://host:8000".')
    action_field: str = Field(
        default="", description="Field of the action that gets a turn's text; by default, calls of tools are actions."
    )
    observation_field: str = Field(
        default="", description="Field of observations that the policy reads; by default, and if null, all as JSON."
    )
    reset_fields: tuple[str, ...] = Field(
        default=(), description="Fields of a prompt's row that the server's `reset` gets, in addition to a seed."
    )

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        return () if self.action_field else _described(self.url, self.deadline_seconds)[2]

    @property
    def row_fields(self) -> RowFields:
        return named_fields(self.reset_fields, "ppo.environment.reset_fields")

    def check(self, _rows: Sequence[Row]) -> None:
        actions, observations, _ = _described(self.url, self.deadline_seconds)
        for key, fields in (("action_field", actions), ("observation_field", observations)):
            if getattr(self, key) not in ("", *fields):
                raise ValueError(f"ppo.environment.{key} is {getattr(self, key)!r}; {' or '.join(fields)} was expected")

    def load(self) -> None:
        self.check(())

    def open(self, _conversation: Messages, row: Row, seed: int) -> Episode:
        return ServedEpisode(self, self.url, partial(_Session, self, {**row, "seed": seed % 2**31}))


class _Session(Episode):
    """One connection. `_rewards` are those of its steps so far that had one."""

    def __init__(self, environment: OpenEnv, start: Row) -> None:
        self._environment, self._start = environment, start
        self._client = _client(environment.url, environment.deadline_seconds)
        self._rewards, self._is_done = list[float](), False

    async def begin(self) -> Messages:
        text = self._text_of((await self._client.reset(**self._start)).observation)
        return [{"role": "user", "content": text}] if text else ()

    async def reply(self, message: AssistantMessage) -> Reply:
        before, calls, field = len(self._rewards), message.tool_calls, self._environment.action_field
        if field:
            messages = [{"role": "user", "content": await self._step({field: message.text})}]
        else:
            messages = [{"role": "tool", "name": call.name, "content": await self._call(call)} for call in calls]
        return Reply(messages, sum(self._rewards[before:]), self._is_done or not messages)

    async def score(self) -> float:
        return math.nan if self._is_done and not self._rewards else 0.0  # in addition to the turns' rewards

    async def close(self) -> None:
        await self._client.close()

    async def _call(self, call: ToolCall) -> str:
        names = [tool["function"]["name"] for tool in self._environment.tools]
        wrong = "the episode is over" if self._is_done else call.failure
        if wrong or call.name not in names:
            return f"Error: {wrong or f'there is no tool {call.name!r}'}"
        own = {"type": "call_tool", "tool_name": call.name, "arguments": call.arguments}
        return await self._step(call.arguments if names == [ACT] else own)

    async def _step(self, action: Mapping[str, Any]) -> str:
        """Returns what the policy reads of a step."""
        try:
            result = await self._client.step(dict(action))
        except RuntimeError as error:
            if "(code: VALIDATION_ERROR)" not in str(error):
                raise
            return "Error: this is not an action of the environment"  # the policy wrote it
        if result.reward is not None:
            self._rewards.append(float(result.reward))
        self._is_done = bool(result.done)
        return self._text_of(result.observation)

    def _text_of(self, observation: Mapping[str, Any]) -> str:
        value = observation.get(self._environment.observation_field)
        if value is None:
            value = {name: own for name, own in observation.items() if name != "metadata"} or ""
        elif isinstance(value, Mapping) and "structured_content" in value:  # a tool's result, in MCP's form
            value = "\n".join(part.get("text", f"[{part['type']}]") for part in value["content"])
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _client(url: str, seconds: float) -> Any:
    """Returns a client, which waits longer than a conversation's deadline. Raises: ValueError without the package."""
    try:
        from openenv.core import GenericEnvClient
    except ImportError:
        raise ValueError("the package openenv is not installed; environment.kind openenv needs it") from None
    return GenericEnvClient(url, connect_timeout_s=2 * seconds, message_timeout_s=2 * seconds, mode="simulation")


@cache
def _described(url: str, seconds: float) -> tuple[Mapping[str, Any], Mapping[str, Any], Sequence[Mapping[str, Any]]]:
    """Returns the fields of actions and of observations, and the tools. Raises: ValueError for no OpenEnv server."""
    import httpx  # only here: a bare GPU machine has no HTTP client

    client = _client(url, seconds).sync()

    async def schema() -> Any:
        async with httpx.AsyncClient(timeout=seconds) as asking:
            return (await asking.get(f"{url}/schema")).raise_for_status().json()

    try:
        schemas = run_within(schema, seconds)
        action, observation = schemas["action"], schemas["observation"]
        del action["properties"]["metadata"]
        tools = [{"name": ACT, "description": action.get("description", ""), "input_schema": action}]
        if not action["properties"] or "tool_name" in action["properties"]:  # its actions are calls of its own tools
            with client:
                tools = client.step({"type": "list_tools"}).observation["tools"]
    except (httpx.HTTPError, DeadlineError, OSError, RuntimeError, ValueError, LookupError, TypeError) as error:
        raise ValueError(f"ppo.environment.url: {url} does not answer as OpenEnv servers do: {error!r}") from None
    for tool in tools:
        tool["parameters"] = tool.pop("input_schema")
    return action["properties"], observation["properties"], [{"type": "function", "function": tool} for tool in tools]
