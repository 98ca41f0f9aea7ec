"""Penalties on the length of training rollouts, added to the rewards of the task.

Held-out rollouts have none. `queues.records.SHAPING` lists their names, so that the task's own
reward can be computed without them.
"""

from actors.config import ActorsConfig
from queues.records import FinishReason


def shaping_parts(
    config: ActorsConfig, length: int, finish_reason: FinishReason, *, space: int
) -> dict[str, float]:
    """Return the configured penalties of a training rollout by name.

    `length` counts sampled tokens, `space` the tokens of the context after the prompt.
    """
    parts = {}
    if config.overlong is not None:
        limit = min(config.max_new_tokens, space)
        parts["overlong"] = overlong_penalty(
            length,
            limit=limit,
            buffer=min(config.overlong.tokens(limit), limit),
            factor=config.overlong.factor,
        )
    if config.missing_eos_penalty:
        ended = finish_reason is FinishReason.STOP
        parts["missing_eos"] = 0.0 if ended else -config.missing_eos_penalty
    return parts


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
