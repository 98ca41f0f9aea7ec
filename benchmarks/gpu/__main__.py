"""Benchmarks of one GPU in at most ten minutes: kernels, memory, learner, generation, pause.

    python -m benchmarks.gpu [--sizes 0.5b,1.5b] [--device cuda] [--output gpu.json]

Each part runs in a process of its own with a deadline, and what it has printed by then is kept. A
part that cannot run is stored with what is missing. This file needs nothing but Python and typer.
"""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, Any

import typer

from benchmarks.harness.record import Record
from benchmarks.harness.study import Options, Study, choice, name_of, several
from benchmarks.harness.synthetic_load import SIZES

SECONDS = 590.0
"""Deadline of all parts together."""
LEARNER = ("torch", "transformers", "numpy", "pydantic", "xxhash")
TRAINING = ("transfers", "attention", "head", "memory", "ipc", "learner", "lag")
NEEDS = {
    "packing": (),
    **dict.fromkeys(TRAINING, LEARNER),
    **dict.fromkeys(("zero1", "zero2", "zero3"), (*LEARNER, "deepspeed")),
    "generation": ("torch", "transformers", "vllm"),
    "pause": (*LEARNER, "tokenizers", "safetensors", "zstandard", "vllm"),
}
PLUGIN = "entry point `headway` for vLLM"
LEAST_SECONDS = 5.0
ENDS = ("not_run", "failed", "part_seconds")
"""Figures of every part; the others are in the record alone."""
ON_GPUS = ("generation", "pause")
"""Parts that a trial on a CPU leaves out."""
WEIGHTS = {
    "packing": 1, "transfers": 2, "attention": 1, "head": 1, "memory": 1, "ipc": 1,
    "zero1": 2, "zero2": 2, "zero3": 2, "learner": 4, "lag": 2, "generation": 5, "pause": 4,
}  # fmt: skip
"""Weights by which parts share the time that is left; `transfers` is the first to import torch."""


@dataclass(frozen=True, kw_only=True)
class GpuOptions(Options):
    """Options of `python -m benchmarks.gpu`."""

    sizes: Annotated[Sequence[str], several(name_of(SIZES), "Of models.")] = ("0.5b", "1.5b")
    device: Annotated[str, choice(("cuda", "cpu"), "Use cpu for a trial.")] = "cuda"
    rounds: Annotated[int, typer.Option(min=1, help="Batches of each measurement.")] = 5
    seconds: Annotated[float, typer.Option(help="Of all parts together.")] = SECONDS
    part: Annotated[
        str, choice(("", *NEEDS), "Only this one, in this process; its figures as JSON.")
    ] = ""


def missing(part: str, device: str) -> list[str]:
    """Return the missing requirements of a part: modules, an entry point for vLLM, a GPU."""
    lacking = [name for name in NEEDS[part] if importlib.util.find_spec(name) is None]
    plugins = {plugin.name for plugin in entry_points(group="vllm.general_plugins")}
    if part == "pause" and "headway" not in plugins:
        lacking.append(PLUGIN)
    return lacking + (["GPU"] if part in ON_GPUS and device != "cuda" else [])


def plan(sizes: Sequence[str]) -> list[tuple[str, str]]:
    """Return parts and sizes, the most important ones first; parts that may fail are last."""
    return [
        ("packing", ""),
        *((part, sizes[-1]) for part in ("transfers", "attention", "head", "memory")),
        ("ipc", ""),
        *((part, sizes[0]) for part in ("zero1", "zero2", "zero3")),
        *(("learner", size) for size in sizes),
        ("lag", sizes[0]),
        *(("generation", size) for size in sizes),
        ("pause", sizes[0]),
    ]


def budget(part: str, later: Sequence[str], left: float) -> float:
    """Return the seconds of a part: its share, by weight, of the time that is left."""
    return left * WEIGHTS[part] / (WEIGHTS[part] + sum(WEIGHTS[other] for other in later))


def run_part(part: str, size: str, device: str, rounds: int) -> Iterator[Record]:
    """Yield the figures of one part, in this process; later ones replace earlier ones."""
    if part == "packing":
        from benchmarks.training.packing import packing_figures

        yield packing_figures()
    elif part == "pause":
        yield from pause(size)
    else:
        yield from _on_device(part, size, device, rounds)


