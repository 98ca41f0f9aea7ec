"""The relay between actors and agents on other machines, over HTTP, with fake gateways."""

import asyncio
import json
import re
import socket
from contextlib import asynccontextmanager
from types import SimpleNamespace

import httpx
import openai
import pytest

from actors.errors import EnvironmentFailed, Excused, ServiceAway
from actors.gateway.http_server import HttpServer
from actors.programs.agent import AgentGone, AgentResult, AgentTask
from actors.remote import relay as task_relay
from actors.remote import remote_agent, task_board
from actors.remote.relay import TaskRelay
from actors.remote.remote_agent import RemoteAgent, RemoteOptions, load_remote
from actors.remote.task_board import TaskBoard
from actors.remote.task_keys import VARIABLE, TaskKeys
from headway.errors import InputError
from tests.waiting import reached

KEYS = TaskKeys(b"a secret of sixteen or more")
MESSAGES = [{"role": "user", "content": "2+2="}]
PROMPT = {"prompt_id": "p", "prompt": "2+2=", "messages": MESSAGES, "answer": "4", "metadata": {}}


class FakeGateway:
    """A gateway with one session that answers by its name and the number of the request."""

    def __init__(self, name, status=200):
        self.name, self.status, self.asked = name, status, []
        self.hold = asyncio.Event()
        self.hold.set()
        self.cancelled = asyncio.Event()

    async def __call__(self, scope, receive, send):
        body = b""
        while (event := await receive())["type"] == "http.request":
            body += event["body"]
            if not event["more_body"]:
                break
        self.asked.append((dict(scope["headers"])[b"authorization"].decode(), json.loads(body)))
        answering, leaving = asyncio.create_task(self.hold.wait()), asyncio.create_task(receive())
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            self.cancelled.set()
            return
        leaving.cancel()
        content = f"{self.name} {len(self.asked)}"
        streams = json.loads(body).get("stream")
        kind = b"text/event-stream" if streams else b"application/json"
        headers = [(b"content-type", kind)]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        whole = {"id": "x", "object": "chat.completion", "created": 0, "model": "policy"}
        if not streams:
            message = {"role": "assistant", "content": content}
            whole["choices"] = [{"index": 0, "message": message, "finish_reason": "stop"}]
            await send({"type": "http.response.body", "body": json.dumps(whole).encode()})
            return
        for word in content.split():
            whole["choices"] = [{"index": 0, "delta": {"content": word}, "finish_reason": None}]
            event = f"data: {json.dumps(whole)}\n\n".encode()
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


@asynccontextmanager
async def serving(app, port=0):
    server = HttpServer(app, "127.0.0.1", port)
    await server.start()
    try:
        yield server.address
    finally:
        await server.close()


@asynccontextmanager
async def relay(port=0, silent_seconds=60.0, waiting_seconds=10.0, now=None):
    """Yield a relay with what actors and agents ask of it."""
    board = TaskBoard(silent_seconds, **({"now": now} if now else {}))
    app = TaskRelay(board, KEYS, waiting_seconds=waiting_seconds)
    async with serving(app, port) as address, httpx.AsyncClient(base_url=address) as client:

        async def post(path, key, /, **content):
            headers = {"Authorization": f"Bearer {key}"}
            return await client.post(path, json=content, headers=headers, timeout=30)

        async def offer(gateway, *, task_id="g/0", key="inner", turns=0, take=0, task=PROMPT):
            fields = {"address": gateway, "key": key, "turns": turns, "take": take}
            return (await post("/offers", KEYS.of_actors, id=task_id, task=task, **fields)).json()

        async def fetch(seconds=10.0):
            return (await post("/tasks", KEYS.of_agents, seconds=seconds)).json()

        yield SimpleNamespace(
            address=address, board=board, client=client, post=post, offer=offer, fetch=fetch
        )
        await app.close()


async def said(fetched, **options):
    """Return what an unchanged client of OpenAI's API is answered with the key of a task."""
    access = {"base_url": fetched["base_url"], "api_key": fetched["key"]}
    async with openai.AsyncOpenAI(**access, max_retries=0, timeout=20) as client:
        answer = await client.chat.completions.create(model="m", messages=MESSAGES, **options)
        if not options.get("stream"):
            return answer.choices[0].message.content
        return [chunk.choices[0].delta.content async for chunk in answer]


def test_an_agent_fetches_a_task_asks_the_policy_and_reports():
    async def go():
        gateway = FakeGateway("first")
        async with relay() as at, serving(gateway) as address:
            waiting = asyncio.create_task(at.fetch())
            offered = asyncio.create_task(at.offer(address))
            fetched = await waiting
            assert fetched["task"] == PROMPT
            assert fetched["base_url"] == f"{at.address}/v1"
            assert await said(fetched) == "first 1"
            assert await said(fetched, stream=True) == ["first", "2"]
            reported = await at.post("/result", fetched["key"], reward={"right": 1.0})
            assert (reported.status_code, reported.json()) == (200, {"accepted": True})
            answer = await offered
            assert answer["result"] == {"reward": {"right": 1.0}}
            assert not answer["left"]
        assert [key for key, _ in gateway.asked] == ["Bearer inner", "Bearer inner"]

    asyncio.run(go())


