"""One run of `headway bench chaos`: its recipe, its processes, and its files for the oracle."""

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import psutil

from actors.sources.load_source import load_source
from benchmarks.harness.processes import CLI, set_options
from benchmarks.harness.record import ROOT
from benchmarks.reliability.chaos_agent import TURNS
from benchmarks.reliability.chaos_agent import VARIABLE as SESSIONS_LOG
from benchmarks.reliability.chaos_oracle import Fate, Verdict, judge
from benchmarks.reliability.chaos_sessions import (
    Key,
    Note,
    characters_of,
    judge_sessions,
    read_ended,
    read_log,
    read_notes,
)
from deploy.cluster.cleanup import AGENTS
from deploy.config.loader import load_recipe
from deploy.errors import RunFailed
from deploy.storage.run_directory import RunDirectory
from deploy.storage.run_record import RECOVERIES
from learner.diagnostics.trained_log import VARIABLE
from queues.schema import summarize
from queues.storage.journal import LOCATION, Location, read_group

T = TypeVar("T")


class Role(NamedTuple):
    """Processes that are struck together."""

    titles: tuple[str, ...]
    """Pattern of the title of each; that of the driver, the child of the command, is empty."""
    back: tuple[str, ...]
    """Names in `recoveries.jsonl` of those that take their places, without numbers."""


ACTOR, RANK, BROADCASTER = "ray::RolloutActor", "ray::RankActor", "ray::Broadcaster"
ROLES = {
    "rollout actor": Role((ACTOR,), ("actor",)),
    "engine worker": Role(("VLLM::EngineCore",), ("actor",)),
    "learner rank": Role((RANK,), ("learner",)),
    "broadcaster": Role((BROADCASTER,), ("broadcaster",)),
    "broker": Role(("ray::BrokerActor",), ("broker",)),
    "driver": Role(("",), ("driver",)),
    "several at once": Role((ACTOR, RANK, BROADCASTER), ("actor", "learner", "broadcaster")),
}
AGENT = Role((), ())
"""A program that talks to the policy, and that has yet to ask it again."""
WARM_START_SECONDS = 600.0
REST_SECONDS = 60.0
"""Time that processes may outlive their driver before they are killed."""
RECIPE = Path(__file__).with_name("chaos.toml")


