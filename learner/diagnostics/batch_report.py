"""Records of a trained batch: its figures, its times, and their form as JSON. Imports no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from statistics import fmean
from typing import Any, Self

ORIGINS = ("fresh", "crossed", "stale")
"""Kinds of rollouts by the policy versions that sampled them; see `off_policy.Origin`."""


def _values(record: type, row: Mapping[str, Any], *, suffix: str = "") -> dict[str, Any]:
    """Return the values of a dataclass's fields in a record of JSON; None where it lacks one."""
    return {item.name: row.get(item.name + suffix) for item in fields(record)}


@dataclass(frozen=True, kw_only=True)
class OriginFigures:
    """Distance of the rollouts of one origin from the policy that is trained."""

    mismatch: float | None
    """Mean |log ratio| of current / behaviour policy over tokens."""
    kl: float | None
    """KL(behaviour ‖ current) in nats a token, by k3."""
    tokens: int
    """Tokens that were trained."""


@dataclass(frozen=True, kw_only=True)
class EngineFigures:
    """Distance of one engine's sampling from the policy that is trained, and from other engines'.

    See `engine_comparison`.
    """

    mismatch_fresh: float | None
    """Mean |log ratio| of current / behaviour policy over its fresh tokens; None without any."""
    tokens_fresh: int
    """Sampled tokens of fresh rollouts that were trained."""
    rank_score: float | None
    """Standardised rank sum of its mismatches among those of all engines: mean 0 and standard
    deviation 1 if it is like the others, positive if it is worse. None with nothing to compare."""
    mismatch_ratio: float | None
    """Its mismatch over that of the others; geometric means over groups."""


@dataclass(frozen=True, kw_only=True)
class OffPolicyFigures:
    """Distance of a batch from the policy that is trained; None where there is nothing to measure.

    Everything is over trained tokens, and rollouts count by theirs. ρ is current / behaviour policy
    over tokens; of the proximal instead of the current policy where it is computed.
    """

    ess: float | None
    """Effective sample size of tokens, as a fraction of their number."""
    ess_sequence: float | None
    """Effective sample size of whole rollouts, by the product of the ratios of their tokens."""
    sequence_clamped: float | None
    """Fraction of rollouts whose product was bounded for it."""
    ratio_mean: float | None
    """1 in expectation."""
    ratio_min: float | None
    """Lower edge of the lowest bin of a histogram of log ρ."""
    ratio_p1: float | None
    ratio_p99: float | None
    ratio_max: float | None
    """Upper edge of the highest bin."""
    chi2: float | None
    """Mean ρ² − 1, the χ²-divergence."""
    mismatch: float | None
    """Mean |log ρ|."""
    kl: float | None
    """KL(behaviour ‖ current) in nats a token, by k3."""
    origins: Mapping[str, OriginFigures]
    """By each of `ORIGINS`; in JSON `<figure>_<origin>`."""


@dataclass(frozen=True, kw_only=True)
class CriticFigures:
    """Figures of the critic on a batch."""

    value_loss: float
    """Mean over minibatches."""
    explained_variance: float | None
    """See `learner.losses.value_loss.explained_variance`."""
    value_mean: float | None
    return_mean: float | None
    critic_grad_norm: float | None
    """Mean over the steps of an optimizer of its own, before clipping."""


@dataclass(frozen=True, kw_only=True)
class GoldFigures:
    """The rewards of groups that have a gold reward, and what their completions look like."""

    groups: Sequence[tuple[float, float]]
    """Mean task reward and mean gold reward of each group, over the rollouts that have both."""
    agreement: Sequence[float] = ()
    """Correlation of the two in each group where both differ."""
    length: float
    """Mean of the sampled tokens of a rollout."""
    finished: float
    """Share of rollouts that were not cut off at a limit: their format is whole."""
    distinct: float
    """Diversity: different pairs of neighbouring sampled tokens in a group, as a share of all; mean
    over groups (distinct-2, Li et al. 2016, arXiv 1510.03055)."""

    @property
    def means(self) -> dict[str, float]:
        """The means `reward` and `gold` of the groups, and the other figures, by name."""
        reward, gold = map(fmean, zip(*self.groups, strict=True))
        others = {"length": self.length, "finished": self.finished, "distinct": self.distinct}
        return {"reward": reward, "gold": gold, **others}


