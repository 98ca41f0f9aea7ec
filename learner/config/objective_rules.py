"""Rules of what goes together in an objective, as functions over its settings and traits.

The settings check themselves with the traits of built-in functions (`LearnerConfig`); a run
checks them again with those of all functions, loaded (`learner.objective.checks`). No torch.
"""

from headway.errors import InputError
from learner.config.objective import ObjectiveConfig
from learner.config.traits import REJECTIONS, WEIGHTS, AdvantageTraits, LossTraits, ObjectiveTraits

RATIO_FORMS = ("ratio_k1", "ratio_k3", "weighted_k2")
"""Forms of the KL term in the loss that weigh by the ratio current / behaviour policy."""


def check_traits(config: ObjectiveConfig, traits: ObjectiveTraits) -> None:
    """Refuse settings that contradict the traits of the functions they name.

    Raises:
        InputError: A ratio would count twice, something needed is not computed, or a function is
            not defined for another setting.
    """
    _check_weights_count_once(traits)
    _check_needs(config, traits)
    if traits.loss is not None:
        _check_correction_of(config, traits.loss, traits)
        _check_steps(config, traits.loss)
        _check_where_defined(config, traits.loss)
    if traits.advantage is not None:
        _check_critic(config, traits.advantage)
        _check_task_rewards(config, traits.advantage)
    if config.drop_tied and (reason := what_ties_teach(config, traits)):
        raise InputError(dropping_refused("learner.drop_tied", reason))


def what_ties_teach(config: ObjectiveConfig, traits: ObjectiveTraits) -> str | None:
    """Return the setting by which groups of equal task rewards teach something; None if none does.

    An advantage that is not loaded is taken to compare the rollouts of a group alone.
    """
    advantage, name = traits.advantage, f"learner.advantage = {config.advantage!r}"
    if advantage is None:
        return None
    if not advantage.relative:
        return f"{name}, which compares with more than the rollouts of a group"
    under = advantage.ties_teach_with.items()
    reasons = [reason for option, reason in under if option in config.advantage_options]
    if advantage.ties_teach or reasons:
        return f"{name}, {advantage.ties_teach or reasons[0]}"
    if config.kl is not None and config.kl.placement == "reward":
        return 'learner.kl.placement = "reward", by which rollouts that earned the same differ'
    if config.process_rewards and advantage.takes_token_rewards:
        return "learner.process_rewards = true, by which turns may differ where sums do not"
    if config.distillation is not None:
        return "[learner.distillation], whose teachers tell of every rollout"
    if config.positive_nll:
        return f"learner.positive_nll = {config.positive_nll}, by which all that pass are imitated"
    return None


def dropping_refused(setting: str, reason: str) -> str:
    """Return the message about a setting that drops groups whose rollouts earned the same."""
    return (
        f"{setting} = true with {reason}: a group whose rollouts earn the same teaches something, "
        f"and its loss would shift what is learned; set {setting} = false"
    )


def corrects_off_policyness(config: ObjectiveConfig, traits: ObjectiveTraits) -> bool:
    """Return True if the objective accounts for rollouts sampled by another policy.

    A loss that is not loaded is taken to own a ratio.
    """
    corrections = traits.corrections.values()
    corrected = any(correction is None or correction.corrects for correction in corrections)
    off_policy = traits.loss is not None and traits.loss.off_policy
    return corrected or off_policy or _weighs_by_behavior(config, traits.loss)


def behavior_comparison(config: ObjectiveConfig, traits: ObjectiveTraits) -> str | None:
    """Return the setting that compares with the probabilities that tokens were sampled with.

    None if no setting does. A loss that is not loaded is taken to own a ratio.
    """
    kl, loss = config.kl, traits.loss
    anchored = loss is not None and loss.anchor == "behavior"
    if config.policy_weight and (anchored or _weighs_by_behavior(config, loss)):
        return "loss"
    if config.policy_weight and config.corrections:
        return "correction"
    if kl is not None and (kl.placement == "reward" or kl.form in RATIO_FORMS):
        return "kl"
    sampled = config.distillation is not None and config.distillation.top_k == 0
    return "distillation" if sampled else None


def _weighs_by_behavior(config: ObjectiveConfig, loss: LossTraits | None) -> bool:
    """Return True if the loss itself weighs tokens by current / behaviour policy."""
    if loss is None:
        return not config.uses_proximal
    return loss.owns_is and (loss.anchor == "behavior" or not config.uses_proximal)


