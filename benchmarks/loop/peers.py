"""Comparison with TRL and Tunix: the same model, task, batches, steps, cores and seeds.

    headway bench peers [RECIPE] [--peers trl,tunix] [--seeds 0,1,2] [--microbatch 32] [--threads 2]

TRL samples by transformers: its vLLM cannot take new weights on a CPU. Tunix samples by its own
sampler in JAX. Which of TRL's settings is best depends on the machine: try several on one seed.
Needs `make trl` and `make tunix`, and a quiet machine. An existing folder of --out is continued.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter, sub, truediv
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from benchmarks.harness.checkpoint_scores import failures
from benchmarks.harness.comparison import (
    Comparison,
    ScoredOptions,
    ScoreEvery,
    measure_scored,
    scored_plan,
)
from benchmarks.harness.cores import all_cores
from benchmarks.harness.record import ROOT, Record
from benchmarks.harness.study import Study, choice, name_of, several
from benchmarks.harness.training_runs import BATCHES, Arm, conditions, vary
from benchmarks.loop.comparison_report import group, medians_table, seeds_of
from benchmarks.loop.run_figures import leased_rows, speed
from deploy.config.loader import load_recipe
from deploy.config.run_config import RunConfig
from deploy.report.summary import WARM_UP
from headway.cpu_cores import bind_process, parse_cores
from headway.errors import InputError
from learner.config.objective import ObjectiveConfig

HEADWAY = "Headway"
PEERS = {"trl": "TRL", "tunix": "Tunix"}
"""Their names in tables, by those of their packages, make targets and workers."""
SETTINGS = "peer.json"
"""File in the folder of a peer's run: its settings and versions."""
GENERATION = ("padded", "continuous")
UNLIKE = {"loss_options", "fixed_length", "positive_reward", "recompute_proximal"}
ALIKE = (
    *(f"objective.{key}" for key in ObjectiveConfig.model_fields.keys() - UNLIKE),
    *(f"learner.{key}" for key in ("optimizer", "dtype", "schedule.kind")),
    *(f"actors.{key}" for key in ("reward", "environment", "top_p", "top_k", "greedy_baseline")),
    *(f"actors.{key}" for key in ("overlong", "missing_eos_penalty")),
    "queues.filter_tied",
)
"""Settings in which peers are like the demo; `objective` is the part of [learner] on the loss."""
COLUMNS = {
    "samples/s": ("samples_per_second", "{:.1f}"),
    "tokens a rollout": ("tokens_per_rollout", "{:.1f}"),
    "score at the end": ("score", "{:.3f}"),
    "seconds to target": ("seconds_to_target", "{:.0f}"),
}


class PeerOptions(ScoredOptions):
    """Options of `headway bench peers`."""

    peers: Annotated[Sequence[str], several(name_of(PEERS), "Next to Headway.")] = (*PEERS,)
    microbatch: Annotated[int, typer.Option(min=1, help="TRL's, in rollouts.")] = 32
    threads: Annotated[int, typer.Option(min=1, help="TRL's.")] = 2
    generation: Annotated[str, choice(GENERATION, "How TRL samples.")] = GENERATION[0]
    score_every: ScoreEvery = 5


def plan(options: PeerOptions) -> Comparison[PeerOptions]:
    """Return the runs of every seed; raises `InputError` where they cannot be measured."""
    for peer in options.peers:
        if not (folder_of(peer) / peer).exists():
            raise InputError(
                f"{folder_of(peer)} has no {PEERS[peer]}: install it with `make {peer}`"
            )
    plan = scored_plan(options, "peers", lambda seeded: arms_of(seeded, options))
    check_alike(plan.base)
    all_cores(plan.base)
    samples = plan.base.prompts.groups_per_batch * plan.base.prompts.group_size
    if samples % options.microbatch:
        raise InputError(
            f"--microbatch {options.microbatch} does not divide a batch of {samples} rollouts"
        )
    return plan


def folder_of(peer: str) -> Path:
    """Return the folder that a peer is installed in."""
    return ROOT / f".{peer}"


