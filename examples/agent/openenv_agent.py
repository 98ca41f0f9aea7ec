"""An environment of OpenEnv's form, unchanged: its client takes steps, the policy says which.

It is called with the address of a server, and with the field of an action that is a text.
"""

import json
import os
import sys

import openai
from openenv.core import GenericEnvClient

address, field = sys.argv[1:]
policy, total = openai.OpenAI(), 0.0
with open(os.environ["HEADWAY_TASK"], encoding="utf-8") as file:
    task = json.load(file)
messages = task["messages"]
with GenericEnvClient(base_url=address).sync() as environment:
    step = environment.reset(**task["metadata"])  # such as its seed
    for _ in range(4):
        messages.append({"role": "user", "content": json.dumps(step.observation)})
        answer = policy.chat.completions.create(model="policy", messages=messages)
        text = answer.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": text})
        step = environment.step({field: text})
        total += step.reward or 0.0
        if step.done:
            break
with open(os.environ["HEADWAY_RESULT"], "w", encoding="utf-8") as file:
    json.dump({"reward": total}, file)
