"""Utilisation of the machine by the learner: tokens/s, and operations beside a matrix product's.

    headway bench train [--sizes demo 60m] [--threads 1]

The real learner of one rank trains synthetic batches, each between two measurements of the best
matrix product. "Host" is the updater's time besides computing; "gap" lies between the computing of
two batches in the loop of a run, whose broker has every group already. Takes four minutes.
"""

import multiprocessing
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness.study import Options, Record, Study, number, option
from benchmarks.harness.synthetic_load import SIZES, batch, build, lengths_of, sampled_tokens, write
from learner.config.learner import LearnerConfig
from queues.schema import decode_arrays, encode

AIM = {"utilisation": 0.6, "gap": 0.03}
"""At least, where arithmetic dominates; and at most."""


def gap_of(batches: Sequence[Mapping[str, float]]) -> Record:
    """Return medians of `learner_loop.gaps`, as shares of a step, which includes the gap."""
    parts = ("gap", "publish", "ack", "take")
    return {
        "shares": {part: median(one[part] / one["step"] for one in batches) for part in parts},
        "raw": batches,
    }


def describe(name: str, figures: Record) -> str:
    loop = dict(figures["loop"]["shares"])
    gap = loop.pop("gap")
    return (
        f"{name:5s} {figures['parameters'] / 1e6:8.1f} M:"
        f" {figures['tokens_per_second']:9,.0f} tokens/s, {figures['utilisation']:.0%} of"
        f" {figures['peak'] / 1e9:,.0f} G operations/s ({_percent(figures['shares'])}),"
        f" {figures['cpu']:.2f} CPU seconds a second; gap {gap:.1%} of a step ({_percent(loop)})"
    )


def _percent(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{part} {share:.1%}" for part, share in shares.items())


def measure_size(name: str, rounds: int) -> Record:
    """Measure a learner of one rank with a model of one size, in this process."""
    import torch

    from benchmarks.training.flops import Peak, shape_of, training_flops
    from benchmarks.training.learner_clock import ClockedEngine, figures_of, timed_rounds
    from benchmarks.training.learner_loop import gaps
    from learner.ranks.rank import Rank
    from learner.ranks.spec import LearnerSpec
    from learner.update import Updater

    size = SIZES[name]
    config = LearnerConfig(microbatch_tokens=size.microbatch_tokens, dtype=size.dtype)
    with tempfile.TemporaryDirectory() as folder:
        write(size, Path(folder))
        rank = Rank(LearnerSpec(config=config, model_path=folder, seed=0, steps=1000))
    engine = ClockedEngine(rank.engine, rank.engine.device)
    rank.updater = Updater(engine, config)
    groups = batch(size, seed=1)
    payloads = [encode(group) for group in groups]
    peak = Peak(engine.device, getattr(torch, size.dtype))
    timed = timed_rounds(rank.updater, engine, lambda: decode_arrays(payloads), peak, rounds)
    with torch.device("meta"):
        model = build(size)
    lengths = lengths_of(groups)
    flops = training_flops(shape_of(model), lengths, sampled_tokens(groups))
    loop = gap_of(gaps(rank, engine, groups, rounds + 1))
    rank.close()
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        **figures_of(timed, flops, sum(lengths)),
        "loop": loop,
    }


def measure(options: Options) -> Iterator[Record]:
    import torch

    from benchmarks.training import packing
    from learner.ranks.spec import GLIBC_ON_CPU

    packed = packing.packing_figures()
    print(packing.describe(packed))
    if not torch.cuda.is_available():
        os.environ.update(GLIBC_ON_CPU)  # as a learner's process does
    spawn = multiprocessing.get_context("spawn")
    sizes: dict[str, Any] = {}
    for name in options.sizes:
        with ProcessPoolExecutor(1, mp_context=spawn) as process:
            sizes[name] = process.submit(measure_size, name, options.rounds).result()
        print(describe(name, sizes[name]), flush=True)
        yield {"threads": options.threads, "packing": packed, "sizes": sizes}
    print(f"aims: {AIM['utilisation']:.0%} at 60m, gap at most {AIM['gap']:.0%}")


def check(options: Options) -> None:
    options.threads = options.threads or len(os.sched_getaffinity(0))
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")


COUNT = number(int, 1)
STUDY = Study(
    name="train",
    about=__doc__,
    options=(
        option(
            "--sizes",
            ["demo", "60m"],
            "of models; tiny is for a trial",
            choices=["tiny", "demo", "60m", "0.5b"],
        ),
        option("--rounds", 3, "batches of each size", type=COUNT),
        option("--threads", None, "of torch; by default as many as cores", type=COUNT),
    ),
    check=check,
    file="train.json",
    measure=measure,
)
