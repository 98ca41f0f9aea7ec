"""Kills the processes of runs again and again, and checks that no prompt is lost.

    headway bench chaos [--kills 30] [--seed 0] [--steps 150] [--out DIR]

Rollout actor, engine worker, broker, learner rank and driver of a run with filtering and drops are
killed at moments drawn from the seed; a run that ends by a kill is resumed. `chaos_oracle` checks
every run by the learner's own log. A kill takes about a minute on two cores.
"""

import random
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.study import Options, Record, Study, number, option
from benchmarks.reliability.chaos_run import (
    END_SECONDS,
    GROUPS,
    REWARD,
    ROLES,
    SIZE,
    STALENESS,
    ChaosRun,
    headway,
    kill,
    until,
)
from deploy.errors import RunFailed

SURVIVED = frozenset({"rollout actor", "engine worker"})
"""Roles whose death a run survives by itself."""
BATCH_SECONDS = 900.0
"""Deadline of a started or resumed run to train its next batch."""
FINISH_SECONDS = 1800.0
"""Deadline of the last run to reach its last step after the last kill."""


def plan_kills(count: int, seed: int, roles: Sequence[str]) -> list[str]:
    """Return the role of each kill: all equally often, in an order drawn from the seed."""
    chosen = [roles[index % len(roles)] for index in range(count)]
    random.Random(seed).shuffle(chosen)
    return chosen


class Chaos:
    """All runs of one call, and the record of kills and verdicts."""

    def __init__(self, options: Options) -> None:
        self.options, self.draw = options, random.Random(options.seed + 1)
        self.folder = options.work.absolute()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        (self.folder / "chaos_reward.py").write_text(REWARD)
        self.settings = {
            "steps": options.steps,
            "seed": options.seed,
            "engine": options.engine,
            "on_overdue": "drop",
        }
        roles = [role for role in ROLES if options.engine == "vllm" or role != "engine worker"]
        self.planned = plan_kills(options.kills, options.seed, roles)
        self.kills: list[Record] = []
        self.runs: dict[str, Record] = {}
        self.resumes = 0
        self.began = time.monotonic()

    def log(self, text: str) -> None:
        """Print a line with the seconds since the beginning."""
        print(f"{time.monotonic() - self.began:7.1f} s  {text}", flush=True)

    def record(self) -> Record:
        """Return kills and verdicts so far."""
        return {
            "settings": self.settings,
            "seconds": time.monotonic() - self.began,
            "kills": self.kills,
            "runs": self.runs,
        }

    def measure(self) -> Iterator[Record]:
        """Start runs and kill their processes until all kills are done."""
        while self.planned or not self.runs:
            run = ChaosRun(self.folder, f"run-{len(self.runs) + 1}", self.settings)
            if not self.runs:
                self.warm_start(run)
            yield from self.torment(run)
            verdict = run.judge()
            self.runs[run.name] = verdict.to_dict()
            self.log(
                f"{run.name} is done: {verdict.trained} prompts trained, "
                f"{verdict.left_out or 'none'} left out, "
                f"{'; '.join(verdict.problems) or 'nothing lost, nothing trained twice'}"
            )
            yield self.record()

    def warm_start(self, run: ChaosRun) -> None:
        """Make the model that all runs start from."""
        self.log("making the warm start")
        with run.output.open("ab") as output:
            code = headway(self.folder, ["sft", f"{run.name}.toml"], output).wait(600)
        if code:
            raise RunFailed(f"no warm start was made; see {run.output}")

    def torment(self, run: ChaosRun) -> Iterator[Record]:
        """Bring one run to its last step, with kills as long as there are any."""
        self.log(f"{run.name} begins")
        run.start()
        try:
            while (code := self.kill_next(run)) != 0:
                yield self.record()
                if code is None:
                    continue
                if self.kills and self.kills[-1]["run"] == run.name:
                    self.kills[-1]["exit_code"] = code
                self.resumes += 1
                if self.resumes > 3 * self.options.kills:
                    raise RunFailed(f"{run.name} ends again and again; see {run.output}")
                run.settle()
                run.start()
        finally:
            run.end()

    def kill_next(self, run: ChaosRun) -> int | None:
        """Wait for the moment of the next kill, and kill; return an exit code of the command."""
        if not self.planned:
            until(lambda: False, run, FINISH_SECONDS, "its last step")
            return run.poll()
        batches = self.draw.randint(0, 4)
        due = run.batches() + batches
        until(lambda: run.batches() >= due, run, BATCH_SECONDS, "a batch")
        # Without waiting for a batch, processes are killed while they start.
        time.sleep(self.draw.uniform(0.0, 1.0 if batches else 8.0))
        role = self.planned[0]
        pid = until(lambda: run.target(role), run, BATCH_SECONDS, f"a process of the {role}")
        if pid is not None and run.poll() is None and kill(pid):
            self.planned.pop(0)
            self.note_kill(run, role)
        return run.poll()

    def note_kill(self, run: ChaosRun, role: str) -> None:
        """Record a kill; a command that cannot survive it is waited for."""
        trained, at = run.batches(), time.monotonic()
        if role not in SURVIVED:
            until(lambda: False, run, END_SECONDS, f"the end after the {role} was killed")
        code = run.poll()
        self.kills.append(
            {
                "number": len(self.kills) + 1,
                "run": run.name,
                "role": role,
                "batches_logged": trained,
                "exit_code": code,
                "seconds_to_end": None if code is None else time.monotonic() - at,
            }
        )
        ended = "the run continues" if code is None else f"the command ended with {code}"
        self.log(f"kill {len(self.kills)}: {role} after {trained} logged batches; {ended}")


