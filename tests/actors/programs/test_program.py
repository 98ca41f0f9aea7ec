"""Programs as agents: what they are given, every way in which they end, and what they leave."""

import asyncio
import inspect
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from actors.errors import EnvironmentFailed
from actors.programs import program
from actors.programs.agent import AgentGone, AgentResult, AgentTask
from actors.programs.launcher import descendants
from actors.programs.program import ProgramAgent, ProgramOptions, load_program
from headway.errors import InputError
from tests.waiting import reached, until

SCRIPT = str(Path(__file__).with_name("agent_programs.py"))
KEY = "a-key-that-nobody-knows"


def task(**changes):
    fields = {
        "prompt_id": "sums/0/1",
        "prompt": "3+4=",
        "messages": [{"role": "user", "content": "3+4="}],
        "answer": "7",
        "metadata": {"level": 2},
        "rollout_id": "g0/1",
        "base_url": "http://127.0.0.1:9/v1",
        "api_key": KEY,
    }
    return AgentTask(**{**fields, **changes})


def agent(*words, **options):
    return ProgramAgent("program:x", ["python", SCRIPT, *words], ProgramOptions(**options))


def play(*words, **options):
    async def run():
        played = agent(*words, **options)
        try:
            return await played.play(task())
        finally:
            await played.close()

    return asyncio.run(run())


def lives(pid):
    return (
        os.path.exists(f"/proc/{pid}")
        and "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    )


def test_a_program_is_given_its_task_and_no_secret_of_the_actor(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "swordfish")
    monkeypatch.setenv("GIVEN_TOKEN", "marmalade")
    told = json.loads(play("tells", variables=["GIVEN_TOKEN"]).completion)
    assert told["task"] == {
        "prompt_id": "sums/0/1", "prompt": "3+4=", "answer": "7", "metadata": {"level": 2},
        "messages": [{"role": "user", "content": "3+4="}], "rollout_id": "g0/1",
    }  # fmt: skip
    assert told["variables"] == {
        "OPENAI_BASE_URL": "http://127.0.0.1:9/v1", "OPENAI_API_KEY": KEY,
        "ANTHROPIC_BASE_URL": "http://127.0.0.1:9", "ANTHROPIC_API_KEY": KEY,
        "HEADWAY_MODEL": "policy", "SECRET_TOKEN": None, "GIVEN_TOKEN": "[GIVEN_TOKEN]",
    }  # fmt: skip
    assert (told["here"], told["files"]) == (True, [])


@pytest.mark.parametrize(
    ("words", "result"),
    [
        (["nothing"], AgentResult()),
        (["prints_little"], AgentResult()),
        (["writes", ""], AgentResult(completion="")),
        (["writes", "it is 7"], AgentResult(completion="it is 7")),
        (["writes", "[7]"], AgentResult(completion="[7]")),
        (["writes", '{"answer": 7}'], AgentResult(completion='{"answer": 7}')),
        (["writes", '{"reward": 0.5}'], AgentResult(reward={"environment": 0.5})),
        (
            ["writes", '{"reward": {"form": 1, "sum": 0}}'],
            AgentResult(reward={"environment/form": 1.0, "environment/sum": 0.0}),
        ),
        (["makes_pipe"], AgentResult(completion="")),
    ],
)
def test_a_program_that_ends_well_gives_its_result(words, result):
    assert play(*words) == result


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fails"], r"ended by exit code 1; the end of its standard error:\nthe key is \[key\]"),
        (["raises"], r"exit code 1; (.|\n)*ZeroDivisionError: division by zero\n, on prompt 'sums"),
        (["crashes"], "ended by SIGSEGV"),
        (["writes", '{"reward": NaN}'], "returned nan for 'environment', must be a finite number"),
        (["writes", '{"reward": 1e999}'], "returned inf for 'environment'"),
        (["writes", '{"reward": "high"}'], "returned 'high' for 'reward', must be a finite"),
        (["writes", '{"reward": null}'], "returned None for 'reward'"),
        (["writes", '{"reward": {}}'], "returned {} for 'environment'"),
        (["writes", '{"reward": {"form": null}}'], "returned None for 'environment/form'"),
        (["writes_bytes"], "which UTF-8 cannot encode"),
        (["writes_much"], "wrote a result of more than 1048576 bytes"),
    ],
)
def test_a_program_that_fails_is_no_reward_of_0(words, message):
    with pytest.raises(EnvironmentFailed, match=f"^agent 'program:x' (.|\n)*{message}") as failure:
        play(*words)
    assert KEY not in str(failure.value)


@pytest.mark.parametrize(
    ("way", "options", "limit"),
    [
        ("prints", {"output_mib": 1}, "the limit of its output, 1048576 bytes"),
        ("takes_memory", {"memory_gib": 0.2}, "MemoryError"),
        ("takes_memory_slowly", {"memory_gib": 0.125}, "the limit of its memory, 0.125 GiB"),
        ("forks", {"processes": 8}, "the limit of 8 processes"),
    ],
)
def test_a_program_is_ended_at_its_limits(way, options, limit):
    with pytest.raises(EnvironmentFailed, match=limit):
        play(way, **options)


def test_children_that_a_program_leaves_end_with_it_whatever_their_session():
    children = play("leaves_children").completion.split()
    assert len(children) == 2
    assert not any(map(lives, children))


