"""Tools of MCP servers, programs and over HTTP, by the library's own server."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from actors.environments.load_environment import load_environment
from actors.environments.mcp_servers import ServerOptions, mcp_server
from actors.environments.protocol import Message
from actors.errors import ServiceAway
from actors.outages import Outages, timeout
from headway.errors import InputError
from queues.records import Prompt
from tests.waiting import until

EXAMPLE = Path(__file__).with_name("mcp_example.py")
COMMAND = f"{sys.executable} {EXAMPLE}"


def call_of(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def replies(options, *messages):
    """Return the replies to calls, each in a conversation of its own."""
    new = load_environment("tools", options)

    async def one(text):
        turn = await new().step(Message("assistant", text))
        return turn.messages[0].content

    return [asyncio.run(one(text)) for text in messages]


@pytest.fixture
def program():
    """Yield the options of a server that nobody else uses, and end it afterwards."""
    mcp_server.cache_clear()
    yield {"mcp": {"example": {"command": COMMAND}}}
    mcp_server.cache_clear()


@pytest.fixture
def port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


@pytest.fixture
def over_http(port):
    """Return a function that starts the server at its port, once it answers."""
    mcp_server.cache_clear()
    started = []

    def start():
        started.append(subprocess.Popen([sys.executable, EXAMPLE, str(port)], stderr=-3))
        until(lambda: answers(port), process=started[-1])
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
    mcp_server.cache_clear()


def answers(port):
    try:
        return httpx.get(f"http://127.0.0.1:{port}/mcp", trust_env=False).status_code
    except httpx.TransportError:
        return None


def test_tools_of_a_server_are_described_and_called_as_those_of_the_actor(program):
    new = load_environment("tools", program)
    opening = asyncio.run(new().reset(Prompt(prompt_id="p", text="3+4=")))
    lines = opening[0].content.split("<tools>\n")[1].split("\n</tools>")[0].splitlines()
    described = {tool["function"]["name"]: tool["function"] for tool in map(json.loads, lines)}
    assert {*described} == {
        "shout", "calculator", "process", "variables", "picture", "die", "sleep",
    }  # fmt: skip
    assert described["shout"]["description"].startswith("Return a text in capitals.")
    assert described["shout"]["parameters"]["required"] == ["text"]
    said = replies(
        program,
        call_of("shout", text="ab", times=2),
        call_of("shout", text="ab", times=10),
        call_of("shout", loud=1),
        call_of("picture"),
        call_of("whisper"),
    )
    assert said[0] == "ABAB"
    assert "at most 9 times" in said[1]
    assert said[2].startswith("error: ")
    assert "text" in said[2]
    assert said[3] == "[image of type image/png, which cannot be shown]"
    assert said[4].startswith("error: no tool 'whisper'; there are shout")
    assert replies({**program, "reply_characters": 3}, call_of("shout", text="abcd")) == ["ABC"]


def test_a_server_that_has_listed_its_tools_is_not_kept_for_nothing(program):
    load_environment("tools", program)
    server = mcp_server("example", ServerOptions(**program["mcp"]["example"]).model_dump_json())
    assert server._ended.is_set()


def test_a_name_that_is_there_twice_gets_that_of_its_server(program):
    options = {**program, "tools": ["calculator"]}
    assert replies(
        options,
        call_of("calculator", expression="2*3"),
        call_of("example_calculator", expression="2"),
    ) == ["6", "the server's 2"]


def test_a_program_gets_no_variable_of_the_actor_that_is_not_named(program, monkeypatch):
    monkeypatch.setenv("SEARCH_KEY", "open sesame")
    monkeypatch.setenv("OTHER_KEY", "not for you")
    program["mcp"]["example"]["environment"] = ["SEARCH_KEY"]
    [names] = replies(program, call_of("variables"))
    assert "SEARCH_KEY" in names.split()
    assert "OTHER_KEY" not in names.split()


def test_one_process_serves_all_conversations_and_another_takes_its_place(program):
    first, second = replies(program, call_of("process"), call_of("process"))
    assert first == second
    os.kill(int(first), signal.SIGKILL)
    options = ServerOptions(**program["mcp"]["example"])
    until(mcp_server("example", options.model_dump_json())._ended.is_set)
    [third] = replies(program, call_of("process"))
    assert third.isdigit()
    assert third != first


def test_a_call_that_ended_its_server_is_shown_and_not_repeated(program, tmp_path):
    [said] = replies(program, call_of("die", file=str(tmp_path / "calls")))
    assert said == "error: the tool's server ended before it answered"
    assert (tmp_path / "calls").read_text() == "called\n"


def test_a_call_has_a_time_limit(program):
    program["mcp"]["example"]["seconds"] = 0.2
    said = replies(program, call_of("sleep", seconds=5), call_of("shout", text="a"))
    assert said == ["error: no answer within 0.2 s", "A"]


def test_a_program_ends_with_the_process_that_started_it(tmp_path):
    script = tmp_path / "actor.py"
    script.write_text(
        "import asyncio, sys, time\n"
        "from actors.environments.mcp_servers import mcp_server, ServerOptions\n"
        f"options = ServerOptions(command={COMMAND!r}).model_dump_json()\n"
        "print(asyncio.run(mcp_server('example', options).call('process', {})), flush=True)\n"
        "time.sleep(60)\n"
    )
    actor = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    server = int(actor.stdout.readline())
    actor.kill()
    actor.communicate()
    until(lambda: not alive(server), seconds=10)


def alive(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")")[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_a_server_over_http_that_is_away_is_waited_for_and_known_again(
    over_http, port, monkeypatch
):
    monkeypatch.setenv("SEARCH_KEY", "open sesame")
    server = over_http()
    headers = {"Authorization": "Bearer ${SEARCH_KEY}"}
    options = {"mcp": {"example": {"url": f"http://127.0.0.1:{port}/mcp", "headers": headers}}}
    new = load_environment("tools", options)
    pauses = []

    async def sleep(seconds):
        pauses.append(seconds)
        over_http()

    async def go():
        def step(text):
            return new().step(Message("assistant", text))

        before = await step(call_of("shout", text="a"))
        server.kill()
        server.wait()
        with pytest.raises(ServiceAway, match=r"mcp\.example: ConnectError"):
            await step(call_of("shout", text="b"))
        async with timeout(60, Outages(60, sleep=sleep)):
            after = await step(call_of("shout", text="c"))
        return [turn.messages[0].content for turn in (before, after)]

    assert asyncio.run(go()) == ["A", "C"]
    assert len(pauses) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mcp": {"a": {"command": "no-such-program -x"}}}, "no program 'no-such-program'"),
        (
            {"mcp": {"a": {"command": "false"}}},
            r"mcp\.a does not list its tools: Connection closed",
        ),
        ({"mcp": {"a": {"url": "http://127.0.0.1:1/mcp"}}}, r"mcp\.a does not list .*ConnectError"),
        ({"mcp": {"a": {"url": "x"}}}, r"mcp\.a: url = 'x'"),
        ({"mcp": {"a": {}}}, "either a command or a url"),
        ({"mcp": {"a": {"command": "cat '"}}}, "No closing quotation"),
        ({"mcp": {"a": {"url": "http://127.0.0.1:1", "headers": {"x": "$5"}}}}, "ConnectError"),
        ({"mcp": {"a": {"command": "cat", "environment": ["NOT_SET"]}}}, "no variable NOT_SET"),
        ({"mcp": {"a": {"comand": "cat"}}}, "did you mean 'command'"),
        ({"mcp": {"a": "cat"}}, r"mcp\.a = 'cat' must be a table"),
        ({"mcp": {"a": {"command": "cat"}}, "style": "plain"}, "names no tool"),
    ],
)
def test_servers_that_cannot_be_used_are_an_input_error(options, message):
    mcp_server.cache_clear()
    with pytest.raises(InputError, match=message):
        load_environment("tools", options)
