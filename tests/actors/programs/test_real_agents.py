"""Agents that are programs with unmodified clients, at the gateway of a real serving app.

The engine's client is a stand-in, whose answers a test writes. The agents of frameworks, the
taskset of verifiers and the environment of OpenEnv need libraries of their own: `make test-agents`.
"""

import asyncio
import os
import re
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from sandboxes import needs_sandbox

from actors.assembly import build_agents
from actors.config import ActorsConfig
from actors.errors import EnvironmentFailed
from actors.programs.load_agent import load_agent
from actors.rewards.rewards import load_rewards
from actors.rollout.chat_rendering import renderer_for
from actors.sources.load_source import load_source
from queues.records import FinishReason
from tests.actors.fakes import POOL, lease
from tests.actors.gateway.agent_model import LENGTH
from tests.waiting import until

pytestmark = pytest.mark.vllm
HERE, ROOT = Path(__file__).parent, Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "agent"
VERIFIERS = ROOT / ".verifiers" / "bin" / "python"
FRAMEWORK = ROOT / ".agents" / "bin" / "python"
OPENENV = ROOT / ".openenv" / "bin" / "python"


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory):
    from tests.actors.gateway.stand_in import stand_in_engine

    return stand_in_engine(tmp_path_factory.mktemp("model"))


def play(stand_in, says, leases, environment, *, reward=("last_answer",), options=None, **settings):
    """Return the rollouts of an agent, whose policy answers a prompt's text with `says`."""
    engine, client = stand_in
    client.reset()
    client.says = says
    config = ActorsConfig(
        environment=environment, environment_options=options or {}, reward=reward, max_turns=6,
        max_new_tokens=300, rollout_timeout_seconds=120, **settings,
    )  # fmt: skip
    rewards = load_rewards(reward, pool=POOL)
    shared = {
        "engine_id": "engine-0", "renderer": renderer_for(client.renderer.tokenizer, config),
        "config": config, "rewards": rewards, "heldout_rewards": rewards, "gold": None,
        "max_model_len": LENGTH,
    }  # fmt: skip

    async def run():
        runner = build_agents(engine, load_agent(config), shared)
        await runner.start()
        try:
            return await asyncio.gather(*(runner.run(one, 0) for one in leases))
        finally:
            await runner.close()

    return asyncio.run(run())


def asks_the_calculator(prompt):
    """Call the calculator in brackets, then give its result."""
    *_, last = prompt.split("<|im_start|>")[:-1]
    role, _, text = last.removesuffix("<|im_end|>\n").partition("\n")
    return f"[{text.strip('=')}]" if role == "user" else f"={text}"


@pytest.mark.parametrize("preload", [[], ["openai.resources.chat"]])
def test_the_example_asks_its_tool_and_is_scored(stand_in, monkeypatch, preload):
    monkeypatch.setenv("HEADWAY_CODE_DIR", str(EXAMPLE))
    tasks = [lease(text=f"12*{n}=", answer=str(12 * n)) for n in (34, 5)]
    options = {"preload": preload}
    rollouts = play(
        stand_in, asks_the_calculator, tasks, "program:python agent.py", options=options
    )
    assert [rollout.reward for rollout in rollouts] == [1.0, 1.0]
    assert [rollout.turns for rollout in rollouts] == [2, 2]
    assert not any(rollout.segments or rollout.left_out for rollout in rollouts)
    tokenizer = stand_in[1].renderer.tokenizer
    sampled = [
        i for i, own in zip(rollouts[0].token_ids, rollouts[0].loss_mask, strict=True) if own
    ]
    assert tokenizer.decode(sampled) == "[12*34]<|im_end|>=408<|im_end|>"


@needs_sandbox
@pytest.mark.parametrize("preload", [[], ["openai.resources.chat"]])
def test_an_unmodified_client_in_the_sandbox_asks_by_a_stream_and_without(
    stand_in, monkeypatch, preload
):
    monkeypatch.setenv("HEADWAY_CODE_DIR", str(HERE))
    [rollout] = play(
        stand_in, lambda prompt: "hello there", [lease(text="hello?", answer="7")],
        "program:python both_ways.py", options={"sandbox": True, "preload": preload},
        reward=(),
    )  # fmt: skip
    assert rollout.turns == 2
    assert rollout.reward_parts == {"environment/whole": 1.0, "environment/streamed": 1.0}


def test_an_agent_that_never_ends_is_cut_off_at_its_turns(stand_in, monkeypatch):
    monkeypatch.setenv("HEADWAY_CODE_DIR", str(HERE))
    [rollout] = play(
        stand_in, lambda prompt: "[1*1]", [lease(text="12*34=")], "program:python endless.py"
    )
    assert (rollout.turns, rollout.finish_reason) == (6, FinishReason.LENGTH)
    assert rollout.reward_parts == {"environment": 0.0, "last_answer": 0.0}


@pytest.mark.slow
@pytest.mark.skipif(not FRAMEWORK.exists(), reason="the framework is not installed")
@pytest.mark.parametrize("preload", [[], ["openai.resources.responses"]])
def test_an_agent_of_a_framework_calls_its_tool(stand_in, monkeypatch, preload):
    monkeypatch.setenv("HEADWAY_CODE_DIR", str(EXAMPLE))
    call = '<tool_call>\n{"name": "multiply", "arguments": {"left": 12, "right": 34}}\n</tool_call>'
    [rollout] = play(
        stand_in,
        lambda prompt: "it is =408" if "<|im_start|>tool" in prompt else call,
        [lease(text="12*34=", answer="408")],
        "program:python framework_agent.py",
        options={"python": str(FRAMEWORK), "preload": preload},
    )
    assert (rollout.turns, rollout.reward, list(rollout.segments)) == (2, 1.0, [])


