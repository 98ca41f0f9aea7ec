"""The same with the framework openai-agents, unchanged: the framework calls the tool."""

import json
import os

from agents import Agent, Runner, function_tool, set_tracing_disabled


@function_tool
def multiply(left: int, right: int) -> int:
    """Multiply two numbers."""
    return left * right


set_tracing_disabled(True)
with open(os.environ["HEADWAY_TASK"], encoding="utf-8") as file:
    task = json.load(file)
agent = Agent(name="Calculator", model="policy", tools=[multiply])
result = Runner.run_sync(agent, task["prompt"], max_turns=4)
with open(os.environ["HEADWAY_RESULT"], "w", encoding="utf-8") as file:
    file.write(str(result.final_output))
