"""The pause part of the suite: `benchmarks/weights/update_pause.py` with a model in bfloat16.

Needs vLLM, and the entry point by which it finds the backend "headway".
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROUNDS = 7


def pause(size: str) -> dict[str, Any]:
    """Return the whole record of `update_pause`; a missed aim is no failure here."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "pause.json"
        command = [
            sys.executable, "-m", "benchmarks.weights.update_pause", "--size", size, "--dtype",
            "bfloat16", "--rounds", str(ROUNDS), "--output", str(file),
        ]  # fmt: skip
        done = subprocess.run(command, check=False)
        if not file.exists():
            sys.exit(done.returncode or "update_pause stored nothing")
        record: dict[str, Any] = json.loads(file.read_text())
    return record
