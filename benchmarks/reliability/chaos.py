"""Kills the processes of runs again and again, and checks that no prompt is lost.

    headway bench chaos [--roles all] [--sessions none|agent|tools] [--kills 30] [--seed 0]
                        [--steps 150] [--out DIR]

Rollout actor, engine worker, one of two learner ranks, broadcaster, broker, driver, and several
at once, of a run with filtering and drops are killed or stopped at moments drawn from the seed. No
command may end before its last step; one that does is resumed, and counted. `chaos_oracle` checks
every run by the learner's own log. With --sessions, rollouts are conversations with an agent, a
program that is struck too as the role `agent`, or with the environment `tools`; all kills are
SIGKILL in the middle of some, and `chaos_sessions` says what became of turns and calls.

Recovery is the time until the process is back and another batch is trained; it is not measured
where the next kill comes before. A kill takes about 45 s on two cores.
"""

import itertools
import math
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from benchmarks.harness.record import Record, timestamp
from benchmarks.harness.study import Options, Study, cells, choice, name_of, several, text_table
from benchmarks.reliability.chaos_run import AGENT, ROLES, ChaosRun, kill, until
from benchmarks.reliability.chaos_sessions import SESSIONS, WRONG, read_notes
from deploy.errors import RunFailed
from headway import clock
from headway.errors import InputError

ALL, NONE = "all", "none"
STRUCK = {**ROLES, "agent": AGENT}
AIM = 30.0
"""Seconds of recovery, at most, of 95 % of the kills of a role."""
BATCH_SECONDS = 900.0
"""Deadline of a started or resumed run to train its next batch."""
IMPATIENCE = 0.2
"""Share of kills that come before the run has recovered from the one before."""
FINISH_SECONDS = 12.0
"""Deadline of each step of the last run after the last kill."""
BATCHES_OF_ONE_BACK = 12
"""New batches after which a process that died is back for sure, although no row names it: one that
died before it had begun to work has none, and its recovery is not measured."""
RUN_COLUMNS = {
    "batches": ("steps", "{}"),
    "trained again": ("retrained_batches", "{}"),
    "issued": ("issued", "{}"),
    "trained": ("trained", "{}"),
    "left out": ("left_out", "{}"),
    "stragglers dropped": ("dropped_overdue", "{}"),
    "largest lag": ("max_lag", "{}"),
    "problems": ("problems", "{}"),
}


def plan_kills(
    roles: Sequence[str], count: int, seed: int, *, stops: bool = True
) -> list[tuple[str, signal.Signals]]:
    """Return role and signal of each kill: roles equally often, in an order drawn from the seed.

    With `stops`, every third time a role is stopped.
    """
    kills = []
    for position, role in enumerate(itertools.islice(itertools.cycle(roles), count)):
        third = stops and position // len(roles) % 3 == 2
        kills.append((role, signal.SIGSTOP if third else signal.SIGKILL))
    random.Random(seed).shuffle(kills)
    return kills


class ChaosOptions(Options):
    """Options of `headway bench chaos`."""

    roles: Annotated[
        Sequence[str], several(name_of([*STRUCK, ALL]), "Processes that are struck, or all.")
    ] = (ALL,)
    sessions: Annotated[str, choice([NONE, *SESSIONS], "What the policy talks to.")] = NONE
    kills: Annotated[int, typer.Option(min=1, help="All runs together.")] = 30
    seed: Annotated[int, typer.Option(help="Of roles, moments and the runs.")] = 0
    steps: Annotated[int, typer.Option(min=1, help="Batches of each run.")] = 150


