"""The pause part of the suite: `benchmarks/weights/update_pause.py` with a model in bfloat16.

Needs vLLM, to which the backend "headway" is known by an entry point of the installed
distribution.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROUNDS = 7


def pause(size: str) -> dict[str, Any]:
    """Its whole record. Whether its aim was met is in there, and is no failure here."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "pause.json"
        command = [
            sys.executable, "-m", "benchmarks.weights.update_pause", "--size", size, "--dtype",
            "bfloat16", "--rounds", str(ROUNDS), "--output", str(file),
        ]  # fmt: skip
        done = subprocess.run(command, check=False)
        if not file.exists():
            sys.exit(done.returncode or "it stored nothing")
        found: dict[str, Any] = json.loads(file.read_text())
    return found
