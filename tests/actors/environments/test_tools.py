"""Conversations with tools: what counts as a call, what the policy is shown, and what it earns."""

import asyncio
import errno
import json
import os
import re
import sys

import pytest
import user_module

from actors.environments.calculator import calculator
from actors.environments.load_environment import load_environment
from actors.environments.protocol import Message
from actors.environments.tool_calls import Call, Unreadable, find_calls
from actors.errors import ServiceAway
from actors.outages import Outages, timeout
from headway.errors import InputError
from queues.records import Prompt

PLAIN = {"style": "plain", "markers": [":", ";"]}
JSON = ("<tool_call>", "</tool_call>")


def converse(options, *messages, code_execution="off"):
    """Return the opening and the turns of the environment for messages of the policy."""
    environment = load_environment("tools", options, code_execution=code_execution)()

    async def go():
        opening = await environment.reset(Prompt(prompt_id="p", text="3+4="))
        return opening, [await environment.step(Message("assistant", text)) for text in messages]

    return asyncio.run(go())


def call_of(name, **arguments):
    return f"{JSON[0]}{json.dumps({'name': name, 'arguments': arguments})}{JSON[1]}"


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("37*82", "3034"), ("7/2", "3.5"), ("6/2", "3"), ("7//2", "3"), ("-7%3", "2"),
        ("2**10", "1024"), ("(1+2)*3", "9"), ("-2**2", "-4"), ("1e3", "1000"), (" 1 + 1 ", "2"),
        ("0.1+0.2", "0.3"),
    ],
)  # fmt: skip
def test_the_calculator_calculates(expression, result):
    assert calculator(expression) == result


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("", "no arithmetic expression"), ("2+", "no arithmetic expression"),
        ("1/0", "division by zero"), ("9**99", "too large"), ("9**9**9", "out of range"),
        ("2**-101", "out of range"), ("(-8)**0.5", "out of range"), ("1e400", "too large"),
        ("True+1", "only numbers"), ("'a'*9", "only numbers"), ("abs(-1)", "only numbers"),
        ("__import__('os')", "only numbers"), ("[1][0]", "only numbers"), ("1j", "only numbers"),
        ("1+" * 100 + "1", "at most 200"), ("(" * 199, "no arithmetic expression"),
    ],
)  # fmt: skip
def test_the_calculator_says_why_there_is_no_result(expression, why):
    with pytest.raises(ValueError, match=why):
        calculator(expression)


def test_calls_are_found_in_their_order_and_none_that_was_not_ended():
    assert find_calls("a [1+1] b [2] [3", "plain", ("[", "]")) == [
        Call(None, "1+1"),
        Call(None, "2"),
    ]
    text = f"so {call_of('f', x=1)} and <tool_call>7</tool_call> <tool_call>{{</tool_call>"
    first, second, third = find_calls(text, "json", JSON)
    assert first == Call("f", {"x": 1})
    assert isinstance(second, Unreadable)
    assert isinstance(third, Unreadable)


@pytest.mark.parametrize(
    "text", ['{"name": "f\\ud800"}', '{"name": "f", "arguments": {"x": ["\\udfff"]}}']
)
def test_a_call_with_a_lone_surrogate_is_unreadable_so_that_no_tool_repeats_it(text):
    [written] = find_calls(f"<<{text}>>", "json", ("<<", ">>"))
    assert isinstance(written, Unreadable)
    assert "a lone surrogate, U+D" in written.why
    assert find_calls("no call", "json", JSON) == []


def test_a_plain_call_is_answered_and_each_turn_that_calls_well_is_paid():
    options = {**PLAIN, "call_reward": 0.25, "error_reply": ","}
    _, turns = converse(options, ":3+4;", ":3+;", "=7")
    replies = [[message.content for message in turn.messages] for turn in turns]
    assert replies == [["7"], [","], []]
    assert [(turn.reward, turn.done) for turn in turns] == [
        (0.25, False),
        (0.0, False),
        (0.0, True),
    ]
    assert [turn.reward for turn in converse(PLAIN, ":3+4;")[1]] == [None]


