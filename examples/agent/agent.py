"""An agent on the plain client of OpenAI's API: it answers, or asks the calculator first."""

import json
import os

import openai

CALL = ("[", "]")
"""Texts around a call of the calculator in what the model says, as in [12*34]."""


def calculate(expression: str) -> str:
    """Return the product of two numbers, or nothing for anything else."""
    left, _, right = expression.partition("*")
    return str(int(left) * int(right)) if left.isdigit() and right.isdigit() else ""


client = openai.OpenAI()  # OPENAI_BASE_URL and OPENAI_API_KEY are those of this rollout
with open(os.environ["HEADWAY_TASK"], encoding="utf-8") as file:
    messages = json.load(file)["messages"]
for _ in range(4):
    answer = client.chat.completions.create(model="policy", messages=messages)
    text = answer.choices[0].message.content or ""
    messages.append({"role": "assistant", "content": text})
    call = text.partition(CALL[0])[2].partition(CALL[1])[0]
    if not call:
        break
    messages.append({"role": "tool", "tool_call_id": "0", "content": calculate(call)})
