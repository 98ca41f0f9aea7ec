"""The specification and the environment that every process of a learner is started with."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from learner.config.learner import LearnerConfig
from weight_sync.config import WeightSyncConfig


class EarlierSession(NamedTuple):
    """Settings of an earlier session of a run, whose batches may be trained again."""

    end: int
    """The first version that was not trained with them."""
    config: LearnerConfig
    steps: int


@dataclass(frozen=True, kw_only=True)
class LearnerSpec:
    """Settings and inputs of a learner, the same for all of its ranks."""

    config: LearnerConfig
    section: str = "learner"
    """Section of the recipe that has these settings, for messages."""
    model_path: str
    """Model folder or hub name: the tokenizer, and the weights unless there is a checkpoint."""
    teachers: tuple[str, ...] = ()
    """Model folders or hub names of the teachers, in the order of the settings."""
    seed: int
    """Seed of Python, NumPy and torch in each rank; a checkpoint restores the random state."""
    steps: int
    """Batches of the whole run, which the learning rate is scheduled over."""
    earlier: tuple[EarlierSession, ...] = ()
    """Earlier sessions in their order; their batches are trained again with their own settings."""
    temperature: float = 1.0
    """Sampling temperature of the actors."""
    context: int | None = None
    """Longest sequence of the engines in tokens; None: there are none."""
    served_dtype: str | None = None
    """Dtype of the engines' weights; None: there are none."""
    checkpoint: str | None = None
    """Folder of a checkpoint to go on from exactly."""
    version: int = 0
    """Version of the weights to begin with: that of the checkpoint."""
    last_version: int | None = None
    """Version to stop at; None: `steps`."""
    session_started_at: float | None = None
    """Epoch seconds when the session of the run began, for its figures; None: as training begins.
    A learner that is made again in it has the same."""
    checkpoints: str = "checkpoints"
    """Folder of all checkpoints."""
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)

    def settings_at(self, version: int) -> tuple[LearnerConfig, int]:
        """Return the settings that the batch of a version is trained with, and the steps."""
        for session in self.earlier:
            if version < session.end:
                return session.config, session.steps
        return self.config, self.steps


GROWING_SEGMENTS = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
"""Environment that has torch fragment the memory of a GPU less."""
GLIBC_ON_CPU: Mapping[str, str] = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(10**11),
    "MALLOC_TOP_PAD_": str(256 * 2**20),
    "GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=1048576",
}
"""Environment that has glibc keep freed memory in one heap for all threads, and copy 1 MiB or more
past the cache, on a CPU.

Tensors of a step are as large as those of the last one. By default glibc maps large ones anew each
time, and the kernel fills every page with zeros first: a tenth of a step of 60 M parameters; and
copies of tensors smaller than the cache read what they overwrite: half of a checkpoint's copy. GPUs
have an allocator of their own."""


def environment(config: LearnerConfig, transport: str) -> dict[str, str]:
    """Return the environment variables of a rank's process, which are read when it starts.

    `transport` is that of the weights: `ipc` cannot share memory whose segments grow.
    """
    variables = {"OMP_NUM_THREADS": str(config.threads_of_rank)}
    if not config.gpus:
        return {**variables, **GLIBC_ON_CPU}
    return variables if transport == "ipc" else {**variables, **GROWING_SEGMENTS}