def check_alike(base: RunConfig) -> None:
    """Refuse a recipe with a setting that peers are not given here; the `InputError` names it."""
    demo = load_recipe("demo")
    for key in sorted(ALIKE):
        value, given = (attrgetter(key)(config) for config in (base, demo))
        if value != given:
            shown = key.replace("objective.", "learner.")
            raise InputError(f"{shown} = {value!r}: peers are only given {given!r} here")
    if set(base.objective.loss_options) != {"cap_high"}:
        raise InputError("learner.loss_options: peers are only given 'cap_high' here")


def arms_of(base: RunConfig, options: PeerOptions) -> Sequence[Arm]:
    """Return Headway's run of a seed, and that of each peer."""
    seed = base.seed
    of_trl = {key: getattr(options, key) for key in ("microbatch", "generation", "threads")}
    arms = [Arm(name=HEADWAY, seed=seed, config=vary(base, f"headway-seed{seed}"))]
    for peer in options.peers:
        own = of_trl if peer == "trl" else {}
        values = [str(value) for value in own.values()]
        arms.append(
            Arm(
                name=", ".join([PEERS[peer], *(f"{key} {value}" for key, value in own.items())]),
                seed=seed,
                config=vary(base, "-".join([peer, *values, f"seed{seed}"])),
                worker=(f"benchmarks.loop.{peer}_worker", *values),
            )
        )
    return arms


def measure(plan: Comparison[PeerOptions]) -> Iterator[Record]:
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
    """Return the figures of a run of Headway or a peer."""
    rows, peer = arm.directory.rows(BATCHES), arm.directory.path / SETTINGS
    return {
        "peer": json.loads(peer.read_text()) if peer.exists() else None,
        **speed(leased_rows(arm.directory, rows) if arm.name == HEADWAY else rows),
        "step_finished_at": [row["step_finished_at"] for row in rows],
    }


def conclude(runs: Sequence[Record]) -> Record:
    """Return Headway's samples/s and seconds to the target over each peer's, and its lead in score.

    They are medians over seeds. A seed with which one of them failed is left out; None where one
    did not reach the target.
    """
    by_name: dict[str, dict[int, Record]] = {}
    for run in runs:
        by_name.setdefault(run["name"].partition(",")[0], {})[run["seed"]] = run
    ours = by_name.pop(HEADWAY, {})

    def typical(theirs: Mapping[int, Record], key: str, of: Callable[[Any, Any], float]) -> Any:
        values = [(ours[seed][key], theirs[seed][key]) for seed in ours.keys() & theirs.keys()]
        if not values or any(None in pair for pair in values):
            return None
        return median(of(*pair) for pair in values)

    return {
        peer: {
            "throughput": typical(theirs, "samples_per_second", truediv),
            "time": typical(theirs, "seconds_to_target", truediv),
            "score": typical(theirs, "score", sub),
        }
        for peer, theirs in by_name.items()
    }


def misses(record: Record) -> list[str]:
    """Return the peers whose score after the same samples is above Headway's."""
    leads = {peer: found["score"] for peer, found in record["conclusions"].items()}
    return [
        f"the score is {-lead:.3f} below {peer}'s after the same samples, in the median over seeds"
        for peer, lead in leads.items()
        if lead is not None and lead < 0
    ]


def table(record: Record) -> str:
    runs = record["arms"]
    seeds = seeds_of(runs)
    title = f"medians of {seeds} seed(s), {record['steps']} steps, target {record['target']:g}"
    lines = [medians_table("", group(runs, ""), COLUMNS, seeds=seeds, title=title)]
    lines += [conditions(record), *failures(runs)]
    for peer, ratios in record["conclusions"].items():
        for what, key, form in (
            ("samples/s over", "throughput", ".2f"),
            ("seconds to the target over", "time", ".2f"),
            ("score less", "score", "+.3f"),
        ):
            value = ratios[key]
            lines.append(f"{what} {peer}'s: {'–' if value is None else f'{value:{form}}'}")
    return "\n".join(lines)


STUDY = Study(
    name="peers",
    options=PeerOptions,
    plan=plan,
    in_folder=True,
    continued=True,
    file="peers.json",
    measure=measure,
    conclude=lambda record: {"conclusions": conclude(record["arms"])},
    table=table,
    misses=misses,
)