@dataclass(frozen=True, kw_only=True)
class BatchReport(OffPolicyFigures):
    """Figures of training one batch, over all ranks; None where there was nothing to measure.

    A figure with a default is absent from JSON where it has none.
    """

    loss: float
    """With penalties; a mean over the minibatches that had a token to train, as `policy_loss` is,
    and 0 where none had."""
    policy_loss: float
    """Without penalties."""
    reward_mean: float | None
    """Whole rewards, with what turns earned, over all rollouts whose reward is finite."""
    reward_std: float | None
    """Over the same."""
    groups: float
    """Groups of the batch."""
    tied_groups: float
    """Groups whose rollouts all earned the same task reward: without shaping, with what turns
    earned."""
    unscored: float
    """Rollouts whose reward, or what else the advantage needs of it, is not finite."""
    truncated_rollouts: int
    """Cut off at their limit of tokens or turns."""
    dropped_rollouts: int
    """Left out of every minibatch."""
    tokens_trained: int
    """Sampled tokens in the loss: neither masked out nor dropped."""
    rollouts_trained: int
    """Rollouts with such a token."""
    multi_version_rollouts: int
    """Rollouts that several policy versions sampled, trained or not."""
    response_length_mean: float | None
    """Sampled tokens of a rollout, over all rollouts of the batch, trained or not."""
    entropy_mean: float | None
    """Nats a token, over trained tokens."""
    max_lag: int | None
    """Versions, over trained tokens."""
    lag_mean: float | None
    """Versions, over trained tokens."""
    lag_histogram: Mapping[int, int]
    """Lag → trained tokens."""
    group_lag_histogram: Mapping[int, int]
    """Lag of the oldest trained token → groups."""
    fractions: Mapping[str, float | None]
    """Fractions of trained tokens that a loss or correction clipped, capped or rejected; of
    masked-in tokens those whose log-probabilities are not finite."""
    microbatches: int
    """Microbatches of all ranks and steps."""
    pack_efficiency: float | None
    """Tokens over the capacity of the microbatches."""
    rank_imbalance: float
    """Workload of the busiest rank over the mean. Ranks wait for each other at every step; with
    ZeRO 2 and 3 at every microbatch, and then it is that of the busiest rank at each, added up."""
    optimizer_steps: int
    grad_norm: float | None
    """Mean over the optimizer steps, before clipping."""
    reference_kl: float | None = None
    """Nats a token, to the reference policy, over trained tokens."""
    teacher_divergence: Mapping[str, float | None] | None = None
    """Nats a token from each teacher, by its path, over the trained tokens that it teaches."""
    learning_rate: float | None = None
    """Rate of the batch's last optimizer step; None where the policy was not trained."""
    reward_parts: Mapping[str, float | None] | None = None
    """Mean of each part of the reward, unweighted, over the rollouts that have it."""
    critic: CriticFigures | None = None
    kl_coefficient: float | None = None
    entropy_coefficient: float | None = None
    lost_to_rounding: float | None = None
    """Share of an adapter's changes that is lost where they are merged into bfloat16 weights, by
    `learner.model.lora.lost_to_rounding`."""
    tokens_too_old: int | None = None
    """Sampled tokens left out for their lag, where there is a limit."""
    tokens_left_out: Mapping[str, int] | None = None
    """Sampled tokens that rollouts do not hold, by reason; None where there are none."""
    engines: Mapping[str, EngineFigures] | None = None
    """By name of the engine; None where nothing was measured."""
    gold: GoldFigures | None = None
    """None where no group has a gold reward."""
    versions_skipped: int | None = None
    """Versions never sent to engines, since a newer one overtook them."""

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values by its keys in `metrics.jsonl`."""
        row = {
            item.name: value
            for item in fields(self)
            if (value := getattr(self, item.name)) is not None or item.name in _ALWAYS
        }
        row |= vars(row.pop("critic")) if self.critic is not None else {}
        for origin, figures in row.pop("origins").items():
            row |= {f"{name}_{origin}": value for name, value in vars(figures).items()}
        if self.engines is not None:
            row["engines"] = {name: dict(vars(figures)) for name, figures in self.engines.items()}
        if self.gold is not None:
            row["gold"] = dict(vars(self.gold))
        for name in _HISTOGRAMS:
            row[name] = {str(lag): count for lag, count in row[name].items()}
        return row

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Self:
        """Read a report from a record of JSON; a key that it lacks reads as None."""
        values = _values(cls, row)
        values["origins"] = {
            origin: OriginFigures(**_values(OriginFigures, row, suffix=f"_{origin}"))
            for origin in ORIGINS
        }
        values["fractions"] = row.get("fractions", {})
        if "engines" in row:
            values["engines"] = {
                name: EngineFigures(**figures) for name, figures in row["engines"].items()
            }
        if "gold" in row:
            values["gold"] = GoldFigures(**row["gold"])
        if "value_loss" in row:
            values["critic"] = CriticFigures(**_values(CriticFigures, row))
        for name in _HISTOGRAMS:
            values[name] = {int(lag): count for lag, count in row.get(name, {}).items()}
        return cls(**values)


_HISTOGRAMS = ("lag_histogram", "group_lag_histogram")
_ALWAYS = {item.name for item in fields(BatchReport) if item.default is MISSING}


@dataclass(frozen=True, kw_only=True)
class BatchTimes:
    """Times of the learner's work on a batch, in seconds since the epoch."""

    session_started_at: float
    """Start of the learner's loop; the same for all batches of a session."""
    wait_started_at: float
    wait_finished_at: float
    step_started_at: float
    step_finished_at: float
    published_at: float

    @property
    def wait_seconds(self) -> float:
        """Seconds that the learner waited for the batch."""
        return self.wait_finished_at - self.wait_started_at

    @property
    def step_seconds(self) -> float:
        """Seconds that it trained."""
        return self.step_finished_at - self.step_started_at

    @property
    def publish_seconds(self) -> float:
        """Seconds until the weights were handed over."""
        return self.published_at - self.step_finished_at


