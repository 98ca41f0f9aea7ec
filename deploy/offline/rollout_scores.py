"""Scores a recorded rollout as the learner does: its advantage, and log-probabilities of tokens."""

import math
import tempfile
from dataclasses import replace
from pathlib import Path

import psutil

from actors.engines.model_folder import context_length, weight_shapes
from deploy.config.run_config import RunConfig
from deploy.offline.evaluated_policy import find_policy
from deploy.planner.byte_counts import GIB, WEIGHT
from deploy.storage.run_directory import RunDirectory
from headway.errors import HeadwayError, InputError
from learner.config.learner import LearnerConfig
from queues.records import Rollout, RolloutGroup
from queues.segments import paths, spans


def describe_advantage(config: LearnerConfig, group: RolloutGroup, index: int) -> str:
    """Return the advantage of the rollout at an index of a group, or why it is not known.

    One that depends on other groups is told by computing it beside a group of other rewards.
    """
    from learner.batch.batch import read_batch
    from learner.objective.objective import Objective

    others = [replace(rollout, reward=2 * rollout.reward + 1) for rollout in group.rollouts]
    try:
        objective = Objective(config)
        if objective.credits_tokens:
            return f"not known: {config.advantage!r} needs scores of models for every token"
        alone, beside = (
            objective.with_advantages(read_batch(groups, process_rewards=config.process_rewards))
            for groups in ([group], [group, replace(group, rollouts=others)])
        )
    except HeadwayError as error:
        return f"not known: {error}"
    assert alone.advantages is not None
    assert beside.advantages is not None
    values = alone.advantages.values
    if objective.state or not values.equal(beside.advantages.values[: len(values)]):
        return f"not known: {config.advantage!r} needs the whole batch"
    chosen = alone.tokens.sequence_ids == index
    of_tokens = alone.advantages.on_tokens(alone.tokens.sequence_ids)[chosen & alone.sampled]
    low, high = map(float, of_tokens.aminmax()) if len(of_tokens) else (0.0, 0.0)
    text = f"{low:+.4g}" if low == high else f"from {low:+.4g} to {high:+.4g}, by token"
    dropped = alone.dropped is not None and bool(alone.dropped[index])
    return f"{text} ({config.advantage}{'; left out of training' if dropped else ''})"


def learner_logprobs(
    directory: RunDirectory, config: RunConfig, rollout: Rollout
) -> tuple[dict[int, float], list[str]]:
    """Return log-probabilities of sampled tokens by index, and why those of others are not known.

    They are the learner's, by the weights of the version that sampled the token: those of the model
    folder or of a checkpoint.
    """
    known, problems = dict[int, float](), list[str]()
    pairs = zip(rollout.versions, rollout.loss_mask, strict=True)
    for version in sorted({version for version, is_sampled in pairs if is_sampled}):
        try:
            with tempfile.TemporaryDirectory(prefix=".models-", dir=directory.path.parent) as made:
                known |= _score(directory, config, rollout, version, Path(made) / "model")
        except HeadwayError as error:
            problems.append(f"version {version}: {error}")
    return known, problems


def _score(
    directory: RunDirectory, config: RunConfig, rollout: Rollout, version: int, copy: Path
) -> dict[int, float]:
    """Score the tokens that a version sampled; InputError where its weights are not here."""
    import torch

    from learner.model.forward_check import choose_way
    from learner.model.logprobs import LogprobOptions
    from learner.model.policy import load_policy

    learner, actors = config.learner, config.actors
    if version == 0 and learner.lora is not None and learner.lora.path is not None:
        raise InputError("its weights are those of learner.lora.path, which is in no folder merged")
    path = find_policy(f"{directory.path}@{version}", directory.path.parent).folder(copy)
    needed = sum(map(math.prod, weight_shapes(path).values())) * WEIGHT[learner.dtype]
    if needed > (free := psutil.virtual_memory().available):
        raise InputError(f"its weights take {needed / GIB:.1f} GiB, {free / GIB:.1f} are free here")
    policy = load_policy(
        path,
        LogprobOptions(
            chunk=learner.logprob_chunk,
            temperature=actors.temperature,
            float32_head=learner.float32_head,
        ),
        dtype=learner.dtype,
        attention=learner.attention,
        context=actors.max_model_len or context_length(path),
    )
    choose_way(policy)
    token_ids, versions = torch.tensor(rollout.token_ids), torch.tensor(rollout.versions)
    chosen, known = torch.tensor(rollout.loss_mask) & (versions == version), dict[int, float]()
    own = spans(rollout.segments, len(token_ids))
    for route, (start, end) in zip(map(torch.from_numpy, paths(rollout)), own, strict=True):
        wanted = chosen[route] & (route >= start) & (route < end)
        with torch.no_grad():
            logprobs, *_ = policy(token_ids[route], torch.arange(len(route)), wanted)
        known |= zip(route[wanted].tolist(), logprobs[wanted].tolist(), strict=True)
    return known