def test_each_task_is_given_to_one_agent_and_none_that_is_absent():
    async def go():
        async with relay() as at:
            offers = [
                asyncio.create_task(
                    at.offer("http://x", task_id=f"g/{n}", task={**PROMPT, "prompt_id": str(n)})
                )
                for n in (0, 1)
            ]
            fetched = [await at.fetch(), await at.fetch()]
            assert sorted(each["task"]["prompt_id"] for each in fetched) == ["0", "1"]
            assert await at.fetch(seconds=0.0) == {"task": None}
            assert fetched[0]["key"] != fetched[1]["key"]
            for each in fetched:
                await at.post("/result", each["key"])
            assert [(await offer)["result"] for offer in offers] == [{}, {}]

    asyncio.run(go())


@pytest.mark.parametrize("status", [None, 401, 503])
def test_an_agent_goes_on_with_the_actor_that_holds_the_rollout_next(status):
    async def go():
        old, new = FakeGateway("old"), FakeGateway("new")
        async with relay() as at, serving(new) as address:
            async with serving(old) as lost:
                offered = asyncio.create_task(at.offer(lost, key="a"))
                fetched = await at.fetch()
                assert await said(fetched) == "old 1"
                if status is not None:  # of a gateway that has closed the session
                    old.status = status
                    asked = asyncio.create_task(said(fetched))
                    await reached(lambda: len(old.asked) == 2)
            if status is None:
                asked = asyncio.create_task(said(fetched))
            moved = asyncio.create_task(at.offer(address, key="b", turns=1))
            assert await asked == "new 1"
            await at.post("/result", fetched["key"], text="4")
            assert (await moved)["result"] == {"text": "4"}
            offered.cancel()
        assert new.asked[0][0] == "Bearer b"

    asyncio.run(go())


def test_an_agent_does_not_wait_for_a_gateway_that_is_frozen(monkeypatch):
    monkeypatch.setattr(task_board, "FROZEN_SECONDS", 0.3)

    async def go():
        old, new = FakeGateway("old"), FakeGateway("new")
        old.hold.clear()
        async with relay() as at, serving(old) as frozen, serving(new) as address:
            offered = asyncio.create_task(at.offer(frozen, key="a"))
            asked = asyncio.create_task(said(await at.fetch()))
            await asyncio.wait_for(old.cancelled.wait(), 10)
            moved = asyncio.create_task(at.offer(address, key="b", turns=1))
            assert await asked == "new 1"
            offered.cancel()
            moved.cancel()

    asyncio.run(go())


def test_an_answer_that_stops_in_its_middle_is_broken_off_once_its_actor_is_silent(monkeypatch):
    monkeypatch.setattr(task_board, "FROZEN_SECONDS", 0.3)

    async def half(scope, receive, send):
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"data: {}", "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass

    async def go():
        async with relay() as at, serving(half) as frozen:
            offered = asyncio.create_task(at.offer(frozen))
            with pytest.raises((openai.APIConnectionError, httpx.RemoteProtocolError)):
                await said(await at.fetch(), stream=True)
            offered.cancel()

    asyncio.run(go())


def test_a_silent_agent_loses_its_task_once_its_actor_has_opened_another_session(monkeypatch):
    monkeypatch.setattr(task_relay, "POLL_SECONDS", 0.2)
    times = [0.0]

    async def go():
        gateway = FakeGateway("policy")
        async with relay(silent_seconds=5.0, now=lambda: times[0]) as at, serving(gateway) as url:
            first = asyncio.create_task(at.offer(url, key="a"))
            lost = await at.fetch()
            assert await said(lost) == "policy 1"
            assert not (await first)["left"]
            times[0] = 6.0
            assert (await at.offer(url, key="a"))["left"]
            assert await at.fetch(seconds=0.0) == {"task": None}
            monkeypatch.setattr(task_relay, "POLL_SECONDS", 5.0)
            again = asyncio.create_task(at.offer(url, key="b", turns=1))
            fetched = await at.fetch()
            assert await said(fetched) == "policy 2"
            with pytest.raises(openai.APIStatusError, match="this one was silent") as refused:
                await said(lost)
            assert refused.value.status_code == 410
            assert (await at.post("/result", lost["key"], reward=1.0)).status_code == 410
            await at.post("/result", fetched["key"], reward=0.5)
            assert (await again)["result"] == {"reward": 0.5}

    asyncio.run(go())


