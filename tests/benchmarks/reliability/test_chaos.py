"""`headway bench chaos`: the oracle finds what it has to find, and a run with real kills passes."""

import itertools
import json
import re
import signal
import subprocess
import sys

import pytest

from benchmarks.reliability.chaos import (
    Chaos,
    ChaosOptions,
    conclude,
    misses,
    percentile,
    plan_kills,
    table,
)
from benchmarks.reliability.chaos_oracle import Fate, judge
from benchmarks.reliability.chaos_run import ROLES
from deploy.cli.bench import ROOT
from headway.errors import InputError
from learner.diagnostics.trained_log import VARIABLE, note_trained
from tests.queues.conftest import make_group, make_rollout

SOURCE = [f"s/0/{index}" for index in range(20)]


def row(version, *prompts, oldest=None, pid=None):
    """Return a line of the learner's log, of a process that trained it alone if none is given."""
    start = max(0, version - 1) if oldest is None else oldest
    groups = [[f"s/0/{prompt}", f"g{prompt}", start] for prompt in prompts]
    return {"version": version, "groups": groups, "pid": pid or next(PIDS)}


PIDS = itertools.count(1)
LOG = [row(0, 0, 1), row(1, 3, 2), row(2, 5, 6)]
FATES = [
    *(Fate(f"s/0/{prompt}", "trained", "", None) for prompt in (0, 1, 2, 3)),
    Fate("s/0/4", "dropped", "filtered", True),
    *(Fate(f"s/0/{prompt}", "trained", "", None) for prompt in (5, 6)),
    Fate("s/0/7", "queued", "", None),
]


def verdict(log=LOG, fates=FATES, source=SOURCE, **changes):
    return judge(
        log, source, fates, **{"steps": 3, "groups_per_batch": 2, "max_staleness": 1, **changes}
    )


def test_a_run_in_which_every_prompt_has_one_fate_is_sound():
    judged = verdict([LOG[0], LOG[1], row(1, 3, 2), LOG[2]])
    assert judged.sound, judged.problems
    assert (judged.issued, judged.trained, judged.retrained_batches, judged.max_lag) == (8, 6, 1, 1)
    assert judged.left_out == {"filtered": 1, "waiting": 1}
    assert (judged.prompts_lost, judged.groups_trained_twice, judged.lags_above_bound) == (0, 0, 0)


@pytest.mark.parametrize(
    ("fate", "what"),
    [
        (None, "the ledger does not have it"),
        (Fate("s/0/4", "dropped", "filtered", False), "the ledger says dropped filtered"),
        (Fate("s/0/4", "dropped", "overdue", None), "the ledger says dropped overdue"),
        (Fate("s/0/4", "failed", "lease_expired", None), "the ledger says failed lease_expired"),
        (Fate("s/0/4", "taken", "", None), "the ledger says taken"),
        (Fate("s/0/4", "trained", "", None), "the ledger says trained"),
    ],
)
def test_a_prompt_that_was_neither_trained_nor_rightly_left_out_is_lost(fate, what):
    judged = verdict(fates=[*others(4), *([fate] if fate else [])])
    assert judged.prompts_lost == 1
    assert judged.problems == [f"prompt s/0/4 is lost: {what}"]


def others(number):
    """Return the fates of all prompts but one."""
    return [fate for fate in FATES if fate.prompt_id != f"s/0/{number}"]


def test_a_prompt_that_was_dropped_and_issued_again_counts_by_its_newest_group():
    dropped = Fate("s/0/4", "dropped", "overdue", None)
    again = Fate("s/0/4", "ready", "", None)
    judged = verdict(fates=[*others(4), dropped, again])
    assert (judged.sound, judged.dropped_overdue) == (True, 1)
    assert verdict(fates=[*others(4), again, dropped]).prompts_lost == 1


@pytest.mark.parametrize(
    ("log", "problem", "counts"),
    [
        ([LOG[0], row(1, 1, 2), LOG[2]], "g1 was trained in two batches", (2, 0)),
        (
            [LOG[0], LOG[1], row(1, 2, 3), LOG[2]],
            "batch 1 was trained again with other groups", (0, 0),
        ),
        (LOG[:2], "the log does not hold the batches 0 to 2 once: [2]", (0, 0)),
        ([*LOG[:2], row(2, 5)], "batch 2 has 1 groups", (0, 0)),
        (
            [LOG[0], row(1, 3, 2, pid=7), row(1, 3, 2, pid=7), LOG[2]],
            "one process trained batch 1 after batch 1", (0, 0),
        ),
        (
            [row(0, 0, 1, pid=7), LOG[1], row(2, 5, 6, pid=7)],
            "one process trained batch 2 after batch 0", (0, 0),
        ),
        ([LOG[0], LOG[1], row(2, 5, 6, oldest=0)], "g5 was trained with a lag of 2", (0, 2)),
    ],
)  # fmt: skip
def test_what_a_learner_may_not_train_is_found_and_counted(log, problem, counts):
    """Counts are of groups and prompts trained twice, and of lags above the bound."""
    judged = verdict(log)
    assert problem in judged.problems
    assert (judged.groups_trained_twice, judged.lags_above_bound) == counts
    assert (judged.max_lag == 2) is (counts[1] > 0)


def test_a_prompt_that_only_the_learner_has_trained_is_found():
    judged = verdict(fates=[*others(5), Fate("s/0/5", "ready", "", None)])
    assert "prompt s/0/5 is trained, but not in the ledger" in judged.problems


