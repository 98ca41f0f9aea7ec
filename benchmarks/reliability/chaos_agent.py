"""An agent on the plain client of OpenAI's API, and a tool: each notes what happens to it.

Both append a line of JSON to the file of `VARIABLE` for each answer, or call, that they have had.
"""

import hashlib
import json
import os
import time
from typing import Any

VARIABLE = "HEADWAY_CHAOS_LOG"
TURNS = 4
PAUSE_SECONDS = 0.3


def append(**row: Any) -> None:
    """Append a line to the log, whole or not at all."""
    line = json.dumps({**row, "pid": os.getpid(), "at": time.time()}).encode() + b"\n"
    log = os.open(os.environ[VARIABLE], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(log, line)
    os.close(log)


def number(expression: str) -> str:
    """Return a number that no other call returns."""
    time.sleep(PAUSE_SECONDS)
    result = str(int.from_bytes(os.urandom(4)) + 10**10)
    append(call=result, expression=expression)
    return result


def play() -> None:
    """Talk to the policy for some turns, with a tool of its own in each."""
    import openai

    client, messages = openai.OpenAI(), list[Any]()
    with open(os.environ["HEADWAY_TASK"], encoding="utf-8") as file:
        task = json.load(file)
    messages += task["messages"]
    for turn in range(TURNS):
        [choice] = client.chat.completions.create(
            model="policy", messages=messages, max_tokens=16, logprobs=True
        ).choices
        said = choice.message.content or ""
        sampled = [
            (t.token, t.logprob) for t in (choice.logprobs and choice.logprobs.content) or ()
        ]
        answer = hashlib.sha256(json.dumps([messages, said, sampled]).encode()).hexdigest()
        append(rollout=task["rollout_id"], turn=turn, answer=answer)
        time.sleep(PAUSE_SECONDS)
        result = str(sum(map(ord, said)) % 97)
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": result}]


if __name__ == "__main__":
    play()
