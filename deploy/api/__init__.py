"""Runs from Python: the names that `import headway` offers."""

from deploy.api.training_run import RunResults, TrainingRun, results, resume, run
from deploy.errors import RunFailed
from headway.errors import InputError

__all__ = ["InputError", "RunFailed", "RunResults", "TrainingRun", "results", "resume", "run"]
