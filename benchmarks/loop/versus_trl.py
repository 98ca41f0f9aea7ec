"""Comparison with TRL's GRPOTrainer: the same model, task, batches, steps, cores and seeds.

    headway bench versus-trl [RECIPE] [--seeds 0,1,2] [--microbatch 128,32] [--threads 1,2]

TRL runs with every combination of microbatch, threads and generation, and the best one of each
figure is compared. It samples by transformers: its vLLM cannot take new weights on a CPU. Needs
`make trl`, and a quiet machine. An existing folder of --out is continued.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from statistics import median
from typing import Any

from benchmarks.harness.checkpoint_scores import (
    failures,
    last_failed,
    measure_variants,
    read_scores,
)
from benchmarks.harness.cores import all_cores
from benchmarks.harness.study import (
    Options,
    Record,
    Study,
    cells,
    known_names,
    option,
    text_table,
    whole_numbers,
)
from benchmarks.harness.training_runs import (
    SCORED,
    Variant,
    conditions,
    make_base,
    vary,
)
from benchmarks.loop.run_figures import curve, learning, samples_per_second, tokens_per_rollout
from deploy.cli.bench import ROOT
from deploy.config.run_config import RunConfig
from deploy.report.summary import WARM_UP
from headway.cpu_cores import bind_process, parse_cores
from headway.errors import InputError

HEADWAY = "Headway"
TRL = ROOT / ".trl"
SETTINGS = "trl.json"
"""File in the folder of a TRL run: its settings and versions."""
GENERATION = ("padded", "continuous")
STORED = ("prompts", "actors", "queues", "learner", "weight_sync")
"""Sections of Headway's recipe that are stored."""
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


def check(options: Options) -> None:
    """Check the options and the recipe; sets `base`, `cores` and `variants` by seed.

    Raises:
        InputError: Something cannot be measured.
    """
    if not (TRL / "trl").exists():
        raise InputError(f"{TRL} has no TRL: install it with `make trl`")
    seeds = whole_numbers(options.seeds, "--seeds")
    options.base = make_base(options, "versus-trl")
    check_alike(options.base)
    options.cores = all_cores(options.base)
    samples = options.base.prompts.groups_per_batch * options.base.prompts.group_size
    settings = make_settings(options, samples)
    options.variants = []
    for position, seed in enumerate(seeds):
        variants = variants_of(options.base, int(seed), settings)
        options.variants.append(variants if position % 2 == 0 else variants[::-1])


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


def make_settings(options: Options, samples: int) -> list[tuple[str, str, str]]:
    """Return the combinations of microbatch, threads and generation that TRL is run with.

    Raises:
        InputError: One of them cannot be.
    """
    microbatches = whole_numbers(options.microbatch, "--microbatch")
    threads = whole_numbers(options.threads, "--threads")
    generation = known_names(options.generation, "--generation", GENERATION)
    for size in map(int, microbatches):
        if size < 1 or samples % size:
            raise InputError(f"--microbatch {size} does not divide a batch of {samples} rollouts")
    if "0" in threads:
        raise InputError(f"--threads {options.threads!r}: there must be at least 1")
    return list(product(microbatches, threads, generation))


