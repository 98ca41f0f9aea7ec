"""Learning-rate schedules, as one pure function of the optimizer step."""

import math

from learner.config.optimizer import ScheduleConfig


def rate_factor(config: ScheduleConfig, step: int, total_steps: int) -> float:
    """Return the factor in [0, 1] on the full learning rate at an optimizer step, from 0.

    It is 1/(warmup_steps + 1) at the first warm-up step, and above 0 at the last step, unless
    `final_fraction` is 0.
    """
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    start = max(config.warmup_steps, int(config.decay_from * total_steps))
    if config.kind == "constant" or step < start:
        return 1.0
    final, last = config.final_fraction, total_steps - 1
    end = last + 1 if final is None else last
    progress = min(1.0, (step - start) / max(1, end - start))
    remaining = 1 - progress if config.kind == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return (final or 0.0) + (1 - (final or 0.0)) * remaining
