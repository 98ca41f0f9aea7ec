"""Rewards that ask a judge on this machine: the address is the answer of the prompt."""

import asyncio
import urllib.request


def score(prompt, completion, answer, metadata):
    with urllib.request.urlopen(answer, timeout=5 if "slow" not in answer else 0.5) as reply:
        return float(reply.read())


async def score_later(prompt, completion, answer, metadata):
    host, port = answer.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET / HTTP/1.0\r\n\r\n")
    reply = await reader.read()
    writer.close()
    return float(reply.rpartition(b"\n")[2])
