"""One batch through a train engine: groups in, optimizer steps, a report out.

    batch ─▶ scored by proximal and reference policies, critic and teachers, where asked for
      └─▶ advantages ─▶ epoch ─▶ minibatch ─▶ microbatches of this rank: forward, backward ─▶ step

Every rank is given the whole batch and trains its microbatches of it (`microbatch_plan`). What is
minimised is `learner.objective.objective`; versions and publishing are `learner.learner`.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from operator import add

import torch
from torch import Tensor

from learner.batch.batch import Microbatch, Sequences, TrainBatch, read_batch, split_groups
from learner.batch.microbatch_plan import Indices, plan_microbatches
from learner.config.learner import LearnerConfig
from learner.diagnostics import engine_comparison
from learner.diagnostics.batch_report import BatchReport
from learner.diagnostics.batch_statistics import StepTotals, batch_report
from learner.diagnostics.off_policy import measure, origins
from learner.diagnostics.update_sums import ComparedTokens, UpdateSums
from learner.engine.protocol import Trainable, TrainEngine
from learner.engine.reference import Reference, Teacher
from learner.losses.value_loss import CriticSums
from learner.model.policy import before_each
from learner.objective.objective import Objective
from queues.records import RolloutGroup


def values_of(critic: Trainable, token_ids: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return a critic's values of the states before and after each token, [N] float32."""
    (after,) = critic.outputs(token_ids, position_ids)
    return before_each(after[:-1], position_ids.to(after.device)), after


