"""Where a sandbox cannot be made, no program is run."""

import pytest

from actors.rewards.rewards import load_rewards
from actors.sandbox import sandbox as module
from actors.sandbox.sandbox import Sandbox, check_sandbox
from headway.errors import InputError


def test_nothing_runs_where_a_wall_is_missing(change_launcher):
    change_launcher("linux.unshare()", "linux.absent()")
    with pytest.raises(InputError, match="no program is run") as caught:
        Sandbox(seconds=30).run("print('ran')")
    assert caught.value.exit_code == 2
    assert "user namespaces" in str(caught.value)


def test_another_machine_is_refused_in_one_message(monkeypatch):
    monkeypatch.setattr(module.platform, "machine", lambda: "riscv64")
    with pytest.raises(InputError, match="it needs Linux on x86_64"):
        check_sandbox.__wrapped__()


def test_programs_are_run_only_where_a_recipe_asks_for_it():
    with pytest.raises(InputError, match=r'set actors\.code_execution = "sandbox" to allow it'):
        load_rewards(["code"])


def test_without_a_sandbox_the_reward_is_refused(monkeypatch):
    def refuse():
        raise InputError("no sandbox for programs that models write")

    monkeypatch.setattr(module, "check_sandbox", refuse)
    with pytest.raises(InputError, match="no sandbox"):
        load_rewards(["code"], code_execution="sandbox")
