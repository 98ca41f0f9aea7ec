"""Kills the processes of runs again and again, and shows that nothing was lost by it.

    headway bench chaos [--kills 30] [--seed 0] [--steps 150] [--engine vllm] [--out DIR]

A small run with filtering and drops is started; its rollout actor,
engine worker, broker, learner rank and driver are killed by SIGKILL at moments drawn from the seed,
each role equally often. What ends by that is gone on with by `headway resume`, and what reaches its
last step gives way to another run, until all kills are done and the last run has reached its step
target. `chaos_oracle` judges every run by what the learner itself wrote down. The report,
chaos.json and chaos.md, is written anew after every kill; the exit code is 1 where anything was
found. On two cores a kill takes 45 to 75 seconds, the resuming included: half an hour for 30.
"""

import argparse
import json
import random
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.reliability.chaos_stage import (
    END_SECONDS,
    GROUPS,
    REWARD,
    ROLES,
    SIZE,
    STALENESS,
    Stage,
    headway,
    kill,
    until,
)

from benchmarks.harness.provenance import RESULTS, environment, reserve
from deploy.cli.app import INTERRUPTED
from deploy.runtime.signals import raise_interrupts

SURVIVED = frozenset({"rollout actor", "engine worker"})
"""Roles whose death a run outlives by itself."""
BATCH_SECONDS = 900.0
"""Deadline of a run, or of one that is gone on with, to train its next batch."""
FINISH_SECONDS = 1800.0
"""Deadline of the last run to reach its step target after the last kill."""


def plan_kills(count: int, seed: int, roles: Sequence[str]) -> list[str]:
    """The role of each kill: all equally often, in an order drawn from the seed."""
    chosen = [roles[index % len(roles)] for index in range(count)]
    random.Random(seed).shuffle(chosen)
    return chosen


class Chaos:
    """All runs of one call, and the report about them."""

    def __init__(self, options: argparse.Namespace) -> None:
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
        self.kills: list[dict[str, Any]] = []
        self.runs: dict[str, dict[str, Any]] = {}
        self.resumes = 0
        self.began = time.monotonic()

    def say(self, text: str) -> None:
        """A line with the seconds since the beginning."""
        print(f"{time.monotonic() - self.began:7.1f} s  {text}", flush=True)

    def run(self) -> bool:
        """Everything; whether nothing was found."""
        roles = [role for role in ROLES if self.options.engine == "vllm" or role != "engine worker"]
        line = plan_kills(self.options.kills, self.options.seed, roles)
        number = 0
        while line or not number:
            number += 1
            stage = Stage(self.folder, f"run-{number}", self.settings)
            if number == 1:
                self.warm_start(stage)
            self.torment(stage, line)
            verdict = stage.judge()
            self.runs[stage.name] = verdict.to_dict()
            self.say(
                f"{stage.name} is done: {verdict.trained} prompts trained, "
                f"{verdict.left_out or 'none'} left out, "
                f"{'; '.join(verdict.problems) or 'nothing lost, nothing trained twice'}"
            )
            self.report()
        return bool(conclude(self.kills, self.runs, self.options.kills)["sound"])

    def warm_start(self, stage: Stage) -> None:
        """The model that all runs begin with."""
        self.say("making the warm start")
        with stage.output.open("ab") as output:
            made = headway(self.folder, ["sft", f"{stage.name}.toml"], output).wait(600)
        if made:
            sys.exit(f"no warm start was made; see {stage.output}")

    def torment(self, stage: Stage, line: list[str]) -> None:
        """One run from its start to its last step, with kills as long as there are any."""
        self.say(f"{stage.name} begins")
        stage.start()
        try:
            while (code := self.go_on(stage, line)) != 0:
                if code is None:
                    continue
                if self.kills and self.kills[-1]["run"] == stage.name:
                    self.kills[-1]["exit_code"] = code
                self.resumes += 1
                if self.resumes > 3 * self.options.kills:
                    sys.exit(f"{stage.name} ends again and again; see {stage.output}")
                stage.rest()
                stage.start()
        finally:
            stage.end()

    def go_on(self, stage: Stage, line: list[str]) -> int | None:
        """Waits for the moment of the next kill, and kills; the exit code, where there is one."""
        if not line:
            until(lambda: False, stage, FINISH_SECONDS, "its last step")
            return stage.poll()
        wanted = self.draw.randint(0, 4)
        before = stage.batches()
        until(lambda: stage.batches() >= before + wanted, stage, BATCH_SECONDS, "a batch")
        # Without waiting for a batch the processes are met while they start.
        time.sleep(self.draw.uniform(0.0, 1.0 if wanted else 8.0))
        self.strike(stage, line)
        return stage.poll()

    def strike(self, stage: Stage, line: list[str]) -> None:
        """One kill, and for roles that a run cannot outlive the end of the command."""
        role = line[0]
        pid = until(lambda: stage.target(role), stage, BATCH_SECONDS, f"a process of the {role}")
        if pid is None or stage.poll() is not None or not kill(pid):
            return
        line.pop(0)
        trained, at = stage.batches(), time.monotonic()
        if role not in SURVIVED:
            until(lambda: False, stage, END_SECONDS, f"the end after the {role} was killed")
        code = stage.poll()
        self.kills.append(
            {
                "number": len(self.kills) + 1,
                "run": stage.name,
                "role": role,
                "batches_logged": trained,
                "exit_code": code,
                "seconds_to_end": None if code is None else time.monotonic() - at,
            }
        )
        ended = "the run goes on" if code is None else f"the command ended with {code}"
        self.say(f"kill {len(self.kills)}: {role} after {trained} logged batches; {ended}")
        self.report()

    def report(self) -> None:
        """Writes chaos.json and chaos.md."""
        document = {
            **environment(),
            "settings": self.settings,
            "seconds": time.monotonic() - self.began,
            "kills": self.kills,
            "runs": self.runs,
            "verdict": conclude(self.kills, self.runs, self.options.kills),
        }
        out = self.options.out
        (out / "chaos.json").write_text(json.dumps(document, indent=1) + "\n")
        (out / "chaos.md").write_text(markdown(document))


