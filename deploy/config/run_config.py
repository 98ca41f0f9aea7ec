"""A whole recipe, and every rule that concerns two or more of its sections.

Rules that need the model or the data on disk are checked by `deploy.preflight`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError, model_validator

from deploy.config.messages import explain
from deploy.config.recipe_keys import RecipeKeys
from deploy.config.rules import check_against_objective, check_batch, check_source, check_transport
from headway.errors import InputError
from learner.config.learner import LearnerConfig
from learner.config.supervised import SupervisedConfig
from queues.config import QueuesConfig
from queues.records import rollouts_at_once


class RunConfig(RecipeKeys):
    """A whole recipe."""

    @model_validator(mode="after")
    def _objective_and_batches_fit(self) -> Self:
        check_against_objective(self, self.learner.traits)
        check_batch(self)
        minibatches, groups = self.learner.minibatches, self.prompts.groups_per_batch
        if minibatches > groups:
            raise ValueError(
                f"learner.minibatches = {minibatches} must be at most prompts.groups_per_batch = "
                f"{groups}: a minibatch is made of whole groups"
            )
        window = self.queues.window
        if window is not None and window < groups:
            raise ValueError(
                f"queues.window = {window} must be at least prompts.groups_per_batch = {groups}: "
                "no batch could ever be ready"
            )
        capacity, size = self.actors.max_concurrent_rollouts, self.prompts.group_size
        more = ", and one more for actors.greedy_baseline" if self.actors.greedy_baseline else ""
        if capacity < self.rollouts_per_group:
            raise ValueError(
                f"actors.max_concurrent_rollouts = {capacity} must be at least "
                f"prompts.group_size = {size}{more}: no group could ever be leased"
            )
        return self

    @model_validator(mode="after")
    def _actors_train(self) -> Self:
        check_transport(self)
        if self.actors.max_count is not None and self.deploy.ray_address == "local":
            raise ValueError(
                f"actors.max_count = {self.actors.max_count} takes actors as nodes join a cluster, "
                'and deploy.ray_address = "local" has this machine alone; leave it out, or set '
                "deploy.ray_address; `headway scale` changes the number of actors in any run"
            )
        if self.heldout is not None and self.heldout.pinned and self.actors.count < 2:
            raise ValueError(
                "heldout.pinned = true keeps one actor for evaluations, and actors.count = "
                f"{self.actors.count} leaves none for training; set actors.count to 2 or more, or "
                "heldout.pinned = false"
            )
        return self

    @model_validator(mode="after")
    def _settings_take_effect(self) -> Self:
        check_source(self.prompts, self.actors)
        critic = self.learner.critic
        if critic is not None and critic.pretrain_batches >= self.steps:
            raise ValueError(
                f"learner.critic.pretrain_batches = {critic.pretrain_batches} must be below steps "
                f"= {self.steps}: all batches would train the critic alone"
            )
        if self.actors.reward_model.each_step and not self.learner.process_rewards:
            raise ValueError(
                "actors.reward_model.each_step = true rewards steps one by one, and needs "
                "learner.process_rewards = true: a sum over steps would pay for more of them"
            )
        named = self.actors.reward_model.named or self.reward_model
        if self.actors.asks_reward_models and not named:
            raise ValueError(
                'the reward "reward_model" needs reward models: name model '
                "folders in actors.reward_model.paths, or add a [reward_model] section, from which "
                "`headway reward-model` trains them"
            )
        return self

    @model_validator(mode="after")
    def _ranks_share_checkpoints(self) -> Self:
        deploy, learner = self.deploy, self.learner
        shared = deploy.checkpoint_dir or deploy.backup_dir or deploy.ray_address == "local"
        gpus = learner.ranks * learner.gpus
        if deploy.node.gpus is not None and gpus > deploy.node.gpus and not shared:
            raise ValueError(
                f"learner.ranks = {learner.ranks} with learner.gpus = {learner.gpus:g} take "
                f"{gpus:g} GPUs, more than deploy.node.gpus = {deploy.node.gpus}, and every rank "
                "writes its part of a checkpoint: set deploy.checkpoint_dir to a folder that the "
                "learner's nodes share"
            )
        return self

    @property
    def rollouts_per_group(self) -> int:
        """Number of rollouts that an engine generates for a training group, with its baseline."""
        return rollouts_at_once(self.prompts.group_size, self.actors.greedy_baseline)

    @property
    def objective(self) -> LearnerConfig:
        """The section `[learner]`, completed by what it takes from other sections."""
        length = self.learner.fixed_length or self.actors.max_new_tokens
        limit = self.learner.max_token_lag
        if self.queues.on_overdue == "mask":
            bound = self.queues.bound
            limit = bound if limit is None else min(limit, bound)
        return self.learner.model_copy(update={"fixed_length": length, "max_token_lag": limit})

    def window(self, engines: int) -> int:
        """Return `queues.window`; by default the one that a number of engines needs."""
        batch = self.prompts.groups_per_batch
        held = engines * (self.actors.max_concurrent_rollouts // self.rollouts_per_group)
        return self.queues.window or batch + max(batch, held) + (batch + 3) // 4

    @property
    def flow(self) -> QueuesConfig:
        """The section `[queues]` with the window filled in."""
        return self.queues.model_copy(update={"window": self.window(self.actors.count)})

    def updated(self, **changes: Any) -> "RunConfig":
        """Return a copy with other values of keys, validated; a section is a mapping of its keys.

        Raises InputError, with a line for each problem, if the changes do not go together.
        """
        document = self.model_dump(exclude_unset=True)
        for key, value in changes.items():
            section = isinstance(value, Mapping)
            document[key] = {**(document.get(key) or {}), **value} if section else value
        try:
            return type(self).model_validate(document)
        except ValidationError as error:
            raise InputError("\n".join(explain(error, type(self)))) from None

    def settings(self) -> dict[str, Any]:
        """Return the settings as JSON values, without `deploy.runs_dir`: a run may be moved."""
        exclude = {"deploy": {"runs_dir"}}
        return self.with_model_names().model_dump(mode="json", exclude=exclude)

    def with_model_names(self) -> "RunConfig":
        """Return the recipe with the names of what is made of its sections filled in."""
        sections = {"sft": self.sft, "prefer": self.prefer, "reward_model": self.reward_model}
        return self.model_copy(
            update={
                key: section.model_copy(update={"name": section.name or self.name})
                for key, section in sections.items()
                if section is not None
            }
        )

    @property
    def heldout_source(self) -> tuple[str, str, dict[str, Any]]:
        """The setting that names the source of held-out problems, its value, and its options."""
        own = self.heldout.source_options if self.heldout else {}
        if self.heldout is not None and self.heldout.source is not None:
            return "heldout.source", self.heldout.source, own
        return "prompts.source", self.prompts.source, own or self.prompts.source_options

    @property
    def warm_start(self) -> Path:
        """Folder of the model that `headway sft` makes from this recipe."""
        return self._made(self.sft, "sft") / "model"

    @property
    def preferred(self) -> Path:
        """Folder of the model that `headway prefer` makes from this recipe."""
        return self._made(self.prefer, "prefer") / "model"

    @property
    def reward_models(self) -> Path:
        """Folder of the model folders that `headway reward-model` makes from this recipe."""
        return self._made(self.reward_model, "rm")

    @property
    def preference_pairs(self) -> Path:
        """Folder of the preference set that `headway pairs` makes from this recipe."""
        return self._made(None, "pairs")

    def _made(self, section: SupervisedConfig | None, kind: str) -> Path:
        name = (section.name if section else None) or self.name
        return self.deploy.runs_dir / f"{name}-{kind}"
