"""A small MCP server with state. It speaks over standard input and output, or HTTP at the port in its argument."""

import sys

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("counting")
total = 0


@server.tool()
def add(number: int) -> str:
    """Add a number to the sum, and return the sum."""
    global total
    if number < 0:
        raise ToolError("a number of at least 0 was expected")
    total += number
    return f"the sum is {total}"


if __name__ == "__main__":
    if sys.argv[1:]:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
