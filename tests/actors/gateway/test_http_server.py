"""The HTTP server by itself: who leaves before an answer is whole, and how much is read."""

import asyncio

import httpx
import pytest

from actors.gateway import http_server
from actors.gateway.http_server import LEFT, Answer, HttpServer, read_body
from actors.gateway.requests import Refused


@pytest.mark.parametrize("reads", [True, False])
def test_a_client_that_leaves_before_the_last_byte_is_told_of(reads):
    """The answer is larger than the buffers of the system, so that its end waits for its reader."""
    left, sent = asyncio.Event(), asyncio.Event()

    async def app(scope, receive, send):
        scope[LEFT] = left.set
        answer = Answer(send, "openai")
        await answer.send({"type": "http.response.start", "status": 200, "headers": []})
        await answer.send({"type": "http.response.body", "body": b"x" * (32 << 20)})
        sent.set()

    async def go():
        server = HttpServer(app, "127.0.0.1")
        await server.start()
        async with httpx.AsyncClient() as client, client.stream("GET", server.address) as answer:
            async for _ in answer.aiter_raw():
                if not reads:
                    assert not sent.is_set()
                    break
        await asyncio.wait_for(sent.wait(), 10)
        await server.close()

    asyncio.run(go())
    assert left.is_set() is not reads


@pytest.mark.parametrize(("share", "fits"), [(1.0, 10), (0.4, 4)])
def test_a_body_may_have_its_share_of_the_longest_one(monkeypatch, share, fits):
    monkeypatch.setattr(http_server, "BODY_BYTES", 10)

    async def body(length):
        events = [{"type": "http.request", "body": b"x", "more_body": n > 0} for n in range(length)]

        async def receive():
            return events.pop()

        return await read_body(receive, share)

    assert asyncio.run(body(fits)) == b"x" * fits
    with pytest.raises(Refused, match=f"has {fits + 1} bytes, may have {fits}") as refused:
        asyncio.run(body(fits + 1))
    assert refused.value.status == 413
