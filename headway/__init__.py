"""Asynchronous reinforcement learning of language models, from a script or a notebook.

import headway

run = headway.run("demo", overrides={"name": "mine", "steps": 20})
for batch in run.metrics():
    print(batch["version"], batch["reward_mean"])
print(run.wait()["heldout"], run.table())

The modules of this package are the foundation: what every part of Headway stands on. They import
none of its parts; the names above are taken from `deploy.api` when they are first used.
"""

import importlib
from typing import Any

__all__ = ["InputError", "RunFailed", "RunResults", "TrainingRun", "results", "resume", "run"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("deploy.api"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
