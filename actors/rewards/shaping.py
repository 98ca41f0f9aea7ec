"""Penalties on the length of training rollouts, added to the rewards of the task.

`queues.records.SHAPING` lists them, so that the task's own reward can be computed without them.
"""

from actors.config import ActorsConfig
from queues.records import FinishReason


def shaping_parts(
    config: ActorsConfig,
    length: int,
    finish_reason: FinishReason,
    *,
    space: int,
    injected: int = 0,
) -> dict[str, float]:
    """Return the configured penalties of a training rollout by name.

    `length` counts sampled tokens, and `injected` those of the environment, a last reply that did
    not fit into the context included. `space` is the context after the prompt. A rollout is as
    close to its limit as to the nearer of two: sampled tokens, and all tokens in the context.
    """
    parts, overlong = {}, config.overlong
    if overlong is not None:
        parts["overlong"] = min(
            overlong_penalty(
                tokens,
                limit=limit,
                buffer=min(overlong.tokens(limit), limit),
                factor=overlong.factor,
            )
            for tokens, limit in ((length, config.max_new_tokens), (length + injected, space))
        )
    if config.missing_eos_penalty:
        ended = finish_reason is FinishReason.STOP
        parts["missing_eos"] = 0.0 if ended else -config.missing_eos_penalty
    return parts


def overlong_penalty(length: int, *, limit: int, buffer: int, factor: float = 1.0) -> float:
    """Compute the soft overlong penalty of DAPO (arXiv 2503.14476 eq. 13), with its floor.

    0 up to `limit − buffer` tokens (L_max − L_cache), from there linear down to −factor at `limit`,
    and no lower. `factor` is 1 in the paper.

    Example:
        >>> [overlong_penalty(n, limit=20480, buffer=4096) for n in (16384, 18432, 20480, 30000)]
        [0.0, -0.5, -1.0, -1.0]
    """
    over = length - (limit - buffer)
    return -factor * min(1.0, over / buffer) if over > 0 else 0.0
