"""One run of `headway bench chaos`: its recipe, its processes, and what is left of it to judge."""

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.reliability.chaos_oracle import Fate, Verdict, judge
from deploy.cluster.cleanup import AGENTS
from learner.diagnostics.trained_log import VARIABLE

T = TypeVar("T")

ROLES = {
    "rollout actor": "ray::RolloutActor",
    "engine worker": "VLLM::EngineCore|.* spawn_main",
    "broker": "ray::_BrokerActor",
    "learner rank": "ray::RankActor",
    "driver": "",
}
"""Patterns of the title of each role's process, as vLLM does not always get to set its own; the
driver is the command itself."""
END_SECONDS = 300.0
"""Deadline of a run to end after a kill that it does not outlive."""
REST_SECONDS = 60.0
"""How long processes may outlive their driver before they are ended."""
GROUPS, SIZE, STALENESS = 4, 2, 2

RECIPE = """
name = "chaos"
steps = {steps}
seed = {seed}

[model.tiny]
characters = "0123456789+-=,abcdefghijklmnopqr"
hidden_size = 32
layers = 2
intermediate_size = 48
heads = 2
kv_heads = 1
head_dim = 32
context = 256

[sft]
name = "chaos"
demonstrations = "lettered_chain_sum"
steps = 3
batch_tokens = 128
microbatch_tokens = 64

[prompts]
source = "lettered_chain_sum"
groups_per_batch = {groups}
group_size = {size}

[actors]
engine = "{engine}"
reward = ["chaos_reward:score"]
max_new_tokens = 96
max_concurrent_rollouts = 16
dtype = "float32"
kv_cache_gib = 1

[queues]
max_staleness = {staleness}
filter_tied = true
on_overdue = "{on_overdue}"
lease_seconds = 20.0
heartbeat_seconds = 2.0

[learner]
learning_rate = 1e-4
microbatch_tokens = 512
checkpoint_every = 10

[deploy]
max_restarts = 1000
"""
REWARD = '''"""Right or wrong by parity, so that half of the groups of two hold no signal."""


def score(prompt, completion, answer, metadata):
    return float(sum(map(ord, completion)) % 2)
'''


class Stage:
    """One run and the command that works on it, seen from outside.

    Args:
        folder: Holds recipe, reward, runs and what commands said.
        name: Of the run.
        settings: Of the recipe, beyond its name.
    """

    def __init__(self, folder: Path, name: str, settings: Mapping[str, Any]) -> None:
        self.folder, self.name, self.steps = folder, name, int(settings["steps"])
        self.log = folder / f"{name}.trained.jsonl"
        self.output = folder / f"{name}.output"
        self.ledger = folder / "runs" / name / "ledger.sqlite"
        recipe = RECIPE.format(groups=GROUPS, size=SIZE, staleness=STALENESS, **settings)
        (folder / f"{name}.toml").write_text(recipe.replace('"chaos"', f'"{name}"', 1))
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Begins the run, or goes on with it."""
        begun = (self.folder / "runs" / self.name / "recipe.json").exists()
        arguments = ["resume", self.name] if begun else ["run", f"{self.name}.toml"]
        with self.output.open("ab") as output:
            self.process = headway(
                self.folder, arguments, output, {VARIABLE: str(self.log.absolute())}
            )

    def poll(self) -> int | None:
        """The exit code of the command; None while it works."""
        assert self.process is not None
        return self.process.poll()

    def batches(self) -> int:
        """Lines of the learner's log."""
        return self.log.read_bytes().count(b"\n") if self.log.exists() else 0

    def target(self, role: str) -> int | None:
        """The process of a role; None while there is none."""
        assert self.process is not None
        if role == "driver":
            return self.process.pid
        found = [pid for pid, title in processes(self.folder) if re.match(ROLES[role], title)]
        return found[-1] if found else None

    def rest(self) -> None:
        """Returns when no process of the run is left; ends those that outlive the deadline.

        Ray's own agents are not waited for: they take a minute to see that their node is gone.
        """
        deadline = time.monotonic() + REST_SECONDS
        while left := [
            pid for pid, title in processes(self.folder) if not title.startswith(AGENTS)
        ]:
            if time.monotonic() > deadline:
                for pid in left:
                    kill(pid)
                deadline += REST_SECONDS
            time.sleep(0.2)

    def end(self) -> None:
        """Ends what is left of the command, where it did not end by itself."""
        assert self.process is not None
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.rest()

    def judge(self) -> Verdict:
        """What the oracle says of the run."""
        rows = [json.loads(line) for line in self.log.read_text().splitlines()]
        fates = read_fates(self.folder / "runs" / self.name)
        return judge(
            rows,
            issued_prompts(self.folder / f"{self.name}.toml", len(fates) + 8 * GROUPS),
            fates,
            steps=self.steps,
            groups_per_batch=GROUPS,
            max_staleness=STALENESS,
        )


def headway(
    folder: Path, arguments: Sequence[str], output: Any, extra: Mapping[str, str] | None = None
) -> "subprocess.Popen[bytes]":
    """Starts a command of ours in a session of its own."""
    program = "from deploy.cli import main; main()"
    root = str(Path(__file__).parents[2])
    paths = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", **(extra or {})},
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def processes(folder: Path) -> list[tuple[int, str]]:
    """Id and title of living processes that work in a folder, oldest first."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            status = (path / "stat").read_text().rsplit(")", 1)[1].split()
            if (path / "cwd").readlink() == folder and status[0] != "Z":
                title = (path / "cmdline").read_text().replace("\0", " ")
                found.append((int(status[19]), int(path.name), title))
        except OSError:
            continue
    return [(pid, title) for _, pid, title in sorted(found)]


def kill(pid: int) -> bool:
    """SIGKILL to one process; whether it was there."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def read_fates(run: Path) -> list[Fate]:
    """What the ledger says of every train group, in the order of issue, with rewards compared."""
    from queues.schema import summarize
    from queues.storage.journal import read_group

    with sqlite3.connect(f"{(run / 'ledger.sqlite').as_uri()}?mode=ro", uri=True) as database:
        rows = database.execute(
            "SELECT prompt_id, state, reason, segment, offset FROM groups LEFT JOIN results"
            " USING (group_id) WHERE purpose = 'train' ORDER BY number"
        ).fetchall()
    database.close()
    fates = []
    for prompt, state, reason, segment, offset in rows:
        tied = None
        if state == "dropped" and segment is not None:
            tied = (
                len(set(summarize(read_group(run / "journal", segment, offset)).task_rewards)) < 2
            )
        fates.append(Fate(prompt, state, reason or "", tied))
    return fates


def issued_prompts(recipe: Path, count: int) -> list[str]:
    """Ids of the first prompts of a recipe's source."""
    from actors.sources.registry import load_source
    from deploy.config.loader import load_recipe

    config = load_recipe(str(recipe))
    prompts = config.prompts
    source = load_source(
        prompts.source,
        options=prompts.source_options,
        seed=config.seed,
        split="train",
        heldout_size=0,
    )
    return [prompt.prompt_id for prompt in source.next(count)]


def until(happened: Callable[[], T], stage: Stage, seconds: float, what: str) -> T | None:
    """What `happened` returns once it is true; None where the command ended first.

    Raises:
        SystemExit: It did not happen in time, which is a finding.
    """
    deadline = time.monotonic() + seconds
    while not (found := happened()):
        if stage.poll() is not None:
            return None
        if time.monotonic() > deadline:
            sys.exit(
                f"{stage.name}: {what} did not happen within {seconds:g} s; see {stage.output}"
            )
        time.sleep(0.02)
    return found
