"""A server of the Model Context Protocol: `python mcp_example.py [PORT]`, stdio without a port."""

import os
import sys
import time

from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("example")


@server.tool()
def shout(text: str, times: int = 1) -> str:
    """Return a text in capitals.

    It may be repeated.
    """
    if times > 9:
        raise ToolError("at most 9 times")
    return text.upper() * times


@server.tool()
def calculator(expression: str) -> str:
    """Say who has calculated."""
    return f"the server's {expression}"


@server.tool()
def process() -> str:
    """Return the id of the process."""
    return str(os.getpid())


@server.tool()
def variables() -> str:
    """Return the names of its variables."""
    return " ".join(os.environ)


@server.tool()
def picture() -> Image:
    """Return a picture."""
    return Image(data=b"1234", format="png")


@server.tool()
def die(file: str) -> str:
    """Write a line, and end the process without an answer."""
    with open(file, "a") as calls:
        calls.write("called\n")
    os._exit(1)


@server.tool()
def sleep(seconds: float) -> str:
    """Answer late."""
    time.sleep(seconds)
    return "late"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