@dataclass(frozen=True, kw_only=True)
class TrainedBatch:
    """A trained batch as it is acknowledged, and recorded in `metrics.jsonl`."""

    version: int
    """The policy version that it was trained at."""
    report: BatchReport
    times: BatchTimes
    weights_checksum: str
    """Checksum of the weights that it produced."""
    totals: Mapping[str, int]
    """`rollouts` and `tokens` trained by the run so far."""
    flow: Mapping[str, Any] = field(default_factory=dict)
    """Figures that the broker adds: groups filtered, overdue, the staleness window."""

    def to_dict(self) -> dict[str, Any]:
        """Return the batch as a flat record of JSON values."""
        return {
            "version": self.version,
            **self.report.to_dict(),
            **vars(self.times),
            "weights_checksum": self.weights_checksum,
            "totals": dict(self.totals),
            **self.flow,
        }

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Self:
        """Read a batch from a flat record of JSON; a figure that it lacks reads as None.

        Keys that are not the learner's go to `flow`.
        """
        batch = cls(
            version=row["version"],
            report=BatchReport.from_dict(row),
            times=BatchTimes(**_values(BatchTimes, row)),
            weights_checksum=row["weights_checksum"],
            totals=row.get("totals", {}),
        )
        known = batch.to_dict()
        return replace(batch, flow={key: value for key, value in row.items() if key not in known})
