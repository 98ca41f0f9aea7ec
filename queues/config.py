"""Section `[queues]` of a recipe. Imports neither pyarrow nor Ray: `headway validate` loads it."""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from queues.policy.admission import OnOverdue


class QueuesConfig(BaseModel):
    """How far actors may run ahead, how groups are redelivered, and how durable results are."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )

    max_staleness: int = Field(default=2, ge=0)
    """η: the largest lag, in policy versions, of a token that is trained. 0 is synchronous
    training. It is also the back-pressure: at most (η + 1) · groups_per_batch groups are live."""
    window: int | None = Field(default=None, ge=1)
    """Groups that may be live at once: leased, ready or being trained; never more than the above.
    A window that is full of ready results makes every group wait until its deadline, and the
    learner wait for those that take long. None: one batch in training, one in the making or what
    all engines hold at once, and a quarter of a batch."""
    on_overdue: OnOverdue = "wait"
    """What the learner does about a straggler that is due. `wait`: it waits, so that nothing is
    discarded and no token exceeds `max_staleness`. The others train without it. `drop`: it is
    aborted and its prompt issued anew, which favours short answers. `mask`: it is trained when it
    is ready, less the tokens that exceed `max_staleness`. `train`: it is trained whole when it is
    ready, beyond `max_staleness`."""
    ess_target: float | None = Field(default=None, gt=0, lt=1)
    """Effective sample size, as a fraction of a batch's tokens, that is held: while it is less, new
    groups get an earlier deadline, down to synchronous training, and while it is more a later one,
    up to `max_staleness`. None: the deadline is always `max_staleness`."""
    ess_batches: int = Field(default=4, ge=1)
    """With ess_target: batches that each decision is made of, since one batch's is noisy."""
    filter_tied: bool = False
    """Dynamic sampling: drop a group whose rollouts all earned the same task reward, since it holds
    no signal, and generate another in its place."""
    max_filtered_batches: int = Field(default=10, ge=1)
    """With filter_tied: groups that may be dropped for one batch, in batches. After that many tied
    groups are trained, on nothing, rather than the batch is waited for without end."""
    allow_uncorrected: bool = False
    """Allow max_staleness > 0 with a loss that corrects for neither staleness nor the engine."""
    lease_seconds: float = Field(default=60.0, gt=0)
    """A lease without a heartbeat for this long is void, and its group is redelivered."""
    heartbeat_seconds: float = Field(default=5.0, gt=0)
    """How often a worker renews its leases."""
    patience_seconds: float = Field(default=0.25, ge=0)
    """How long an engine that serves an older version than the learner's is given no training
    groups after a batch: one that takes the new version meanwhile starts them a version later, and
    so with a later deadline. Longer than a weight update, shorter than a step."""
    max_attempts: int = Field(default=3, ge=1)
    """Attempts of a group that may fail, a lost lease included, before it counts as failed and its
    prompt is set aside: later epochs of the source skip it. An engine or reward models that died
    are not held against it."""
    retry_seconds: float = Field(default=1.0, ge=0, le=3600)
    """How long a group whose attempt failed waits for its next lease; doubled with every further
    failure, up to 32 times this. Others are leased meanwhile. Again without a wait: attempts whose
    engine or reward models died, and evaluations, which one version is to answer."""
    queued_batches: int = Field(default=2, ge=1)
    """Batches of prompts kept waiting for their first lease."""
    synchronous: Literal["full", "normal"] = "full"
    """Durability of the ledger: `full` survives the loss of power, `normal` only that of
    processes."""
    commit_interval_seconds: float = Field(default=0.001, ge=0, le=0.1)
    """How long a commit waits for other changes to join it."""
    segment_bytes: int = Field(default=256 * 2**20, ge=1)
    """A journal segment that has reached this size is closed and the next one begun."""
    keep_rollouts: Literal["all", "needed"] = "all"
    """Which rollouts the journal keeps: all of them, for `headway replay` and `inspect --parquet`,
    at 13 bytes a token; or only segments that a rollback to a checkpoint could need."""

    @model_validator(mode="after")
    def _leases_outlive_heartbeats(self) -> Self:
        if self.lease_seconds < 2 * self.heartbeat_seconds:
            raise ValueError(
                f"lease_seconds = {self.lease_seconds:g} must be at least twice heartbeat_seconds"
                f" = {self.heartbeat_seconds:g}: one late heartbeat would void leases of live"
                " workers, and their groups would be generated again and again"
            )
        return self