def _on_device(part: str, size: str, device: str, rounds: int) -> Iterator[dict[str, Any]]:
    import torch

    where = torch.device(device)
    if part == "generation":
        from benchmarks.gpu.generation import generation

        return generation(size, where)
    from benchmarks.gpu import kernels
    from benchmarks.gpu.learner import sample_size_by_lag, utilisation

    if part == "ipc":
        return kernels.ipc(where)
    if part == "memory":
        return kernels.memory(size, where)
    if part.startswith("zero"):
        return kernels.zero(size, where, int(part.removeprefix("zero")))
    if part == "lag":
        return sample_size_by_lag(size, where)
    ways = {"learner": utilisation, **{way.__name__: way for way in kernels.TIMED}}
    return ways[part](size, where, rounds=rounds)


def pause(size: str) -> Iterator[Record]:
    """Yield the record of `headway bench update-pause`; a missed aim is no failure here."""
    from benchmarks.weights import update_pause

    options = update_pause.PauseOptions(size=size, dtype="bfloat16", rounds=7)
    for record in update_pause.measure(options):
        yield record | update_pause.conclude(record)


def command_of(part: str, size: str, options: GpuOptions) -> list[str]:
    return [
        sys.executable, "-m", "benchmarks.gpu", "--part", part, "--sizes", size or "tiny",
        "--device", options.device, "--rounds", str(options.rounds),
    ]  # fmt: skip


def outcome(command: Sequence[str], seconds: float) -> dict[str, Any]:
    """Run a part for at most so many seconds; return its figures, and how it failed if it did."""
    begin = time.monotonic()
    ended: dict[str, Any] = {}
    scratch = partial(TemporaryFile, "w+", errors="replace")
    with scratch() as output, scratch() as errors:
        process = subprocess.Popen(command, stdout=output, stderr=errors, start_new_session=True)
        try:
            if code := process.wait(timeout=seconds):
                errors.seek(0)
                last = errors.read().strip().splitlines()[-3:]
                ended["failed"] = last or [f"exit code {code}"]
            ended["part_seconds"] = time.monotonic() - begin
        except subprocess.TimeoutExpired:
            ended["failed"] = f"took longer than {seconds:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):  # its engines too
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        printed = figures(output)
    if not printed:
        ended.setdefault("failed", "it ended well and printed no figures")
    return printed | ended


def figures(lines: Iterable[str]) -> Record:
    """Merge the lines that are JSON objects; others are the logs of libraries."""
    merged: Record = {}
    for line in lines:
        with contextlib.suppress(ValueError):
            parsed = json.loads(line)
            if isinstance(parsed, dict):
                merged |= parsed
    return merged


def measure(options: GpuOptions) -> Iterator[Record]:
    deadline = time.monotonic() + options.seconds
    planned = plan(options.sizes)
    lacks = {part: missing(part, options.device) for part in NEEDS}
    parts: dict[str, Record] = {}
    for index, (part, size) in enumerate(planned):
        name = f"{part} {size}".strip()
        later = [other for other, _ in planned[index + 1 :] if not lacks[other]]
        left = deadline - time.monotonic()
        if lacks[part]:
            parts[name] = {"not_run": f"there is no {', '.join(lacks[part])}"}
        elif left < LEAST_SECONDS:
            parts[name] = {"failed": "there was no time left"}
        else:
            seconds = budget(part, later, left)
            parts[name] = outcome(command_of(part, size, options), seconds)
        ended = {key: parts[name][key] for key in ENDS if key in parts[name]}
        print(f"{name}: {json.dumps(ended)}", flush=True)
        yield {"device": options.device, "parts": parts}


class Suite(Study[GpuOptions]):
    """The suite, which runs a part alone where it is asked to."""

    def run(self, options: GpuOptions) -> int:
        """Measure all parts and store the record; one part alone is printed and not stored."""
        if not options.part:
            return super().run(options)
        for record in run_part(options.part, options.sizes[0], options.device, options.rounds):
            print(json.dumps(record), flush=True)
        return 0


STUDY = Suite(
    name="benchmarks.gpu",
    about=__doc__,
    options=GpuOptions,
    command="python -m",
    folder=lambda options: Path(),
    file="gpu.json",
    measure=measure,
)

if __name__ == "__main__":
    STUDY.main()