class Updater:
    """Trains batches; only the objective carries state between them."""

    def __init__(
        self,
        engine: TrainEngine,
        config: LearnerConfig,
        *,
        critic: Trainable | None = None,
        reference: Reference | None = None,
        teachers: Sequence[Teacher] = (),
    ) -> None:
        """Check the objective, and raise InputError if a setting is wrong.

        Without a `reference`, that of a policy with an adapter is the policy without it.
        `teachers` are those of the settings, in their order.
        """
        self.objective = Objective(config)
        self._engine = engine
        self._critic = critic
        self._reference = reference
        self._teachers = teachers
        self.config = config
        """May be replaced between two batches, as far as `LearnerConfig.stepping_as` goes."""

    def update(self, groups: Sequence[RolloutGroup], version: int) -> BatchReport:
        """Take the optimizer steps of a batch; return figures over all ranks. Collective.

        Every rank is given the same batch. The steps move `version` to `version + 1`.

        Raises:
            HeadwayError: The batch cannot be trained.
            TrainingDiverged: The loss or the gradient is not finite, on any rank.
        """
        config, limit = self.config, self.config.max_token_lag
        batch = read_batch(
            groups,
            mask_truncated=config.mask_truncated,
            oldest_version=None if limit is None else version - limit,
            process_rewards=config.process_rewards,
        )
        batch = self._with_teachers(self._with_model_scores(batch), groups)
        batch = self.objective.with_advantages(batch)
        tokens = batch.tokens
        column = origins(tokens.versions, batch.sampled, tokens.sequence_ids, version=version)
        units, unit_of_token = engine_comparison.units(
            tokens.versions, batch.sampled, tokens.sequence_ids, tokens.group_ids, batch.engines,
            version=version,
        )  # fmt: skip
        batch = batch.with_columns(origins=column, units=unit_of_token)
        totals = StepTotals(ranks=self._engine.ranks)
        minibatches = (
            batch.minibatch(part, aggregation=config.aggregation, fixed_length=config.fixed_length)
            for epoch in range(config.epochs)
            for part in split_groups(batch.groups, config.minibatches, version=version, epoch=epoch)
        )
        steps = (self._step(part, version, totals, units=len(units)) for part in minibatches)
        sums = reduce(add, steps).over_ranks(self._engine.sum_over_ranks)
        report = replace(
            batch_report(batch, totals, sums, version, config, units),
            kl_coefficient=self.objective.kl_coefficient if config.kl else None,
            entropy_coefficient=self.objective.entropy_coefficient if config.entropy else None,
        )
        if self._trains_policy(version):
            self.objective.adapt(
                kl=report.reference_kl, entropy=report.entropy_mean, rollouts=len(batch.rewards)
            )
        self._refresh(version + 1)
        return report

    def _trains_policy(self, version: int) -> bool:
        critic = self.config.critic
        return critic is None or version >= critic.pretrain_batches

    def _step(
        self, minibatch: Sequences, version: int, totals: StepTotals, *, units: int
    ) -> UpdateSums:
        """Compute the gradient of a minibatch and take the steps of policy and critic.

        Where no token has a part in the loss, on any rank, there is no step: neither momentum nor
        weight decay moves the weights, and the schedule stays where it is.
        """
        config, engine = self.config, self._engine
        plan = self._plan(minibatch, minibatch.trainable)
        totals.add_plan(
            minibatch.lengths,
            plan,
            capacity=config.microbatch_tokens,
            together=config.zero_stage >= 2,
        )
        positive = self.objective.count_positive_tokens(minibatch)
        masked_in = bool(minibatch.tokens.mask.any())
        totals.minibatches += masked_in
        trains_policy = masked_in and self._trains_policy(version)
        policies, critics, compared = [], [], []
        for micro in minibatch.microbatches(plan[engine.rank], engine.device):
            with torch.set_grad_enabled(trains_policy):
                words = micro.teacher_words
                others = () if words is None else (words.flatten(1).long(),)
                out = engine.forward(micro.token_ids, micro.position_ids, micro.mask, *others)
                result = self.objective.loss(micro, out, version=version, positive_tokens=positive)
            if trains_policy:
                engine.backward(result.loss)
            policies.append(result.sums)
            compared.append(result.compared)
            if self._critic is not None:
                critics.append(self._critic_pass(self._critic, micro, train=masked_in))
            elif result.critic is not None:
                critics.append(result.critic)
        policy, tokens = reduce(add, policies), ComparedTokens.joined(compared)
        if trains_policy and engine.sum_over_ranks(policy.learned) > 0:
            totals.grad_norms.append(engine.step())
            totals.learning_rate = engine.learning_rate
        if self._critic is not None and masked_in:
            totals.critic_grad_norms.append(self._critic.step())
        ratios, trained = tokens.log_ratios, tokens.trained
        return UpdateSums(
            policy=policy,
            critic=reduce(add, critics) if critics else None,
            off_policy=measure(ratios, trained, tokens.origins, tokens.sequence_ids),
            units=engine_comparison.measure(
                ratios, trained, tokens.units, tokens.behavior_logprobs, count=units
            ),
        )

    def _with_model_scores(self, batch: TrainBatch) -> TrainBatch:
        """Return the batch with the scores of models before its first step, from all ranks."""
        columns: dict[str, Tensor] = {}
        shared = self._critic is None and self.config.critic is not None
        values = ("values", "values_after") if self.config.bootstraps else ("values",)
        if self.config.uses_proximal or shared:
            names = ("proximal_logprobs", *(values if shared else ()))
            columns |= self._score(batch, names, self._of_policy)
            if not self.config.uses_proximal:
                del columns["proximal_logprobs"]
        if self._reference is not None:
            columns |= self._score(batch, ("reference_logprobs",), self._reference.logprobs)
        elif self.config.uses_reference and not self.config.holds_reference:
            columns |= self._score(batch, ("reference_logprobs",), self._engine.base_logprobs)
        if self._critic is not None:
            columns |= self._score(batch, values, self._of_critic)
        if "values_after" in columns:
            ends = torch.bincount(batch.tokens.sequence_ids).cumsum(0) - 1
            batch = replace(batch, end_values=columns.pop("values_after")[ends])
        return batch.with_columns(**columns) if columns else batch

    def _with_teachers(self, batch: TrainBatch, groups: Sequence[RolloutGroup]) -> TrainBatch:
        """Return the batch with the scores of each teacher on the rollouts that it teaches."""
        config = self.config.distillation
        if config is None:
            return batch
        shares = torch.tensor([config.shares(group.prompt_id) for group in groups])
        scores = []
        for number, teacher in enumerate(self._teachers):
            taught = [i for i in batch.trainable if shares[batch.group_of_path[i], number] > 0]
            scores.append(self._score(batch, teacher.columns, teacher.scores, taught, teacher.told))
        columns = {name: torch.stack([s[name] for s in scores], dim=1) for name in scores[0]}
        if "teacher_words" in columns:
            columns["teacher_words"] = columns["teacher_words"].int()
        return batch.with_columns(teacher_shares=shares[batch.tokens.group_ids], **columns)

    def _of_policy(self, token_ids: Tensor, position_ids: Tensor, wanted: Tensor) -> Tensor:
        """Return log-probabilities, and the values of a shared critic that are needed, [·, N]."""
        out = self._engine.forward(token_ids, position_ids, wanted)
        columns = (out.logprobs, out.values, out.values_after)
        return torch.stack([column for column in columns if column is not None])

    def _of_critic(self, token_ids: Tensor, position_ids: Tensor, _: Tensor) -> Tensor:
        """Return the values before each token, and those after it where they are needed, [·, N]."""
        assert self._critic is not None
        before, after = values_of(self._critic, token_ids, position_ids)
        return torch.stack([before, after] if self.config.bootstraps else [before])

    @torch.no_grad()
    def _score(
        self,
        batch: TrainBatch,
        names: Sequence[str],
        model: Callable[[Tensor, Tensor, Tensor], Tensor],
        paths: Sequence[int] | None = None,
        *shape: int,
    ) -> dict[str, Tensor]:
        """Return the scores of one model by name, [N, *shape] float32 each.

        Each rank computes its microbatches. Log-probabilities are 0 for tokens not sampled, and
        everything is for `paths` that are not needed; None: the objective says which ones are.
        """
        if paths is None:
            paths = batch.generated if self.objective.credits_tokens else batch.trainable
        mine = self._plan(batch, paths)[self._engine.rank]
        device = self._engine.device
        scores = torch.zeros(len(names), len(batch.tokens.token_ids), *shape, device=device)
        for members, micro in zip(mine, batch.microbatches(mine, device), strict=True):
            output = model(micro.token_ids, micro.position_ids, micro.mask | (micro.versions >= 0))
            if members:
                scores[:, batch.positions(members)] = output.float()
        return dict(zip(names, self._engine.sum_over_ranks(scores).cpu(), strict=True))

    def _plan(self, batch: Sequences, paths: Sequence[int]) -> list[Indices]:
        """Plan the microbatches of some paths, with whole rollouts or groups where need be.

        A rollout is always on one rank, which measures its ratio.
        """
        rollouts, groups = batch.rollout_of_path, batch.group_of_path
        whole = {"token": range(len(rollouts)), "sequence": rollouts, "group": groups}
        units: defaultdict[int, list[int]] = defaultdict(list)
        for path in paths:
            units[whole[self.objective.unit][path]].append(path)
        members = [*units.values()]
        plan = plan_microbatches(
            [sum(batch.lengths[path] for path in unit) for unit in members],
            self._engine.ranks,
            self.config.microbatch_tokens,
            [rollouts[unit[0]] for unit in members],
        )
        return [[[path for i in of for path in members[i]] for of in share] for share in plan]

    def _critic_pass(self, critic: Trainable, micro: Microbatch, *, train: bool) -> CriticSums:
        with torch.set_grad_enabled(train):
            values, _ = values_of(critic, micro.token_ids, micro.position_ids)
            loss, sums = self.objective.value_loss(micro, values)
        if train:
            critic.backward(loss)
        return sums

    def _refresh(self, version: int) -> None:
        """Move the reference towards the policy, where the version is one for it. Collective."""
        kl = self.config.kl
        if kl is None or kl.refresh_every is None or version % kl.refresh_every:
            return
        assert self._reference is not None
        self._reference.refresh(self._engine.weights(), kl.refresh_mix)
