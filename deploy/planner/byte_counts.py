"""The bytes of what a run keeps, copies and sends: one formula for each. Pure.

A learner steps float32 weights by AdamW, which has two moments for each; Muon has one.
"""

import math

from deploy.config.run_config import RunConfig
from learner.config.learner import LearnerConfig

MIB, GIB = 2**20, 2**30
WEIGHT = {"float32": 4, "bfloat16": 2}
"""Bytes of a weight, by the dtype of the model."""
STEPPED, MOMENTS, GRADIENT = 4, 8, 4
"""Bytes of a trained weight that the optimizer steps, of its two moments and of its gradient."""
SCORE = 8
"""Bytes of a word that a teacher tells for a token: the word and its log-probability."""
TOKEN = 13
"""Bytes of a token in the journal: id, log-probability, version (4 each), mask."""


def version_bytes(config: RunConfig, weights: int, adapter: int = 0) -> int:
    """Return the bytes of a published version; engines that merge an adapter get that alone."""
    merged = config.learner.lora is not None and config.weight_sync.staged
    return version_weight_bytes(config) * (adapter if merged else weights)


def version_weight_bytes(config: RunConfig) -> int:
    """Return the bytes of a weight on its way to the engines."""
    half = "bfloat16" in (config.weight_sync.wire_dtype, config.learner.dtype)
    return WEIGHT["bfloat16" if half else "float32"]


def reference_weight_bytes(learner: LearnerConfig) -> int:
    """Return the bytes of a weight of the reference, which is float32 where it moves in part."""
    kl = learner.kl
    soft = kl is not None and kl.refresh_every is not None and kl.refresh_mix < 1
    return WEIGHT["float32" if soft else learner.dtype]


def teacher_score_bytes(config: RunConfig, longest: int, vocabulary: int) -> float:
    """Return the bytes of what all teachers tell of a batch of rollouts of so many tokens."""
    distillation, prompts = config.learner.distillation, config.prompts
    if distillation is None:
        return 0.0
    tokens = prompts.groups_per_batch * prompts.group_size * longest
    told = len(distillation.teachers) * max(1, min(distillation.top_k, vocabulary))
    return float(SCORE * tokens * told)


def checkpoint_bytes(learner: LearnerConfig, weights: int, adapters: int = 0) -> int:
    """Return the bytes of a checkpoint of a model, with its critic and its refreshed reference.

    A checkpoint has the weights for actors, those that are stepped, and two moments. What an
    adapter is added to is not stored. `weights` counts those of the model, and of a critic that is
    trained whole; `adapters` those of the adapters of policy and critic together.
    """
    own, kl = learner.critic, learner.kl
    whole = (learner.lora is None) + (own is not None and not own.shared and own.lora is None)
    stored = WEIGHT[learner.dtype] + STEPPED + MOMENTS
    refreshed = kl is not None and kl.refresh_every is not None
    reference = reference_weight_bytes(learner) * refreshed * weights
    return stored * (whole * weights + adapters) + reference


def most_checkpoints(config: RunConfig, version: int = 0, made: int = 0) -> int:
    """Return how many checkpoints a run has at a time; it writes one before it deletes another.

    A run that goes on from a `version` has `made` some.
    """
    every = config.learner.checkpoint_every
    saves = math.ceil(config.steps / every) - version // every if version < config.steps else 0
    return min(config.learner.keep_checkpoints + 1, made + saves)


def journal_bytes(config: RunConfig, batches: int) -> int:
    """Return the most bytes that the rollouts of some batches take in the journal."""
    rollouts = batches * config.prompts.groups_per_batch * config.prompts.group_size
    return TOKEN * rollouts * config.actors.max_new_tokens
