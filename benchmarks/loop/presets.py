"""Held-out scores of all presets on the demo's task at an equal budget of batches.

    headway bench presets [--presets a,b] [--steps 40] [--seed 0] [--set KEY=VALUE] [--out DIR]

Each preset is one `headway run` from the same warm start, one after the other; a preset that learns
badly, or fails, is a row like the others. The learning rate is the demo's for all of them, which
suits some better than others. Besides the table, written as JSON and Markdown, every run stays in
the folder with its report.
"""

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.harness.provenance import environment, reserve
from deploy.config.loader import load_recipe
from deploy.config.presets import preset_names
from deploy.config.run_config import RunConfig
from deploy.errors import InputError
from deploy.preflight.provenance import ORIGIN_FILE, warm_start_origin

COLUMNS = {
    "greedy before": ("greedy_before", "{:.3f}"),
    "greedy after": ("greedy_after", "{:.3f}"),
    "sampled after": ("sampled_after", "{:.3f}"),
    "reward, last 5": ("reward_last", "{:.3f}"),
    "tokens a rollout, last 5": ("length_last", "{:.0f}"),
    "optimizer steps": ("optimizer_steps", "{:d}"),
    "largest lag": ("max_lag", "{:d}"),
    "ESS": ("ess", "{:.3f}"),
    "samples/s": ("samples_per_second", "{:.0f}"),
    "seconds": ("seconds", "{:.0f}"),
}


def headway(*arguments: str) -> int:
    """Runs a command of ours in the foreground; its exit code."""
    program = "from deploy.cli import main; main()"
    return subprocess.run([sys.executable, "-c", program, *arguments], check=False).returncode


def figures(folder: Path) -> dict[str, Any]:
    """A row of the table, from what a finished run left behind; None where it has no figure."""
    summary = json.loads((folder / "summary.json").read_text())
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    greedy = summary["heldout"] or [{"score": None, "size": None}]
    sampled = summary["heldout_sampled"] or [{"score": None}]
    last = rows[-5:]
    return {
        "status": summary["status"],
        "greedy_before": greedy[0]["score"],
        "greedy_after": greedy[-1]["score"],
        "sampled_after": sampled[-1]["score"],
        "problems": greedy[-1]["size"],
        "reward_last": _mean(row["reward_mean"] for row in last),
        "length_last": _mean(row["response_length_mean"] for row in last),
        "optimizer_steps": summary["optimizer_steps"],
        "max_lag": summary["max_lag_trained"],
        "ess": summary["ess_mean"],
        "samples_per_second": summary["samples_per_second"],
        "seconds": summary["seconds"],
        "rewards": [row["reward_mean"] for row in rows],
    }


def _mean(values: Iterable[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return fmean(present) if present else None


def markdown(document: Mapping[str, Any]) -> str:
    """The table for people, best score first."""
    head = f"# Presets on the demo's task, {document['steps']} batches, seed {document['seed']}\n\n"
    head += (
        f"`{document['command']}` at {document['commit'][:12]}, {document['time']}; held-out exact "
        "match; the same warm start, learning rate and number of batches for all.\n\n"
    )
    lines = [f"| preset | {' | '.join(COLUMNS)} |", f"|---|{'---|' * len(COLUMNS)}"]
    done = {name: row for name, row in document["presets"].items() if row["status"] == "done"}
    scores = {name: row["greedy_after"] for name, row in done.items()}
    for name in sorted(done, key=lambda name: (scores[name] is None, -(scores[name] or 0))):
        found = [(done[name][key], form) for key, form in COLUMNS.values()]
        cells = ("–" if value is None else form.format(value) for value, form in found)
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    lines += [
        f"| `{name}` | {row['status']} |"
        for name, row in document["presets"].items()
        if row["status"] != "done"
    ]
    return head + "\n".join(lines) + "\n"


def prepare(
    wanted: RunConfig, there: RunConfig, options: Sequence[str], presets: Sequence[str]
) -> None:
    """The models that runs start from; a warm start of the same settings is copied.

    Args:
        wanted: The demo's recipe as it will run.
        there: The same where the user's own runs are.
        options: Those of the command line that make `wanted`.
        presets: That will run.
    """
    origin = there.warm_start / ORIGIN_FILE
    if origin.exists() and origin.read_text() == warm_start_origin(wanted):
        shutil.copytree(there.warm_start.parent, wanted.warm_start.parent)
    elif code := headway("sft", "demo", *options):
        sys.exit(code)
    if "ppo_rlhf" in presets and (code := headway("reward-model", "demo", *options)):
        sys.exit(code)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="headway bench presets",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--presets", default=",".join(preset_names()))
    parser.add_argument("--steps", type=int, default=40, help="batches of each run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path, help="new folder; runs/bench-presets-TIME by default")
    arguments = parser.parse_args()
    presets = [name for name in arguments.presets.split(",") if name]
    out = arguments.out or Path("runs") / f"bench-presets-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    every = [
        *arguments.settings,
        f"seed={arguments.seed}",
        f"deploy.runs_dir={json.dumps(str(out.absolute()))}",
    ]
    own = [f"steps={arguments.steps}", f"heldout.every={arguments.steps}"]
    try:
        there, wanted = load_recipe("demo", arguments.settings), load_recipe("demo", every)
        for name in presets:
            load_recipe(name, [*every, *own])
        if out.exists():
            raise InputError(f"--out {out} exists; name a folder that does not")
    except InputError as error:
        sys.exit(f"headway: {error}")
    reserve(out / "presets.json")
    options = [part for setting in every for part in ("--set", setting)]
    prepare(wanted, there, options, presets)
    document: dict[str, Any] = {
        **environment(),
        "steps": arguments.steps,
        "seed": arguments.seed,
        "settings": arguments.settings,
        "presets": {},
    }
    for name in presets:
        code = headway("run", name, *options, *(p for s in own for p in ("--set", s)))
        row = figures(out / name) if code == 0 else {"status": f"failed with exit code {code}"}
        document["presets"][name] = row
        (out / "presets.json").write_text(json.dumps(document, indent=1))
        (out / "presets.md").write_text(markdown(document))
    print((out / "presets.md").read_text())


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)  # the run in progress got the interrupt too, and has ended itself
