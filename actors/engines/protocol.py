"""What generates tokens: the seam between rollouts and an inference engine.

Implementations are `vllm_engine`, and `scripted_engine` for tests and load without a model; both
pass `tests/actors/engines/test_engine_contract.py`. Leaves out text: prompts and answers are token
ids.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from queues.records import FinishReason
from weight_sync.manifest import Signature
from weight_sync.receive.engine import UpdatableEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParameters:
    """How one continuation is sampled."""

    temperature: float
    """0 is greedy."""
    max_new_tokens: int
    top_p: float = 1.0
    top_k: int = -1
    """−1: no limit."""
    seed: int | None = None
    """None: the engine's own stream of random numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One continuation. All lists have one entry per sampled token, the last one included."""

    token_ids: list[int]
    logprobs: list[float]
    """Natural log-probability under what was sampled from: after temperature, top-p and top-k."""
    versions: list[int]
    """Policy version that sampled the token, as stamped by the engine; never decreases."""
    finish_reason: FinishReason
    cache_salt: str
    """The one that was given; else it names the version that the engine prefilled the prompt with.
    """


class RolloutEngine(UpdatableEngine, Protocol):
    """Generates many requests at once while its weights are replaced under them."""

    async def start(self) -> None:
        """Loads the model; the engine is STALE until its first version unless it was given one."""
        ...

    def inventory(self) -> Signature:
        """Names, shapes and (where it matters) dtypes of the weights that it takes."""
        ...

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling: SamplingParameters,
        *,
        cache_salt: str | None = None,
    ) -> Generation:
        """Samples one continuation; cancelling the call aborts the request.

        Nothing begins while the engine is paused: a request that comes during a pause, or whose
        first token was not sampled before it, is sampled wholly by the version that resumes.

        Args:
            request_id: Unique among the running requests.
            prompt_ids: Token ids, at least one.
            sampling: How to sample.
            cache_salt: Requests with different salts share no cached state. A continuation is
                given the salt of the rollout's first request, which has None: the version that
                prefills it.

        Raises:
            EngineStale: No version was loaded yet.
            EngineDied: The engine is gone, and with it every request.
        """
        ...

    async def interrupt(self) -> None:
        """Ends every request, running or to come, as ABORTED with the tokens that it has; for good.

        Raises:
            EngineDied: The engine is gone, and with it every request.
        """
        ...

    async def close(self) -> None:
        """Ends every process of the engine; running requests fail."""
        ...
