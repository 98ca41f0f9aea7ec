"""Differences between two recipes, and those of them that a run can go on with.

`RULES` says of every key whether it may change between two sessions of a run, or why not.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from deploy.config.recipe_text import toml_value

OF_A_STEP = {
    "": "steps",
    "queues": "max_staleness",
    "learner": "learning_rate muon_learning_rate gradient_clipping schedule",
    "learner.critic": "learning_rate muon_learning_rate gradient_clipping schedule",
}
"""Keys that may change, and that decide what a batch does to the weights: batches of earlier
sessions that are trained again keep the values that they were trained with."""

OF_THE_WORK = {
    "actors": (
        "count min_count max_count cores cpus gpus kv_cache_gib gpu_memory_utilization"
        " tensor_parallel_size dtype float32_head enforce_eager max_concurrent_rollouts"
        " rollout_timeout_seconds environment_timeout_seconds reward_timeout_seconds"
        " reward_processes reward_memory_gib code_execution scripted_options vllm_options"
        " reward_environment verifier_seconds"
    ),
    "actors.reward_model": "batch_size max_wait_ms dtype cores gpus",
    "queues": (
        "window ess_target ess_batches allow_uncorrected lease_seconds heartbeat_seconds"
        " patience_seconds max_attempts retry_seconds queued_batches synchronous"
        " commit_interval_seconds segment_bytes keep_rollouts"
    ),
    "learner": (
        "ranks zero_stage dtype activation_checkpointing offload_optimizer attention cores threads"
        " gpus microbatch_tokens logprob_chunk float32_head checkpoint_every keep_checkpoints"
        " keep_checkpoint_hours"
    ),
    "weight_sync": (
        "transport folder codec wire_dtype update_mode clear_cache update_fraction bucket_bytes"
        " timeout_seconds on_drift"
    ),
    "prompts": "on_change",
    "heldout": "pinned pinned_seconds",
    "deploy": (
        "ray_address placement node metrics engine_metrics metrics_port metrics_host metrics_token"
        " trackers start_timeout_seconds watchdog_seconds watchdog_aborts checkpoint_seconds"
        " max_failed_groups failure_window max_restarts private environment backup_seconds"
    ),
}
"""Keys that may change, and that decide how the work is done: they change rounding at most."""

REFUSED = {
    "it is the name of the run's folder; start a run of its own under another name": {"": "name"},
    "the run is where its folder is: move the folder, and name it": {"deploy": "runs_dir"},
    "the run's folder has a link to it: move what is there, and set the link anew": {
        "deploy": "checkpoint_dir backup_dir"
    },
    "a preset fills in what a recipe leaves out, and the recipe of a run is complete": {
        "": "preset"
    },
    "the weights of the run began with it; `headway export` makes a model folder of its newest, "
    "which a run of its own can begin with": {"": "model sft"},
    "its ledger has prompts, groups and recorded batches that were made with it": {
        "": "seed",
        "prompts": (
            "source source_options max_tokens groups_per_batch group_size pass_rate_cap"
            " pass_threshold"
        ),
        "actors": "greedy_baseline",
    },
    "rollouts in its ledger, half-finished and waiting to be trained, were sampled and scored with "
    "it": {
        "": "reward_model",
        "actors": (
            "engine environment environment_options max_turns reward reward_options reward_weights"
            " temperature top_p top_k max_new_tokens max_model_len chat_template"
            " chat_template_options stop include_stop overlong missing_eos_penalty"
        ),
        "actors.reward_model": "paths combine uncertainty standardise",
    },
    "results in its ledger were admitted by it": {
        "queues": "on_overdue filter_tied max_filtered_batches"
    },
    "it is a constant of the optimizer whose state its checkpoints have": {
        "learner": "optimizer betas epsilon weight_decay weight_decay_on",
        "learner.critic": "optimizer betas epsilon weight_decay weight_decay_on",
    },
    "its checkpoints have the factors of this adapter": {
        "learner": "lora",
        "learner.critic": "lora",
    },
    "it is the objective that its checkpoints, recorded batches and figures belong to": {
        "learner": (
            "advantage advantage_options loss loss_options correction correction_options"
            " aggregation fixed_length mask_truncated max_token_lag drop_tied process_rewards kl"
            " entropy positive_nll positive_reward minibatches epochs recompute_proximal"
        ),
        "learner.critic": "path shared coefficient clip pretrain_batches",
    },
    "its evaluations are planned and queued when it begins, and are compared with each other": {
        "actors": "heldout_reward",
        "heldout": "source source_options size every final_size sampled samples",
    },
}
"""Keys that may not change, by the reason; of a section that is named, all keys."""


def _rules() -> Iterator[tuple[str, str | None]]:
    tables: list[tuple[str | None, Mapping[str, str]]] = [(None, OF_A_STEP), (None, OF_THE_WORK)]
    for reason, table in (*tables, *REFUSED.items()):
        for section, keys in table.items():
            yield from ((f"{section}.{key}".lstrip("."), reason) for key in keys.split())


RULES: Mapping[str, str | None] = dict(_rules())
"""The reason why a key, or all keys of a section, may not change; None: they may."""


def refusal(name: str) -> str | None:
    """Return why a key may not change between the sessions of a run, or None if it may.

    `name` may go on inside a table that is a key's value, as learner.loss_options.cap_high.
    """
    parts = name.split(".")
    prefixes = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return RULES[next(prefix for prefix in prefixes if prefix in RULES)]


class Change(NamedTuple):
    """A setting that differs between two recipes."""

    name: str
    before: str
    """As TOML; "none" where it is not set."""
    after: str

    def __str__(self) -> str:
        return f"{self.name}: {self.before} → {self.after}"


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
