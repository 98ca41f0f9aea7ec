"""Caveats of a plan by the rates of a run and by its network; refuses a run of another model."""

from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path

from actors.engines.model_folder import read_description
from deploy.config.run_config import RunConfig
from deploy.planner.calibration import Measured
from headway.errors import InputError
from learner.config.learner import ModelConfig

LEAST_EXPLAINED = 0.5
"""Share of the variance of rollout times below which the rates of engines are not reliable."""
SIZES = {
    "hidden_size": "hidden_size",
    "num_hidden_layers": "layers",
    "intermediate_size": "intermediate_size",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_dim",
}
"""Sizes by which models are compared: names in `config.json`, and in [model.tiny]."""
TAKEN_OVER = {
    "engines are taken to be as fast as": (
        *("actors.engine", "actors.tensor_parallel_size", "actors.dtype"),
    ),
    "rollouts are taken to be as long as": ("actors.temperature", "prompts.source"),
    "groups are taken to be tied as often as": ("prompts.group_size",),
    "the learner is taken to be as fast as": (
        *("learner.zero_stage", "learner.dtype", "learner.epochs", "learner.minibatches"),
        *("learner.critic", "learner.activation_checkpointing", "learner.microbatch_tokens"),
    ),
    "updates are taken to be as fast as": ("weight_sync.transport", "weight_sync.codec"),
    "updates and the learner are taken to be as fast as": ("learner.lora",),
}
"""Keys of a recipe by what a plan takes over from the run where they differ."""


def refuse_another_model(config: RunConfig, recorded: RunConfig) -> None:
    """Raise InputError, naming both, if the run of the recipe `recorded` trained another model.

    Models are compared by their sizes, or by their names where one of the two is not here.
    """
    if config.model == recorded.model:
        return
    wanted, measured = _sizes(config.model), _sizes(recorded.model)
    both = wanted.keys() & measured.keys()
    differ = [name for name in SIZES if name in both and wanted[name] != measured[name]]
    if differ or not both:
        raise InputError(
            f"the run {recorded.name} trained {_named(recorded.model, measured, differ)}, and the "
            f"recipe has {_named(config.model, wanted, differ)}: rates of one model say nothing of "
            "another, so name a run that trained the recipe's"
        )


def _sizes(model: ModelConfig) -> dict[str, int]:
    """Return the known sizes of a model; none if its folder is not on this machine."""
    if model.tiny is not None:
        return {name: getattr(model.tiny, ours) for name, ours in SIZES.items()}
    folder = Path(str(model.path)).expanduser()
    if not folder.is_dir():
        return {}
    description = read_description(folder)
    text = description.get("text_config") or description
    return {name: text[name] for name in SIZES if isinstance(text.get(name), int)}


def _named(model: ModelConfig, sizes: dict[str, int], shown: Sequence[str]) -> str:
    name = "[model.tiny]" if model.path is None else repr(model.path)
    if not shown:
        return name
    return f"{name} with {', '.join(f'{size} = {sizes[size]}' for size in shown)}"


def differences(config: RunConfig, recorded: RunConfig) -> list[str]:
    """List where a recipe differs from that of the run in what rates and lengths depend on."""
    notes = []
    if config.model != recorded.model:
        wanted, measured = (_named(model, {}, ()) for model in (config.model, recorded.model))
        notes.append(
            f"the recipe has {wanted}, in the run {measured} of the same size: rollouts are taken "
            "to be as long as the run's"
        )
    for key, taken in ((key, taken) for taken, keys in TAKEN_OVER.items() for key in keys):
        wanted, measured = attrgetter(key)(config), attrgetter(key)(recorded)
        if wanted != measured:
            notes.append(f"{key} = {wanted!r}, in the run {measured!r}: {taken} the run's")
    tokens, recorded_tokens = config.actors.max_new_tokens, recorded.actors.max_new_tokens
    if tokens > recorded_tokens:
        notes.append(
            f"actors.max_new_tokens = {tokens}, in the run {recorded_tokens}: no rollout is taken "
            "to be longer than the run's"
        )
    return notes


def slow_updates(
    config: RunConfig, size: float, receivers: int, samples_per_second: float
) -> list[str]:
    """Return a note if a version of `size` bytes is sent for longer than a batch is trained.

    It is sent once by `nccl`, and else to each of the nodes that receive it. Deltas, whose size is
    not known before, are taken as sent in time.
    """
    sync, gbit = config.weight_sync, config.deploy.node.network_gbit
    if not receivers or not samples_per_second or sync.codec == "delta":
        return []
    times = 1 if sync.transport == "nccl" else receivers
    step = config.prompts.groups_per_batch * config.prompts.group_size / samples_per_second
    seconds = 8 * size * times / (gbit * 1e9)
    if seconds <= step:
        return []
    once = f' (weight_sync.transport = "nccl" sends it once: {seconds / times:.1f} s)'
    return [
        f"weight_sync.transport = {sync.transport!r} sends {size / 1e9:.1f} GB to "
        f"{receivers} node(s) in {seconds:.1f} s at deploy.node.network_gbit = {gbit:g}, and a "
        f"batch is trained in {step:.1f} s: engines miss versions and their lag grows"
        f"{once if times > 1 and config.actors.gpus else ''}"
    ]


def caveats(
    measured: Measured, recorded: RunConfig, *, bounds: Sequence[int], evaluated: bool
) -> list[str]:
    """List reasons to doubt the rates of a run, which may have been `evaluated` meanwhile."""
    notes = []
    if evaluated:
        notes.append(
            "the run was evaluated while it trained, which its journal does not show: its engines "
            "look slower than they are"
        )
    if recorded.queues.bound == 0 and any(bounds):
        notes.append(
            "the run was synchronous: what actors and learner cost each other where they share "
            "cores is not in its rates, so above a bound of 0 they are too high there"
        )
    if measured.explained < LEAST_EXPLAINED:
        notes.append(
            f"the engines' rates explain {measured.explained:.0%} of how long rollouts took: "
            "something else held them up, so do not rely on this"
        )
    return notes
