"""Environments of the package `verifiers`, up to its version 0.3 (github.com/PrimeIntellect-ai/verifiers).

There an environment's rollout asks a client for the model's turns. Here the client hands each request to a conversation
and waits for the policy's turn. All rollouts of a process run in one event loop, since they may share clients.
"""

import asyncio
import json
import signal
from collections.abc import Mapping, Sequence
from functools import cache
from threading import Thread
from typing import Any, Literal

from pydantic import ConfigDict, Field

from files.importing import explain, load_function
from files.rows import Row
from lm.tokenizer import Messages
from lm.tool_calls import AssistantMessage
from ppo.environments.environment import Environment, Episode, Reply
from training.data import RowFields

FIELDS = ("example_id", "task", "answer", "info")  # of the rows of its data sets


class VerifiersEnvironment(Environment):
    """An environment of the package verifiers. Its rubric scores conversations."""

    model_config = ConfigDict(title="Environment verifiers")

    kind: Literal["verifiers"] = Field(default="verifiers", description="The kind of this table.")
    environment: str = Field(
        pattern=r"^.+$", description="Module or FILE.py that has `load_environment`, such as an installed environment."
    )
    settings: dict[str, Any] = Field(default_factory=dict, description="Arguments of `load_environment`.")

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        own, keys = self._loaded()[0].tool_defs or (), {"name", "description", "parameters"}
        return [{"type": "function", "function": tool.model_dump(include=keys)} for tool in own]

    @property
    def row_fields(self) -> RowFields:
        return RowFields(lambda _, row: {name: row[name] for name in FIELDS if name in row}, "verifiers")

    def check(self, _rows: Sequence[Row]) -> None:
        self._loaded()

    def load(self) -> None:
        self._loaded()

    def open(self, conversation: Messages, row: Row, _seed: int) -> Episode:
        start = {"example_id": 0, **row, "prompt": [dict(message) for message in conversation]}
        return _Rollout(*self._loaded(), start)

    def _loaded(self) -> tuple[Any, Any, asyncio.AbstractEventLoop]:
        return _loaded(self.environment, json.dumps(self.settings, default=str))


class _Rollout(Episode):
    """A rollout, which is a task in the loop of all rollouts, as `_next` is."""

    def __init__(self, environment: Any, client: Any, loop: asyncio.AbstractEventLoop, start: Row) -> None:
        self._loop, self._rollout = loop, environment.run_rollout(start, client(self), "policy", {})
        self._task: asyncio.Task[Mapping[str, Any]] | None = None
        self.requests, self.turns = asyncio.Queue[Any](), asyncio.Queue[Mapping[str, Any]]()
        self._known = [(message["role"], message["content"]) for message in start["prompt"]]
        self._tools = dict[str, str]()  # names of tools by the ids of calls

    async def begin(self) -> Messages:
        return await self._in_loop() or ()

    async def reply(self, message: AssistantMessage) -> Reply:
        turn: dict[str, Any] = {"content": message.text, "finish_reason": "stop"}
        if message.tool_calls and not any(call.failure for call in message.tool_calls):  # otherwise all is text
            named = {f"{len(self._known)}-{place}": call for place, call in enumerate(message.tool_calls)}
            self._tools |= {key: call.name for key, call in named.items()}
            calls = [{"id": k, "name": c.name, "arguments": json.dumps(dict(c.arguments))} for k, c in named.items()]
            turn = {"content": message.content, "finish_reason": "tool_calls", "tool_calls": calls}
        self._known.append(("assistant", turn["content"]))
        messages = await self._in_loop(turn)
        return Reply(is_over=True) if messages is None else Reply(messages)

    async def score(self) -> float:
        await self._in_loop({})  # ends the rollout if it waits for a turn that the conversation cannot have
        assert self._task is not None, "a rollout is scored after it has begun"
        return float(self._task.result()["reward"])

    async def close(self) -> None:
        if self._task is not None:
            self._loop.call_soon_threadsafe(self._task.cancel)

    async def _in_loop(self, turn: Mapping[str, Any] | None = None) -> Messages | None:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._next(turn), self._loop))

    async def _next(self, turn: Mapping[str, Any] | None) -> Messages | None:
        """Returns the messages before the policy's next turn; None if the rollout is over. Without a turn it starts."""
        if self._task is None:
            self._task = asyncio.create_task(self._rollout)
            self._task.add_done_callback(lambda _: self.requests.put_nowait(None))
        if turn is not None:
            self.turns.put_nowait(turn)
        request = None if self._task.done() else await self.requests.get()
        if request is None:
            if error := self._task.result().get("error"):
                raise RuntimeError(error["error_chain_repr"])
            return None
        told, number = [(message.role, message.content or "") for message in request], len(self._known)
        if told[:number] != self._known or not all(isinstance(content, str) for _, content in told):
            raise RuntimeError("the environment changed earlier messages, or sent other messages than texts")
        self._known = told
        tools = [self._tools[message.tool_call_id] if message.role == "tool" else "" for message in request[number:]]
        new = zip(told[number:], tools, strict=True)
        return [{"role": role, **({"name": tool} if tool else {}), "content": content} for (role, content), tool in new]


@cache
def _loaded(name: str, settings: str) -> tuple[Any, Any, asyncio.AbstractEventLoop]:
    """Returns the environment, a class of clients, and a loop. Raises: ValueError unless it can hold conversations."""
    try:
        import verifiers as vf
        from verifiers.types import Response, ResponseMessage
    except ImportError:  # version 0.4 has no such module
        raise ValueError("environment.kind verifiers needs the package verifiers, version 0.3") from None

    class PolicyClient(vf.OpenAIChatCompletionsClient):
        async def get_response(self, prompt: Any, *_: Any, **__: Any) -> Any:
            self.client.requests.put_nowait(prompt)
            turn = await self.client.turns.get()
            if not turn:  # a reason to end the rollout and score it that is no error
                raise vf.OverlongPromptError("the conversation has no room or no turn left")
            return Response(id="", created=0, model="policy", message=ResponseMessage(**turn, is_truncated=False))

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    load_environment = load_function(f"{name}:load_environment", "environment")
    try:
        environment = load_environment(**json.loads(settings))
    except Exception as error:
        raise ValueError(f"ppo.environment: load_environment of {name}: {explain(error, __file__)}") from None
    finally:
        for number, handler in handlers.items():  # which an environment replaces
            signal.signal(number, handler or signal.SIG_DFL)
    if not isinstance(environment, vf.MultiTurnEnv) or environment.rubric.has_group_rewards:
        raise ValueError(f"ppo.environment: {name} is no MultiTurnEnv, or its rubric scores groups of rollouts")
    loop = asyncio.new_event_loop()
    Thread(target=loop.run_forever, name="verifiers", daemon=True).start()
    return environment, PolicyClient, loop
