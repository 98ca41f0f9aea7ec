"""Differences between two recipes, and those of them that a run can go on with."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from deploy.config.recipe_text import toml_value

APPLIED = (
    "name", "steps", "deploy", "weight_sync",
    "learner.learning_rate", "learner.muon_learning_rate", "learner.schedule",
    "learner.gradient_clipping", "learner.cores", "learner.threads", "learner.gpus",
    "learner.microbatch_tokens", "learner.logprob_chunk", "learner.activation_checkpointing",
    "learner.checkpoint_every", "learner.keep_checkpoints", "learner.keep_checkpoint_hours",
    "actors.count", "actors.cores", "actors.cpus", "actors.gpus", "actors.kv_cache_gib",
    "actors.gpu_memory_utilization", "actors.tensor_parallel_size", "actors.enforce_eager",
    "actors.max_concurrent_rollouts", "actors.rollout_timeout_seconds",
    "actors.environment_timeout_seconds", "actors.reward_timeout_seconds",
    "actors.reward_processes", "actors.reward_memory_gib", "actors.reward_environment",
    "actors.verifier_seconds",
    "queues.lease_seconds", "queues.heartbeat_seconds", "queues.patience_seconds",
    "queues.max_attempts", "queues.retry_seconds", "queues.queued_batches",
)  # fmt: skip
"""Settings, and sections of them, that may change between two sessions of a run: its length, its
learning rate, and what it runs on. Others define what it learns from; some are in its checkpoints
and its ledger."""


class Change(NamedTuple):
    """A setting that differs between two recipes."""

    name: str
    before: str
    """As TOML; "none" where it is not set."""
    after: str

    def __str__(self) -> str:
        return f"{self.name} = {self.after}, was {self.before}"

    @property
    def applied(self) -> bool:
        """True if a run that is resumed goes on with the new value."""
        return any(f"{self.name}.".startswith(f"{key}.") for key in APPLIED)


def changes(before: Any, after: Any) -> list[Change]:
    """Return the settings that differ between two recipes, given as JSON values, by name."""
    return [Change(name, *values) for name, values in differing([before, after]).items()]


def differing(recipes: Sequence[Any]) -> dict[str, list[str]]:
    """Return the settings that are not the same in all recipes, with the value in each as TOML."""
    settings = [dict(_settings(recipe)) for recipe in recipes]
    values = {
        name: [known.get(name, "none") for known in settings]
        for name in sorted(set().union(*settings))
    }
    return {name: row for name, row in values.items() if len(set(row)) > 1}


def _settings(section: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted name and the value, as TOML, of every setting that is set."""
    if isinstance(section, dict):
        for key, value in section.items():
            yield from _settings(value, f"{name}.{key}" if name else key)
    elif section is not None:
        yield name, toml_value(section)
