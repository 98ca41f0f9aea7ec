"""The specification of an engine."""

from dataclasses import dataclass

from actors.config import ActorsConfig
from weight_sync.config import WeightSyncConfig


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """How the engine of one actor is made."""

    index: int
    """Number of the actor, from 0."""
    config: ActorsConfig
    weight_sync: WeightSyncConfig
    model_path: str
    """Local folder or hub name."""
    seed: int
    """Seed of the run."""
    initial_version: int | None = None
    """Version of the weights in the model folder; None waits for the first update."""
    engine_metrics: bool = False
    """Let vLLM count what it does, for `actors.metrics.EngineMetrics`."""