def test_a_relay_that_is_restarted_knows_who_works_on_what():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    async def go():
        gateway = FakeGateway("policy")
        async with serving(gateway) as url:
            async with relay(port) as at:
                offered = asyncio.create_task(at.offer(url))
                fetched = await at.fetch()
                take = KEYS.read(fetched["key"])[1]
                offered.cancel()
            async with relay(port) as at:
                offered = asyncio.create_task(at.offer(url, take=take))
                assert await said(fetched) == "policy 1"
                assert await at.fetch(seconds=0.0) == {"task": None}
                await at.post("/result", fetched["key"], reward=1.0)
                assert (await offered)["result"] == {"reward": 1.0}

    asyncio.run(go())


def test_a_rollout_that_begins_anew_is_given_to_another_agent():
    async def go():
        async with relay() as at:
            offered = [asyncio.create_task(at.offer("http://x", key="a"))]
            old = await at.fetch()
            await at.post("/result", old["key"], error="no tool")
            assert (await offered[0])["result"] == {"error": "no tool"}
            offered.append(asyncio.create_task(at.offer("http://x", key="b", turns=3)))
            new = await at.fetch()
            refused = await at.post("/result", old["key"], reward=1.0)
            assert refused.status_code == 410
            await at.post("/result", new["key"], reward=0.0)
            assert (await offered[1])["result"] == {"reward": 0.0}

    asyncio.run(go())


def test_a_client_that_leaves_ends_its_request_at_the_gateway():
    async def go():
        gateway = FakeGateway("policy")
        gateway.hold.clear()
        async with relay() as at, serving(gateway) as url:
            offered = asyncio.create_task(at.offer(url))
            asked = asyncio.create_task(said(await at.fetch()))
            await reached(lambda: gateway.asked)
            asked.cancel()
            await asyncio.wait_for(gateway.cancelled.wait(), 10)
            offered.cancel()

    asyncio.run(go())


@pytest.mark.parametrize(
    ("path", "key", "content", "status", "message"),
    [
        ("/tasks", "wrong", {}, 401, "not the one of this run"),
        ("/tasks", KEYS.of_actors, {}, 401, "not the one of this run"),
        ("/offers", KEYS.of_agents, {}, 401, "not the one of this run"),
        ("/tasks", KEYS.of_agents, {"seconds": 61}, 400, "seconds: .* less than or equal to 60"),
        ("/result", KEYS.of_agents, {"reward": 1}, 401, "belongs to no task"),
        ("/result", KEYS.of_session("other", 1)[:-1] + "x", {}, 401, "belongs to no task"),
        ("/result", TaskKeys(b"another secret").of_session("g/0", 1), {}, 401, "no task"),
        ("/result", KEYS.of_session("other", 1), {}, 503, "no actor has had the task for 0.1 s"),
        ("/result", "TASK", {"reward": "much"}, 400, "reward"),
        ("/result", "TASK", {"reward": float("nan")}, 400, "finite"),
        ("/result", "TASK", {"score": 1}, 400, "score: .*; its fields: reward, text, error"),
        ("/result", "TASK", {"reward": 1, "text": "x"}, 400, "one of reward, text and error"),
        ("/v1/chat/completions", "TASK", {}, 503, "no actor"),
        ("/result", "TASK", b"{", 400, "the body: Invalid JSON"),
        ("/result", "TASK", b"\xff", 400, "the body: Invalid JSON"),
        ("/result", "TASK", b"[" * 9999, 400, "the body: Invalid JSON"),
        ("/v1/files", "TASK", {}, 404, "/result, /v1/chat/completions"),
        ("/v1/messages", "", {}, 401, "no task"),
    ],
)
def test_what_is_wrong_is_answered_by_a_clear_error(path, key, content, status, message):
    async def go():
        async with relay(waiting_seconds=0.1) as at:
            offered = asyncio.create_task(at.offer("http://127.0.0.1:1"))
            fetched = await at.fetch()
            sent = content if isinstance(content, bytes) else json.dumps(content)  # with NaN
            headers = {"x-api-key": fetched["key"] if key == "TASK" else key}
            answer = await at.client.post(path, content=sent, headers=headers, timeout=20)
            offered.cancel()
            return answer

    answer = asyncio.run(go())
    assert answer.status_code == status
    assert re.search(message, answer.json()["error"]["message"])
    assert (answer.json().get("type") == "error") == (path == "/v1/messages")


@pytest.mark.parametrize("path", ["/offers", "/tasks", "/result", "/v1/messages"])
def test_nothing_is_read_of_a_request_without_a_key(path):
    async def go():
        async with relay() as at:
            port = int(at.address.rpartition(":")[2])
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n".encode())
            answer = await asyncio.wait_for(reader.readline(), 10)
            writer.close()
            return answer

    assert asyncio.run(go()).startswith(b"HTTP/1.1 401 ")


