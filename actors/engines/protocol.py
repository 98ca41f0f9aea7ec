"""The interface of an inference engine. Prompts and answers are token ids."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from actors.config import ActorsConfig
from queues.records import FinishReason
from weight_sync.config import WeightSyncConfig
from weight_sync.manifest import Signature
from weight_sync.probe import Scores, Sequences
from weight_sync.receive.engine import UpdatableEngine


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """Settings with which the engine of one actor is made."""

    index: int
    """Number of the actor, from 0."""
    config: ActorsConfig
    weight_sync: WeightSyncConfig
    model_path: str
    """Local folder or hub name."""
    seed: int
    initial_version: int | None = None
    """Version of the weights in the model folder; None waits for the first update."""
    log: Path | None = None
    """File for the output of vLLM's processes; None leaves it in that of this process."""
    engine_metrics: bool = False
    """Let vLLM count what it does, for `actors.metrics.EngineMetrics`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParameters:
    """Sampling parameters of one continuation."""

    temperature: float
    """0 is greedy."""
    max_new_tokens: int
    top_p: float = 1.0
    top_k: int = -1
    """−1: no limit."""
    seed: int | None = None
    """None takes the engine's own stream of random numbers."""
    stop: tuple[str, ...] = ()
    """Texts after which the engine may stop; the caller cuts at the first of them."""
    stop_ids: tuple[int, ...] = ()
    """Tokens after which the engine may stop, besides those that end the model's sequences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One continuation. All lists have one entry per sampled token, the last one included."""

    token_ids: list[int]
    logprobs: list[float]
    """Natural log-probability after temperature, top-p and top-k."""
    versions: list[int]
    """Policy version that sampled the token, as stamped by the engine; never decreases."""
    finish_reason: FinishReason
    cache_salt: str
    """The salt of the request; without one, the version that prefilled the prompt."""


class RolloutEngine(UpdatableEngine, Protocol):
    """Generates many requests at once while its weights are replaced under them."""

    async def start(self) -> None:
        """Load the model; without an initial version the engine is STALE until its first."""

    def inventory(self) -> Signature:
        """Return names, shapes and (where it matters) dtypes of the weights that it takes."""

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling: SamplingParameters,
        *,
        cache_salt: str | None = None,
    ) -> Generation:
        """Sample one continuation; cancelling the call aborts the request.

        Nothing begins while the engine is paused: a request that has no token by then is sampled
        wholly by the version that resumes. Raises EngineStale before the first version, and
        EngineDied.

        Args:
            request_id: Unique among the running requests.
            prompt_ids: At least one.
            sampling: The answer has at most its `max_new_tokens`.
            cache_salt: Requests with different salts share no cached state. None, for the first
                request of a rollout, takes the version that prefills it; later requests repeat
                the salt of the first.
        """

    async def score(self, sequences: Sequences) -> tuple[Scores, Scores] | None:
        """Return `scores` and `sampled` of a `ProbeReport`, the former by no prefix cache.

        None if the weights were replaced meanwhile, or there are none. Raises EngineDied.
        """

    async def interrupt(self) -> None:
        """End every request, running or to come, as ABORTED with its tokens; raises EngineDied."""

    async def close(self) -> None:
        """End every process of the engine; running requests fail."""
