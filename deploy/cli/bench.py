"""`headway bench NAME`: starts a benchmark from the folder that contains this package.

That is a checkout with all of them, or an installation with those about whole training runs.
"""

import os
import sys
from pathlib import Path
from typing import NoReturn

from deploy.errors import InputError

ROOT = Path(__file__).parents[2]
BENCHMARKS = {
    "async": "loop.async_gain",
    "chaos": "reliability.chaos",
    "episodes": "rollouts.slow_episodes",
    "generate": "rollouts.generate",
    "metrics": "observability.metrics_cost",
    "plan": "loop.plan_check",
    "presets": "loop.presets",
    "queue": "broker.queue",
    "rewards": "rollouts.reward_rate",
    "scale": "broker.scale",
    "staleness": "loop.staleness",
    "train": "training.train",
    "update-pause": "weights.update_pause",
    "versus-trl": "loop.versus_trl",
    "weight-sync": "weights.weight_sync",
}
"""Modules of the folder `benchmarks`, by the name that the command gives them."""


def start(name: str, arguments: list[str], root: Path = ROOT) -> NoReturn:
    """Replace this process by a benchmark, which gets the user's Ctrl-C and sets the exit code.

    Raises:
        InputError: There is no such benchmark, or it is not installed.
    """
    if name not in BENCHMARKS:
        raise InputError(f"no benchmark {name!r}; there are {', '.join(sorted(BENCHMARKS))}")
    path = BENCHMARKS[name].replace(".", "/")
    if not (root / "benchmarks" / f"{path}.py").exists():
        raise InputError(
            f"{root} has no benchmarks/{path}.py: this benchmark comes with a checkout of the "
            "repository, not with the installed package"
        )
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-m", "benchmarks", name, *arguments], environment)
