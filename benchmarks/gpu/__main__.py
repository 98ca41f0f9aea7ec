"""The benchmarks of one GPU, in at most eight minutes and without anybody watching.

    python -m benchmarks.gpu [--sizes 0.5b 1.5b] [--device cuda] [--output gpu.json]

Parts run one after the other, each in a process of its own with a deadline, so that one that fails
costs the others nothing: packing; for each size the learner's utilisation; the effective sample
size by lag; for each size generation beside the roofline of bandwidth; the pause of a weight
update. A part says each figure when it has it, and what it has said is kept when its time is over.
What cannot run is named, with what is missing. This file needs nothing but Python.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from benchmarks.gpu.lines import line

from benchmarks.harness.provenance import environment, reserve
from benchmarks.harness.synthetic_load import SIZES

SECONDS = 470.0
"""Of everything."""
LEARNER = ("torch", "transformers", "numpy", "pydantic")
NEEDS = {
    "packing": (),
    "learner": LEARNER,
    "lag": LEARNER,
    "generation": ("torch", "transformers", "vllm"),
    "pause": (*LEARNER, "tokenizers", "safetensors", "xxhash", "zstandard", "vllm"),
}
SMALL = frozenset({"numpy", "pydantic", "safetensors", "tokenizers", "xxhash", "zstandard"})
"""What can be put into a folder beside an installed PyTorch."""
PLUGIN = "entry point `headway` for vLLM"
GPU = "GPU"
ON_GPUS = ("generation", "pause")
"""What a trial on a CPU leaves out."""
WEIGHTS = {"packing": 1, "learner": 4, "lag": 2, "generation": 5, "pause": 4}
"""How parts share the time that is left."""


def missing(part: str, device: str) -> list[str]:
    """What a part needs and is not here: modules, vLLM's way to our backend, or a GPU."""
    lacking = [name for name in NEEDS[part] if importlib.util.find_spec(name) is None]
    plugins = {each.name for each in entry_points(group="vllm.general_plugins")}
    if part == "pause" and "headway" not in plugins:
        lacking.append(PLUGIN)
    return lacking + ([GPU] if part in ON_GPUS and device != "cuda" else [])


def reason(lacking: Sequence[str]) -> str:
    """Why a part cannot run, and the commands that would change it."""
    told = f"there is no {', '.join(lacking)}"
    mends = []
    if small := [name for name in lacking if name in SMALL]:
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        mends.append(
            "pip install --target .gpu --only-binary :all: "
            f"--python-version {python} {' '.join(small)}"
        )
    if PLUGIN in lacking:
        mends.append("pip install --target .gpu --no-deps .")
    return "; ".join([told, *mends, *(["then PYTHONPATH=.:.gpu"] if mends else [])])


def plan(sizes: Sequence[str]) -> list[tuple[str, str]]:
    """Parts and sizes in the order of what matters most; what may fail is last."""
    return [
        ("packing", ""),
        *(("learner", size) for size in sizes),
        ("lag", sizes[0]),
        *(("generation", size) for size in sizes),
        ("pause", sizes[0]),
    ]


def budget(part: str, later: Sequence[str], left: float) -> float:
    """Seconds for a part: what is left, shared with those that run after it by their weights.

    What a part does not use is left for the others.
    """
    return left * WEIGHTS[part] / (WEIGHTS[part] + sum(WEIGHTS[each] for each in later))


def run_part(part: str, size: str, device: str, rounds: int) -> Iterator[dict[str, Any]]:
    """One part, in this process: its figures, as they are found; later ones replace earlier."""
    if part == "packing":
        from benchmarks.training.packing import packing_figures

        yield packing_figures()
    elif part == "pause":
        from benchmarks.gpu.pause import pause

        yield pause(size)
    else:
        yield from _on_device(part, size, device, rounds)


def _on_device(part: str, size: str, device: str, rounds: int) -> Iterator[dict[str, Any]]:
    import torch

    where = torch.device(device)
    if part == "generation":
        from benchmarks.gpu.generation import generation

        return generation(size, where)
    from benchmarks.gpu.learner import sample_size_by_lag, utilisation

    if part == "learner":
        return utilisation(size, where, rounds=rounds)
    return sample_size_by_lag(size, where)


def command_of(part: str, size: str, options: argparse.Namespace) -> list[str]:
    """What runs a part."""
    return [
        sys.executable, "-m", "benchmarks.gpu", "--part", part, "--sizes", size or "tiny",
        "--device", options.device, "--rounds", str(options.rounds),
    ]  # fmt: skip


def outcome(command: Sequence[str], seconds: float) -> dict[str, Any]:
    """What a part said, and how it ended if not well; never longer than so many seconds."""
    begin = time.monotonic()
    ended: dict[str, Any] = {}
    scratch = partial(TemporaryFile, "w+", errors="replace")
    with scratch() as told, scratch() as complaint:
        process = subprocess.Popen(command, stdout=told, stderr=complaint, start_new_session=True)
        try:
            if code := process.wait(timeout=seconds):
                complaint.seek(0)
                last = complaint.read().strip().splitlines()[-3:]
                ended["failed"] = last or [f"exit code {code}"]
            ended["part_seconds"] = time.monotonic() - begin
        except subprocess.TimeoutExpired:
            ended["failed"] = f"took longer than {seconds:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):  # engines that it has left, too
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        told.seek(0)
        said = figures(told)
    if not said:
        ended.setdefault("failed", "it ended well and told no figures")
    return said | ended


def figures(told: Iterable[str]) -> dict[str, Any]:
    """The lines that are objects of JSON as one object; others are what libraries log."""
    found: dict[str, Any] = {}
    for text in told:
        with contextlib.suppress(ValueError):
            said = json.loads(text)
            if isinstance(said, dict):
                found |= said
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--sizes", nargs="+", default=["0.5b", "1.5b"], choices=SIZES, help="of models"
    )
    parser.add_argument(
        "--device", default="cuda", choices=["cuda", "cpu"], help="cpu: for a trial"
    )
    parser.add_argument("--rounds", type=int, default=5, help="batches of each measurement")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of everything")
    parser.add_argument("--output", type=Path, default=Path("gpu.json"), help="of the figures")
    parser.add_argument("--part", choices=list(NEEDS),
                        help="only this one, in this process; its figures as JSON")  # fmt: skip
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds} must be at least 1")
    if options.part:
        for found in run_part(options.part, options.sizes[0], options.device, options.rounds):
            print(json.dumps(found), flush=True)
        return
    reserve(options.output)
    deadline = time.monotonic() + options.seconds
    record = environment() | {"device": options.device, "parts": {}}
    parts = plan(options.sizes)
    lacks = {part: missing(part, options.device) for part in NEEDS}
    for place, (part, size) in enumerate(parts):
        name = f"{part} {size}".strip()
        later = [each for each, _ in parts[place + 1 :] if not lacks[each]]
        left = deadline - time.monotonic()
        if lacks[part]:
            found = {"not_run": reason(lacks[part])}
        elif left < 5:
            found = {"failed": "there was no time left"}
        else:
            found = outcome(command_of(part, size, options), budget(part, later, left))
        record["parts"][name] = found
        print(line(name, found), flush=True)
        options.output.write_text(json.dumps(record, indent=1) + "\n")
    print(f"stored in {options.output}")


if __name__ == "__main__":
    main()
