"""What the learner makes of the machine: tokens a second, and operations beside a matrix product's.

    headway bench train [--sizes demo 60m] [--rounds 3] [--threads 2]

The real learner of one rank (DeepSpeed, AdamW, the loss of CISPO, packed rows) trains batches of
synthetic rollouts of lognormal lengths, as they come from the broker, on models with random
weights. Before and after each batch the best rate of a matrix product is measured with the same
threads and dtype; the utilisation of a batch is its own rate over the mean of the two
(`flops.training_flops` says what is counted). How full rows are and how even ranks is told of a
large batch, without training it. "Host" is what the updater does besides computing. "Gap" is all
that lies between the last optimizer step of a batch and the first forward pass of the next in the
loop of a run, whose broker has every group already: as many batches are trained in it again. CPU
seconds over seconds of a batch, beside the utilisation, are fewer than the threads where others use
the machine. Takes about four minutes on two quiet cores. Raw numbers are stored under
benchmarks/results/.
"""

import argparse
import os
import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.harness.provenance import RESULTS, environment, reserve, store
from learner.ranks.spec import KEEP_FREED_MEMORY, LearnerSpec

AIM = {"utilisation": 0.6, "gap": 0.03}
"""At least and at most; the first where arithmetic dominates."""
FIRST_BATCH = "trained its first batch"
"""What is said of an endless training, once."""


def figures_of(rounds: list[dict[str, float]], flops: float, tokens: int) -> dict[str, Any]:
    """Medians over rounds of one size.

    Args:
        rounds: As from `learner_clock.timed_update`, with `peak` and `peak_after`, in operations/s.
        flops: Of a batch.
        tokens: Of a batch, prompts included.
    """
    peaks = [(each["peak"] + each["peak_after"]) / 2 for each in rounds]

    def median(values: list[float]) -> float:
        return statistics.median(values)

    parts = ("forward", "backward", "step", "between", "host")
    return {
        "tokens": tokens,
        "flops": flops,
        "tokens_per_second": median([tokens / each["seconds"] for each in rounds]),
        "peak": median(peaks),
        "utilisation": median(
            [flops / each["seconds"] / peak for each, peak in zip(rounds, peaks, strict=True)]
        ),
        "cpu": median([each["cpu_seconds"] / each["seconds"] for each in rounds]),
        "shares": {
            part: median([each[part] / each["seconds"] for each in rounds]) for part in parts
        },
        "raw": rounds,
    }


def gap_of(batches: list[dict[str, float]]) -> dict[str, Any]:
    """Medians of what `learner_loop.gaps` found: shares of a step, which the gap is part of."""
    parts = ("gap", "publish", "ack", "take")
    return {
        "shares": {
            part: statistics.median([each[part] / each["step"] for each in batches])
            for part in parts
        },
        "raw": batches,
    }


def told(name: str, found: dict[str, Any]) -> str:
    """One size on a line."""
    shares = _listed(found["shares"])
    loop = found["loop"]["shares"]
    inside = _listed({part: share for part, share in loop.items() if part != "gap"})
    return (
        f"{name:5s} {found['parameters'] / 1e6:8.1f} M: {found['tokens_per_second']:9,.0f} tokens/s"
        f", {found['utilisation']:.0%} of {found['peak'] / 1e9:,.0f} G operations/s ({shares})"
        f", {found['cpu']:.2f} CPU seconds a second; gap {loop['gap']:.1%} of a step ({inside})"
    )


def _listed(shares: dict[str, float]) -> str:
    return ", ".join(f"{part} {share:.1%}" for part, share in shares.items())


def measure(name: str, *, rounds: int | None) -> dict[str, Any]:
    """One size, in this process.

    Args:
        name: Of the size.
        rounds: Batches that count; None trains without measuring until the process is ended.
    """
    import torch

    from benchmarks.harness.synthetic_load import (
        SIZES,
        batch,
        build,
        lengths_of,
        sampled_tokens,
        write,
    )
    from benchmarks.training.flops import Peak, shape_of, training_flops
    from benchmarks.training.learner_clock import ClockedEngine, timed_update
    from learner.config.learner import LearnerConfig
    from learner.ranks.rank import Rank
    from learner.update import Updater
    from queues.schema import decode_arrays, encode

    size = SIZES[name]
    config = LearnerConfig(microbatch_tokens=size.row_tokens, dtype=size.dtype)
    with tempfile.TemporaryDirectory() as folder:
        write(size, Path(folder))
        rank = Rank(LearnerSpec(config=config, model_path=folder, seed=0, steps=1000))
    engine = ClockedEngine(rank.engine, rank.engine.device)
    updater = rank.updater = Updater(engine, config)
    with torch.device("meta"):
        model = build(size)
    groups = batch(size, seed=1)
    payloads = [encode(group) for group in groups]
    peak = Peak(rank.engine.device, getattr(torch, size.dtype))
    found = []
    before = 0.0
    for version in count() if rounds is None else range(rounds + 1):
        seconds = timed_update(updater, engine, lambda: decode_arrays(payloads), version)
        if rounds is None:
            if not version:
                print(f"{name} {FIRST_BATCH}", flush=True)
            continue
        after = peak.measure()
        if version:  # the first touches fresh memory
            found.append({**seconds, "peak": before, "peak_after": after})
        before = after
    lengths = lengths_of(groups)
    flops = training_flops(shape_of(model), lengths, sampled_tokens(groups))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    from benchmarks.training.learner_loop import gaps

    loop = gap_of(gaps(rank, engine, groups, len(found) + 1))
    rank.close()
    figures = figures_of(found, flops, sum(lengths))
    return {"parameters": parameters, **figures, "loop": loop}


def measured_aside(name: str, rounds: int) -> dict[str, Any]:
    """`measure` in a process of its own, which keeps freed memory as a learner's process does."""
    import torch

    if not torch.cuda.is_available():
        os.environ.update(KEEP_FREED_MEMORY)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(measure, name, rounds=rounds).result()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="headway bench train", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--sizes", nargs="+", default=["demo", "60m"], choices=["tiny", "demo", "60m", "0.5b"],
        help="models; tiny is for a trial",
    )  # fmt: skip
    parser.add_argument(
        "--rounds", type=int, default=3, help="batches of each size; 3 take about four minutes"
    )
    parser.add_argument(
        "--endless", action="store_true", help="train the first size, measure nothing, never end"
    )
    parser.add_argument("--threads", type=int, default=None, help="of torch; all cores if not said")
    parser.add_argument(
        "--output", type=Path, default=RESULTS / "train.json", help="of the figures"
    )
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error(f"--rounds {arguments.rounds} must be at least 1")
    if arguments.threads is not None and arguments.threads < 1:
        parser.error(f"--threads {arguments.threads} must be at least 1")
    threads = arguments.threads or len(os.sched_getaffinity(0))
    os.environ["OMP_NUM_THREADS"] = str(threads)  # before torch is imported
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if arguments.endless:
        measure(arguments.sizes[0], rounds=None)
    reserve(arguments.output)
    from benchmarks.training.packing import packing_figures
    from benchmarks.training.packing import told as packing_told

    packing = packing_figures()
    print(packing_told(packing))
    record = environment() | {"threads": threads, "packing": packing, "sizes": {}}
    for name in arguments.sizes:
        record["sizes"][name] = measured_aside(name, arguments.rounds)
        print(told(name, record["sizes"][name]), flush=True)
    print(f"aims: {AIM['utilisation']:.0%} at 60m, gap at most {AIM['gap']:.0%}")
    store(record, arguments.output)


if __name__ == "__main__":
    main()
