"""Agents by name: what is one, functions as agents, and what is refused before a run."""

import asyncio
import sys
from pathlib import Path

import pytest

from actors.config import ActorsConfig
from actors.errors import EnvironmentFailed
from actors.programs.agent import AgentResult, AgentTask, FunctionAgent
from actors.programs.load_agent import is_agent, load_agent
from actors.programs.program import ProgramAgent
from actors.sources.load_source import load_source
from headway.errors import InputError

MODULE = "agent_functions"


@pytest.fixture(autouse=True)
def folder_of_functions(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def load(name, engine="vllm", **options):
    config = ActorsConfig(environment=name, environment_options=options, engine=engine, reward=[])
    return load_agent(config)


def play(function, **options):
    task = AgentTask(
        prompt_id="p/0/1", prompt="3+4=", messages=[], answer="7", metadata={},
        base_url="http://127.0.0.1:9/v1", api_key="a-key-that-nobody-knows",
    )  # fmt: skip
    return asyncio.run(load(f"{MODULE}:{function}", **options).play(task))


def test_functions_and_programs_are_agents_and_classes_are_conversations():
    assert load(f"{MODULE}:World") is None
    assert isinstance(load(f"{MODULE}:says"), FunctionAgent)
    assert isinstance(load("program:true"), ProgramAgent)
    names = ("single_turn", "tools", f"{MODULE}:World", "program:x", "verifiers:x")
    assert [is_agent(name) for name in names[1:]] == [False, False, True, True]


def test_a_function_gives_a_reward_or_a_text():
    assert play("scores") == AgentResult({"environment/form": 0.5, "environment/folder": 1.0})
    assert play("says") == AgentResult(completion="7")
    assert play("says", text="8") == AgentResult(completion="8")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("breaks", r"raised ZeroDivisionError\('with \[key\]'\)\n.*agent_functions.py"),
        ("gives_nan", "returned nan for 'environment', must be a finite number, on prompt 'p/0/1'"),
    ],
)
def test_a_function_that_fails_names_itself_and_the_prompt(function, message):
    with pytest.raises(EnvironmentFailed, match=f"agent '{MODULE}:{function}' {message}"):
        play(function)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            f"{MODULE}:no_such",
            {},
            "actors.environment = .*: agent_functions has no 'no_such', only",
        ),
        ("no_such_module:x", {}, "actors.environment = .*: cannot import no_such_module"),
        (f"{MODULE}:takes_two", {}, "actors.environment = .* takes .task, other., but is called"),
        (f"{MODULE}:says", {"words": 1}, "actors.environment = .* has no option words; .*: text"),
        ("program:no-such-command", {}, "actors.environment = .* there is no program"),
        ("verifiers:x", {}, "environment_options requires the option python"),
        ("verifiers:x", {"python": sys.executable}, "preload: .* cannot load them: .*verifiers"),
        (
            f"{MODULE}:says",
            {"engine": "scripted"},
            'is an agent, .* of the engine "vllm"; found actors.engine = "scripted"',
        ),
    ],
)
def test_an_agent_that_cannot_be_used_is_refused_with_the_key_that_names_it(name, options, message):
    with pytest.raises(InputError, match=message):
        load(name, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "requires the option python"),
        ({"python": "/no/python"}, "python: there is no program '/no/python'"),
        ({"python": sys.executable}, "cannot list the tasks of 'verifiers:x': ModuleNotFoundErr"),
    ],
)
def test_a_taskset_that_cannot_be_listed_says_why(options, message):
    with pytest.raises(InputError, match=f"prompts.source = 'verifiers:x': .*{message}"):
        load_source("verifiers:x", options=options, seed=0)


def test_a_taskset_in_the_sandbox_is_refused():
    with pytest.raises(InputError, match="verifiers do not run in the sandbox"):
        load("verifiers:x", python=sys.executable, sandbox=True)


def test_programs_find_the_folder_of_the_recipe_though_they_begin_elsewhere(monkeypatch, tmp_path):
    monkeypatch.delenv("HEADWAY_CODE_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    command = "program:sh -c 'printf %s $HEADWAY_CODE_DIR > $HEADWAY_RESULT'"
    task = AgentTask(
        prompt_id="p", prompt="", messages=[], answer=None, metadata={},
        base_url="http://127.0.0.1:9/v1", api_key="a-key-that-nobody-knows",
    )  # fmt: skip
    agent = load(command)

    async def play_once():
        try:
            return await agent.play(task)
        finally:
            await agent.close()

    assert asyncio.run(play_once()) == AgentResult(completion=str(tmp_path))
