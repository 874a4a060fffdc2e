"""The part of the package `mcp` that Heed calls, over lines of JSON: its client, and (run as a program) a server whose
tool `add` adds numbers to a sum. For tests of outages, which need no MCP.
"""

import asyncio
import json
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Self


class MCPError(Exception):
    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.error = SimpleNamespace(code=code, message=message)


@dataclass
class StdioServerParameters:
    command: str
    args: list[str]


class Client:
    def __init__(self, server: StdioServerParameters) -> None:
        self.server = server

    async def __aenter__(self) -> Self:
        pipe = asyncio.subprocess.PIPE
        self.process = await asyncio.create_subprocess_exec(
            self.server.command, *self.server.args, stdin=pipe, stdout=pipe
        )
        assert await self._asked(None)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()

    async def call_tool(self, _name: str, arguments: dict[str, Any]) -> Any:
        text = await self._asked(arguments["number"])
        return SimpleNamespace(content=[SimpleNamespace(type="text", text=text)], is_error=False)

    async def _asked(self, value: Any) -> str:
        assert self.process.stdin
        assert self.process.stdout
        try:
            self.process.stdin.write(f"{json.dumps(value)}\n".encode())
            await self.process.stdin.drain()
        except OSError:
            raise MCPError(-32000, "Connection closed") from None
        if not (line := await self.process.stdout.readline()):
            raise MCPError(-32000, "Connection closed")
        return str(json.loads(line))


if __name__ == "__main__":
    total = 0
    for asked in sys.stdin:
        total += json.loads(asked) or 0
        print(json.dumps(f"the sum is {total}"), flush=True)
