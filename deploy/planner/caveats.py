"""What a plan by the rates of a run leaves out, and runs of which it says nothing."""

from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path

from actors.engines.model_folder import read_description
from deploy.config.run_config import RunConfig
from deploy.errors import InputError
from deploy.planner.calibration import Measured
from learner.config.learner import ModelConfig

LEAST_EXPLAINED = 0.5
"""Of the variance of rollout times; below, engines are not what the model of them says."""
SIZES = {
    "hidden_size": "hidden_size",
    "num_hidden_layers": "layers",
    "intermediate_size": "intermediate_size",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_dim",
}
"""What two models are held against each other by: names in `config.json`, and in [model.tiny]."""
TAKEN_OVER = {
    "actors.tensor_parallel_size": "engines are taken to be as fast as the run's",
    "actors.dtype": "engines are taken to be as fast as the run's",
    "actors.temperature": "rollouts are taken to be as long as the run's",
    "prompts.source": "rollouts are taken to be as long as the run's",
    "prompts.group_size": "groups are taken to be tied as often as the run's",
    "learner.zero_stage": "the learner is taken to be as fast as the run's",
    "learner.dtype": "the learner is taken to be as fast as the run's",
}
"""What the rates of a run say of a recipe in which a key has another value."""


def refuse_another_model(config: RunConfig, recorded: RunConfig) -> None:
    """Refuses rates of another model.

    Models are told apart by their sizes, or by their names where one of the two is not here.

    Args:
        config: The recipe.
        recorded: That of the run.

    Raises:
        InputError: The run trained another model; names both.
    """
    if config.model == recorded.model:
        return
    mine, its = _sizes(config.model), _sizes(recorded.model)
    both = mine.keys() & its.keys()
    differ = [name for name in SIZES if name in both and mine[name] != its[name]]
    if differ or not both:
        raise InputError(
            f"the run {recorded.name} trained {_named(recorded.model, its, differ)}, and the "
            f"recipe has {_named(config.model, mine, differ)}: rates of one model say nothing of "
            "another, so name a run that trained the recipe's"
        )


def _sizes(model: ModelConfig) -> dict[str, int]:
    """Those that are known; none of a model that is not here."""
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
    return f"{name} with {', '.join(f'{each} = {sizes[each]}' for each in shown)}"


def differences(config: RunConfig, recorded: RunConfig) -> list[str]:
    """Where a recipe differs from that of the run in what rates and lengths depend on."""
    notes = []
    if config.model != recorded.model:
        notes.append(
            f"the recipe has {_named(config.model, {}, ())}, in the run "
            f"{_named(recorded.model, {}, ())} of the same size: rollouts are taken to be as long "
            "as the run's"
        )
    for key, taken in TAKEN_OVER.items():
        mine, its = (attrgetter(key)(each) for each in (config, recorded))
        if mine != its:
            notes.append(f"{key} = {mine!r}, in the run {its!r}: {taken}")
    mine, its = (each.actors.max_new_tokens for each in (config, recorded))
    if mine > its:
        notes.append(
            f"actors.max_new_tokens = {mine}, in the run {its}: no rollout is taken to be longer "
            "than the run's"
        )
    return notes


def caveats(
    measured: Measured, recorded: RunConfig, *, bounds: Sequence[int], evaluated: bool
) -> list[str]:
    """What to keep in mind of measured rates.

    Args:
        measured: Of the run.
        recorded: Its recipe.
        bounds: That are predicted.
        evaluated: Whether held-out problems were generated meanwhile.
    """
    notes = []
    if evaluated:
        notes.append(
            "the run was evaluated while it trained, which its journal does not show: its engines "
            "look slower than they are"
        )
    if recorded.queues.max_staleness == 0:
        notes.append(
            "the run was synchronous: what actors and learner cost each other where they share "
            "cores is not in its rates, so above a bound of 0 they are too high there"
        )
    elif 0 in bounds:
        notes.append(
            "the run was asynchronous: what actors and learner cost each other where they share "
            "cores is in its rates, so at a bound of 0, where they take turns, these are too low"
        )
    if measured.explained < LEAST_EXPLAINED:
        notes.append(
            f"the engines' rates explain {measured.explained:.0%} of how long rollouts took: "
            "something else held them up, so do not rely on this"
        )
    return notes