def test_kills_are_spread_over_the_roles_in_an_order_that_the_seed_gives():
    kills = plan_kills([*ROLES], 42, 0)
    struck = [role for role, _ in kills]
    assert {role: struck.count(role) for role in ROLES} == dict.fromkeys(ROLES, 6)
    stopped = [role for role, how in kills if how is signal.SIGSTOP]
    assert {role: stopped.count(role) for role in ROLES} == dict.fromkeys(ROLES, 2)
    roles = ["broker", "driver"]
    assert {role for role, _ in plan_kills(roles, 5, 0)} == {"broker", "driver"}
    assert plan_kills(roles, 30, 0) == plan_kills(roles, 30, 0) != plan_kills(roles, 30, 1)


def test_only_conversations_with_agents_have_agents_to_kill_and_nothing_there_is_stopped(tmp_path):
    with pytest.raises(InputError, match="only with --sessions agent"):
        Chaos(ChaosOptions(roles=("agent",), sessions="tools", out=tmp_path))
    planned = Chaos(ChaosOptions(sessions="agent", kills=24, out=tmp_path)).planned
    assert {role for role, _ in planned} == {*ROLES, "agent"}
    assert {how for _, how in planned} == {signal.SIGKILL}


def test_runs_of_conversations_are_sound_where_some_went_on_and_nothing_was_made_again():
    judged = record(verdict(), 4, 0)
    for sessions, sound in (({"turns_gone_on_from": 2}, True), ({"answers": 2}, False)):
        judged["runs"]["run-1"]["sessions"] = sessions
        concluded = conclude(judged)["verdict"]
        assert concluded.items() >= {**sessions, "sound": sound}.items()


def test_the_95th_percentile_is_a_value_that_was_measured():
    assert percentile([*range(20)], 0.95) == 18
    assert percentile([3.0, 1.0, 2.0], 0.95) == 3.0
    assert percentile([5.0], 0.95) == 5.0


KILLS = [
    {"role": role, "run": "run-1", "signal": how, "exit_code": None, "recovery_seconds": seconds}
    for role, how, seconds in (
        ("broker", "SIGKILL", 30.0),
        ("rollout actor", "SIGKILL", 4.0),
        ("rollout actor", "SIGKILL", 2.0),
        ("rollout actor", "SIGSTOP", None),
    )
]
OVERDUE = Fate("s/0/5", "dropped", "overdue", None)
WHOLE = verdict(fates=[OVERDUE, *FATES])
UNFILTERED = verdict(
    source=[prompt for prompt in SOURCE if prompt != "s/0/4"],
    fates=[OVERDUE, *others(4)],
)


def record(judged, wanted, ended):
    """Return the record of four kills in one run."""
    runs = {"run-1": judged.to_dict()} if judged else {}
    return {
        "kills": KILLS, "runs": runs, "commands_ended": ended, "arguments": {"kills": wanted}
    }  # fmt: skip


@pytest.mark.parametrize(
    ("judged", "wanted", "ended", "expected"),
    [
        (WHOLE, 4, 0, {"sound": True}),
        (WHOLE, 5, 0, {"sound": False, "finished": False}),
        (WHOLE, 4, 1, {"sound": False, "commands_ended": 1}),
        (None, 4, 0, {"sound": False, "finished": False}),
        (verdict(), 4, 0, {"sound": False, "dropped_overdue": 0}),
        (UNFILTERED, 4, 0, {"sound": False, "filtered": 0}),
        (verdict(fates=FATES[:4]), 4, 0, {"sound": False, "prompts_lost": 1}),
    ],
    ids=["whole", "kills missing", "a command ended", "no run", "no straggler", "no tie", "lost"],
)
def test_the_report_is_sound_only_when_every_kill_and_every_run_is_in_it(
    judged, wanted, ended, expected
):
    concluded = conclude(record(judged, wanted, ended))["verdict"]
    assert {key: concluded[key] for key in expected} == expected


def test_the_table_has_recoveries_and_fates_and_slow_recoveries_miss_their_aim():
    document = record(WHOLE, 4, 0)
    document |= conclude(document)
    lines = [re.split(r"  +", line) for line in table(document).splitlines()]
    assert ["broker", "1", "30.0", "30.0"] in lines
    assert ["rollout actor", "2", "3.0", "4.0"] in lines
    left_out = "1 filtered, 1 waiting"
    assert ["run-1", "3", "0", "8", "6", left_out, "1", "1", "none"] in lines
    assert "prompts lost 0" in lines[-1][0]
    assert misses(document) == []
    slow = [{**kill, "recovery_seconds": 31.0} for kill in KILLS]
    late = [f"p95 of {role} is 31 s, at most 30" for role in ("broker", "rollout actor")]
    assert misses({**document, "kills": slow}) == late


def test_the_learner_writes_a_line_for_each_batch_where_the_environment_asks(tmp_path, monkeypatch):
    group = make_group(rollouts=[make_rollout(0, (4, 5)), make_rollout(1, (3,))])
    monkeypatch.delenv(VARIABLE, raising=False)
    note_trained([group], 5)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "log"))
    note_trained([group], 5)
    note_trained([group], 6)
    rows = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [row["version"] for row in rows] == [5, 6]
    assert rows[0]["groups"] == [["sums/0/0", "g00000001", 3]]


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.deepspeed
@pytest.mark.vllm
@pytest.mark.timeout(6000)
def test_kills_spread_over_all_roles_lose_nothing(tmp_path):
    """An hour on two cores that do nothing else."""
    command = [sys.executable, "-m", "benchmarks", "chaos", "--kills", "42"]
    command += ["--out", tmp_path / "out"]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=5900)
    document = json.loads((tmp_path / "out" / "chaos.json").read_text())
    struck = [kill["role"] for kill in document["kills"]]
    assert {role: struck.count(role) for role in ROLES} == dict.fromkeys(ROLES, 6)
    assert document["verdict"]["sound"], out.stdout + out.stderr
