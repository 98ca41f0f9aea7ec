"""Requests to servers that may answer anything: limited in size and, from begin to end, in time."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from headway.clean_text import without_secrets


class BadAnswer(Exception):
    """A server gave no answer, or none that can be read; the message has no secret."""


class NoAnswer(BadAnswer):
    """It cannot be reached, broke off, or took too long: another attempt may succeed."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a request."""

    status: int
    headers: Mapping[str, str]
    """By names in lower case."""
    text: str
    """The body, without the secrets of this process."""


async def ask(
    client: httpx.AsyncClient,
    url: str,
    *,
    seconds: float,
    most_bytes: int,
    json: Any = None,
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """Get an address, or post `json` to it, following no redirection.

    Raises NoAnswer without a whole answer within `seconds`, and BadAnswer if it is longer than
    `most_bytes` or compressed, or the request cannot be written.
    """
    method = "GET" if json is None else "POST"
    sent = {"Accept-Encoding": "identity", **(headers or {})}
    body = bytearray()
    try:
        async with (
            asyncio.timeout(seconds),
            client.stream(method, url, json=json, headers=sent) as response,
        ):
            async for block in response.aiter_raw(1 << 16):
                body += block
                if len(body) > most_bytes:
                    raise BadAnswer(f"an answer of more than {most_bytes} bytes")
    except (TimeoutError, httpx.TimeoutException):
        raise NoAnswer(f"no whole answer within {seconds:g} s") from None
    except (httpx.LocalProtocolError, httpx.InvalidURL, ValueError) as error:
        raise BadAnswer(f"a request that is impossible: {without_secrets(str(error))}") from None
    except httpx.HTTPError as error:
        raise NoAnswer(f"{type(error).__name__} {without_secrets(str(error))}".strip()) from None
    if response.headers.get("content-encoding", "identity") != "identity":
        raise BadAnswer("a compressed answer, which was not asked for")
    text = without_secrets(body.decode(errors="replace"))
    return Answer(response.status_code, dict(response.headers), text)
