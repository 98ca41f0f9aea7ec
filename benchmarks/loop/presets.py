"""Held-out scores of all presets on the demo's task at an equal budget of batches.

    headway bench presets [--presets a,b] [--steps 40] [--seed 0] [--set KEY=VALUE] [--out DIR]

Each preset is one `headway run` from the same warm start and with the same learning rate, which
suits some better than others; one that fails is a row like the others.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.harness.study import Options, Record, Study, cells, option
from benchmarks.harness.subprocesses import CLI, set_options
from deploy.config.loader import load_recipe
from deploy.config.presets import preset_names
from deploy.config.run_config import RunConfig
from deploy.errors import RunFailed
from deploy.preflight.model_origins import warm_start_origin
from deploy.storage.atomic_folder import ORIGIN_FILE

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
    """Run a command of Headway in the foreground and return its exit code."""
    return subprocess.run([sys.executable, *CLI, *arguments], check=False).returncode


def figures(folder: Path) -> Record:
    """Return the figures of a finished run; None where it has none."""
    summary = json.loads((folder / "summary.json").read_text())
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    greedy = summary["heldout"] or [{"score": None, "size": None}]
    sampled = summary["heldout_sampled"] or [{"score": None}]
    return {
        "status": summary["status"],
        "greedy_before": greedy[0]["score"],
        "greedy_after": greedy[-1]["score"],
        "greedy_failed": greedy[-1].get("failed", 0),
        "sampled_after": sampled[-1]["score"],
        "problems": greedy[-1]["size"],
        "reward_last": _mean(row["reward_mean"] for row in rows[-5:]),
        "length_last": _mean(row["response_length_mean"] for row in rows[-5:]),
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
    """Return the table as Markdown, best score first."""
    lines = [
        f"# Presets on the demo's task, {document['steps']} batches, seed {document['seed']}",
        "",
        f"`{document['command']}` at {(document['commit'] or 'no commit')[:12]}, "
        f"{document['time']}; held-out exact match; the same warm start, learning rate and number "
        "of batches for all.",
        "",
        f"| preset | {' | '.join(COLUMNS)} |",
        f"|---|{'---|' * len(COLUMNS)}",
    ]
    done = {name: row for name, row in document["presets"].items() if row["status"] == "done"}
    scores = {name: row["greedy_after"] for name, row in done.items()}
    ranked = sorted(done, key=lambda name: (scores[name] is None, -(scores[name] or 0)))
    rows = {name: cells(done[name], COLUMNS) for name in ranked}
    rows |= {name: [row["status"]] for name, row in document["presets"].items() if name not in done}
    lines += [f"| `{name}` | {' | '.join(row)} |" for name, row in rows.items()]
    for name in ranked:
        if failed := done[name].get("greedy_failed"):
            lines += ["", f"`{name}`: {failed} of {done[name]['problems']} rollouts failed."]
    return "\n".join(lines) + "\n"


def prepare(
    config: RunConfig, users: RunConfig, settings: Sequence[str], presets: Sequence[str]
) -> None:
    """Make the models that runs start from; a warm start of the same settings is copied.

    Raises:
        RunFailed: A model could not be made.
    """
    origin = users.warm_start / ORIGIN_FILE
    if origin.exists() and origin.read_text() == warm_start_origin(config):
        shutil.copytree(users.warm_start.parent, config.warm_start.parent)
    elif headway("sft", "demo", *settings):
        raise RunFailed("the warm start failed, for the reason above")
    if "ppo_rlhf" in presets and headway("reward-model", "demo", *settings):
        raise RunFailed("the reward model failed, for the reason above")


def check(options: Options) -> None:
    """Check that every preset can be loaded; sets `names`, `shared` and `own` settings.

    Raises:
        InputError: A preset or setting is wrong.
    """
    if options.out is None:
        options.out = Path("runs") / f"bench-presets-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    options.names = [name for name in options.presets.split(",") if name]
    runs_dir = f"deploy.runs_dir={json.dumps(str(options.out.absolute()))}"
    options.shared = [*options.settings, f"seed={options.seed}", runs_dir]
    options.own = [f"steps={options.steps}", f"heldout.every={options.steps}"]
    for name in options.names:
        load_recipe(name, [*options.shared, *options.own])


def measure(options: Options) -> Iterator[Record]:
    config, users = load_recipe("demo", options.shared), load_recipe("demo", options.settings)
    prepare(config, users, set_options(options.shared), options.names)
    rows: dict[str, Record] = {}
    yield {
        "steps": options.steps,
        "seed": options.seed,
        "settings": options.settings,
        "presets": rows,
    }
    for name in options.names:
        code = headway("run", name, *set_options([*options.shared, *options.own]))
        failed = {"status": f"failed with exit code {code}"}
        rows[name] = failed if code else figures(options.out / name)
        yield {"presets": rows}


def write_page(record: Record, folder: Path) -> None:
    (folder / "presets.md").write_text(markdown(record))


STUDY = Study(
    name="presets",
    about=__doc__,
    options=(
        option("--presets", ",".join(preset_names()), "names"),
        option("--steps", 40, "batches of each run"),
        option("--seed", 0, "of prompts and sampling"),
        option("--set", [], dest="settings", action="append", metavar="KEY=VALUE"),
    ),
    check=check,
    in_folder=True,
    folder=None,
    file="presets.json",
    measure=measure,
    table=markdown,
    figures=write_page,
)
