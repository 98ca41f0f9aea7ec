"""Lists or plays tasks of the library verifiers, from 0.4 on.

    PYTHON verifiers_main.py list CONFIG MOST SELECT   writes a line of JSON for each task
    PYTHON verifiers_main.py play CONFIG               plays HEADWAY_TASK, writes HEADWAY_RESULT

PYTHON has verifiers; nothing of Headway is imported. CONFIG is the JSON of the library's own
`[env]` section. Taskset, harness and rewards are the library's; its model client asks the gateway.
"""

import asyncio
import itertools
import json
import os
import sys
from typing import Any

from verifiers.v1 import EvalClientConfig, ModelContext, SamplingConfig, SelectConfig
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

KEY = "OPENAI_API_KEY"


def load(config: str) -> Any:
    """Return the environment of a config."""
    sys.path[0] = os.environ.get("HEADWAY_CODE_DIR", "")  # a taskset may be beside the recipe
    section = json.loads(config)
    for role in agent_config_fields(resolve_env_config(json.loads(config))):
        section.setdefault(role, {}).setdefault("runtime", {"type": "subprocess"})
    return load_environment(resolve_env_config(section))


def write_tasks(config: str, most: str, select: str) -> None:
    """Write the data of up to `most` tasks that a selection names, with their prompts."""
    tasks = load(config).taskset.select(SelectConfig(**json.loads(select)))
    for task in itertools.islice(tasks, int(most)):
        data = task.data.model_dump(mode="json", exclude_none=True)
        line = {"prompt": task.data.prompt_text or task.key, "data": data}
        if isinstance(data.get("answer"), str):
            line["answer"] = data["answer"]
        sys.stdout.write(json.dumps(line) + "\n")


async def play(config: str, stored: dict[str, Any]) -> dict[str, float]:
    """Play a stored task, and return the rewards of its agent by name, each times its weight.

    Raises RuntimeError with the library's own error if the episode has one.
    """
    env = load(config)
    kind = type(env.taskset).task_type()
    task = kind(kind.data_type().model_validate(stored), env.config.taskset.task)
    client = EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var=KEY)
    policy = ModelContext(
        client=client, model=os.environ["HEADWAY_MODEL"], sampling=SamplingConfig()
    )
    async with env.serving():
        episode = await env.run_episode(task, policy)
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if errors or not episode.ok:
        problems = "; ".join(f"{error.type}: {error.message}" for error in errors)
        raise RuntimeError(problems or "the episode is not ok")
    trained = [trace for trace in episode.traces if trace.agent.trainable]
    return {
        name: sum(trace.rewards[name].value for trace in trained if trace.rewards.get(name))
        for name in dict.fromkeys(name for trace in trained for name in trace.rewards)
    }


if __name__ == "__main__":
    if sys.argv[1] == "list":
        write_tasks(*sys.argv[2:])
    else:
        with open(os.environ["HEADWAY_TASK"], encoding="utf-8") as file:
            task = json.load(file)["metadata"]["verifiers"]
        rewards = asyncio.run(play(sys.argv[2], task))
        with open(os.environ["HEADWAY_RESULT"], "w", encoding="utf-8") as file:
            json.dump({"reward": rewards}, file)