class Chaos:
    """All runs of one call, and the record of kills and verdicts."""

    def __init__(self, options: ChaosOptions) -> None:
        self.options, self.draw = options, random.Random(options.seed + 1)
        self.folder = (options.out or Path("runs") / f"bench-chaos-{timestamp()}").absolute()
        self.settings = [f"steps={options.steps}", f"seed={options.seed}"]
        self.settings += SESSIONS.get(options.sessions, ())
        known = [*ROLES, "agent"] if options.sessions == "agent" else [*ROLES]
        roles = known if ALL in options.roles else options.roles
        if not {*roles} <= {*known}:
            raise InputError("--roles agent: there are agents only with --sessions agent")
        self.talks = options.sessions != NONE
        self.planned = plan_kills(roles, options.kills, options.seed, stops=not self.talks)
        self.kills: list[Record] = []
        self.struck: tuple[float, int] | None = None
        """Time and newest version of the last kill, until the run is seen to recover from it."""
        self.runs: dict[str, Record] = {}
        self.ended = 0
        """Commands that ended before their last step."""
        self.began = time.monotonic()

    def log(self, text: str) -> None:
        """Print a line with the seconds since the beginning."""
        print(f"{time.monotonic() - self.began:7.1f} s  {text}", flush=True)

    def record(self) -> Record:
        """Return kills and verdicts so far."""
        seconds, kills, runs = time.monotonic() - self.began, self.kills, self.runs
        return {"seconds": seconds, "commands_ended": self.ended, "kills": kills, "runs": runs}

    def measure(self) -> Iterator[Record]:
        """Start runs and kill their processes until all kills are done."""
        while self.planned or not self.runs:
            run = ChaosRun(self.folder, f"run-{len(self.runs) + 1}", self.settings)
            if not self.runs:
                run.warm_start()
            yield from self.torment(run)
            verdict = run.judge()
            self.runs[run.name] = verdict.to_dict()
            if self.talks:
                sessions = self.judge_sessions(run)
                sound = verdict.sound and not any(sessions.get(name) for name in WRONG)
                self.runs[run.name] |= {"sessions": sessions, "sound": sound}
            self.log(f"{run.name} is done: {'; '.join(verdict.problems) or 'sound'}")
            yield self.record()

    def judge_sessions(self, run: ChaosRun) -> dict[str, int]:
        """Return what became of turns and calls so far, and print it."""
        sessions = run.judge_sessions([k["at"] for k in self.kills if k["run"] == run.name])
        self.log(", ".join(f"{name} {count}" for name, count in sessions.items()))
        return sessions

    def torment(self, run: ChaosRun) -> Iterator[Record]:
        """Bring one run to its last step, with kills as long as there are any."""
        self.log(f"{run.name} begins")
        self.struck = None
        run.start()
        try:
            while (code := self.kill_next(run)) != 0:
                yield self.record()
                if code is None:
                    continue
                if self.kills and self.kills[-1]["run"] == run.name:
                    self.kills[-1]["exit_code"] = code
                self.log(f"the command ended with {code}")
                self.ended += 1
                if self.ended > 3 * self.options.kills:
                    raise RunFailed(f"{run.name} ends again and again; see {run.output}")
                run.settle()
                run.start()
        finally:
            run.end()

    def kill_next(self, run: ChaosRun) -> int | None:
        """Wait for the moment of the next kill, and kill; return an exit code of the command."""
        if self.struck is not None and (not self.planned or self.draw.random() > IMPATIENCE):
            self.await_recovery(run)
        if not self.planned:
            seconds = FINISH_SECONDS * self.options.steps + BATCH_SECONDS
            until(lambda: False, run, seconds, "its last step")
            return run.poll()
        batches = self.draw.randint(0, 4)
        due = max(0, run.newest() + batches)  # a run that never trained may end by a hang
        until(lambda: run.newest() >= due, run, BATCH_SECONDS, "a batch")
        # Without waiting for a batch, processes are killed while they start.
        time.sleep(self.draw.uniform(0.0, 1.0 if batches else 8.0))
        if self.talks:
            until(lambda: len(read_notes(run.directory.path)) > 4, run, BATCH_SECONDS, "a turn")
        role, how = self.planned[0]
        what = f"a process of the {role}"
        pids = until(lambda: run.targets(STRUCK[role]), run, BATCH_SECONDS, what) or []
        at, newest = clock.now(), run.newest()
        struck = [kill(pid, how) for pid in pids if run.poll() is None]
        run.note()
        if any(struck):
            self.planned.pop(0)
            self.struck = at, newest
            number = len(self.kills) + 1
            facts = {"number": number, "run": run.name, "role": role, "signal": how.name}
            facts["at"] = at
            unknown = {"exit_code": None, "recovery_seconds": None}
            self.kills.append({**facts, "newest_version": newest, **unknown})
            self.log(f"{how.name} {number}: {role} after version {newest}")
        return run.poll()

    def await_recovery(self, run: ChaosRun) -> None:
        """Wait until what was struck last is back and another batch is trained; record when."""
        assert self.struck is not None
        (at, newest), last = self.struck, self.kills[-1]
        role, self.struck = STRUCK[last["role"]], None
        if last["exit_code"] is None:
            many, what = newest + BATCHES_OF_ONE_BACK, f"another {last['role']}"
            until(lambda: run.is_back(role, at) or run.newest() > many, run, BATCH_SECONDS, what)
            if not run.is_back(role, at):
                return
            newest = run.newest()
        until(lambda: run.newest() > newest, run, BATCH_SECONDS, "a batch after the kill")
        if run.newest() > newest:  # else the run has ended
            last["recovery_seconds"] = clock.now() - at
            self.log(f"recovered after {last['recovery_seconds']:.1f} s")
            if self.talks:
                self.judge_sessions(run)