class ChaosRun:
    """One run and its command, seen from outside."""

    def __init__(self, folder: Path, name: str, settings: Sequence[str]) -> None:
        self.folder, self.name = folder, name
        self.log = folder / f"{name}.trained.jsonl"
        self.output = folder / f"{name}.output"
        self.directory = RunDirectory(folder / "runs" / name)
        self._settings = [f"name={name}", *settings]
        self._recipe = [RECIPE, *set_options(self._settings)]
        self.process: subprocess.Popen[bytes] | None = None
        self.sessions_log = folder / f"{name}.sessions.jsonl"
        self.noted: list[tuple[Key, Note]] = []
        """Notes that the ledger had at each kill."""

    def headway(self, *arguments: Any) -> "subprocess.Popen[bytes]":
        """Start a command of Headway in a session of its own."""
        paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        variables = {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", VARIABLE: str(self.log)}
        variables[SESSIONS_LOG] = str(self.sessions_log)
        with self.output.open("ab") as output:
            return subprocess.Popen(
                [sys.executable, *CLI, *arguments], stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True, env={**os.environ, **variables}, cwd=self.folder,
            )  # fmt: skip

    def warm_start(self) -> None:
        """Make the model that all runs start from; raises `RunFailed`."""
        if self.headway("sft", *self._recipe).wait(WARM_START_SECONDS):
            raise RunFailed(f"no warm start was made; see {self.output}")

    def start(self) -> None:
        """Start the run, or resume it."""
        begun = (self.directory.path / "recipe.toml").exists()
        command = ["resume", self.name] if begun else ["run", *self._recipe]
        self.process = self.headway(*command)

    def poll(self) -> int | None:
        """Return the exit code of the command; None while it runs."""
        assert self.process is not None
        return self.process.poll()

    def newest(self) -> int:
        """Return the newest version that the learner's log has trained; -1 before the first."""
        lines = self.log.read_bytes().splitlines(keepends=True) if self.log.exists() else []
        whole = (line for line in lines if line.endswith(b"\n"))
        return max((json.loads(line)["version"] for line in whole), default=-1)

    def targets(self, role: Role) -> list[int] | None:
        """Return the newest process of each title of a role; None while one is missing."""
        assert self.process is not None
        if role is AGENT:
            return self._agents()[-1:] or None
        alive, newest = processes(self.folder), []
        for pattern in role.titles:
            pids = [pid for pid, title in alive if re.match(pattern, title)]
            if not pattern:
                children = psutil.Process(self.process.pid).children()
                pids = [child.pid for child in children][:1]  # a younger one stands by
            if not pids:
                return None
            newest.append(pids[-1])
        return newest

    def _agents(self) -> list[int]:
        """Return the process groups, as negative numbers, of agents between two of their turns."""
        told = {row["pid"]: row["turn"] for row in read_log(self.sessions_log) if "turn" in row}
        alive = psutil.pids()
        return [-pid for pid, turn in told.items() if turn < TURNS - 1 and pid in alive]

    def note(self) -> None:
        """Remember the notes that the ledger has now."""
        self.noted += read_notes(self.directory.path).items()

    def judge_sessions(self, kills: Sequence[float]) -> dict[str, int]:
        """Return what became of turns and calls; `kills` are the times of kills."""
        self.note()
        ended, log = read_ended(self.directory.path), read_log(self.sessions_log)
        return judge_sessions(self.noted, ended, log, kills, characters_of(self.folder))

    def is_back(self, role: Role, since: float) -> bool:
        """Return True if others took the places of processes that were struck at a time."""
        rows = self.directory.rows(RECOVERIES)
        names = {row["process"].partition("-")[0] for row in rows if row["at"] > since}
        return names.issuperset(role.back)

    def settle(self) -> None:
        """Wait until no process of the run is left; kills those that outlive the deadline.

        Ray's own agents are not waited for: they need a minute to notice that their node is gone.
        """
        deadline = time.monotonic() + REST_SECONDS
        while left := [p for p, title in processes(self.folder) if not title.startswith(AGENTS)]:
            if time.monotonic() > deadline:
                for pid in left:
                    kill(pid)
            time.sleep(0.2)

    def end(self) -> None:
        """Kill the command if it has not ended, and wait for its processes."""
        assert self.process is not None
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.settle()

    def judge(self) -> Verdict:
        """Return the oracle's verdict on the run."""
        config = load_recipe(str(RECIPE), self._settings)
        groups = config.prompts.groups_per_batch
        rows = [json.loads(line) for line in self.log.read_text().splitlines()]
        fates = read_fates(self.directory.path)
        source = load_source(
            config.prompts.source,
            options=config.prompts.source_options,
            seed=config.seed,
            split="train",
            heldout_size=0,
        )
        return judge(
            rows,
            [prompt.prompt_id for prompt in source.next(len(fates) + 8 * groups)],
            fates,
            steps=config.steps,
            groups_per_batch=groups,
            max_staleness=config.queues.bound,
        )


def processes(folder: Path) -> list[tuple[int, str]]:
    """Return id and title of the living processes whose working directory is a folder, in order."""
    facts = ["pid", "cwd", "status", "cmdline", "create_time"]
    alive = [
        process.info
        for process in psutil.process_iter(facts)
        if process.info["cwd"] == str(folder) and process.info["status"] != psutil.STATUS_ZOMBIE
    ]
    alive.sort(key=itemgetter("create_time"))
    return [(info["pid"], " ".join(info["cmdline"])) for info in alive]


def kill(pid: int, how: signal.Signals = signal.SIGKILL) -> bool:
    """Send a signal to a process, or by a negative number to a group; False if it is gone."""
    try:
        os.kill(pid, how)
    except ProcessLookupError:
        return False
    return True


def read_fates(run: Path) -> list[Fate]:
    """Return the ledger's rows of all train groups in the order of issue, with rewards compared."""
    with sqlite3.connect(f"{(run / 'ledger.sqlite').as_uri()}?mode=ro", uri=True) as database:
        rows = database.execute(
            f"SELECT prompt_id, state, reason, {LOCATION} FROM groups LEFT JOIN results"
            " USING (group_id) WHERE purpose = 'train' ORDER BY number"
        ).fetchall()
    database.close()
    fates = []
    for prompt, state, reason, *location in rows:
        tied = None
        if state == "dropped" and location[0] is not None:
            summary = summarize(read_group(run / "journal", Location(*location)))
            tied = len(set(summary.task_rewards)) < 2
        fates.append(Fate(prompt, state, reason or "", tied))
    return fates


def until(condition: Callable[[], T], run: ChaosRun, seconds: float, what: str) -> T | None:
    """Wait until a condition is true and return its value; None where the command ended first."""
    deadline = time.monotonic() + seconds
    while run.poll() is None:
        if value := condition():
            return value
        if time.monotonic() > deadline:
            raise RunFailed(
                f"{run.name}: {what} did not happen within {seconds:g} s; see {run.output}"
            )
        time.sleep(0.02)
    return None
