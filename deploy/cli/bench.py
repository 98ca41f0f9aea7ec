"""`headway bench NAME`: starts a benchmark of the checkout that this package lies in."""

import os
import sys
from pathlib import Path
from typing import NoReturn

from deploy.errors import InputError

ROOT = Path(__file__).parents[2]
BENCHMARKS = {
    "async": "async_gain",
    "chaos": "chaos",
    "episodes": "slow_episodes",
    "generate": "generate",
    "logprob-memory": "logprob_memory",
    "metrics": "metrics_cost",
    "plan": "plan_check",
    "presets": "presets",
    "queue": "queue",
    "rewards": "reward_rate",
    "scale": "scale",
    "screenshots": "screenshots",
    "staleness": "staleness",
    "train": "train",
    "update-pause": "update_pause",
    "versus-trl": "versus_trl",
    "weight-sync": "weight_sync",
}
"""Modules of the folder `benchmarks`, by the name that the command gives them."""


def start(name: str, arguments: list[str], root: Path = ROOT) -> NoReturn:
    """Becomes the benchmark, so that its exit code and the user's Ctrl-C are its own.

    Args:
        name: See `BENCHMARKS`.
        arguments: What the benchmark itself understands.
        root: The checkout.

    Raises:
        InputError: No such benchmark, or no checkout.
    """
    if name not in BENCHMARKS:
        raise InputError(f"no benchmark {name!r}; there are {', '.join(sorted(BENCHMARKS))}")
    module = BENCHMARKS[name]
    if not (root / "benchmarks" / f"{module}.py").exists():
        raise InputError(
            f"{root} has no benchmarks/{module}.py: benchmarks come with a checkout of the "
            "repository, not with the installed package"
        )
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}
    sys.stdout.flush()
    os.execve(
        sys.executable, [sys.executable, "-m", f"benchmarks.{module}", *arguments], environment
    )