def conclude(record: Record) -> Record:
    """Return the verdict over all runs: four figures must be 0, and two must not be.

    Where nothing was filtered, or no straggler dropped, it was not shown that those are not lost.
    """
    kills, runs = record["kills"], record["runs"]
    names = ("prompts_lost", "groups_trained_twice", "lags_above_bound", "dropped_overdue")
    figures = {name: sum(run[name] for run in runs.values()) for name in names}
    figures["commands_ended"] = record["commands_ended"]
    figures["filtered"] = sum(run["left_out"].get("filtered", 0) for run in runs.values())
    wanted = record["arguments"]["kills"]
    done = len(kills) == wanted and {kill["run"] for kill in kills} <= runs.keys()
    sessions = sum((Counter(run.get("sessions", {})) for run in runs.values()), Counter[str]())
    if sessions:
        figures |= sessions
        shown = sessions["turns_gone_on_from"] > 0
    else:
        shown = figures["filtered"] > 0 and figures["dropped_overdue"] > 0
    alive = figures["commands_ended"] == 0
    sound = done and shown and alive and all(run["sound"] for run in runs.values())
    return {"verdict": {"finished": done, "sound": sound, "kills": len(kills), **figures}}


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least such a share of the values does not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def recoveries(kills: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Return the seconds of the recoveries that were measured, by role."""
    seconds: dict[str, list[float]] = {}
    for row in kills:
        if row["recovery_seconds"] is not None:
            seconds.setdefault(row["role"], []).append(row["recovery_seconds"])
    return seconds


def misses(record: Record) -> list[str]:
    late = {
        role: percentile(seconds, 0.95) for role, seconds in recoveries(record["kills"]).items()
    }
    slow = [
        f"p95 of {role} is {seconds:.0f} s, at most {AIM:g}"
        for role, seconds in late.items()
        if seconds > AIM
    ]
    return [*([] if record["verdict"]["sound"] else ["not sound, or not finished"]), *slow]


def in_words(run: Record) -> Record:
    """Return why groups of a run were left out, and its problems, as text."""
    left_out = ", ".join(f"{count} {reason}" for reason, count in run["left_out"].items())
    return {"left_out": left_out or "none", "problems": "; ".join(run["problems"]) or "none"}


def table(record: Record) -> str:
    rows = [
        [role, str(len(times)), f"{median(times):.1f}", f"{percentile(times, 0.95):.1f}"]
        for role, times in recoveries(record["kills"]).items()
    ]
    runs = [
        [name, *cells(run | in_words(run), RUN_COLUMNS)] for name, run in record["runs"].items()
    ]
    verdict = ", ".join(
        f"{key.replace('_', ' ')} {value}" for key, value in record["verdict"].items()
    )
    recovered = text_table(["role", "recoveries", "s: median", "p95"], rows)
    return "\n".join([recovered, text_table(["run", *RUN_COLUMNS], runs), verdict])


STUDY = Study(
    name="chaos",
    options=ChaosOptions,
    plan=Chaos,
    in_folder=True,
    measure=Chaos.measure,
    conclude=conclude,
    table=table,
    misses=misses,
)
