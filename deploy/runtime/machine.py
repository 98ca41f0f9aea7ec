"""What a record says about this machine and about the commit of a folder; needs only Python."""

import platform
import subprocess
from pathlib import Path

ANSWER_SECONDS = 10.0
"""Deadline of git and nvidia-smi."""


def cpu() -> str:
    """Return the name of the processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.processor()


def gpus() -> list[str]:
    """Return name, memory and driver of each NVIDIA GPU; none where nvidia-smi fails."""
    output = output_of(
        "nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"
    )
    return (output or "").splitlines()


def git(folder: Path, *arguments: str) -> str | None:
    """Return the output of git for a folder; None without git, or outside a checkout."""
    return output_of("git", "-C", str(folder), *arguments)


def output_of(*command: str, seconds: float = ANSWER_SECONDS) -> str | None:
    """Return the standard output of a program; None where it is missing, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=seconds)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
