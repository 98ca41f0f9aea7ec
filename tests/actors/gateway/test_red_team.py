"""Requests that no session should get through: each has its API's own error, and nothing ends."""

import asyncio
import json

import httpx
import pytest

from actors.gateway import http_server
from tests.actors.gateway.agents import AGENTS, chat
from tests.actors.gateway.gateway_bench import check_exact
from tests.waiting import reached

pytestmark = pytest.mark.vllm

CHAT = {"model": "m", "messages": [{"role": "user", "content": "add name"}]}
PATHS = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": "m", "prompt": "add name"},
    "/v1/responses": {"model": "m", "input": "add name"},
    "/v1/messages": {**CHAT, "max_tokens": 9},
}


def check_error(answer, status, path, *, says=""):
    """Check that an answer is an error in the form of the API that was asked."""
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert says in body["error"]["message"]
    assert isinstance(body["error"]["type"], str)
    anthropic = path.startswith("/v1/messages")
    assert body.get("type") == ("error" if anthropic else None)
    assert ("param" in body["error"]) is not anthropic
    assert answer.headers["x-should-retry"] == "false"


@pytest.fixture
def ask(bench):
    """Return a function that asks an address of the gateway with the key of a session."""

    def post(opened, path, body, *, key=None, method="POST", headers=None):
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        given = {"Authorization": f"Bearer {opened.key}"} if key is None else key

        async def asked():
            async with httpx.AsyncClient(base_url=opened.address, headers=given) as client:
                return await client.request(method, path, content=content, headers=headers)

        return bench.run(asked())

    return post


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("key", ["none", "foreign", "closed", "half", "not ASCII", "basic"])
def test_nothing_is_served_without_the_key_of_an_open_session(bench, ask, path, key):
    opened, closed = bench.open(), bench.open()
    bench.run(closed.close())
    keys = {
        "none": {},
        "foreign": {"Authorization": "Bearer " + "x" * 43},
        "closed": {"x-api-key": closed.key},
        "half": {"Authorization": f"Bearer {opened.key[:20]}"},
        "not ASCII": {"x-api-key": opened.key.encode() + b"\xff"},
        "basic": {"Authorization": f"Basic {opened.key}"},
    }
    check_error(ask(opened, path, PATHS[path], key=keys[key]), 401, path)
    assert opened.session.turns == closed.session.turns == 0
    assert bench.client.prompts == []


def test_a_key_may_stand_in_the_address(bench, ask):
    opened = bench.open()
    path = f"/s/{opened.key}/v1/chat/completions"
    assert ask(opened, path, CHAT, key={}).status_code == 200
    check_error(ask(opened, "/s/x/v1/messages", CHAT, key={}), 401, "/v1/messages")


