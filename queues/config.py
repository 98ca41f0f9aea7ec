"""Section `[queues]` of a recipe, and what else the broker is given of a run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from headway.errors import InputError
from headway.recipe_section import MAY_CHANGE, ResumeRule, Section
from queues.policy.admission import Bounds, OnOverdue
from queues.policy.auto_staleness import AutoStaleness
from queues.policy.curriculum import CurriculumConfig
from queues.policy.staleness_controller import StalenessController

ADMITTED = ResumeRule("results in its ledger were admitted by it")
ONLY_RAISED = ResumeRule(
    lowering_refusal="it can only be raised, since results in its ledger may lag so far"
)
DEFAULT_CEILING = 8
"""η with max_staleness = "auto"."""
DEFAULT_FLOOR = 0.9
"""Least ESS with "auto". In the study of staleness CISPO's runs have 0.90 at η = 8, and 0.78 at 16,
where some of their scores fall (benchmarks/results/staleness.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """Sizes and prompt rules of one run, which the broker needs beside `[queues]`."""

    groups_per_batch: int
    """B."""
    group_size: int
    """G, rollouts per group."""
    steps: int
    """Batches to train."""
    greedy_baseline: bool = False
    """Generate one greedy rollout beside every train group, as a baseline."""
    pass_rate_cap: float | None = None
    """Pass rate from which a prompt is not issued again (`queues.policy.prompt_retirement`); None
    is no cap."""
    pass_threshold: float = 1.0
    """Task reward from which a rollout passes."""
    curriculum: CurriculumConfig | None = None
    """Weights of prompts by their pass rates; None issues every prompt."""
    seed: int = 0
    """Seed of the curriculum's decisions."""
    backup: Path | None = None
    """Folder of a copy of ledger and journal (`queues.storage.backup`); None makes none."""
    backup_seconds: float = 5.0
    """Time within which everything is in it."""

    def __post_init__(self) -> None:
        """Refuse empty groups; `Bounds` checks batches and steps."""
        if self.group_size < 1:
            raise InputError(f"group_size = {self.group_size} must be at least 1")


class QueuesConfig(Section):
    """Section `[queues]`: bound of the actors' lead, redelivery, and durability of results."""

    on_resume = MAY_CHANGE

    max_staleness: Annotated[Annotated[int, Field(ge=0)] | Literal["auto"], ONLY_RAISED] = 2
    """η: the largest lag, in policy versions, of a trained token. 0 is synchronous training. It is
    also the back-pressure: at most (η + 1) · groups_per_batch groups are live. `"auto"`: η is
    `staleness_ceiling`, and the run looks for the smallest window of staleness within it that costs
    no throughput and keeps the effective sample size above `ess_target`."""
    staleness_ceiling: Annotated[int | None, ONLY_RAISED] = Field(default=None, ge=1)
    """With max_staleness = "auto": η, which no window exceeds; None: 8."""
    window: int | None = Field(default=None, ge=1)
    """Groups that may be live at once: leased, ready or being trained; at most the number above. A
    window that is full of ready results makes every group wait until its deadline, and the learner
    wait for long rollouts. None: one batch in training, one being generated or as much as all
    engines hold at once, and a quarter of a batch."""
    on_overdue: Annotated[OnOverdue, ADMITTED] = "wait"
    """Treatment of a group that is due and not ready. `wait`: the learner waits for it, so that
    nothing is discarded and no token exceeds `max_staleness`. Otherwise it trains without the
    group. `drop`: the group is aborted and its prompt issued anew, which favours short answers.
    `mask`: it is trained when it is ready, less the tokens that exceed `max_staleness`. `train`: it
    is trained whole when it is ready, beyond `max_staleness`."""
    ess_target: float | None = Field(default=None, gt=0, lt=1)
    """Set point of the effective sample size, as a fraction of a batch's tokens. Below it, new
    groups get an earlier deadline, down to synchronous training; above it a later deadline, up to
    `max_staleness`. None: the deadline is always `max_staleness`. With max_staleness = "auto" it is
    a floor, below which the window is narrowed whatever that costs; None: 0.9."""
    ess_batches: int = Field(default=4, ge=1)
    """With ess_target: batches for each decision, since the figure of one batch is noisy. With
    max_staleness = "auto" the fewest; a decision takes w + 1 in a window w that is wider, and once
    w was narrowed twice the fewest."""
    filter_tied: Annotated[bool, ADMITTED] = False
    """Dynamic sampling: drop a group whose rollouts all earned the same task reward, since it holds
    no signal, and generate another in its place. Only for advantages that compare the rollouts of a
    group alone, as learner.drop_tied."""
    max_filtered_batches: Annotated[int, ADMITTED] = Field(default=10, ge=1)
    """With filter_tied: largest number of groups dropped for one batch, in batches. Further tied
    groups are trained, without effect, so that the batch does not wait for ever."""
    allow_uncorrected: bool = False
    """Allow max_staleness > 0 with a loss that corrects for neither staleness nor the engine."""
    lease_seconds: float = Field(default=60.0, gt=0)
    """A lease without a heartbeat for this long is void, and its group is redelivered."""
    heartbeat_seconds: float = Field(default=5.0, gt=0)
    """Interval in which a worker renews its leases."""
    patience_seconds: float = Field(default=0.25, ge=0)
    """Time after a batch in which an engine that serves an older version than the learner's gets no
    training groups: once it has the new version it starts them a version later, and so with a later
    deadline. Should be longer than a weight update and shorter than a step."""
    max_attempts: int = Field(default=3, ge=1)
    """Failed attempts, lost leases included, after which a group counts as failed and later epochs
    of the source skip its prompt. Attempts whose engine or reward models died do not count."""
    retry_seconds: float = Field(default=1.0, ge=0, le=3600)
    """Wait of a group whose attempt failed for its next lease; doubled with every further failure,
    up to 32 times this. Other groups are leased meanwhile. There is no wait after an attempt whose
    engine or reward models died, nor for evaluations, which one version is to answer."""
    queued_batches: int = Field(default=2, ge=1)
    """Batches of prompts kept waiting for their first lease."""
    synchronous: Literal["full", "normal"] = "full"
    """Durability of the ledger: `full` survives the loss of power, `normal` only that of
    processes."""
    commit_interval_seconds: float = Field(default=0.001, ge=0, le=0.1)
    """Time that a commit waits for other changes to join it."""
    segment_bytes: int = Field(default=256 * 2**20, ge=1)
    """A journal segment that has reached this size is closed and the next one begun."""
    keep_rollouts: Literal["all", "needed"] = "all"
    """Rollouts that the journal keeps: `all`, for `headway replay` and `inspect --parquet`, at 13
    bytes a token; or only the segments that a rollback to a checkpoint could need."""

    @property
    def bound(self) -> int:
        """η as a number: `max_staleness`, or the ceiling where that is "auto"."""
        ceiling = self.staleness_ceiling or DEFAULT_CEILING
        return ceiling if self.max_staleness == "auto" else self.max_staleness

    def controller(self) -> StalenessController | AutoStaleness | None:
        """Return the controller of the window of staleness; None where that is always η."""
        target, batches = self.ess_target, self.ess_batches
        if self.max_staleness == "auto":
            return AutoStaleness(floor=target or DEFAULT_FLOOR, most=self.bound, batches=batches)
        if target is None:
            return None
        return StalenessController(target=target, most=self.bound, batches=batches)

    def bounds(self, spec: RunSpec) -> Bounds:
        """Return the bounds of a run; InputError if no batch could be trained under them."""
        return Bounds(
            max_staleness=self.bound,
            groups_per_batch=spec.groups_per_batch,
            steps=spec.steps,
            most_live=self.window,
            on_overdue=self.on_overdue,
        )

    @model_validator(mode="after")
    def _ceiling_of_auto(self) -> Self:
        if self.staleness_ceiling is not None and self.max_staleness != "auto":
            raise ValueError(
                f"staleness_ceiling = {self.staleness_ceiling} is for max_staleness ="
                f' "auto", and max_staleness = {self.max_staleness} is the bound itself: leave the'
                ' ceiling out, or set max_staleness = "auto"'
            )
        return self

    @model_validator(mode="after")
    def _leases_outlive_heartbeats(self) -> Self:
        if self.lease_seconds < 2 * self.heartbeat_seconds:
            raise ValueError(
                f"lease_seconds = {self.lease_seconds:g} must be at least twice heartbeat_seconds"
                f" = {self.heartbeat_seconds:g}: one late heartbeat would void leases of live"
                " workers, and their groups would be generated again and again"
            )
        return self
