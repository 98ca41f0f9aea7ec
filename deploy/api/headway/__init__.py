"""Asynchronous reinforcement learning of language models, from a script or a notebook.

import headway

run = headway.run("demo", overrides={"name": "mine", "steps": 20})
for batch in run.metrics():
    print(batch["version"], batch["reward_mean"])
print(run.wait()["heldout"], run.table())
"""

from deploy.api.training_run import RunResults, TrainingRun, results, resume, run
from deploy.errors import InputError, RunFailed

__all__ = ["InputError", "RunFailed", "RunResults", "TrainingRun", "results", "resume", "run"]