MALFORMED = {
    "no JSON": (b"{", "JSON"),
    "empty": (b"", "JSON"),
    "not UTF-8": (b'{"a": "\xff\xfe"}', "JSON"),
    "a list": (b"[1]", "object"),
    "deep": (b'{"messages": ' + b"[" * 100_000, "JSON"),
    "a text": (b'"x"', "object"),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_body_is_refused(bench, ask, path, case):
    body, says = MALFORMED[case]
    check_error(ask(bench.open(), path, body), 400, path, says=says)


WRONG = [
    {"messages": 5, "prompt": {"a": 1}, "input": 5},
    {"messages": [5], "prompt": [[[1]]], "input": [5]},
    {"messages": [{"role": 5, "content": "x"}], "prompt": [-1], "input": [{"role": 5}]},
    {"messages": [{"content": "x"}], "prompt": ["a", "b"], "input": [{"type": "unknown"}]},
    {"messages": [{"role": "wizard", "content": {"a": 1}}], "prompt": [10**9], "input": {"a": 1}},
    {"max_tokens": "many", "max_output_tokens": "many"},
    {"max_tokens": -3, "max_output_tokens": -3},
    {"stream": "perhaps"},
    {"tools": {"a": 1}},
    {"tools": [5]},
    {"stop": 5, "stop_sequences": 5, "input": None, "instructions": 5},
]


READ = {
    "/v1/completions": {"prompt", "max_tokens", "stream", "stop"},
    "/v1/responses": {"input", "max_output_tokens", "stream", "tools", "instructions"},
    "/v1/messages": {"messages", "max_tokens", "stream", "tools", "stop_sequences"},
    "/v1/chat/completions": {"messages", "max_tokens", "stream", "tools", "stop"},
}
CHANGES = [
    (path, changed)
    for path, read in READ.items()
    for wrong in WRONG
    if (changed := {name: value for name, value in wrong.items() if name in read})
]


@pytest.mark.parametrize(("path", "changed"), CHANGES, ids=str)
def test_wrong_types_are_refused(bench, ask, path, changed):
    opened = bench.open()
    check_error(ask(opened, path, {**PATHS[path], **changed}), 400, path)
    assert opened.session.turns == 0


REFUSED = {
    "n": 2,
    "logit_bias": {"5": 100},
    "presence_penalty": 0.5,
    "frequency_penalty": -1,
    "repetition_penalty": 1.2,
    "response_format": {"type": "json_schema", "json_schema": {}},
    "text": {"format": {"type": "json_schema", "schema": {}}},
    "structured_outputs": {"regex": "a"},
    "tool_choice": "required",
    "functions": [{"name": "f"}],
    "echo": True,
    "prompt_logprobs": 1,
    "use_beam_search": True,
    "min_tokens": 5,
    "ignore_eos": True,
    "bad_words": ["x"],
    "allowed_token_ids": [5],
    "previous_response_id": "resp_1",
    "background": True,
    "kv_transfer_params": {"prompt_token_ids": [1]},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_changes_the_distribution_is_refused_by_name(bench, ask, name):
    for path, body in PATHS.items():
        answer = ask(bench.open(), path, {**body, name: REFUSED[name]})
        check_error(answer, 400, path, says=name)


@pytest.mark.parametrize("kind", ["image_url", "input_image", "input_audio", "image", "document"])
def test_only_text_is_read(bench, ask, kind):
    part = [{"type": "text", "text": "x"}, {"type": kind, kind: {"url": "http://127.0.0.1/x"}}]
    for name, path in (("messages", "/v1/chat/completions"), ("input", "/v1/responses")):
        body = {name: [{"role": "user", "content": part}]}
        check_error(ask(bench.open(), path, body), 400, path, says=kind)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/metrics", 404),
        ("GET", "/health", 404),
        ("GET", "/", 404),
        ("GET", "/docs", 404),
        ("POST", "/tokenize", 404),
        ("POST", "/v1/chat/completions/render", 404),
        ("POST", "/v1/chat/completions/batch", 404),
        ("POST", "/v1/embeddings", 404),
        ("POST", "/v1/load_lora_adapter", 404),
        ("POST", "/inference/v1/generate", 404),
        ("POST", "/v1//chat/completions", 404),
        ("POST", "/v1/chat/completions/../../../metrics", 404),
        ("POST", "/v1/messages/batches", 404),
        ("GET", "/v1/responses/resp_1", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
    ],
)
def test_other_addresses_of_vllm_are_not_served(bench, ask, method, path, status):
    check_error(ask(bench.open(), path, CHAT, method=method), status, path)


def test_no_header_of_a_client_reaches_vllm(bench, ask):
    one, other = bench.open(), bench.open()
    headers = {"X-Request-Id": "same", "X-data-parallel-rank": "7", "X-Session-ID": "s"}
    for opened in (one, other):
        assert ask(opened, "/v1/chat/completions", CHAT, headers=headers).status_code == 200
    assert one.session.turns == other.session.turns == 1


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("declared", [True, False])
def test_a_body_that_is_too_long_is_refused(bench, monkeypatch, path, declared):
    monkeypatch.setattr(http_server, "BODY_BYTES", 1000)
    opened = bench.open()

    async def parts():
        for _ in range(100):
            yield b" " * 100

    async def asked():
        body = b" " * 10_000 if declared else parts()
        headers = {"x-api-key": opened.key}
        async with httpx.AsyncClient(base_url=opened.address, headers=headers) as client:
            return await client.post(path, content=body)

    check_error(bench.run(asked()), 413, path, says="1000")


async def raw(opened, *parts):
    """Send bytes over a connection of its own; return all that is answered."""
    port = int(opened.address.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for part in parts:
        writer.write(part)
        await writer.drain()
    answer = await reader.read()
    writer.close()
    return answer


def head(opened, length, path="/v1/messages"):
    return f"POST {path} HTTP/1.1\r\nhost: x\r\nx-api-key: {opened.key}\r\n".encode() + (
        b"content-length: %d\r\n\r\n" % length
    )


def test_a_slow_body_has_a_deadline(bench, monkeypatch):
    monkeypatch.setattr(http_server, "BODY_SECONDS", 0.2)
    opened = bench.open()
    answer = bench.run(raw(opened, head(opened, 100), b"{"))
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "timeout_error"


@pytest.mark.parametrize("sent", [b"", b"POST /v1/messages HT", b"GET / HTTP/1.1\r\nhost: "])
def test_a_slow_head_has_a_deadline(bench, monkeypatch, sent):
    monkeypatch.setattr(http_server, "HEADER_SECONDS", 0.2)
    assert bench.run(raw(bench.open(), sent)) == b""


@pytest.mark.parametrize(
    "sent", [b"\x16\x03\x01\x00\xff" * 9, b"GET / HTTP/9.9\r\n\r\n", b"x" * 99]
)
def test_what_is_no_http_is_refused(bench, sent):
    answer = bench.run(raw(bench.open(), sent, b"\r\n\r\n"))
    assert answer == b"" or answer.startswith(b"HTTP/1.1 400 ")
    assert bench.run(chat(bench.open(), "add name")) == [("hello", [])]


def test_a_request_that_is_dropped_in_its_body_is_nothing(bench):
    opened = bench.open()

    async def dropped():
        port = int(opened.address.rpartition(":")[2])
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head(opened, 1000) + b"{")
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        return await chat(opened, "add name")

    assert bench.run(dropped()) == [("hello", [])]
    assert opened.session.turns == 1


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("limits", "status", "says"),
    [
        ({"turns": 1}, 429, "1 turns"),
        ({"tokens": 6}, 429, "6 tokens"),
        ({"seconds": 0.0}, 408, "0 s"),
    ],
)
def test_a_session_ends_at_its_limits(bench, ask, path, limits, status, says):
    opened = bench.open(**limits)
    if "seconds" not in limits:
        assert ask(opened, path, PATHS[path]).status_code == 200
    check_error(ask(opened, path, PATHS[path]), status, path, says=says)
    assert says in opened.limit
    assert opened.session.turns == ("seconds" not in limits)


