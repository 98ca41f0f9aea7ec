"""Penalties on the length of training rollouts, added to the rewards of the task.

Held-out rollouts have none. `queues.records.SHAPING` lists their names, so that the task's own
reward can be computed without them.
"""

from dataclasses import dataclass

from actors.config import ActorsConfig, OverlongConfig
from queues.records import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Shaping:
    """Penalties that are added to the reward of a training rollout."""

    limit: int
    """Most tokens that may be sampled where the context has space for them."""
    overlong: OverlongConfig | None = None
    missing_eos_penalty: float = 0.0

    def parts(self, length: int, finish_reason: FinishReason, *, space: int) -> dict[str, float]:
        """Return the configured penalties by name.

        Args:
            length: Sampled tokens.
            finish_reason: How the rollout ended.
            space: Tokens of the context after the prompt; a limit where it is below `limit`.
        """
        parts = {}
        if self.overlong is not None:
            limit = min(self.limit, space)
            parts["overlong"] = overlong_penalty(
                length,
                limit=limit,
                buffer=min(self.overlong.tokens(limit), limit),
                factor=self.overlong.factor,
            )
        if self.missing_eos_penalty:
            ended = finish_reason is FinishReason.STOP
            parts["missing_eos"] = 0.0 if ended else -self.missing_eos_penalty
        return parts


def load_shaping(config: ActorsConfig) -> Shaping:
    """Return the penalties that a recipe asks for."""
    return Shaping(
        limit=config.max_new_tokens,
        overlong=config.overlong,
        missing_eos_penalty=config.missing_eos_penalty,
    )


def overlong_penalty(length: int, *, limit: int, buffer: int, factor: float = 1.0) -> float:
    """Compute the soft overlong penalty of DAPO (arXiv 2503.14476 eq. 13), with its floor.

    0 up to `limit − buffer` tokens, from there linear down to −factor at `limit`, and no lower.

    Args:
        length: Sampled tokens.
        limit: L_max.
        buffer: L_cache, at least 1.
        factor: Largest penalty; 1 in the paper.

    Example:
        >>> [overlong_penalty(n, limit=20480, buffer=4096) for n in (16384, 18432, 20480, 30000)]
        [0.0, -0.5, -1.0, -1.0]
    """
    over = length - (limit - buffer)
    return -factor * min(1.0, over / buffer) if over > 0 else 0.0
