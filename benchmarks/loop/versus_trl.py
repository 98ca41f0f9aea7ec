"""Comparison with TRL's GRPOTrainer: the same model, task, batches, steps, cores and seeds.

    headway bench versus-trl [RECIPE] [--seeds 0,1,2] [--microbatch 128,32] [--threads 1,2]

TRL runs with every combination of microbatch, threads and generation, and the best one of each
figure is compared. It samples by transformers: its vLLM cannot take new weights on a CPU. Needs
`make trl`, and a quiet machine. An existing folder of --out is continued.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import Annotated, Any

from benchmarks.harness.checkpoint_scores import failures, last_failed, read_scores
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
from benchmarks.harness.study import Study, name_of, number, several
from benchmarks.harness.tables import cells, text_table
from benchmarks.harness.training_runs import BATCHES, Arm, conditions, vary
from benchmarks.loop.comparison_report import group, median_of, seeds_of
from benchmarks.loop.run_figures import learning, speed
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
FIGURES = ("samples_per_second", "tokens_per_rollout", "score", "seconds", "seconds_to_target")
COLUMNS = {
    "samples/s": ("samples_per_second", "{:.1f}"),
    "tokens a rollout": ("tokens_per_rollout", "{:.1f}"),
    "score at the end": ("score", "{:.3f}"),
    "seconds to target": ("seconds_to_target", "{:.0f}"),
}


@dataclass(frozen=True, kw_only=True)
class TrlOptions(ScoredOptions):
    """Options of `headway bench versus-trl`."""

    microbatch: Annotated[Sequence[int], several(number(1), "TRL's, in rollouts.")] = (128, 32)
    threads: Annotated[Sequence[int], several(number(1), "TRL's.")] = (1, 2)
    generation: Annotated[Sequence[str], several(name_of(GENERATION), "How TRL samples.")] = (
        GENERATION
    )
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
    for size in options.microbatch:
        if samples % size:
            raise InputError(f"--microbatch {size} does not divide a batch of {samples} rollouts")
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
    """Return Headway's run and those of TRL with every combination of its settings."""
    seeded = base.model_copy(update={"seed": seed})
    arms = [Arm(name=HEADWAY, seed=seed, config=vary(seeded, f"headway-seed{seed}"))]
    paths = [str(TRL), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    for size, threads, generation in product(
        options.microbatch, options.threads, options.generation
    ):
        arms.append(
            Arm(
                name=f"TRL, microbatch {size}, threads {threads}, {generation}",
                seed=seed,
                config=vary(seeded, f"trl-{size}-{threads}-{generation}-seed{seed}"),
                worker=(TRL_WORKER, str(size), generation),
                variables={"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": str(threads)},
            )
        )
    return arms


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


def read_arm(arm: Arm, target: float) -> Record:
    """Return the figures of a scored run of Headway or TRL."""
    directory = arm.directory
    rows, trl = directory.rows(BATCHES), directory.path / SETTINGS
    return {
        **arm.tags(),
        "environment": arm.environment(),
        "trl": json.loads(trl.read_text()) if arm.worker[0] == TRL_WORKER else None,
        **speed(rows),
        **learning(rows, read_scores(directory.path), target),
        "heldout": last_failed(directory.path),
        "step_finished_at": [row["step_finished_at"] for row in rows],
    }


def conclude(runs: Sequence[Record]) -> Record:
    """Return medians over seeds, and ratios within a seed to the best TRL setting of a figure.

    Returns:
        `medians` by name; `throughput` and `time` with `best`, the TRL setting with the most
        samples/s, or that reached the target first, and `ratio`, Headway's samples/s or seconds
        over its; None where none reached it with every seed. An arm that failed with a seed is left
        out; without Headway's there are no ratios.
    """
    seeds = seeds_of(runs)
    by_name = {name: same for name, same in group(runs, "").items() if len(same) == seeds}
    medians = {
        name: {key: median_of(same, key) for key in FIGURES} for name, same in by_name.items()
    }

    def compare(key: str, sign: int) -> Record:
        known = {
            name: value
            for name, figures in medians.items()
            if name != HEADWAY and (value := figures[key]) is not None
        }
        best = min(known, key=lambda name: sign * known[name], default=None)
        if best is None or medians.get(HEADWAY, {}).get(key) is None:
            return {"best": best, "ratio": None}
        theirs = {run["seed"]: run[key] for run in by_name[best]}
        ratio = median(run[key] / theirs[run["seed"]] for run in by_name[HEADWAY])
        return {"best": best, "ratio": ratio}

    return {
        "medians": medians,
        "throughput": compare("samples_per_second", -1),
        "time": compare("seconds_to_target", 1),
    }


def table(record: Record) -> str:
    conclusions = record["conclusions"]
    rows = [[name, *cells(medians, COLUMNS)] for name, medians in conclusions["medians"].items()]
    speed, time = conclusions["throughput"], conclusions["time"]
    seeds = seeds_of(record["arms"])
    title = f"medians of {seeds} seed(s), {record['steps']} steps, target {record['target']:g}"
    lines = [text_table(["", *COLUMNS], rows, title), conditions(record)]
    lines += failures(record["arms"])
    if speed["ratio"] is None:
        return "\n".join([*lines, "Headway, or every setting of TRL, failed with some seed"])
    lines.append(f"{speed['ratio']:.2f} times the samples/s of {speed['best']}")
    if time["ratio"] is None:
        lines.append("Headway or all settings of TRL missed the target with some seed")
    else:
        lines.append(f"{time['ratio']:.2f} of the seconds of {time['best']} to the target")
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
