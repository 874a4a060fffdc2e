"""Two small OpenEnv environments: words that are counted, and a tool. Arguments: `count` or `tool`, and a port."""

import sys
from typing import Any

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation


class Word(Action):
    word: str


class Count(Observation):
    text: str = ""
    count: int = 0


class Counting(Environment):
    """Each word adds its length to the count, which is its reward, except for the words seed, end, quiet and fail."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def reset(self, seed: int | None = None, start: int = 0) -> Count:
        self.count, self.seed = start, seed
        return Count(text=f"the count is {start}", count=start)

    def step(self, action: Word, **_: Any) -> Count:
        if action.word == "fail":
            raise OSError("the disk is full")
        if action.word == "seed":
            return Count(text=str(self.seed), count=self.count)
        if action.word == "quiet":
            return Count(text="no reward", count=self.count, done=True)
        if action.word == "end":
            return Count(text="over", count=self.count, reward=1, done=True)
        self.count += len(action.word)
        return Count(text=f"the count is {self.count}", count=self.count, reward=len(action.word))

    @property
    def state(self) -> State:
        return State()


class Tools(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server, self.total = FastMCP("tools"), 0

        @server.tool
        def add(number: int) -> str:
            """Add a number to the sum, and return the sum."""
            if number < 0:
                raise ValueError("a number of at least 0 was expected")
            self.total += number
            return f"the sum is {self.total}"

        super().__init__(server)

    def reset(self, **_: Any) -> Observation:
        self.total = 0
        return Observation()

    def _step_impl(self, _action: Action, **_: Any) -> Observation:
        raise ValueError("only tools are called")

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    kinds = {"count": (Counting, Word, Count), "tool": (Tools, CallToolAction, CallToolObservation)}
    app = create_fastapi_app(*kinds[sys.argv[1]], max_concurrent_envs=4)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")
