"""Benchmarks of one GPU in at most ten minutes: kernels, memory, learner, generation, pause.

    python -m benchmarks.gpu [--sizes 0.5b,1.5b] [--device cuda] [--output gpu.json]

Each part runs in a process of its own with a deadline, and what it has printed by then is kept. A
part that cannot run is stored with what is missing. This file needs nothing but Python and typer.
"""

import contextlib
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from importlib.metadata import entry_points
from tempfile import TemporaryFile
from typing import Annotated, Any, NamedTuple

import typer

from benchmarks.harness.record import Record
from benchmarks.harness.study import Options, Study, choice, name_of, several
from benchmarks.harness.synthetic_load import SIZES

SECONDS = 590.0
"""Deadline of all parts together."""
LEARNER = ("torch", "transformers", "numpy", "pydantic", "xxhash")
PLUGIN = "entry point `headway` for vLLM"
ENDS = ("not_run", "failed", "part_seconds")
"""Figures of every part; the others are in the record alone."""
FIRST, LAST, EACH = slice(1), slice(-1, None), slice(None)
"""Sizes of the command that a part is run with."""


class Part(NamedTuple):
    """A part of the suite, which runs in a process of its own."""

    work: str
    """Function that yields its figures so far, of a size on a device in so many rounds; later ones
    replace earlier ones."""
    sizes: slice | None
    """Sizes that it is run with, one after the other; None: with none."""
    needs: Sequence[str] = LEARNER
    """Modules, and an entry point for vLLM."""
    on_gpu: bool = False
    """A trial on a CPU leaves it out."""


ZERO = partial(Part, sizes=FIRST, needs=(*LEARNER, "deepspeed"))
SERVING = ("tokenizers", "safetensors", "zstandard", "vllm", PLUGIN)
PARTS = {
    "transfers": Part("kernels:transfers", LAST),
    "attention": Part("kernels:attention", LAST),
    "head": Part("kernels:head", LAST),
    "memory": Part("kernels:memory", LAST),
    "ipc": Part("kernels:ipc", None),
    "zero1": ZERO("kernels:zero1"),
    "zero2": ZERO("kernels:zero2"),
    "zero3": ZERO("kernels:zero3"),
    "learner": Part("learner:utilisation", EACH),
    "generation": Part("generation:generation", EACH, ("torch", "transformers", "vllm"), True),
    "pause": Part("generation:pause", FIRST, (*LEARNER, *SERVING), True),
}
"""Parts by name, in their order: those that may fail or take long are last, since they get what the
others have left of their time."""


class GpuOptions(Options):
    """Options of `python -m benchmarks.gpu`."""

    sizes: Annotated[Sequence[str], several(name_of(SIZES), "Of models.")] = ("0.5b", "1.5b")
    device: Annotated[str, choice(("cuda", "cpu"), "Use cpu for a trial.")] = "cuda"
    rounds: Annotated[int, typer.Option(min=1, help="Batches of each measurement.")] = 5
    seconds: Annotated[float, typer.Option(help="Of all parts together.")] = SECONDS
    part: Annotated[
        str, choice(("", *PARTS), "Only this one, in this process; its figures as JSON.")
    ] = ""


def missing(name: str, device: str) -> list[str]:
    """Return the missing requirements of a part: modules, an entry point for vLLM, a GPU."""
    plugins = {plugin.name for plugin in entry_points(group="vllm.general_plugins")}
    part = PARTS[name]
    lacking = [
        need
        for need in part.needs
        if ("headway" not in plugins if need == PLUGIN else importlib.util.find_spec(need) is None)
    ]
    return lacking + (["GPU"] if part.on_gpu and device != "cuda" else [])


def plan(sizes: Sequence[str]) -> list[tuple[str, str]]:
    """Return the names of parts and the sizes that they are run with, in their order."""
    return [
        (name, size)
        for name, part in PARTS.items()
        for size in ([""] if part.sizes is None else sizes[part.sizes])
    ]


def run_part(name: str, options: GpuOptions) -> Iterator[Record]:
    """Return the figures of one part, computed in this process."""
    import torch

    module, _, function = PARTS[name].work.partition(":")
    loaded = importlib.import_module(f"benchmarks.gpu.{module}")
    work: Callable[..., Iterator[Record]] = getattr(loaded, function)
    return work(options.sizes[0], torch.device(options.device), options.rounds)


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
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", options.device]
    command += ["--rounds", str(options.rounds)]
    planned = plan(options.sizes)
    lacks = {part: missing(part, options.device) for part in PARTS}
    parts: dict[str, Record] = {}
    for index, (part, size) in enumerate(planned):
        name = f"{part} {size}".strip()
        later = [other for other, _ in planned[index + 1 :] if not lacks[other]]
        left = deadline - time.monotonic()
        if lacks[part]:
            parts[name] = {"not_run": f"there is no {', '.join(lacks[part])}"}
        elif left < 5.0:
            parts[name] = {"failed": "there was no time left"}
        else:
            own = ["--part", part, "--sizes", size or "tiny"]
            parts[name] = outcome([*command, *own], left / (1 + len(later)))
        ended = {key: parts[name][key] for key in ENDS if key in parts[name]}
        print(f"{name}: {json.dumps(ended)}", flush=True)
        yield {"device": options.device, "parts": parts}


class Suite(Study[GpuOptions]):
    """The suite, which runs a part alone where it is asked to."""

    def run(self, options: GpuOptions) -> int:
        """Measure all parts and store the record; one part alone is printed and not stored."""
        if not options.part:
            return super().run(options)
        for record in run_part(options.part, options):
            print(json.dumps(record), flush=True)
        return 0


STUDY = Suite(
    name="benchmarks.gpu",
    options=GpuOptions,
    command="python -m",
    file="gpu.json",
    measure=measure,
)

if __name__ == "__main__":
    STUDY.main()