def variants_of(
    base: RunConfig, seed: int, settings: Sequence[tuple[str, str, str]]
) -> list[Variant]:
    seeded = base.model_copy(update={"seed": seed})
    variants = [Variant(HEADWAY, seed, vary(seeded, f"headway-seed{seed}"))]
    paths = [str(TRL), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    for microbatch, threads, generation in settings:
        variants.append(
            Variant(
                f"TRL, microbatch {microbatch}, threads {threads}, {generation}",
                seed,
                vary(seeded, f"trl-{microbatch}-{threads}-{generation}-seed{seed}"),
                worker=("benchmarks.loop.trl_worker", microbatch, generation),
                variables={"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": threads},
            )
        )
    return variants


def hold(cores: str) -> None:
    """Bind this process, and every process that it starts, to cores.

    Raises:
        InputError: This machine does not have them.
    """
    try:
        bind_process(parse_cores(cores), "actors.cores with learner.cores")
    except InputError as error:
        raise InputError(str(error)) from None


def measure(options: Options) -> Iterator[Record]:
    hold(options.cores)
    facts = {
        "headway": options.base.model_dump(mode="json", include=set(STORED)),
        "warm_up_steps_left_out": WARM_UP,
        "cores": options.cores,
    }
    for runs in measure_variants(options, read_variant):
        yield facts | runs


def read_variant(variant: Variant, target: float) -> Record:
    directory = variant.directory
    rows = directory.rows("metrics.jsonl")
    trl = directory.path / SETTINGS
    return {
        "name": variant.name,
        "seed": variant.seed,
        "environment": variant.environment(),
        "trl": json.loads(trl.read_text()) if variant.worker else None,
        "samples_per_second": samples_per_second(rows),
        "tokens_per_rollout": tokens_per_rollout(rows),
        **learning(curve(rows, read_scores(directory.path)), target),
        "heldout": last_failed(directory.path),
        "step_finished_at": [row["step_finished_at"] for row in rows],
    }


def conclude(runs: Sequence[Mapping[str, Any]]) -> Record:
    """Return medians over seeds, and ratios within a seed to the best TRL variant of a figure.

    Returns:
        `medians` by variant; `throughput` with `best`, the TRL variant with the most samples/s, and
        `ratio`, Headway's over its; `time` with `best`, the TRL variant that reached the target
        first, and `ratio`, Headway's seconds over its. None where none reached it with every seed.
        A variant that failed with a seed is left out; without Headway's there are no ratios.
    """
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for run in runs:
        by_name.setdefault(run["name"], []).append(run)
    seeds = len({run["seed"] for run in runs})
    by_name = {name: same for name, same in by_name.items() if len(same) == seeds}
    medians: dict[str, dict[str, Any]] = {
        name: {
            key: None if any(run[key] is None for run in same) else median(r[key] for r in same)
            for key in FIGURES
        }
        for name, same in by_name.items()
    }

    def compare(key: str, best: str | None) -> Record:
        if best is None or HEADWAY not in medians or medians[HEADWAY][key] is None:
            return {"best": best, "ratio": None}
        theirs = {run["seed"]: run[key] for run in by_name[best]}
        ratio = median(run[key] / theirs[run["seed"]] for run in by_name[HEADWAY])
        return {"best": best, "ratio": ratio}

    theirs = {name: figures for name, figures in medians.items() if name != HEADWAY}
    fastest = max(theirs, key=lambda name: theirs[name]["samples_per_second"], default=None)
    arrived = [name for name in theirs if theirs[name]["seconds_to_target"] is not None]
    first = min(arrived, key=lambda name: theirs[name]["seconds_to_target"], default=None)
    return {
        "medians": medians,
        "throughput": compare("samples_per_second", fastest),
        "time": compare("seconds_to_target", first),
    }


def table(record: Record) -> str:
    seeds = len({run["seed"] for run in record["arms"]})
    conclusions = record["conclusions"]
    rows = [[name, *cells(medians, COLUMNS)] for name, medians in conclusions["medians"].items()]
    speed, time = conclusions["throughput"], conclusions["time"]
    title = f"medians of {seeds} seed(s), {record['steps']} steps, target {record['target']:g}"
    lines = [text_table(["", *COLUMNS], rows, title), conditions(record)]
    lines += failures(record["arms"])
    if speed["ratio"] is None:
        lines.append("Headway, or every variant of TRL, failed with some seed: there is no ratio")
        return "\n".join(lines)
    lines.append(f"{speed['ratio']:.2f} times the samples/s of {speed['best']}")
    if time["ratio"] is None:
        lines.append("Headway or all variants of TRL missed the target with some seed")
    else:
        lines.append(f"{time['ratio']:.2f} of the seconds of {time['best']} to the target")
    return "\n".join(lines)


STUDY = Study(
    name="versus-trl",
    about=__doc__,
    options=(
        *SCORED,
        option("--microbatch", "128,32", "TRL's, in rollouts"),
        option("--threads", "1,2", "TRL's"),
        option("--generation", ",".join(GENERATION), "how TRL samples"),
        option("--score-every", 5, "steps between scores"),
    ),
    check=check,
    in_folder=True,
    continued=True,
    folder=None,
    file="versus_trl.json",
    measure=measure,
    conclude=lambda record: {"conclusions": conclude(record["arms"])},
    table=table,
)
