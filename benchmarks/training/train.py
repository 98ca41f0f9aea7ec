"""Utilisation of the machine by the learner: tokens/s, and operations beside a matrix product's.

    headway bench train [--sizes demo 60m] [--threads 1]

The real learner of one rank trains synthetic batches, each between two measurements of the best
matrix product. "Host" is the updater's time besides computing; "gap" lies between the computing of
two batches in the loop of a run, whose broker has every group already. Takes four minutes.
"""

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness.study import Options, Record, Study, number, option
from benchmarks.harness.subprocesses import call_in_process
from learner.ranks.spec import KEEP_FREED_MEMORY, LearnerSpec

AIM = {"utilisation": 0.6, "gap": 0.03}
"""At least, where arithmetic dominates; and at most."""
PARTS = ("forward", "backward", "step", "between", "host")


def figures_of(rounds: Sequence[Mapping[str, float]], flops: float, tokens: int) -> Record:
    """Return medians over the rounds of one size.

    Args:
        rounds: `learner_clock.timed_update`, with `peak` and `peak_after` in operations/s.
        flops: Of a batch.
        tokens: Of a batch, prompts included.
    """
    peaks = [(one["peak"] + one["peak_after"]) / 2 for one in rounds]
    return {
        "tokens": tokens,
        "flops": flops,
        "tokens_per_second": median(tokens / one["seconds"] for one in rounds),
        "peak": median(peaks),
        "utilisation": median(
            flops / one["seconds"] / peak for one, peak in zip(rounds, peaks, strict=True)
        ),
        "cpu": median(one["cpu_seconds"] / one["seconds"] for one in rounds),
        "shares": {part: median(one[part] / one["seconds"] for one in rounds) for part in PARTS},
        "raw": rounds,
    }


def gap_of(batches: Sequence[Mapping[str, float]]) -> Record:
    """Return medians of `learner_loop.gaps`, as shares of a step, which includes the gap."""
    parts = ("gap", "publish", "ack", "take")
    return {
        "shares": {part: median(one[part] / one["step"] for one in batches) for part in parts},
        "raw": batches,
    }


def describe(name: str, figures: Record) -> str:
    """Return one size as a line."""
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


class Trainer:
    """A learner of one rank with a model of one size, and a batch for it."""

    def __init__(self, name: str) -> None:
        from benchmarks.harness.synthetic_load import SIZES, batch, write
        from benchmarks.training.learner_clock import ClockedEngine
        from learner.config.learner import LearnerConfig
        from learner.ranks.rank import Rank
        from learner.update import Updater
        from queues.schema import encode

        self.size = SIZES[name]
        config = LearnerConfig(microbatch_tokens=self.size.microbatch_tokens, dtype=self.size.dtype)
        with tempfile.TemporaryDirectory() as folder:
            write(self.size, Path(folder))
            self.rank = Rank(LearnerSpec(config=config, model_path=folder, seed=0, steps=1000))
        self.engine = ClockedEngine(self.rank.engine, self.rank.engine.device)
        self.updater = self.rank.updater = Updater(self.engine, config)
        self.groups = batch(self.size, seed=1)
        self._payloads = [encode(group) for group in self.groups]

    def train(self, version: int) -> dict[str, float]:
        """Train the batch; return `learner_clock.timed_update`."""
        from benchmarks.training.learner_clock import timed_update
        from queues.schema import decode_arrays

        return timed_update(
            self.updater, self.engine, lambda: decode_arrays(self._payloads), version
        )


def measure_size(name: str, rounds: int) -> Record:
    """Measure one size in this process."""
    import torch

    from benchmarks.harness.synthetic_load import build, lengths_of, sampled_tokens
    from benchmarks.training.flops import Peak, shape_of, training_flops
    from benchmarks.training.learner_loop import gaps

    trainer = Trainer(name)
    peak = Peak(trainer.engine.device, getattr(torch, trainer.size.dtype))
    trainer.train(0)  # touches fresh memory
    before, measured = peak.measure(), []
    for version in range(1, rounds + 1):
        seconds = trainer.train(version)
        after = peak.measure()
        measured.append({**seconds, "peak": before, "peak_after": after})
        before = after
    with torch.device("meta"):
        model = build(trainer.size)
    lengths = lengths_of(trainer.groups)
    flops = training_flops(shape_of(model), lengths, sampled_tokens(trainer.groups))
    loop = gap_of(gaps(trainer.rank, trainer.engine, trainer.groups, rounds + 1))
    trainer.rank.close()
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        **figures_of(measured, flops, sum(lengths)),
        "loop": loop,
    }


def measure(options: Options) -> Iterator[Record]:
    import torch

    from benchmarks.training.packing import describe as describe_packing
    from benchmarks.training.packing import packing_figures

    packing = packing_figures()
    print(describe_packing(packing))
    if not torch.cuda.is_available():
        os.environ.update(KEEP_FREED_MEMORY)  # as a learner's process does
    sizes: dict[str, Any] = {}
    for name in options.sizes:
        sizes[name] = call_in_process(measure_size, name, options.rounds)
        print(describe(name, sizes[name]), flush=True)
        yield {"threads": options.threads, "packing": packing, "sizes": sizes}
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