@pytest.mark.parametrize("path", PATHS)
def test_a_prompt_that_fills_the_context_is_refused(bench, ask, path):
    body = json.loads(json.dumps(PATHS[path]).replace("add name", "word " * 1000))
    opened = bench.open()
    check_error(ask(opened, path, body), 400, path, says="1024")
    assert "1024" in opened.limit


def test_requests_beside_each_other_keep_to_the_turns(bench):
    opened = bench.open(turns=3)

    async def crowd():
        asked = [chat(opened, f"name {n}") for n in range(10)]
        return await asyncio.gather(*asked, return_exceptions=True)

    done = bench.run(crowd())
    assert sum(answer == [("hello", [])] for answer in done) == 3
    assert opened.session.turns == 3


def test_a_session_has_so_many_requests_at_once_and_the_others_are_told_so(bench):
    opened = bench.open(turns=20, tokens=400)
    bench.client.goes_on.clear()
    headers = {"x-api-key": opened.key}

    async def crowd():
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=opened.address, headers=headers, limits=limits, timeout=60
        ) as client:
            asked = [
                asyncio.create_task(client.post("/v1/messages", json=PATHS["/v1/messages"]))
                for _ in range(300)
            ]
            while sum(one.done() for one in asked) < 280:
                await asyncio.wait({one for one in asked if not one.done()}, timeout=0.1)
            bench.client.goes_on.set()
            return await asyncio.gather(*asked)

    answers = bench.run(crowd())
    refused = [answer for answer in answers if answer.status_code != 200]
    assert (len(answers) - len(refused), opened.session.turns) == (20, 20)
    for answer in refused:
        check_error(answer, 429, "/v1/messages", says="20 requests")
    assert not opened.running
    assert bench.run(chat(bench.open(), "add name")) == [("hello", [])]


