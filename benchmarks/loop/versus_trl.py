"""Comparison with TRL's GRPOTrainer: the same model, task, batches, steps, cores and seeds.

    headway bench versus-trl [RECIPE] [--seeds 0,1,2] [--microbatch 32] [--threads 2]

TRL samples by transformers: its vLLM cannot take new weights on a CPU. Which of its settings is
best depends on the machine: try several on one seed. Needs `make trl`, and a quiet machine. An
existing folder of --out is continued.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Annotated, Any

import typer

from benchmarks.harness.checkpoint_scores import failures
from benchmarks.harness.comparison import (
    Comparison,
    ScoredOptions,
    ScoreEvery,
    in_turn,
    make_scored_base,
    measure_scored,
)
from benchmarks.harness.cores import all_cores
from benchmarks.harness.record import ROOT, Record
from benchmarks.harness.study import Study, choice
from benchmarks.harness.training_runs import BATCHES, Arm, conditions, vary
from benchmarks.loop.comparison_report import group, medians_table, seeds_of
from benchmarks.loop.run_figures import speed
from deploy.config.run_config import RunConfig
from deploy.report.summary import WARM_UP
from headway.cpu_cores import bind_process, parse_cores
from headway.errors import InputError

HEADWAY = "Headway"
TRL = ROOT / ".trl"
TRL_WORKER = "benchmarks.loop.trl_worker"
SETTINGS = "trl.json"
"""File in the folder of a TRL run: its settings and versions."""
GENERATION = ("padded", "continuous")
REQUIRED: Mapping[str, object] = {
    "actors.reward": ("last_answer",),
    "actors.environment": "single_turn",
    "objective.loss": "cispo",
    "objective.advantage": "grpo",
    "objective.advantage_options": {},
    "objective.correction": "none",
    "objective.correction_options": {},
    "objective.aggregation": "token_mean",
    "objective.kl": None,
    "objective.entropy": None,
    "objective.mask_truncated": False,
    "objective.drop_tied": False,
    "objective.max_token_lag": None,
    "objective.process_rewards": False,
    "objective.positive_nll": 0.0,
    "learner.optimizer": "adamw",
    "learner.minibatches": 1,
    "learner.epochs": 1,
    "learner.schedule.kind": "constant",
    "learner.critic": None,
    "learner.dtype": "float32",
    "queues.filter_tied": False,
    "actors.greedy_baseline": False,
    "actors.overlong": None,
    "actors.missing_eos_penalty": 0.0,
    "actors.top_p": 1.0,
    "actors.top_k": -1,
}
"""Settings that TRL is given too; `objective` is the part of [learner] about the loss."""
COLUMNS = {
    "samples/s": ("samples_per_second", "{:.1f}"),
    "tokens a rollout": ("tokens_per_rollout", "{:.1f}"),
    "score at the end": ("score", "{:.3f}"),
    "seconds to target": ("seconds_to_target", "{:.0f}"),
}


@dataclass(frozen=True, kw_only=True)
class TrlOptions(ScoredOptions):
    """Options of `headway bench versus-trl`."""

    microbatch: Annotated[int, typer.Option(min=1, help="TRL's, in rollouts.")] = 32
    threads: Annotated[int, typer.Option(min=1, help="TRL's.")] = 2
    generation: Annotated[str, choice(GENERATION, "How TRL samples.")] = GENERATION[0]
    score_every: ScoreEvery = 5


def plan(options: TrlOptions) -> Comparison[TrlOptions]:
    """Return the runs of every seed.

    Raises:
        InputError: Something cannot be measured.
    """
    if not (TRL / "trl").exists():
        raise InputError(f"{TRL} has no TRL: install it with `make trl`")
    base = make_scored_base(options, "versus-trl")
    check_alike(base)
    all_cores(base)
    samples = base.prompts.groups_per_batch * base.prompts.group_size
    if samples % options.microbatch:
        raise InputError(
            f"--microbatch {options.microbatch} does not divide a batch of {samples} rollouts"
        )
    arms = [
        in_turn(arms_of(base, seed, options), position)
        for position, seed in enumerate(options.seeds)
    ]
    return Comparison(options=options, base=base, arms=arms)


def check_alike(base: RunConfig) -> None:
    """Refuse a recipe with a setting that TRL is not given here.

    Raises:
        InputError: Names the setting.
    """
    for key, required in REQUIRED.items():
        value: Any = base
        for part in key.split("."):
            value = getattr(value, part)
        if (dict(value) if isinstance(value, Mapping) else value) != required:
            shown = key.replace("objective.", "learner.")
            raise InputError(f"{shown} = {value!r}: TRL is only given {required!r} here")
    if set(base.objective.loss_options) != {"cap_high"}:
        raise InputError("learner.loss_options: TRL is only given 'cap_high' here")


def arms_of(base: RunConfig, seed: int, options: TrlOptions) -> Sequence[Arm]:
    """Return Headway's run and that of TRL."""
    seeded = base.model_copy(update={"seed": seed})
    size, threads, generation = options.microbatch, options.threads, options.generation
    paths = [str(TRL), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    trl = Arm(
        name=f"TRL, microbatch {size}, threads {threads}, {generation}",
        seed=seed,
        config=vary(seeded, f"trl-{size}-{threads}-{generation}-seed{seed}"),
        worker=(TRL_WORKER, str(size), generation),
        variables={"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": str(threads)},
    )
    return [Arm(name=HEADWAY, seed=seed, config=vary(seeded, f"headway-seed{seed}")), trl]


def measure(plan: Comparison[TrlOptions]) -> Iterator[Record]:
    cores = all_cores(plan.base)
    bind_process(parse_cores(cores), "actors.cores with learner.cores")
    facts = {
        "headway": plan.base.model_dump(
            mode="json", include={"prompts", "actors", "queues", "learner", "weight_sync"}
        ),
        "warm_up_steps_left_out": WARM_UP,
        "cores": cores,
    }
    for runs in measure_scored(plan, read_arm):
        yield facts | runs


def read_arm(arm: Arm) -> Record:
    """Return the figures of a run of Headway or TRL."""
    rows, trl = arm.directory.rows(BATCHES), arm.directory.path / SETTINGS
    return {
        "trl": json.loads(trl.read_text()) if arm.worker[0] == TRL_WORKER else None,
        **speed(rows),
        "step_finished_at": [row["step_finished_at"] for row in rows],
    }


def conclude(runs: Sequence[Record]) -> Record:
    """Return Headway's samples/s and seconds to the target over TRL's, medians over seeds.

    A seed with which one of them failed is left out; None where one did not reach the target.
    """
    of_seed = {(run["name"] == HEADWAY, run["seed"]): run for run in runs}
    pairs = [(run, of_seed.get((False, seed))) for (ours, seed), run in of_seed.items() if ours]

    def ratio(key: str) -> float | None:
        values = [(ours[key], theirs[key]) for ours, theirs in pairs if theirs]
        if not values or any(None in pair for pair in values):
            return None
        return float(median(ours / theirs for ours, theirs in values))

    return {"throughput": ratio("samples_per_second"), "time": ratio("seconds_to_target")}


def table(record: Record) -> str:
    runs, ratios = record["arms"], record["conclusions"]
    seeds = seeds_of(runs)
    title = f"medians of {seeds} seed(s), {record['steps']} steps, target {record['target']:g}"
    lines = [medians_table("", group(runs, ""), COLUMNS, seeds=seeds, title=title)]
    lines += [conditions(record), *failures(runs)]
    lines += [
        f"{what} over TRL's: {'–' if ratio is None else f'{ratio:.2f}'}"
        for what, ratio in (
            ("samples/s", ratios["throughput"]),
            ("seconds to the target", ratios["time"]),
        )
    ]
    return "\n".join(lines)


STUDY = Study(
    name="versus-trl",
    about=__doc__,
    options=TrlOptions,
    plan=plan,
    in_folder=True,
    continued=True,
    folder=lambda plan: plan.folder,
    file="versus_trl.json",
    measure=measure,
    conclude=lambda record: {"conclusions": conclude(record["arms"])},
    table=table,
)
