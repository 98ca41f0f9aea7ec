"""Benchmarks of one GPU in at most ten minutes: kernels, memory, learner, generation, pause.

    python -m benchmarks.gpu [--sizes 0.5b,1.5b] [--device cuda] [--output gpu.json]

Each part has a deadline and checks what it measures; what it has found by then is kept, and stored
as it ends. A part that cannot run is stored with what is missing. This file needs nothing but
Python and typer.
"""

import importlib.util
import json
import os
import shutil
import sysconfig
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, nullcontext
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from benchmarks.gpu.worker import Worker
from benchmarks.harness.record import Record
from benchmarks.harness.study import Options, Study, choice, name_of, several
from benchmarks.harness.synthetic_load import SIZES

SECONDS = 590.0
"""Deadline of all parts together."""
LEARNER = ("torch", "transformers", "numpy", "pydantic", "safetensors", "xxhash")
DEEPSPEED = (
    "deepspeed", "einops", "hjson", "msgpack", "ninja", "packaging", "psutil", "cpuinfo", "tqdm",
)  # fmt: skip
"""DeepSpeed, and what it imports beyond `LEARNER`."""
PLUGIN = "entry point `headway` for vLLM"
COMPILING = COMPILER, HEADER = "C compiler (gcc)", "Python.h (python3-dev)"
"""What Triton compiles its launchers with."""
ENDS = ("not_run", "failed", "part_seconds")
"""Figures of every part that are printed; the others are in the record alone."""
FIRST, LAST, EACH = slice(1), slice(-1, None), slice(None)
"""Sizes of the command that a part is run with."""


class Part(NamedTuple):
    """A part of the suite."""

    work: str
    """Function that yields its figures so far, of a size on a device in so many rounds; later ones
    replace earlier ones. `claims` are statements about them, each true or false."""
    sizes: slice | None = None
    """Sizes that it is run with, one after the other; None: with none."""
    seconds: float = 90.0
    """Its deadline."""
    needs: Sequence[str] = LEARNER
    """Modules, an entry point for vLLM, a compiler."""
    alone: bool = False
    """It changes its process, or starts others; the other parts share one."""
    on_gpu: bool = False
    """A trial on a CPU leaves it out."""


ZERO = partial(Part, sizes=FIRST, needs=(*LEARNER, *DEEPSPEED), alone=True)
SERVING = ("vllm", *COMPILING)
UPDATING = ("tokenizers", "safetensors", "zstandard", PLUGIN)
PARTS = {
    "imports": Part("kernels:imports"),
    "graph": Part("swap:graph", LAST),
    "zero1": ZERO("kernels:zero1"),
    "compiled": ZERO(
        "kernels:zero1_compiled", seconds=180, needs=(*LEARNER, *DEEPSPEED, *COMPILING)
    ),
    "memory": Part("kernels:memory", LAST),
    "learner": Part("learner:utilisation", EACH),
    "head": Part("kernels:head", LAST),
    "sums": Part("kernels:sums", LAST, needs=(*LEARNER, *COMPILING)),
    "transfers": Part("kernels:transfers", LAST),
    "attention": Part("kernels:attention", LAST),
    "sharing": Part("sharing:sharing", alone=True),
    "ipc": Part("kernels:ipc", alone=True),
    "zero2": ZERO("kernels:zero2"),
    "zero3": ZERO("kernels:zero3"),
    "generation": Part(
        "generation:generation", EACH, 240, ("torch", "transformers", *SERVING), True, True
    ),
    "pause": Part("generation:pause", FIRST, 240, (*LEARNER, *SERVING, *UPDATING), True, True),
}
"""Parts by name, in their order: what the central claims rest on is first."""


class GpuOptions(Options):
    """Options of `python -m benchmarks.gpu`."""

    sizes: Annotated[Sequence[str], several(name_of(SIZES), "Of models.")] = ("0.5b", "1.5b")
    device: Annotated[str, choice(("cuda", "cpu"), "Use cpu for a trial.")] = "cuda"
    rounds: Annotated[int, typer.Option(min=1, help="Batches of each measurement.")] = 5
    seconds: Annotated[float, typer.Option(help="Of all parts together.")] = SECONDS
    parts: Annotated[Sequence[str], several(name_of(PARTS), "To run.")] = tuple(PARTS)


def missing(name: str, device: str) -> list[str]:
    """Return the missing requirements of a part: modules, a compiler, a GPU, and such."""
    plugins = {plugin.name for plugin in entry_points(group="vllm.general_plugins")}
    compilers = os.environ.get("CC", "cc"), "gcc", "clang"
    others = {
        PLUGIN: "headway" in plugins,
        COMPILER: any(map(shutil.which, compilers)),
        HEADER: Path(sysconfig.get_path("include"), "Python.h").exists(),
        "GPU": device == "cuda",
    }
    needs = [*PARTS[name].needs, *(["GPU"] if PARTS[name].on_gpu else [])]
    return [
        need
        for need in needs
        if not (others[need] if need in others else importlib.util.find_spec(need))
    ]


def plan(options: GpuOptions) -> list[tuple[str, str]]:
    """Return the names of parts and the sizes that they are run with, in their order."""
    return [
        (name, size)
        for name, part in PARTS.items()
        if name in options.parts
        for size in ([""] if part.sizes is None else options.sizes[part.sizes])
    ]


def measure(options: GpuOptions) -> Iterator[Record]:
    """Yield the record so far as each part ends, however it ends."""
    deadline = time.monotonic() + options.seconds
    parts: dict[str, Record] = {}
    with closing(Worker()) as shared:
        for name, size in plan(options):
            part, key = PARTS[name], f"{name} {size}".strip()
            left = deadline - time.monotonic()
            if lacking := missing(name, options.device):
                parts[key] = {"not_run": f"there is no {', '.join(lacking)}"}
            elif left < 5.0:
                parts[key] = {"failed": "there was no time left"}
            else:
                call = f"benchmarks.gpu.{part.work}", size or "tiny", options.device, options.rounds
                with closing(Worker()) if part.alone else nullcontext(shared) as worker:
                    parts[key] = worker.outcome(call, min(part.seconds, left))
            ended = {end: parts[key][end] for end in ENDS if end in parts[key]}
            print(f"{key}: {json.dumps(ended)}", flush=True)
            yield {"device": options.device, "parts": parts}


def misses(record: Record) -> list[str]:
    """Return the parts that failed, and the claims of others that are false."""
    failed = [f"{name} failed" for name, part in record["parts"].items() if "failed" in part]
    return failed + [
        f"{name}: {claim}"
        for name, part in record["parts"].items()
        for claim, holds in part.get("claims", {}).items()
        if not holds
    ]


STUDY = Study(
    name="benchmarks.gpu",
    options=GpuOptions,
    command="python -m",
    file="gpu.json",
    measure=measure,
    misses=misses,
)

if __name__ == "__main__":
    STUDY.main()
