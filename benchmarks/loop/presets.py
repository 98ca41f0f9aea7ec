"""Held-out scores of all presets on the demo's task at an equal budget of batches.

    headway bench presets [--presets a,b] [--steps 40] [--seeds 0] [--set KEY=VALUE] [--out DIR]

Each preset is a run from the same warm start and with the same learning rate, which suits some
better than others; one that fails is left out. An existing folder of --out is continued.
"""

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

from benchmarks.harness.checkpoint_scores import failures
from benchmarks.harness.comparison import (
    Comparison,
    ScoredOptions,
    make_model,
    measure_scored,
    scored_plan,
)
from benchmarks.harness.record import Record
from benchmarks.harness.study import Study, name_of, number, several
from benchmarks.harness.training_runs import Arm, conditions, vary
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


class PresetOptions(ScoredOptions):
    """Options of `headway bench presets`."""

    presets: Annotated[Sequence[str], several(name_of(preset_names()), "Names.")] = tuple(
        preset_names()
    )
    seeds: Annotated[Sequence[int], several(number(0), "Of prompts and sampling.")] = (0,)


def measure(plan: Comparison[PresetOptions]) -> Iterator[Record]:
    make_reward_models(plan)
    yield from measure_scored(plan, read_arm)


def make_reward_models(plan: Comparison[PresetOptions]) -> None:
    """Make the demo's reward models from the warm start of the arms where a preset asks them."""
    settings = demo_settings(plan.options, plan.folder)
    demo = load_recipe("demo", settings)
    asked = any(arm.config.actors.asks_reward_models for arms in plan.arms for arm in arms)
    if asked and not demo.reward_models.exists():
        plan.make_warm_start()
        if not demo.warm_start.exists():
            shutil.copytree(Path(str(plan.base.model.path)).parent, demo.warm_start.parent)
        make_model("reward-model", "demo", settings, plan.folder)


def demo_settings(options: PresetOptions, folder: Path) -> list[str]:
    """Return the settings by which the demo's models are made for presets, in another folder."""
    return [*options.settings, f"deploy.runs_dir={json.dumps(str(folder))}"]


def plan(options: PresetOptions) -> Comparison[PresetOptions]:
    """Return the runs of every seed; raises `InputError` where they cannot be measured."""

    def arms_of(base: RunConfig) -> list[Arm]:
        return [preset_arm(base, name, options) for name in options.presets]

    return scored_plan(options, "presets", arms_of)


def preset_arm(base: RunConfig, name: str, options: PresetOptions) -> Arm:
    """Return a preset with the seed, model, steps, checkpoints and devices of a recipe."""
    shared = {key: getattr(base, key) for key in ("seed", "steps", "model", "heldout")}
    shared |= {"sft": None, "reward_model": None}
    recipe = load_recipe(name, options.settings).model_copy(update=shared)
    actors: dict[str, Any] = {"cores": base.actors.cores}
    if recipe.actors.asks_reward_models:
        demo = load_recipe("demo", demo_settings(options, base.deploy.runs_dir))
        members = range(demo.reward_model.members if demo.reward_model else 0)
        paths = [str(demo.reward_models / f"model-{number}") for number in members]
        combine = recipe.actors.reward_model.combine
        actors["reward_model"] = {"combine": combine, "paths": paths}
    every, cores = base.learner.checkpoint_every, base.learner.cores
    config = vary(
        recipe,
        f"{name}-seed{base.seed}",
        deploy={"runs_dir": base.deploy.runs_dir},
        actors=actors,
        learner={"cores": cores, "checkpoint_every": every, "keep_checkpoints": base.steps},
    )
    return Arm(name=name, seed=base.seed, config=config)


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
    options=PresetOptions,
    plan=plan,
    in_folder=True,
    continued=True,
    measure=measure,
    table=table,
    figures=write_page,
)