def _weighing(traits: ObjectiveTraits) -> list[str]:
    """Return the corrections that weigh by proximal / behaviour policy."""
    return [name for name, item in traits.corrections.items() if item and item.weighs]


def _check_weights_count_once(traits: ObjectiveTraits) -> None:
    weighing = _weighing(traits)
    if len(weighing) > 1:
        raise InputError(
            f"corrections {' and '.join(weighing)} each weigh by proximal / behaviour policy, so "
            f"together they would count it twice; use one of {', '.join(WEIGHTS)}, with any of "
            f"{', '.join(REJECTIONS)}"
        )


def _check_correction_of(
    config: ObjectiveConfig, loss: LossTraits, traits: ObjectiveTraits
) -> None:
    if config.corrections and loss.unit == "group":
        raise InputError(
            f"loss {config.loss!r} compares the rollouts of a group, and correction "
            f"{config.corrections[0]!r} would weigh the tokens of one apart from those of the "
            'others; use correction = "none"'
        )
    if not (weighing := _weighing(traits)):
        return
    only_rejects = f"or one of {', '.join(REJECTIONS)}, which weigh nothing"
    if _weighs_by_behavior(config, loss):
        other = '; or loss = "reinforce", or recompute_proximal = true'
        raise InputError(
            f"loss {config.loss!r} already weighs by current / behaviour policy, so correction "
            f'{weighing[0]!r} would count it twice; use correction = "none", {only_rejects}'
            f"{other if loss.anchor == 'proximal' else ''}"
        )
    if loss.off_policy:
        raise InputError(
            f"loss {config.loss!r} is defined for rollouts of any policy, unweighed; use "
            f'correction = "none" instead of {weighing[0]!r}, {only_rejects}'
        )


def _check_needs(config: ObjectiveConfig, traits: ObjectiveTraits) -> None:
    supplies = {
        "reference_logprobs": (config.uses_reference, "give a [learner.kl] section"),
        "proximal_logprobs": (config.uses_proximal, "set learner.recompute_proximal = true"),
        "values": (config.critic is not None, "give a [learner.critic] section"),
    }
    for name, (supplied, remedy) in supplies.items():
        setting = traits.needs.get(name)
        if setting is not None and not supplied:
            function = f"{setting} {getattr(config, setting)!r}"
            raise InputError(f"{function} needs {name}, which nothing computes; {remedy}")


def _check_steps(config: ObjectiveConfig, loss: LossTraits) -> None:
    if loss.single_step and config.steps_per_batch > 1:
        raise InputError(
            f"loss {config.loss!r} with loss_options = {config.loss_options} takes the current "
            "policy for that at the start of the batch, but "
            f"{config.steps_per_batch} steps (minibatches · epochs) move it; use "
            '"recompute", or one step'
        )


def _check_where_defined(config: ObjectiveConfig, loss: LossTraits) -> None:
    advantages = None if ":" in config.advantage else loss.advantages
    for setting, allowed in (("aggregation", loss.aggregations), ("advantage", advantages)):
        value = getattr(config, setting)
        if allowed is not None and value not in allowed:
            names = " or ".join(f'"{name}"' for name in allowed)
            raise InputError(
                f"loss {config.loss!r} is not defined for {setting} = {value!r}; use "
                f"{setting} = {names}"
            )


def _check_critic(config: ObjectiveConfig, advantage: AdvantageTraits) -> None:
    built_in = ":" not in config.advantage  # a user's may give returns without needing values
    if config.critic is not None and built_in and "values" not in advantage.needs:
        raise InputError(
            f'[learner.critic] needs advantage = "gae", not {config.advantage!r}: only GAE uses '
            "values"
        )


def _check_task_rewards(config: ObjectiveConfig, advantage: AdvantageTraits) -> None:
    if not advantage.takes_task_rewards:
        return
    if config.kl is not None and config.kl.placement == "reward":
        raise InputError(
            f'kl.placement = "reward" with advantage = {config.advantage!r}, which takes rewards '
            'as the task gives them; use placement = "loss"'
        )
    if config.process_rewards and "reward_parts" in advantage.needs:
        raise InputError(
            f"process_rewards = true with advantage = {config.advantage!r}, which normalises the "
            "parts of the reward, and the reward of a turn belongs to none; use process_rewards = "
            "false"
        )