CHAIN = """
import os, sys
for _ in range(60):
    if os.fork():
        os.wait()
        sys.exit()
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_chain_of_processes_is_seen_to_its_end():
    limit, pipe = sys.getrecursionlimit(), subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", CHAIN], stdin=pipe, stdout=pipe) as first:
        assert first.stdout.readline() == b"ready\n"
        sys.setrecursionlimit(len(inspect.stack(0)) + 40)
        try:
            below = descendants(first.pid)
        finally:
            sys.setrecursionlimit(limit)
    assert len(below) == 60


@pytest.mark.parametrize("preload", [(), ("colorsys",)])
def test_a_cancelled_program_is_dead_with_its_children_and_its_folder_gone(tmp_path, preload):
    async def run():
        played = agent("sleeps", str(tmp_path / "pid"), preload=preload, keep_folder=str(tmp_path))
        playing = asyncio.create_task(played.play(task()))

        def results():
            return [path.read_text() for path in tmp_path.glob("*/result") if path.read_text()]

        await reached(results)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        processes = [*results()[0].split(), (tmp_path / "pid").read_text()]
        assert not any(map(lives, processes))
        await played.close()

    asyncio.run(run())


def test_folders_are_deleted_unless_they_are_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    play("writes", "7")
    assert not [*(tmp_path / "temporary").glob("*sums*")]
    play("writes", "7", keep_folder=str(tmp_path / "kept"))
    [folder] = (tmp_path / "kept").iterdir()
    assert folder.name.startswith("headway-sums-0-1-")
    assert sorted(path.name for path in folder.iterdir()) == ["folder", "result", "task"]


def test_a_prompt_of_any_id_has_a_folder(tmp_path):
    async def run():
        played = agent("writes", "7", keep_folder=str(tmp_path))
        try:
            return await played.play(task(prompt_id="../" + "数" * 200))
        finally:
            await played.close()

    assert asyncio.run(run()) == AgentResult(completion="7")
    [folder] = tmp_path.iterdir()
    assert folder.name.startswith("headway-..-")


def test_modules_that_load_for_too_long_are_refused(monkeypatch):
    monkeypatch.setattr(program, "IMPORT_SECONDS", 0.001)
    with pytest.raises(InputError, match=r"preload: .* took longer than 0\.001 s"):
        agent("nothing", preload=["colorsys"])


def test_modules_are_loaded_once_for_all_rollouts():
    assert play("is_preloaded") == AgentResult(reward={"environment": 0.0})
    assert play("is_preloaded", preload=["colorsys"]) == AgentResult(reward={"environment": 1.0})


def test_a_fork_is_judged_as_a_program_of_its_own():
    with pytest.raises(EnvironmentFailed, match=r"ended by exit code 1; (.|\n)*the key is"):
        play("fails", preload=["colorsys"])
    assert play("writes", "7", preload=["colorsys"]) == AgentResult(completion="7")


def test_a_program_that_was_killed_from_outside_is_lost():
    with pytest.raises(AgentGone, match="ended by SIGKILL"):
        play("killed")


def test_a_launcher_that_was_killed_is_started_again():
    async def run():
        played = agent("writes", "7")
        assert await played.play(task()) == AgentResult(completion="7")
        played._launcher.kill()
        played._launcher.wait()
        assert await played.play(task()) == AgentResult(completion="7")
        await played.close()

    asyncio.run(run())


def test_a_launcher_that_ends_says_why(monkeypatch):
    monkeypatch.setattr(ProgramAgent, "_check_modules", lambda self: None)
    with pytest.raises(AgentGone, match=r"lost its launcher; (.|\n)*named 'no_such_module'"):
        play("nothing", preload=["no_such_module"])


def test_programs_end_when_their_actor_is_killed(tmp_path):
    import subprocess

    code = (
        "import asyncio, sys; sys.path.insert(0, '.'); from tests.actors.programs.test_program "
        f"import agent, task; asyncio.run(agent('sleeps', {str(tmp_path / 'pid')!r}).play(task()))"
    )
    actor = subprocess.Popen([sys.executable, "-c", code])
    until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), process=actor)
    actor.send_signal(signal.SIGKILL)
    actor.wait()
    until(lambda: not lives((tmp_path / "pid").read_text()), 10.0)


def test_a_script_is_found_beside_the_recipe_and_its_arguments_stay(tmp_path, monkeypatch):
    (tmp_path / "agent.py").write_text(
        "import os, sys\nopen(os.environ['HEADWAY_RESULT'], 'w').write(repr(sys.argv[1:]))\n"
    )
    monkeypatch.setenv("HEADWAY_CODE_DIR", str(tmp_path))
    played = load_program("program:python agent.py --style 'a b'", {})
    assert asyncio.run(played.play(task())).completion == "['--style', 'a b']"
    asyncio.run(played.close())


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("program: ", {}, "'program: ' has no command"),
        ("program:no-such-thing", {}, "environment = .*: there is no program 'no-such-thing'"),
        ("program:'x", {}, "No closing quotation"),
        (
            "program:python x.py",
            {"python": "/no/python"},
            "environment_options.python: there is",
        ),
        ("program:sh x", {"python": sys.executable}, "environment_options.python has no effect"),
        (
            "program:sh x",
            {"preload": ["json"]},
            "options.preload: .* is not of the form",
        ),
        (
            f"program:python {SCRIPT}",
            {"preload": ["json", "no_such_module"]},
            "options.preload: .* cannot load them: ModuleNotFoundError: No module named 'no_such",
        ),
        ("program:sh x", {"memory": 1}, "environment_options has no option memory; .*memory_gib"),
    ],
)
def test_a_program_that_cannot_run_is_refused_before_anything_starts(name, options, message):
    with pytest.raises(InputError, match=message):
        load_program(name, options)