@pytest.mark.slow
@pytest.mark.skipif(not VERIFIERS.exists(), reason="verifiers is not installed")
def test_a_taskset_of_verifiers_brings_tasks_harness_and_rewards(stand_in, monkeypatch):
    monkeypatch.chdir(HERE)
    python = str(VERIFIERS)
    select = {"include": {"idx": ["1:4"]}}
    prompts = load_source(
        "verifiers:tiny-taskset", options={"python": python, "select": select}, seed=0
    ).next(3)
    assert sorted((prompt.text, prompt.answer) for prompt in prompts) == [
        ("1+1=", "2"), ("2+2=", "4"), ("3+3=", "6"),
    ]  # fmt: skip

    def says(prompt):
        *_, last = prompt.split("<|im_start|>user\n")
        text = last.partition("<|im_end|>")[0]
        if text == "3+3=":
            return "no"
        return f"[{text.strip('=')}]" if text.endswith("=") else f"={text}"

    rollouts = play(
        stand_in,
        says,
        [replace(lease(), prompt=prompt) for prompt in prompts],
        "verifiers:tiny-taskset",
        reward=(),
        options={"python": python},
    )
    parts = {
        prompt.text: rollout.reward_parts for prompt, rollout in zip(prompts, rollouts, strict=True)
    }
    right = {"environment/right": 2.0, "environment/asked": 1.0}
    wrong = {"environment/right": 0.0, "environment/asked": 0.0}
    assert parts == {"1+1=": right, "2+2=": right, "3+3=": wrong}


@pytest.mark.slow
@pytest.mark.skipif(not VERIFIERS.exists(), reason="verifiers is not installed")
def test_a_harness_of_the_library_plays_a_taskset(stand_in, monkeypatch):
    """It is a program that the library starts with `uv`, and streams."""
    monkeypatch.setenv("HEADWAY_CODE_DIR", str(HERE))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    config = {"agent": {"harness": {"id": "null"}}}
    [rollout] = play(
        stand_in, lambda prompt: "=2",
        [lease(metadata={"verifiers": {"prompt": "1+1=", "answer": "2"}})],
        "verifiers:tiny-taskset", reward=(),
        options={"python": str(VERIFIERS), "config": config},
    )  # fmt: skip
    assert rollout.reward_parts == {"environment/right": 2.0, "environment/asked": 0.0}
    assert (rollout.turns, list(rollout.segments), dict(rollout.left_out)) == (1, [], {})


@pytest.mark.slow
@pytest.mark.skipif(not VERIFIERS.exists(), reason="verifiers is not installed")
def test_an_error_of_the_library_fails_the_rollout(stand_in, monkeypatch):
    monkeypatch.setenv("HEADWAY_CODE_DIR", str(HERE))
    with pytest.raises(EnvironmentFailed, match=r"exit code 1; (.|\n)*RuntimeError: .*ValueError"):
        play(
            stand_in, lambda prompt: "[one+two]",
            [lease(metadata={"verifiers": {"prompt": "1+1=", "answer": "2"}})],
            "verifiers:tiny-taskset", reward=(), options={"python": str(VERIFIERS)},
        )  # fmt: skip


@pytest.fixture
def echo_address(tmp_path):
    """Serve the environment that `openenv init` writes, which echoes, and return its address."""
    init = [OPENENV.with_name("openenv"), "init", "echo_env"]
    subprocess.run(init, cwd=tmp_path, check=True, capture_output=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ["--host", "127.0.0.1", "--port", str(port)]
    log = tmp_path / "log"
    with log.open("wb") as output:
        server = subprocess.Popen(
            [OPENENV, "-m", "echo_env.server.app", *options],
            cwd=tmp_path, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        until(lambda: "Uvicorn running" in log.read_text(), 120, process=server)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


@pytest.mark.slow
@pytest.mark.skipif(not OPENENV.exists(), reason="openenv is not installed")
def test_an_environment_of_openenv_is_stepped_by_its_client_and_gives_the_reward(
    stand_in, monkeypatch, echo_address
):
    monkeypatch.setenv("HEADWAY_CODE_DIR", str(EXAMPLE))

    def says(prompt):
        *_, length = re.findall(r'"message_length": (\d+)', prompt)
        return "a" * (2 * int(length) + 2)

    [rollout] = play(
        stand_in, says, [lease(text="Say more each time.", metadata={"seed": 1})],
        f"program:python openenv_agent.py {echo_address} message", reward=(),
        options={"python": str(OPENENV), "preload": ["openai.resources.chat", "openenv.core"]},
    )  # fmt: skip
    # It rewards each step by a tenth of the letters, at most 1: 2, 6, 14 and 30.
    assert rollout.reward == pytest.approx(0.2 + 0.6 + 1.0 + 1.0)
    assert (rollout.turns, list(rollout.segments), dict(rollout.left_out)) == (4, [], {})
    assert sum(rollout.loss_mask) == 2 + 6 + 14 + 30 + 4  # with the end of each message
