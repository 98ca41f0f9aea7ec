"""Learning-rate schedules, as one pure function of the optimizer step."""

import math

from learner.config.optimizer import ScheduleConfig


def rate_factor(config: ScheduleConfig, step: int, total_steps: int) -> float:
    """Return the factor in [0, 1] on the full learning rate at an optimizer step, from 0.

    It is 1/(warmup_steps + 1) at the first warm-up step, not 0.
    """
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    start = max(config.warmup_steps, int(config.decay_from * total_steps))
    if config.kind == "constant" or step < start:
        return 1.0
    progress = min(1.0, (step - start) / max(1, total_steps - 1 - start))
    remaining = 1 - progress if config.kind == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.final_fraction + (1 - config.final_fraction) * remaining
