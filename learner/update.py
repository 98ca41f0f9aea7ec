"""One batch through a train engine: groups in, optimizer steps, statistics out.

    batch ─▶ scored by the proximal and reference policies and the critic, where asked for
      └─▶ advantages ─▶ epoch ─▶ minibatch ─▶ rows of this rank: forward, backward ─▶ one step

Every rank is given the whole batch and trains its rows of it; `work_plan` says which. The loop
around it, versions and publishing are `learner.learner`; what is minimised is
`learner.objective.objective`.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from learner.batch.batch import MicroBatch, Sequences, TrainBatch, read_batch, split_groups
from learner.batch.row_plan import Rows, plan_rows, slowest, workloads
from learner.config.learner import LearnerConfig
from learner.diagnostics.batch_report import Work, statistics
from learner.diagnostics.off_policy import measure, origins
from learner.engine.protocol import TrainEngine, ValueEngine
from learner.model.reference import Reference
from learner.objective.objective import Objective
from queues.records import RolloutGroup


class Updater:
    """Trains batches; keeps nothing between them but what the objective carries."""

    def __init__(
        self,
        engine: TrainEngine,
        config: LearnerConfig,
        *,
        critic: ValueEngine | None = None,
        reference: Reference | None = None,
    ) -> None:
        """Tries the objective out, so that a wrong setting is found before anything is generated.

        Raises:
            InputError: See `check_objective`.
        """
        self.objective = Objective(config)
        self._engine = engine
        self._critic = critic
        self._reference = reference
        self._config = config

    def update(self, groups: Sequence[RolloutGroup], version: int) -> dict[str, Any]:
        """Takes the optimizer steps of a batch. Collective: every rank is given the same batch.

        Args:
            groups: The batch.
            version: The version being trained; the steps produce `version + 1`.

        Returns:
            Statistics over all ranks, JSON-serialisable; `statistics` lists them. With a limit of
            lag also `tokens_too_old`: sampled tokens that are left out for it.

        Raises:
            LearnerError: The batch cannot be trained.
            TrainingDiverged: The loss or the gradient is not finite, on any rank.
        """
        config, limit = self._config, self._config.max_token_lag
        batch = read_batch(
            groups,
            mask_truncated=config.mask_truncated,
            oldest_version=None if limit is None else version - limit,
            process_rewards=config.process_rewards,
        )
        batch = _with_origins(self.objective.weighed(self._scored(batch)), version)
        trains_policy = config.critic is None or version >= config.critic.pretrain_batches
        sums = _Sums()
        packed: Counter[str] = Counter()
        norms: list[float] = []
        critic_norms: list[float] = []
        busiest, total, minibatches = 0, 0, 0
        for epoch in range(config.epochs):
            for part in split_groups(
                batch.groups, config.minibatches, version=version, epoch=epoch
            ):
                minibatch = batch.minibatch(
                    part, aggregation=config.aggregation, fixed_length=config.fixed_length
                )
                plan = self._plan(minibatch, minibatch.trainable)
                busiest += slowest(minibatch.lengths, plan, at_rows=config.zero_stage >= 2)
                total += sum(workloads(minibatch.lengths, plan))
                positive = self.objective.positive(minibatch)
                rows = plan[self._engine.rank]
                packed.update(self._packed(minibatch, rows))
                compared = []
                for micro in minibatch.rows(rows, self._engine.device):
                    of_row, tokens = self._policy_row(micro, version, positive, train=trains_policy)
                    compared.append(tokens)
                    sums.add(of_row)
                    sums.add(self._critic_row(micro))
                sums.add(measure(*map(torch.cat, zip(*compared, strict=True))))
                minibatches += 1
                if trains_policy:
                    norms.append(self._engine.step())
                if self._critic is not None:
                    critic_norms.append(self._critic.step())
        work = Work(
            sums=self._over_ranks({**sums.numbers(), **packed}),
            epochs=config.epochs,
            minibatches=minibatches,
            grad_norms=norms,
            critic_grad_norms=critic_norms,
            imbalance=busiest * self._engine.ranks / total if total else 1.0,
        )
        figures = statistics(batch, work, version)
        figures |= self._coefficients()
        if limit is not None:
            lags = version - batch.tokens.versions[batch.sampled]
            figures["tokens_too_old"] = int((lags > limit).sum())
        if trains_policy:
            self.objective.adapt(
                kl=figures.get("reference_kl"),
                entropy=figures["entropy_mean"],
                rollouts=len(batch.lengths),
            )
        self._refresh(version + 1)
        return figures

    def _scored(self, batch: TrainBatch) -> TrainBatch:
        """The batch with what models say of it before its first step, from all ranks."""
        columns: dict[str, Tensor] = {}
        shared = self._critic is None and self._config.critic is not None
        if self._config.uses_proximal or shared:
            logprobs, *values = self._score(batch, self._of_policy, outputs=1 + shared)
            columns |= {"proximal_logprobs": logprobs} if self._config.uses_proximal else {}
            columns |= {"values": values[0]} if shared else {}
        if self._reference is not None:
            [columns["reference_logprobs"]] = self._score(batch, self._reference.logprobs)
        if self._critic is not None:
            [columns["values"]] = self._score(batch, self._of_critic)
        return batch.with_columns(**columns) if columns else batch

    def _of_policy(self, token_ids: Tensor, position_ids: Tensor, wanted: Tensor) -> Tensor:
        """Log-probabilities, and values where the policy has a head for them; [N] or [2, N]."""
        out = self._engine.forward(token_ids, position_ids, wanted)
        return out.logprobs if out.values is None else torch.stack([out.logprobs, out.values])

    def _of_critic(self, token_ids: Tensor, position_ids: Tensor, _wanted: Tensor) -> Tensor:
        assert self._critic is not None
        return self._critic.values(token_ids, position_ids)

    @torch.no_grad()
    def _score(
        self,
        batch: TrainBatch,
        model: Callable[[Tensor, Tensor, Tensor], Tensor],
        *,
        outputs: int = 1,
    ) -> Tensor:
        """[outputs, N] float32 of one model, at least of tokens that were sampled; else 0.

        Each rank computes its rows.
        """
        rollouts = batch.generated if self.objective.credits_tokens else batch.trainable
        rows = self._plan(batch, rollouts)[self._engine.rank]
        device = self._engine.device
        scores = torch.zeros(outputs, len(batch.tokens.token_ids), device=device)
        for row, micro in zip(rows, batch.rows(rows, device), strict=True):
            said = model(micro.token_ids, micro.position_ids, micro.mask | (micro.versions >= 0))
            if row:
                scores[:, batch.positions(row)] = said.float()
        return self._engine.sum_over_ranks(scores).cpu()

    def _plan(self, batch: Sequences, rollouts: Sequence[int]) -> list[Rows]:
        """Rows of some rollouts, whole groups in one row where the loss needs them."""
        units = [[i] for i in rollouts]
        if self.objective.unit == "group":
            units = batch.by_group(rollouts)
        lengths = [sum(batch.lengths[i] for i in unit) for unit in units]
        plan = plan_rows(lengths, self._engine.ranks, self._config.microbatch_tokens)
        return [[[i for u in row for i in units[u]] for row in rows] for rows in plan]

    def _packed(self, batch: Sequences, rows: Rows) -> dict[str, int]:
        """How full rows are; a dummy takes no place."""
        tokens = [sum(batch.lengths[i] for i in row) for row in rows]
        room = sum(max(self._config.microbatch_tokens, each) for each in tokens if each)
        return {"rows": len(rows), "row_tokens": sum(tokens), "row_room": room}

    def _over_ranks(self, sums: Mapping[str, float]) -> dict[str, float]:
        names = sorted(sums)
        values = torch.tensor([sums[name] for name in names], dtype=torch.float64)
        total = self._engine.sum_over_ranks(values).tolist()
        return dict(zip(names, total, strict=True))

    def _policy_row(
        self, micro: MicroBatch, version: int, positive: int, *, train: bool
    ) -> tuple[dict[str, Tensor], tuple[Tensor, ...]]:
        """Forward and backward of one row; what `Objective.loss` gives beside the loss."""
        with torch.set_grad_enabled(train):
            out = self._engine.forward(micro.token_ids, micro.position_ids, micro.mask)
            loss, sums, compared = self.objective.loss(
                micro, out, version=version, positive_tokens=positive
            )
        if train:
            self._engine.backward(loss)
        return sums, compared

    def _critic_row(self, micro: MicroBatch) -> dict[str, Tensor]:
        if self._critic is None:
            return {}
        values = self._critic.values(micro.token_ids, micro.position_ids)
        loss, sums = self.objective.value_loss(micro, values)
        self._critic.backward(loss)
        return sums

    def _coefficients(self) -> dict[str, float]:
        """Coefficients that a batch was trained with."""
        config = self._config
        kl = {"kl_coefficient": self.objective.kl_coefficient} if config.kl else {}
        entropy = {"entropy_coefficient": self.objective.entropy_coefficient}
        return kl | (entropy if config.entropy else {})

    def _refresh(self, version: int) -> None:
        """Moves the reference towards the policy, where the version is one for it. Collective."""
        kl = self._config.kl
        if kl is None or kl.refresh_every is None or version % kl.refresh_every:
            return
        assert self._reference is not None
        self._reference.refresh(self._engine.weights(), kl.refresh_mix)


def _with_origins(batch: TrainBatch, version: int) -> TrainBatch:
    tokens = batch.tokens
    found = origins(tokens.versions, tokens.mask, tokens.sequence_ids, version=version)
    return batch.with_columns(origins=found)


class _Sums:
    """Sums over rows, which stay on the device until they are asked for."""

    def __init__(self) -> None:
        self._totals: dict[tuple[tuple[str, torch.Size], ...], Tensor] = {}

    def add(self, row: Mapping[str, Tensor]) -> None:
        """Adds sums over one row or more, scalars and vectors."""
        if not row:
            return
        names = tuple((name, value.shape) for name, value in row.items())
        values = torch.cat([value.detach().double().reshape(-1) for value in row.values()])
        known = self._totals.get(names)
        self._totals[names] = values if known is None else known.add_(values)

    def numbers(self) -> dict[str, float]:
        """Scalars by name, and vectors as `name/0`, `name/1`, …; one transfer from the device."""
        found: defaultdict[str, float] = defaultdict(float)
        for names, total in self._totals.items():
            for label, value in zip(_labels(names), total.tolist(), strict=True):
                found[label] += value
        return found


def _labels(names: Sequence[tuple[str, torch.Size]]) -> Iterator[str]:
    for name, shape in names:
        yield from (f"{name}/{index}" for index in range(shape.numel())) if shape else (name,)