def test_a_second_report_changes_nothing():
    async def go():
        async with relay() as at:
            offered = asyncio.create_task(at.offer("http://x"))
            fetched = await at.fetch()
            reports = [
                await at.post("/result", fetched["key"], reward=reward)
                for reward in (1.0, 1.0, 0.0)
            ]
            assert [report.status_code for report in reports] == [200, 200, 409]
            assert (await offered)["result"] == {"reward": 1.0}

    asyncio.run(go())


async def outcome(at, report, keys=KEYS, session="a"):
    """Return what an actor makes of an agent's report on its rollout."""
    agent = RemoteAgent(RemoteOptions(relay=at.address), keys)
    access = {"base_url": "http://127.0.0.1:1/v1", "api_key": session, "rollout_id": "g/0"}
    playing = asyncio.create_task(agent.play(AgentTask(**PROMPT, **access)))
    if report is not None:
        await at.post("/result", (await at.fetch())["key"], **report)
    try:
        return await playing
    finally:
        await agent.close()


@pytest.mark.parametrize(
    ("report", "result"),
    [
        ({"reward": 1.5}, AgentResult(reward={"environment": 1.5})),
        (
            {"reward": {"right": 1.0, "short": 0.5}},
            AgentResult(reward={"environment/right": 1.0, "environment/short": 0.5}),
        ),
        ({"text": "4"}, AgentResult(completion="4")),
        ({}, AgentResult()),
    ],
)
def test_an_actor_hears_the_result_of_an_agent_elsewhere(report, result):
    async def go():
        async with relay() as at:
            return await outcome(at, report)

    assert asyncio.run(go()) == result


def test_a_rollout_fails_whose_agent_reports_an_error_and_is_played_again_if_it_is_silent(
    monkeypatch, caplog
):
    monkeypatch.setattr(task_relay, "POLL_SECONDS", 0.1)
    monkeypatch.setattr(remote_agent, "NOBODY_SECONDS", 0.0)

    async def go():
        async with relay(silent_seconds=0.2) as at:
            with pytest.raises(EnvironmentFailed, match="reported: no tool, on prompt 'p'"):
                await outcome(at, {"error": "no tool"})
            again = asyncio.create_task(outcome(at, None, session="b"))
            await reached(lambda: "no agent has fetched a task from http" in caplog.text)
            with pytest.raises(AgentGone, match="was silent"):
                await asyncio.gather(again, at.fetch())

    asyncio.run(go())


def test_a_relay_that_is_away_is_waited_for_and_one_with_another_secret_refused():
    async def go():
        async with relay() as at:
            with pytest.raises(InputError, match="has another HEADWAY_TASKS_KEY than this run"):
                await outcome(at, None, TaskKeys(b"another secret"))
        with pytest.raises(ServiceAway, match="the relay at http"):
            await outcome(at, None)

    asyncio.run(go())


@pytest.mark.parametrize("body", [b"<html>", b"[1]", b"{}", b"\xff", b"[" * 9999])
def test_an_answer_of_another_server_than_the_relay_is_an_outage_of_it(body):
    async def other(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    async def go():
        async with serving(other) as address:
            with pytest.raises(ServiceAway, match=r"the relay at http.*must be"):
                await outcome(SimpleNamespace(address=address), None)

    asyncio.run(go())


def test_a_host_that_is_no_text_is_given_back_to_the_agent_all_the_same():
    async def go():
        async with relay() as at:
            offered = asyncio.create_task(at.offer("http://127.0.0.1:1"))
            await reached(lambda: at.board._tasks)
            headers = {"Authorization": f"Bearer {KEYS.of_agents}", "x-forwarded-proto": b"\xff"}
            answer = await at.client.post("/tasks", headers=headers)
            offered.cancel()
            return answer.status_code

    assert asyncio.run(go()) == 200


def test_an_actor_that_has_lost_a_rollout_does_not_take_it_back():
    async def go():
        async with relay() as at:
            first = asyncio.create_task(outcome(at, None, session="a"))
            await reached(lambda: at.board.claim())
            second = asyncio.create_task(at.offer("http://127.0.0.1:1", key="b", turns=1))
            with pytest.raises(Excused, match="g/0 is played by another actor"):
                await first
            assert at.board.find("g/0", 1 << 60).key == "b"
            second.cancel()

    asyncio.run(go())


def test_a_run_without_a_secret_is_refused(monkeypatch):
    monkeypatch.setenv(VARIABLE, "short")
    with pytest.raises(InputError, match="at least 16 characters"):
        load_remote("remote", {})
    monkeypatch.setenv(VARIABLE, "s" * 16)
    with pytest.raises(InputError, match=r"no option relais; .*did you mean 'relay'"):
        load_remote("remote", {"relais": "http://x"})