def conclude(
    kills: Sequence[Mapping[str, Any]], runs: Mapping[str, Mapping[str, Any]], wanted: int
) -> dict[str, Any]:
    """Over all runs that were judged: three figures that have to be 0, and two that must not be.

    Where nothing was filtered, or no straggler dropped, it was not shown that those are not lost.
    """
    figures = {
        name: sum(run[name] for run in runs.values())
        for name in (
            "prompts_lost", "groups_trained_twice", "lags_above_bound", "dropped_overdue",
        )
    }  # fmt: skip
    figures["filtered"] = sum(run["left_out"].get("filtered", 0) for run in runs.values())
    done = len(kills) == wanted and {kill["run"] for kill in kills} <= runs.keys()
    shown = figures["filtered"] > 0 and figures["dropped_overdue"] > 0
    sound = done and shown and all(run["sound"] for run in runs.values())
    return {"finished": done, "sound": sound, "kills": len(kills), **figures}


def markdown(document: Mapping[str, Any]) -> str:
    """The report for people."""
    verdict, settings = document["verdict"], document["settings"]
    struck = {role: [kill for kill in document["kills"] if kill["role"] == role] for role in ROLES}
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
        "A run outlives the kill of a rollout actor or of an engine worker, except while it "
        "starts: then the command ends, as after every other kill, and `headway resume` goes on.",
        "",
        "| killed | times | the command ended | seconds until then |",
        "|---|---|---|---|",
    ]
    for role, kills in struck.items():
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
            f"{run['trained']} | {left_out or '–'} | {run['dropped_overdue']} | "
            f"{run['max_lag']} | "
            f"{'; '.join(run['problems']) or 'none'} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="headway bench chaos",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--kills", type=int, default=30, help="how many, all runs together (30)")
    parser.add_argument("--seed", type=int, default=0, help="of roles, moments and the runs (0)")
    parser.add_argument("--steps", type=int, default=150, help="batches of each run (150)")
    parser.add_argument(
        "--engine", choices=["vllm", "scripted"], default="vllm",
        help="of the rollout actor; scripted has no worker process to kill (vllm)",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="folder of the report (benchmarks/results)"
    )
    parser.add_argument(
        "--work", type=Path, default=Path("runs/chaos"),
        help="folder of the runs, emptied first (runs/chaos)",
    )  # fmt: skip
    options = parser.parse_args()
    reserve(options.out / "chaos.json")
    raise_interrupts()
    chaos = Chaos(options)
    try:
        sound = chaos.run()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    print((chaos.options.out / "chaos.md").read_text())
    sys.exit(0 if sound else 1)


if __name__ == "__main__":
    main()
