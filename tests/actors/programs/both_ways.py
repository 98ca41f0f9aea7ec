"""An agent on the unmodified client of OpenAI, which asks by a stream and without one."""

import json
import os

import openai

policy = openai.OpenAI()
asked = {"model": "policy", "messages": [{"role": "user", "content": "hello?"}]}
whole = policy.chat.completions.create(**asked).choices[0].message.content
chunks = [
    chunk.choices[0].delta.content
    for chunk in policy.chat.completions.create(**asked, stream=True)
    if chunk.choices and chunk.choices[0].delta.content
]
parts = {
    "whole": whole == "hello there",
    "streamed": "".join(chunks) == "hello there" and len(chunks) > 1,
}
with open(os.environ["HEADWAY_RESULT"], "w") as file:
    json.dump({"reward": parts}, file)