def test_several_calls_of_a_message_are_answered_one_by_one():
    calls = call_of("calculator", expression="1+1") + call_of("calculator", expression="2*3")
    _, [turn] = converse({}, calls)
    assert [message.content for message in turn.messages] == ["2", "6"]
    assert {message.role for message in turn.messages} == {"tool"}
    assert not turn.done


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (call_of("calculator", expression="1/0"), "error: division by zero"),
        (call_of("calculator", formula="1"), "error: missing a required argument: 'expression'"),
        (call_of("oracle"), "error: no tool 'oracle'; there are calculator"),
        ("<tool_call>[]</tool_call>",
         'error: a call must be an object with "name" and "arguments"'),
        ('<tool_call>{"name": "calculator", "arguments": 3}</tool_call>',
         'error: "arguments" must be an object'),
    ],
)  # fmt: skip
def test_the_policy_is_told_what_was_wrong_with_a_call(said, told):
    _, [turn] = converse({"call_reward": 1.0}, said)
    assert [message.content for message in turn.messages] == [told]
    assert (turn.reward, turn.done) == (0.0, False)


def test_tools_of_the_users_own_may_be_coroutines_and_long_replies_are_cut_off():
    options = {"tools": ["user_module:shout", "user_module:whisper"], "reply_characters": 4}
    _, turns = converse(options, call_of("shout", text="hello"), call_of("whisper", text="AB"))
    assert [turn.messages[0].content for turn in turns] == ["HELL", "ab"]


def test_models_that_call_by_json_are_told_what_tools_there_are():
    [system, user], _ = converse({"tools": ["calculator", "user_module:shout"]})
    assert (system.role, user.content) == ("system", "3+4=")
    lines = system.content.split("\n")
    tools = [json.loads(line)["function"] for line in lines if line.startswith('{"type"')]
    assert [tool["name"] for tool in tools] == ["calculator", "shout"]
    assert tools[1] == {
        "name": "shout",
        "description": "Says it louder.",
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string"},
                "times": {"type": "integer", "default": 1},
            },
            "required": ["text"],
            "additionalProperties": False,
        },
    }
    assert [message.role for message in converse(PLAIN)[0]] == ["user"]


def test_types_are_told_however_they_are_written():
    [system, _], _ = converse({"tools": ["postponed_tool:pick"]})
    lines = system.content.split("\n")
    (tool,) = [json.loads(line)["function"] for line in lines if line.startswith('{"type"')]
    assert tool["parameters"]["properties"] == {
        "numbers": {"type": "array", "items": {"type": "integer"}},
        "place": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "exact": {"type": "boolean"},
        "names": {"type": "object", "additionalProperties": {"type": "string"}},
        "plain": {"type": "array", "items": {}},
    }


UNIT = {"type": "string", "enum": ["m", "ft"], "title": "Unit"}
INTEGER, TEXT = {"type": "integer"}, {"type": "string"}
POINT = {
    "type": "object",
    "properties": {"x": INTEGER, "unit": {**UNIT, "default": "m"}},
    "required": ["x"],
    "title": "Point",
}


def array(items, **more):
    return {"type": "array", "items": items, **more}


