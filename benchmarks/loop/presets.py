"""Held-out scores of all presets on the demo's task at an equal budget of batches.

    headway bench presets [--presets a,b] [--steps 40] [--seed 0] [--set KEY=VALUE] [--out DIR]

Each preset is one `headway run` from the same warm start and with the same learning rate, which
suits some better than others; one that fails is a row like the others.
"""

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer

from benchmarks.harness.comparison import Settings, make_model
from benchmarks.harness.record import Record, timestamp
from benchmarks.harness.study import Options, Study, name_of, several
from benchmarks.harness.tables import cells
from benchmarks.harness.training_runs import BATCHES, WORKER, Arm, TrainingRuns
from deploy.config.loader import load_recipe
from deploy.config.presets import preset_names
from deploy.config.run_config import RunConfig
from deploy.preflight.model_origins import warm_start_origin
from deploy.storage.atomic_folder import ORIGIN_FILE
from deploy.storage.run_directory import RunDirectory

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


@dataclass(frozen=True, kw_only=True)
class PresetOptions(Options):
    """Options of `headway bench presets`."""

    presets: Annotated[Sequence[str], several(name_of(preset_names()), "Names.")] = tuple(
        preset_names()
    )
    steps: Annotated[int, typer.Option(min=1, help="Batches of each run.")] = 40
    seed: Annotated[int, typer.Option(help="Of prompts and sampling.")] = 0
    settings: Settings = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class PresetRuns:
    """The plan: a run of each preset below one folder."""

    options: PresetOptions
    folder: Path

    @property
    def shared(self) -> list[str]:
        """Settings of every command."""
        runs_dir = f"deploy.runs_dir={json.dumps(str(self.folder.absolute()))}"
        return [*self.options.settings, f"seed={self.options.seed}", runs_dir]

    def arms(self) -> list[Arm]:
        """Return the runs.

        Raises:
            InputError: A setting is wrong.
        """
        steps = self.options.steps
        settings = [*self.shared, f"steps={steps}", f"heldout.every={steps}"]
        recipes = {name: load_recipe(name, settings) for name in self.options.presets}
        return [
            Arm(name=name, title=name, config=recipe, worker=(WORKER, "run"))
            for name, recipe in recipes.items()
        ]


def plan(options: PresetOptions) -> PresetRuns:
    """Check that every preset can be loaded."""
    runs = PresetRuns(
        options=options, folder=options.out or Path("runs") / f"bench-presets-{timestamp()}"
    )
    runs.arms()
    return runs


def figures(directory: RunDirectory) -> Record:
    """Return the figures of a finished run; None where it has none."""
    summary, rows = json.loads(directory.summary_file.read_text()), directory.rows(BATCHES)
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
    rows |= {
        name: [row["status"].splitlines()[0]]
        for name, row in document["presets"].items()
        if name not in done
    }
    lines += [f"| `{name}` | {' | '.join(row)} |" for name, row in rows.items()]
    for name in ranked:
        if failed := done[name].get("greedy_failed"):
            lines += ["", f"`{name}`: {failed} of {done[name]['problems']} rollouts failed."]
    return "\n".join(lines) + "\n"


def prepare(config: RunConfig, users: RunConfig, plan: PresetRuns) -> None:
    """Make the models that runs start from; a warm start of the same settings is copied.

    Raises:
        RunFailed: A model could not be made.
    """
    origin = users.warm_start / ORIGIN_FILE
    if origin.exists() and origin.read_text() == warm_start_origin(config):
        shutil.copytree(users.warm_start.parent, config.warm_start.parent)
    else:
        make_model("sft", "demo", plan.shared, plan.folder)
    if "ppo_rlhf" in plan.options.presets:
        make_model("reward-model", "demo", plan.shared, plan.folder)


def measure(plan: PresetRuns) -> Iterator[Record]:
    options, arms = plan.options, plan.arms()
    facts = {"steps": options.steps, "seed": options.seed, "settings": options.settings}
    rows: dict[str, Record] = {}
    yield {**facts, "presets": rows}
    prepare(load_recipe("demo", plan.shared), load_recipe("demo", options.settings), plan)
    runs = TrainingRuns(len(arms))
    for arm in arms:
        _, failed = runs.train([arm])
        rows[arm.name] = {"status": failed[0]["why"]} if failed else figures(arm.directory)
        yield {"presets": rows}


def write_page(record: Record, folder: Path) -> None:
    (folder / "presets.md").write_text(markdown(record))


STUDY = Study(
    name="presets",
    about=__doc__,
    options=PresetOptions,
    plan=plan,
    in_folder=True,
    folder=lambda plan: plan.folder,
    file="presets.json",
    measure=measure,
    table=markdown,
    figures=write_page,
)