def test_many_requests_at_once_have_short_bodies(bench, monkeypatch):
    monkeypatch.setattr(http_server, "BODY_BYTES", 1000)
    opened = bench.open()
    bench.client.goes_on.clear()
    body = {**CHAT, "user": "x" * 700}
    headers = {"Authorization": f"Bearer {opened.key}"}

    async def crowd():
        async with httpx.AsyncClient(base_url=opened.base_url, headers=headers) as client:
            asked = []
            for _ in range(8):
                asked.append(asyncio.create_task(client.post("chat/completions", json=body)))
                await reached(lambda: len(opened.running) == len(asked) or asked[-1].done())
            refused = [one.result() for one in asked[5:] if await asyncio.wait({one})]
            bench.client.goes_on.set()
            return refused, [await one for one in asked[:5]]

    refused, served = bench.run(crowd())
    for answer in refused:
        check_error(answer, 413, "/v1/chat/completions", says="beside other requests")
    assert [answer.status_code for answer in served] == [200] * 5


@pytest.mark.parametrize(
    ("most", "statuses", "sampled"),
    [
        (4, [200, 200, 200, 429], 10),  # 4, 4 and 2
        (None, [200, 429, 429, 429], 10),  # the first takes all
        (30, [200, 429, 429, 429], 10),
    ],
)
def test_requests_beside_each_other_keep_to_the_tokens(bench, most, statuses, sampled):
    bench.client.says = lambda prompt: "x" * 50
    opened = bench.open(tokens=10)
    body = {**CHAT, "max_tokens": most}

    async def crowd():
        async with httpx.AsyncClient(base_url=opened.base_url, timeout=60) as client:
            headers = {"Authorization": f"Bearer {opened.key}"}
            asked = [client.post("chat/completions", json=body, headers=headers) for _ in range(4)]
            return await asyncio.gather(*asked)

    answers = bench.run(crowd())
    assert sorted(answer.status_code for answer in answers) == statuses
    assert opened.session.sampled == sampled
    for answer in answers:
        if answer.status_code == 429:
            check_error(answer, 429, "/v1/chat/completions", says="sampled its 10 tokens")


def test_a_request_waits_for_the_tokens_that_another_has_reserved_and_may_leave(bench):
    opened = bench.open(tokens=20)

    async def crowd():
        return await asyncio.gather(*(chat(opened, f"name {n}") for n in range(3)))

    assert bench.run(crowd()) == [[("hello", [])]] * 3
    assert opened.session.sampled == 18
    assert [asked.max_tokens for asked in bench.client.parameters] == [20, 14, 8]


def test_a_deadline_breaks_off_what_runs(bench):
    bench.client.goes_on.clear()
    opened = bench.open(seconds=0.5)
    with pytest.raises(Exception, match="session's 0") as caught:
        bench.run(chat(opened, "add name"))
    assert caught.value.status_code == 408
    assert opened.session.tokens().left_out == {"undelivered": 1}
    assert len(bench.client.aborted) == 1


def test_closing_a_session_breaks_off_what_runs_and_touches_no_other(bench):
    bench.client.goes_on.clear()
    opened, other = bench.open(), bench.open()

    async def play():
        asking = [asyncio.create_task(chat(one, "add name")) for one in (opened, other)]
        await bench.client.began.wait()
        await opened.close()
        with pytest.raises(Exception, match="closed") as caught:
            await asking[0]
        bench.client.goes_on.set()
        return caught.value.status_code, await asking[1]

    assert bench.run(play()) == (401, [("hello", [])])
    assert (opened.session.turns, other.session.turns) == (0, 1)


def test_a_hundred_sessions_at_once_stay_apart(bench):
    bench.client.says = lambda prompt: prompt.partition("user\n")[2].partition("<|im_end|>")[0]
    opened = [bench.open() for _ in range(100)]
    agents = [*AGENTS.values()]

    async def crowd():
        return await asyncio.gather(
            *(
                agents[n % 3](one, f"task of agent {n}", stream=bool(n % 2))
                for n, one in enumerate(opened)
            )
        )

    done = bench.run(crowd())
    assert list(done) == [[(f"task of agent {n}", [])] for n in range(100)]
    for n, one in enumerate(opened):
        assert (one.session.turns, one.session.reply) == (1, f"task of agent {n}")
        check_exact(one.session)
        bench.run(one.close())