@pytest.mark.reported("tools_schema")
@pytest.mark.parametrize(
    ("name", "schema", "given", "reply"),
    [
        ("listed", array({}), [1], "[1]"),
        ("typing_listed", array({}), [1], "[1]"),
        ("lists", array(array(INTEGER)), [[1], ["2"]], "[[1], [2]]"),
        ("mapped", {"type": "object", "additionalProperties": INTEGER}, {"a": 1}, "{'a': 1}"),
        ("typing_mapped", {"type": "object", "additionalProperties": True}, {"a": 1}, "{'a': 1}"),
        ("chosen", {"enum": ["c", 1], "default": "c"}, 1, "1"),
        ("enumerated", UNIT, "ft", "<Unit.FOOT: 'ft'>"),
        ("described", {**INTEGER, "description": "how many", "minimum": 1}, 2, "2"),
        ("pair", {"type": "array", "prefixItems": [INTEGER, TEXT], "minItems": 2, "maxItems": 2},
         [1, "a"], "(1, 'a')"),
        ("many", array(INTEGER), [1, 2], "(1, 2)"),
        ("unique", array(INTEGER, uniqueItems=True), [1, 1], "{1}"),
        ("point", POINT, {"x": 1}, "Point(x=1, unit=<Unit.METRE: 'm'>)"),
        ("points", array(POINT), [], "[]"),
        ("forward", array(POINT), [], "[]"),
        ("inner_forward", array(UNIT), ["m"], "[<Unit.METRE: 'm'>]"),
        ("row", {"type": "object", "properties": {"key": TEXT, "value": {"type": "number"}},
                 "required": ["key"], "title": "Row"}, {"key": "a"}, "{'key': 'a'}"),
        ("named", {"type": "array", "prefixItems": [INTEGER, {**TEXT, "default": "b"}],
                   "minItems": 1, "maxItems": 2}, [1], "Pair(first=1, second='b')"),
        ("optional", {"anyOf": [INTEGER, {"type": "null"}], "default": None}, None, "None"),
        ("either", {"anyOf": [INTEGER, TEXT]}, "a", "'a'"),
        ("model", {"type": "object", "properties": {"size": {**INTEGER}}, "required": ["size"],
                   "title": "Model"}, {"size": 3}, "Model(size=3)"),
        ("tree", {"$ref": "#/$defs/Tree"}, {"leaves": [{"leaves": []}]},
         "Tree(leaves=[Tree(leaves=[])])"),
        ("untyped", {}, {"a": [1]}, "{'a': [1]}"),
        ("positional", INTEGER, 1, "(1, 'b', 0.5)"),
        ("first", None, 1, "error: first has no argument x; it has y, z"),
        ("keyword", INTEGER, 1, "1"),
        ("counted", None, 1, "{'x': 1}"),
        ("counted", None, "a", "error: argument x: Input should be a valid integer, unable to "
                               "parse string as an integer"),
        ("wrapped", None, 1, "((), {'x': 1})"),
        ("find", INTEGER, 1, "1"),
        ("shelf", INTEGER, 1, "1"),
        ("find_later", INTEGER, 1, "1"),
        ("pair", ..., [1], "error: argument x.1: Field required"),
        ("enumerated", ..., "yd", "error: argument x: Input should be 'm' or 'ft'"),
        ("point", ..., {"x": "one"}, "error: argument x.x: Input should be a valid integer, unable "
                                     "to parse string as an integer"),
    ],
)  # fmt: skip
def test_a_type_is_described_as_json_schema_and_what_a_call_gives_becomes_of_it(
    name, schema, given, reply
):
    [system, _], [turn] = converse({"tools": [f"typed_tools:{name}"]}, call_of(name, x=given))
    assert turn.messages[0].content == reply
    (line,) = [line for line in system.content.split("\n") if line.startswith('{"type"')]
    if schema is not ...:
        assert json.loads(line)["function"]["parameters"]["properties"].get("x") == schema


@pytest.mark.reported("tools_schema")
@pytest.mark.parametrize(
    ("written", "reply"),
    [
        ({"parameters": {"x": 1}}, "((), {'x': 1})"),
        ({"arguments": '{"x": 1}', "id": "call_1", "type": "function"}, "((), {'x': 1})"),
        ({}, "((), {})"),
        ({"args": {"x": 1}}, "error: a call has the keys 'args' where it must have \"arguments\""),
        ({"arguments": {}, "parameters": {"x": 1}},
         "error: a call has the keys 'arguments', 'parameters' where it must have \"arguments\""),
        ({"\ud800": 1}, "error: a call has the keys '\\ud800' where it must have \"arguments\""),
        ({"arguments": "x=1"}, "error: a call must be JSON: Expecting value: line 1 column 1 "
                               "(char 0)"),
        ({"arguments": '{"x": "\\ud800"}'}, "error: a call has a lone surrogate, U+D800, at 0"),
        ({"arguments": "[1]"}, 'error: "arguments" must be an object'),
    ],
)  # fmt: skip
def test_arguments_are_read_however_models_write_them_and_never_dropped(written, reply):
    call = f"{JSON[0]}{json.dumps({'name': 'wrapped', **written})}{JSON[1]}"
    _, [turn] = converse({"tools": ["typed_tools:wrapped"]}, call)
    assert turn.messages[0].content == reply


def test_what_is_bound_stays_so_though_a_tool_takes_any_argument():
    _, turns = converse(
        {"tools": ["typed_tools:fixed"]}, call_of("fixed", limit=9), call_of("fixed", x=1)
    )
    assert [turn.messages[0].content for turn in turns] == [
        "error: fixed has no argument limit", "((), {'limit': 1, 'x': 1})",
    ]  # fmt: skip


def test_the_policy_has_no_say_in_what_the_user_has_bound():
    options = {"tools": ["user_module:twice"]}
    _, turns = converse(options, call_of("twice", text="a", times=9), call_of("twice", text="a"))
    assert [turn.messages[0].content for turn in turns] == [
        "error: twice has no argument times; it has text", "AA",
    ]  # fmt: skip


