"""Tools of an MCP server (modelcontextprotocol.io), which the policy calls.

A turn with calls is answered with their results, one message each. A turn without calls is the policy's answer, and
ends the conversation. Each conversation has its own session with the server, so that a server with state keeps
conversations apart. Needs the package `mcp`.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field, model_validator

from files.rows import Row
from lm.tokenizer import Messages
from lm.tool_calls import AssistantMessage, ToolCall
from ppo.environments.environment import Episode, Reply, ServedEnvironment, ServedEpisode, run_within
from ppo.environments.tools import refusal

INSTALL = "environment.kind \"mcp\" needs the Python package mcp, which is not installed: pip install 'mcp>=2.3,<3'"


class MCPTools(ServedEnvironment):
    """Tools of an MCP server, which is started for each conversation (`command`) or is already running (`url`)."""

    model_config = ConfigDict(title="Environment mcp")
    scores: ClassVar[bool] = False
    begins: ClassVar[bool] = False

    kind: Literal["mcp"] = Field(default="mcp", description="The kind of this table.")
    command: tuple[str, ...] = Field(
        default=(), description="Program and arguments of a server that speaks over its standard input and output."
    )
    url: str = Field(default="", description='Address of a server that speaks HTTP, such as "http://host:8000/mcp".')

    @model_validator(mode="after")
    def _has_one_server(self) -> "MCPTools":
        if bool(self.command) == bool(self.url):
            raise ValueError("exactly one of command and url was expected")
        return self

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        return _listed(self.command, self.url, self.deadline_seconds)

    def check(self, _rows: Sequence[Row]) -> None:
        if not self.tools:
            raise ValueError(f"ppo.environment: the MCP server {self.url or ' '.join(self.command)} has no tools")

    def load(self) -> None:
        _ = self.tools

    def open(self, _conversation: Messages, _row: Row, _seed: int) -> Episode:
        return ServedEpisode(self, self.url or " ".join(self.command), partial(_Session, self.command, self.url))


class _Session(Episode):
    """A session with a server. One task opens and closes it, since both must happen in the same task, whereas each call
    of an episode runs in a task of its own.
    """

    def __init__(self, command: Sequence[str], url: str) -> None:
        self._server = (command, url)
        self._client: Any = None
        self._is_over = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def begin(self) -> Messages:
        opened = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold(opened))
        self._client = await asyncio.shield(opened)
        return ()

    async def _hold(self, opened: asyncio.Future[Any]) -> None:
        try:
            async with _client_of(*self._server) as client:
                opened.set_result(client)
                await self._is_over.wait()
        except Exception as error:
            if opened.done():  # the session broke while it was closed
                raise
            opened.set_exception(_cause(error))

    async def reply(self, message: AssistantMessage) -> Reply:
        if not message.tool_calls:
            return Reply(is_over=True)
        contents = [await _answer(self._client, place, call) for place, call in enumerate(message.tool_calls)]
        results = zip(message.tool_calls, contents, strict=True)
        return Reply([{"role": "tool", "name": call.name, "content": content} for call, content in results])

    async def close(self) -> None:
        self._is_over.set()
        if self._task is not None:
            await asyncio.wait([self._task])
            if not self._task.cancelled():
                self._task.exception()  # a call has already reported it


async def _answer(client: Any, place: int, call: ToolCall) -> str:
    """Returns what the policy reads in answer to a call: the tool's texts, or what is wrong with the call."""
    from mcp import MCPError

    if wrong := refusal(place, call):
        return f"Error: {wrong}"
    try:
        result = await client.call_tool(call.name, dict(call.arguments))
    except MCPError as error:  # such as an unknown tool
        if error.error.code in _LOST or error.error.message in _SAID_BY_THE_CLIENT:
            raise
        return f"Error: {error}"
    texts = [part.text if part.type == "text" else f"[{part.type}]" for part in result.content]
    if not texts and result.structured_content is not None:
        texts = [json.dumps(result.structured_content, ensure_ascii=False)]
    return ("Error: " if result.is_error else "") + "\n".join(texts)


_LOST = (-32000, -32700)  # the connection is closed; the answer is malformed
# What the client makes of HTTP statuses: 404, since a server that was started again does not know the session; others.
_SAID_BY_THE_CLIENT = ("Session terminated", "Server returned an error response")


def _client_of(command: Sequence[str], url: str) -> Any:
    """Returns a client of the server, as a context manager. Raises: ValueError if the package is missing."""
    try:
        from mcp import Client, StdioServerParameters
    except ImportError:
        raise ValueError(INSTALL) from None
    return Client(url or StdioServerParameters(command=command[0], args=list(command[1:])))


@cache
def _listed(command: Sequence[str], url: str, seconds: float) -> Sequence[Mapping[str, Any]]:
    """Returns the schemas of a server's tools. Raises: ValueError if the server does not answer."""

    async def listed() -> list[Mapping[str, Any]]:
        found, cursor = list[Mapping[str, Any]](), None
        async with _client_of(command, url) as client:
            while True:
                page = await client.list_tools(cursor=cursor)
                found += [
                    {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
                    for tool in page.tools
                ]
                cursor = page.next_cursor
                if not cursor:
                    return [{"type": "function", "function": function} for function in found]

    try:
        return run_within(listed, seconds)
    except ValueError:
        raise
    except Exception as failed:
        error = _cause(failed)
        raise ValueError(
            f"ppo.environment: the tools of the MCP server {url or ' '.join(command)} cannot be listed:"
            f" {str(error) or type(error).__name__}"
        ) from None


def _cause(error: Exception) -> Exception:
    """Returns what went wrong in a client's tasks, whose groups of exceptions only say how many there were."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
