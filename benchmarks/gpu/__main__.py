"""The benchmarks of one GPU, in at most eight minutes and without anybody watching.

    python -m benchmarks.gpu [--sizes 0.5b 1.5b] [--device cuda] [--output gpu.json]

Parts run one after the other, each in a process of its own with a deadline, so that one that fails
costs the others nothing: packing; for each size the learner's utilisation; the effective sample
size by lag; for each size generation beside the roofline of bandwidth; the pause of a weight
update. Packing and learner need PyTorch, transformers and pydantic alone. What needs vLLM, and
finds none, is named as not run, with what is missing.
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.environment import environment, reserve

SECONDS = 470.0
"""Of everything."""
NEEDS = {
    "packing": (),
    "learner": ("torch", "transformers", "pydantic"),
    "lag": ("torch", "transformers", "pydantic"),
    "generation": ("torch", "transformers", "vllm"),
    "pause": ("torch", "transformers", "pydantic", "vllm"),
}
LONGEST = {"packing": 30.0, "learner": 110.0, "lag": 60.0, "generation": 100.0, "pause": 100.0}
"""Seconds that a part may take."""


ON_GPUS = ("generation", "pause")
"""What a trial on a CPU leaves out."""


def missing(part: str, device: str) -> list[str]:
    """What a part needs and is not here: modules, or a GPU."""
    modules = [name for name in NEEDS[part] if importlib.util.find_spec(name) is None]
    return modules + (["GPU"] if part in ON_GPUS and device != "cuda" else [])


def plan(sizes: Sequence[str]) -> list[tuple[str, str]]:
    """Parts and sizes in the order of what matters most; what may fail is last."""
    return [
        ("packing", ""),
        *(("learner", size) for size in sizes),
        ("lag", sizes[0]),
        *(("generation", size) for size in sizes),
        ("pause", ""),
    ]


def run_part(part: str, size: str, device: str, rounds: int) -> dict[str, Any]:
    """One part, in this process."""
    if part == "packing":
        from benchmarks.packing import packing_figures

        return packing_figures()
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
    if part == "pause":
        return [
            sys.executable, "-m", "benchmarks.update_pause",
            "--hidden", "1024", "--layers", "24", "--rounds", "7",
        ]  # fmt: skip
    return [
        sys.executable, "-m", "benchmarks.gpu", "--part", part, "--sizes", size or "tiny",
        "--device", options.device, "--rounds", str(options.rounds),
    ]  # fmt: skip


def outcome(command: Sequence[str], part: str, seconds: float) -> dict[str, Any]:
    """What a part found, or how it ended; never longer than so many seconds."""
    begin = time.monotonic()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        told, complaint = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"failed": f"took longer than {seconds:.0f} s"}
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    took = {"part_seconds": time.monotonic() - begin}
    if part == "pause" and "stored in" in told:  # its exit code says whether an aim was met
        return took | {"told": told.splitlines()}
    if process.returncode:
        return took | {"failed": complaint.strip().splitlines()[-3:]}
    for text in reversed(told.splitlines()):  # what vLLM logs at its end comes after the figures
        with contextlib.suppress(ValueError):
            found = json.loads(text)
            if isinstance(found, dict):
                return took | found
    return took | {"failed": f"it ended well and told no figures: {told[-200:]!r}"}


def line(name: str, found: dict[str, Any]) -> str:
    """One part on a line."""
    if "not_run" in found:
        return f"{name}: not run, since there is no {found['not_run']}"
    if "failed" in found:
        return f"{name}: failed: {found['failed']}"
    if name.startswith("learner"):
        arms = [
            f"{kind} {found[kind]['tokens_per_second']:,.0f} tokens/s, "
            f"{found[kind]['utilisation']:.0%} of {found[kind]['peak'] / 1e12:,.2f} T operations/s"
            f" (host {found[kind]['shares']['host']:.1%})"
            for kind in ("packed", "masked")
        ]
        return f"{name}: {'; '.join(arms)}"
    if name.startswith("lag"):
        return f"{name}: ESS " + ", ".join(f"{r['lag']}: {r['ess']:.3f}" for r in found["by_lag"])
    if name.startswith("generation"):
        return f"{name}: " + ", ".join(
            f"{n} at once {each['tokens_per_second']:,.0f} tokens/s ({each['share']:.0%})"
            for n, each in found["at_once"].items()
        )
    shown = {k: v for k, v in found.items() if k != "part_seconds"}
    return f"{name}: {json.dumps(shown)}"


def device_name(device: str) -> str:
    """Of the GPU."""
    if device != "cuda":
        return device
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--sizes", nargs="+", default=["0.5b", "1.5b"], help="of models")
    parser.add_argument(
        "--device", default="cuda", choices=["cuda", "cpu"], help="cpu: for a trial"
    )
    parser.add_argument("--rounds", type=int, default=5, help="batches of each measurement")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of everything")
    parser.add_argument("--output", type=Path, default=Path("gpu.json"), help="of the figures")
    parser.add_argument("--part", choices=["packing", "learner", "lag", "generation"],
                        help="only this one, in this process; its figures as JSON")  # fmt: skip
    options = parser.parse_args()
    if options.part:
        found = run_part(options.part, options.sizes[0], options.device, options.rounds)
        print(json.dumps(found))
        return
    reserve(options.output)
    deadline = time.monotonic() + options.seconds
    record = environment() | {"device": device_name(options.device), "parts": {}}
    for part, size in plan(options.sizes):
        name = f"{part} {size}".strip()
        left = deadline - time.monotonic()
        if lacking := missing(part, options.device):
            found = {"not_run": ", ".join(lacking)}
        elif left < 5:
            found = {"failed": "there was no time left"}
        else:
            command = command_of(part, size, options)
            found = outcome(command, part, min(left, LONGEST[part]))
        record["parts"][name] = found
        print(line(name, found), flush=True)
        options.output.write_text(json.dumps(record, indent=1) + "\n")
    print(f"stored in {options.output}")


if __name__ == "__main__":
    main()