@pytest.mark.parametrize("arguments", [{"seconds": 1e9}, {"limit": 1}, {"folders": ["/"]}])
def test_the_policy_cannot_lift_the_limit_of_its_programs(monkeypatch, arguments):
    ran = []
    monkeypatch.setattr("actors.sandbox.sandbox.check_sandbox", lambda: None)
    monkeypatch.setattr(
        "actors.environments.tools.python",
        lambda program, *, seconds, folders: ran.append((program, seconds)),
    )
    options = {"tools": ["python"], "python_seconds": 2.0}
    _, [refused, _] = converse(
        options, call_of("python", program="a", **arguments), call_of("python", program="b"),
        code_execution="sandbox",
    )  # fmt: skip
    (name,) = arguments
    assert re.search(f"argument '?{name}", refused.messages[0].content)
    assert ran == [("b", 2.0)]


def test_python_is_refused_until_it_is_allowed():
    with pytest.raises(InputError, match='code_execution = "sandbox"'):
        load_environment("tools", {"tools": ["python"]})


def test_a_sandbox_that_cannot_be_started_is_waited_for_and_is_no_reply(monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("actors.sandbox.sandbox.check_sandbox", lambda: None)
    monkeypatch.setattr("actors.sandbox.sandbox.tempfile.NamedTemporaryFile", full)
    options = {"tools": ["python", "user_module:fails_to_open"]}
    program = call_of("python", program="print(1)")
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        with pytest.raises(ServiceAway, match=r"could not be started: .* No space left"):
            converse(options, program, code_execution="sandbox")
    assert len(os.listdir("/proc/self/fd")) <= len(before)
    _, [turn] = converse(options, call_of("fails_to_open"), code_execution="sandbox")
    assert turn.messages[0].content == "error: [Errno 2] no such page"


class Host:
    """A service that refuses connections twice."""

    left = 2

    @classmethod
    def ask(cls, question: str) -> str:
        cls.left -= 1
        if cls.left >= 0:
            raise ConnectionRefusedError(f"no host for {question}")
        return "42"


def ask_host(question: str) -> str:
    return Host.ask(question)


@pytest.mark.parametrize(
    ("question", "reply", "pauses"),
    [("the sum", "42", 2), ("http://nowhere/", "error: no host for http://nowhere/", 0)],
)
def test_a_tool_whose_service_is_away_is_called_again_unless_the_policy_gave_an_address(
    monkeypatch, question, reply, pauses
):
    monkeypatch.setattr(Host, "left", 2)
    monkeypatch.setattr(user_module, "ask_host", ask_host, raising=False)
    waited = []

    async def note(seconds):
        waited.append(seconds)

    async def go():
        environment = load_environment("tools", {"tools": ["user_module:ask_host"]})()
        async with timeout(10, Outages(60.0, sleep=note)):
            return await environment.step(
                Message("assistant", call_of("ask_host", question=question))
            )

    assert asyncio.run(go()).messages[0].content == reply
    assert len(waited) == pauses


@pytest.mark.slow
def test_python_runs_in_the_sandbox():
    programs = ["print(6*7)", "import socket; socket.socket()", "while True: pass"]
    options = {"tools": ["python"], "python_seconds": 2.0}
    _, turns = converse(
        options, *(call_of("python", program=p) for p in programs), code_execution="sandbox"
    )
    assert [turn.messages[0].content for turn in turns] == [
        "42\n",
        "error: PermissionError: [Errno 1] Operation not permitted",
        "error: stopped after 2 s",
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tool": []}, "no option tool; its options: .*tools"),
        ({"tools": []}, "leaves no tool"),
        ({"tools": ["calculator", "user_module:calculator"]}, "two are named 'calculator'"),
        ({"style": "plain", "tools": ["calculator", "user_module:shout"]}, "there is one"),
        ({"tools": ["builtins:max"]}, "'builtins:max' cannot be described .* no signature"),
        ({"tools": ["postponed_tool:unknown"]}, "cannot be described .* 'Nowhere'"),
        ({"tools": ["typed_tools:unknown"]}, "described .*Unknown'>; it needs parameters with"),
        ({"tools": ["typed_tools:function"]}, "described .*CallableSchema; it needs parameters"),
        pytest.param(
            {"tools": ["typed_tools:old_row"]},
            "use `typing_extensions.TypedDict`",
            marks=pytest.mark.skipif(sys.version_info >= (3, 12), reason="is read"),
        ),
        ({"markers": ["", "]"]}, "must both have a character"),
    ],
)
def test_tools_that_cannot_be_used_are_an_input_error(options, message):
    with pytest.raises(InputError, match=message):
        load_environment("tools", options)
