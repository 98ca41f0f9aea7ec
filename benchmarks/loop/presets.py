"""Held-out scores of all presets on the demo's task at an equal budget of batches.

    headway bench presets [--presets a,b] [--steps 40] [--seeds 0] [--set KEY=VALUE] [--out DIR]

Each preset is a run from the same warm start and with the same learning rate, which suits some
better than others; one that fails is left out. An existing folder of --out is continued.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from benchmarks.harness.checkpoint_scores import failures
from benchmarks.harness.comparison import (
    Comparison,
    ScoredOptions,
    make_model,
    make_scored_base,
    measure_scored,
)
from benchmarks.harness.record import Record
from benchmarks.harness.study import Study, name_of, number, several
from benchmarks.harness.training_runs import Arm, TrainingRuns, conditions, vary
from benchmarks.loop.comparison_report import group, medians_table, seeds_of
from benchmarks.loop.run_figures import read_run
from deploy.config.loader import load_recipe, preset_names
from deploy.config.run_config import RunConfig

COLUMNS = {
    "greedy score": ("score", "{:.3f}"),
    "reward": ("reward_mean", "{:.3f}"),
    "tokens/rollout": ("tokens_per_rollout", "{:.0f}"),
    "optimizer steps": ("optimizer_steps", "{:.0f}"),
    "largest lag": ("lag_max", "{:.0f}"),
    "ESS": ("ess", "{:.3f}"),
    "samples/s": ("samples_per_second", "{:.0f}"),
    "seconds": ("seconds", "{:.0f}"),
}


@dataclass(frozen=True, kw_only=True)
class PresetOptions(ScoredOptions):
    """Options of `headway bench presets`."""

    presets: Annotated[Sequence[str], several(name_of(preset_names()), "Names.")] = tuple(
        preset_names()
    )
    seeds: Annotated[Sequence[int], several(number(0), "Of prompts and sampling.")] = (0,)


class PresetComparison(Comparison[PresetOptions]):
    """Runs of presets, and the models that they start from."""

    def start(self, further: int = 0) -> TrainingRuns:
        """See `Comparison.start`; makes the reward models too where a preset asks them."""
        runs, demo = super().start(further), make_demo(self.options, self.folder)
        asked = any(arm.config.actors.asks_reward_models for arms in self.arms for arm in arms)
        if asked and not demo.reward_models.exists():
            if not demo.warm_start.exists():
                shutil.copytree(Path(str(self.base.model.path)).parent, demo.warm_start.parent)
            settings = [*self.options.settings, _runs_dir(self.folder)]
            make_model("reward-model", "demo", settings, self.folder)
        return runs


def _runs_dir(folder: Path) -> str:
    return f"deploy.runs_dir={json.dumps(str(folder))}"


def make_demo(options: PresetOptions, folder: Path) -> RunConfig:
    """Return the demo's recipe with the settings of all presets and another folder."""
    return load_recipe("demo", [*options.settings, _runs_dir(folder)])


def plan(options: PresetOptions) -> PresetComparison:
    """Return the runs of every seed.

    Raises:
        InputError: Something cannot be measured.
    """
    base = make_scored_base(options, "presets")
    demo = make_demo(options, base.deploy.runs_dir)
    members = demo.reward_model.members if demo.reward_model else 0
    reward_models = [str(demo.reward_models / f"model-{number}") for number in range(members)]
    arms = []
    for seed in options.seeds:
        of_seed = [preset_arm(base, name, seed, options, reward_models) for name in options.presets]
        arms.append(of_seed)
    return PresetComparison(options=options, base=base, arms=arms)


def preset_arm(
    base: RunConfig, name: str, seed: int, options: PresetOptions, reward_models: Sequence[str]
) -> Arm:
    """Return a preset with the model, the steps, the checkpoints and the devices of all."""
    shared = {"seed": seed, "steps": base.steps, "model": base.model, "heldout": base.heldout}
    recipe = load_recipe(name, options.settings)
    recipe = recipe.model_copy(update={**shared, "sft": None, "reward_model": None})
    actors: dict[str, Any] = {"cores": base.actors.cores}
    if recipe.actors.asks_reward_models:
        combine = recipe.actors.reward_model.combine
        actors["reward_model"] = {"combine": combine, "paths": reward_models}
    every, cores = base.learner.checkpoint_every, base.learner.cores
    config = vary(
        recipe,
        f"{name}-seed{seed}",
        deploy={"runs_dir": base.deploy.runs_dir},
        actors=actors,
        learner={"cores": cores, "checkpoint_every": every, "keep_checkpoints": base.steps},
    )
    return Arm(name=name, seed=seed, config=config)


def read_arm(arm: Arm) -> Record:
    """Return the figures of a run."""
    summary = json.loads(arm.directory.summary_file.read_text())
    return {**read_run(arm.directory), "optimizer_steps": summary["optimizer_steps"]}


def table(record: Record) -> str:
    runs = record["arms"]
    ranked = sorted(runs, key=lambda run: -run["score"])
    title = f"{record['steps']} batches, {record['problems']} problems at the last score"
    text = medians_table("preset", group(ranked, ""), COLUMNS, seeds=seeds_of(runs), title=title)
    return "\n".join([text, *failures(runs), conditions(record)])


def write_page(record: Record, folder: Path) -> None:
    page = f"# Presets on the demo's task\n\n`{record['command']}`, {record['time']}\n"
    (folder / "presets.md").write_text(f"{page}\n```\n{table(record)}\n```\n")


STUDY = Study(
    name="presets",
    about=__doc__,
    options=PresetOptions,
    plan=plan,
    in_folder=True,
    continued=True,
    folder=lambda plan: plan.folder,
    file="presets.json",
    measure=lambda plan: measure_scored(plan, read_arm),
    table=table,
    figures=write_page,
)