def conclude(
    kills: Sequence[Mapping[str, Any]], runs: Mapping[str, Mapping[str, Any]], wanted: int
) -> Record:
    """Return the verdict over all runs: three figures must be 0, and two must not be.

    Where nothing was filtered, or no straggler dropped, it was not shown that those are not lost.
    """
    names = ("prompts_lost", "groups_trained_twice", "lags_above_bound", "dropped_overdue")
    figures = {name: sum(run[name] for run in runs.values()) for name in names}
    figures["filtered"] = sum(run["left_out"].get("filtered", 0) for run in runs.values())
    done = len(kills) == wanted and {kill["run"] for kill in kills} <= runs.keys()
    shown = figures["filtered"] > 0 and figures["dropped_overdue"] > 0
    sound = done and shown and all(run["sound"] for run in runs.values())
    return {"finished": done, "sound": sound, "kills": len(kills), **figures}


def markdown(document: Mapping[str, Any]) -> str:
    """Return the record as Markdown."""
    verdict, settings = document["verdict"], document["settings"]
    lines = [
        "# Chaos",
        "",
        f"`{document['command']}` at {(document['commit'] or 'no commit')[:12]}, "
        f"{document['time']}; engine {settings['engine']}, filtering and drops, η = {STALENESS}, "
        f"{settings['steps']} batches of {GROUPS} groups of {SIZE} a run; "
        f"{document['seconds']:.0f} s.",
        "",
        f"**{verdict['kills']} kills: {verdict['prompts_lost']} prompts lost, "
        f"{verdict['groups_trained_twice']} groups trained twice, {verdict['lags_above_bound']} "
        f"trained lags above η; {verdict['filtered']} groups filtered and "
        f"{verdict['dropped_overdue']} stragglers dropped on the way (neither may be 0); "
        f"{'sound' if verdict['sound'] else 'NOT SOUND, or not finished'}.**",
        "",
        "A run survives the kill of a rollout actor or of an engine worker, except while it "
        "starts: then the command ends, as after every other kill, and `headway resume` continues.",
        "",
        "| killed | times | the command ended | seconds until then |",
        "|---|---|---|---|",
    ]
    for role in ROLES:
        kills = [kill for kill in document["kills"] if kill["role"] == role]
        ended = sum(kill["exit_code"] is not None for kill in kills)
        times = [kill["seconds_to_end"] for kill in kills if kill["seconds_to_end"] is not None]
        seconds = f"{min(times):.1f} to {max(times):.1f}" if times else "–"
        lines.append(f"| {role} | {len(kills)} | {ended} | {seconds} |")
    lines += [
        "",
        "| run | batches | trained again | issued | trained | left out | stragglers dropped and "
        "issued again | largest lag | problems |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, run in document["runs"].items():
        left_out = ", ".join(f"{count} {what}" for what, count in run["left_out"].items())
        lines.append(
            f"| {name} | {run['steps']} | {run['retrained_batches']} | {run['issued']} | "
            f"{run['trained']} | {left_out or '–'} | {run['dropped_overdue']} | {run['max_lag']} | "
            f"{'; '.join(run['problems']) or 'none'} |"
        )
    return "\n".join(lines) + "\n"


def write_page(record: Record, folder: Path) -> None:
    """Write the record as chaos.md."""
    (folder / "chaos.md").write_text(markdown(record))


STUDY = Study(
    name="chaos",
    about=__doc__,
    options=(
        option("--kills", 30, "all runs together", type=number(int, 1)),
        option("--seed", 0, "of roles, moments and the runs"),
        option("--steps", 150, "batches of each run", type=number(int, 1)),
        option(
            "--engine",
            "vllm",
            "of the rollout actor; scripted has no worker process to kill",
            choices=["vllm", "scripted"],
        ),
        option("--work", Path("runs/chaos"), "folder of the runs, emptied first", type=Path),
    ),
    in_folder=True,
    file="chaos.json",
    measure=lambda options: Chaos(options).measure(),
    conclude=lambda record: {
        "verdict": conclude(record["kills"], record["runs"], record["arguments"]["kills"])
    },
    table=markdown,
    figures=write_page,
    misses=lambda record: [] if record["verdict"]["sound"] else ["not sound, or not finished"],
)

if __name__ == "__main__":
    STUDY.main()
