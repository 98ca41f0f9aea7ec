"""The state of a run in memory, and every decision about it, without disk or event loop.

The methods that answer a call of `queues.protocols` raise the errors documented there.
"""

from bisect import insort
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from queues.config import QueuesConfig, RunSpec
from queues.errors import ProtocolError, QueueClosed
from queues.policy.admission import Bounds, Choice, choose_batch, fits, leases_allowed
from queues.policy.auto_staleness import AutoStaleness, use_of_deadlines
from queues.policy.curriculum import Curriculum
from queues.policy.dynamic_sampling import TieFilter, Verdict
from queues.policy.prompt_retirement import Retirement
from queues.policy.staleness_controller import StalenessController
from queues.records import BatchRecord, Lease, Prompt, Purpose, PutStatus, Summary, rollouts_at_once
from queues.state import groups as reasons
from queues.state.groups import Acceptance, EvaluationRun, Group, Groups, State
from queues.state.prompt_queue import PromptQueue

BATCHES_KEPT = 100
TOKENS_KEPT = 100
MOST_DOUBLINGS = 5
"""Failures after which `retry_seconds` is not doubled any more."""


@dataclass(slots=True, kw_only=True)
class BrokerState:
    """The groups, engines and evaluations of a run, and the learner's version."""

    config: QueuesConfig
    spec: RunSpec
    bounds: Bounds = field(init=False)
    controller: StalenessController | AutoStaleness | None = field(init=False, default=None)
    """Chooses the window of staleness; None keeps it at its widest."""
    window_moves: Counter[str] = field(default_factory=Counter)
    """Moves of the window since the broker began, by the first word of their reason."""
    use_of_window: dict[str, float] = field(default_factory=dict)
    """Figures of the batch that is to be acknowledged next, which an `AutoStaleness` reads; those
    of a batch that is taken when the broker ends are lost."""
    has_waited: bool = False
    """True if the learner has waited for a due group since the last batch that it took."""
    tie_filter: TieFilter = field(init=False)
    retirement: Retirement = field(init=False)
    curriculum: Curriculum | None = field(init=False, default=None)
    groups: Groups = field(default_factory=Groups)
    prompts: PromptQueue = field(init=False)
    results: list[Group] = field(default_factory=list)
    """The results queue: ready groups, earliest deadline first, then in the order of issue. So a
    batch does not depend on which worker was faster, nor on a restart of the broker."""
    evaluations: dict[str, EvaluationRun] = field(default_factory=dict)
    engines: dict[str, int] = field(default_factory=dict)
    """Version that each engine serves."""
    version: int = 0
    """The learner's version."""
    learner: tuple[int, int] = (0, -1)
    """Epoch of the learner, and the batch that it asked for last, be it one trained before."""
    taken: list[Group] = field(default_factory=list)
    """The batch being trained."""
    batches: deque[BatchRecord] = field(default_factory=lambda: deque(maxlen=BATCHES_KEPT))
    accepted: int = 0
    """Results, evaluations included, over the whole run."""
    late: int = 0
    """Groups that were taken after their deadline, over the whole run."""
    next_number: int = 1
    cursor: str | None = None
    """Position from which the source of prompts continues."""
    issue_tokens: deque[str] = field(default_factory=lambda: deque(maxlen=TOKENS_KEPT))
    """Tokens of the last calls of `issue`, which are not repeated."""
    ended: bool = False
    """True if the source has no more prompts."""
    patience_ends: float = 0.0
    """Monotonic seconds until which engines that lag get no training groups."""
    given_back: Counter[str] = field(default_factory=Counter)
    """Leases that ended without a result since the broker began, by reason."""
    answers: Counter[PutStatus] = field(default_factory=Counter)
    """Answers to results since then."""
    diverged: int = 0
    """Batches since then that were trained again and gave other weights than before."""
    last_error: str | None = None

    def __post_init__(self) -> None:
        config, spec = self.config, self.spec
        self.bounds = config.bounds(spec)
        self.prompts = PromptQueue(self.evaluations)
        self.controller = config.controller()
        most_filtered = config.max_filtered_batches * spec.groups_per_batch
        self.tie_filter = TieFilter(limit=most_filtered if config.filter_tied else None)
        self.retirement = Retirement(cap=spec.pass_rate_cap, threshold=spec.pass_threshold)
        if spec.curriculum is not None:
            self.curriculum = Curriculum(spec.curriculum, seed=spec.seed)

    @property
    def training_over(self) -> bool:
        """True once no further batch can come."""
        exhausted = self.ended and not self.prompts and not self.groups.live
        return self.version >= self.bounds.steps or exhausted

    @property
    def over(self) -> bool:
        """True once nothing is left to generate, evaluations included."""
        return self.training_over and all(run.finished for run in self.evaluations.values())

    @property
    def staleness(self) -> int:
        """The window of staleness w: new groups are due so many versions after their start."""
        controller = self.controller
        return self.bounds.max_staleness if controller is None else controller.state.window

    @property
    def lease_bounds(self) -> Bounds:
        """The bounds of new leases, within the window of staleness."""
        return self.bounds.within(self.staleness)

    def issue(self, prompts: Sequence[Prompt], run: EvaluationRun | None = None) -> list[Group]:
        """Queue a group for each prompt, for training or a new evaluation."""
        if run is not None:
            self.evaluations[run.name] = run
        name = None if run is None else run.name
        groups = [self._new_group(prompt, name) for prompt in prompts]
        for group in groups:
            self.prompts.append(group)
        return groups

    def wanted(self) -> int | None:
        """Return how many prompts to issue now; None while the prompt queue is long enough."""
        if self.training_over or self.ended:
            raise QueueClosed("prompts_wanted: no more prompts will be wanted")
        size = self.bounds.groups_per_batch
        length = self.config.queued_batches * size
        trainable = (self.bounds.steps - self.version) * size - self.groups.live - len(self.prompts)
        wanted = min(length - self.prompts.available, trainable)
        # Half a queue at a time, and not one prompt for each lease: every issue is a commit.
        return wanted if wanted > 0 and wanted >= min((length + 1) // 2, trainable) else None

    def serving(self, engine_id: str, version: int) -> None:
        """Record the version that an engine serves from now on."""
        known = self.engines.get(engine_id, 0)
        if version < known:
            raise ProtocolError(
                f"serving: engine {engine_id!r} reports version {version} after {known}, but"
                " versions never go backwards"
            )
        self.engines[engine_id] = version

    def lease(
        self, engine_id: str, capacity: int, *, now: float, expires: float,
        purpose: Purpose | None = None,
    ) -> list[Lease]:  # fmt: skip
        """Lease what this engine may generate now: evaluations first, then training.

        The leased groups have at most `capacity` rollouts together, baselines included. An engine
        that lags gets no train groups while there is patience: it waits for its weights.
        """
        if self.over:
            raise QueueClosed("lease: the run is over")
        version = self.engines.get(engine_id)
        if version is None:
            return []
        self.prompts.advance(now)
        groups: list[Group] = []
        if purpose is not Purpose.TRAIN:  # evaluation groups have 1 rollout each
            groups = self.prompts.pop_evaluations(capacity, version)
        lags = version < self.version and now < self.patience_ends
        if purpose is not Purpose.EVALUATE and not lags:
            groups += self._pop_train(capacity - len(groups), version)
        leases = []
        for index, group in enumerate(groups):
            self._drop_unfitting(group, version, others=len(groups) - 1 - index)
            leases.append(self._lease(group, engine_id, version, expires))
        return leases

    def accept(self, group: Group, result: Summary, *, now: float) -> Acceptance:
        """Accept the one result of a leased group: a train group becomes ready, or is filtered."""
        group.check(result, self.spec.group_size)
        self.accepted += 1
        if (run := self._evaluation(group)) is not None:
            self.groups.move(group, State.SCORED)
            run.ended += 1
            return Acceptance(State.SCORED)
        rewards = result.task_rewards
        retires = self.retirement.retire(result.prompt_id, rewards)
        passes = self.retirement.passes(rewards)
        if self.curriculum is not None:
            self.curriculum.measure(
                group.prompt, number=group.number, passes=passes, rollouts=len(rewards)
            )
        verdict = self.tie_filter.judge(rewards)
        if verdict is Verdict.DROPPED:
            self.groups.move(group, State.DROPPED, reason=reasons.FILTERED)
            return Acceptance(State.DROPPED, retires=retires, passes=passes)
        group.ready_at, group.ready_version = now, self.version
        self.groups.move(group, State.READY, due=group.due)
        self.add_result(group)
        let_through = verdict is Verdict.LET_THROUGH
        return Acceptance(State.READY, let_through=let_through, retires=retires, passes=passes)

    def add_result(self, group: Group) -> None:
        """Insert a ready group into the results queue."""
        assert group.due is not None, "a ready group has a deadline"
        insort(self.results, group, key=lambda ready: (ready.due, ready.number))

    def give_back(self, group: Group, reason: str, *, now: float) -> State:
        """End a lease without a result: the group is queued again, or failed for good.

        An attempt that `EXCUSED` explains does not count, and its group is first in the queue; so
        is an evaluation. After any other failure a train group waits, and after its last attempt
        its prompt is not issued again.
        """
        self.given_back[reason] += 1
        excused = reason in reasons.EXCUSED
        if not excused:
            group.failures += 1
            if group.failures > 1:  # the last attempt went on from them
                group.noted = None
        if group.failures >= self.config.max_attempts:
            self._fail(group, reason)
            if group.evaluation is None:
                self.retirement.add_failed(group.prompt.prompt_id)
            return State.FAILED
        self.groups.move(group, State.QUEUED)
        if excused or not self.config.retry_seconds or group.evaluation is not None:
            self.prompts.redeliver(group)
        else:
            doublings = min(group.failures - 1, MOST_DOUBLINGS)
            group.not_before = now + self.config.retry_seconds * 2**doublings
            self.prompts.defer(group, group.not_before)
        return State.QUEUED

    def fail_unreachable(self) -> list[Group]:
        """Once training is over, fail evaluation groups that want a version which never comes."""
        groups = self.prompts.pop_unreachable(self.version) if self.training_over else []
        for group in groups:
            self._fail(group, reasons.UNREACHABLE)
        return groups

    def begin_learner(self, epoch: int) -> None:
        """Go on with a learner that was made again; those before it are refused."""
        self.check_epoch(epoch)
        self.learner = epoch, -1

    def check_epoch(self, epoch: int) -> None:
        """Raise ProtocolError if the learner of this epoch was replaced."""
        if epoch < self.learner[0]:
            raise ProtocolError(
                f"a learner of epoch {epoch} calls, but that of epoch {self.learner[0]} goes on"
            )

    def take(self, version: int) -> list[str] | None:
        """Take the batch of `version`: its group ids, or None while the learner has to wait."""
        if self.training_over:
            raise QueueClosed(f"take: no batch {version} will come, {self.version} are trained")
        if version != self.version or self.taken:
            raise ProtocolError(f"take: batch {version}, but the learner is at {self.version}")
        choice = self.choose_batch()
        self.has_waited |= choice.waits_until_due is not None
        if not (count := choice.count):
            return None
        if isinstance(self.controller, AutoStaleness):
            ready = [(x.due or 0, x.ready_version, x.ready_at) for x in self.results]
            size = self.bounds.groups_per_batch
            self.use_of_window |= use_of_deadlines(
                ready, count, version=version, groups_per_batch=size, has_waited=self.has_waited
            )
        self.has_waited = False
        self.taken, self.results = self.results[:count], self.results[count:]
        for group in self.taken:
            self.groups.move(group, State.TAKEN, due=version)
            if group.overdue:
                self.late += 1
        self.tie_filter.next_batch()
        return [group.group_id for group in self.taken]

    def pass_over(self) -> list[tuple[Group, Group]]:
        """Settle the groups that were due with the last batch and not taken; call after every take.

        With `drop`, return them with the new groups of their prompts, which are first in the queue.
        """
        last = self.version if self.taken else self.version - 1
        if sum(n for due, n in self.groups.due.items() if due <= last) == len(self.taken):
            return []
        missed = self.groups.missed(last)
        if self.bounds.on_overdue in ("mask", "train"):
            for group in missed:
                self.groups.pass_over(group)
            return []
        reissues = [(group, self._new_group(group.prompt)) for group in missed]
        for dropped, new in reversed(reissues):
            if dropped.state is State.READY:
                self.results.remove(dropped)
            self.groups.move(dropped, State.DROPPED, reason=reasons.OVERDUE)
            new.failures = dropped.failures
            self.prompts.redeliver(new)
        return reissues

    def waits_for(self) -> list[Group]:
        """Return the leased groups that the learner has to wait for; empty if it need not wait."""
        if self.taken or self.training_over:
            return []
        until = self.choose_batch().waits_until_due
        if until is None:
            return []
        return [x for x in self.groups.leased() if x.due is not None and x.due <= until]

    def ack(self, record: BatchRecord, *, now: float) -> None:
        """Record that the taken batch is trained; patience with engines that lag begins."""
        if record.version != self.version or not self.taken:
            raise ProtocolError(f"ack: batch {record.version} is not taken, next is {self.version}")
        for group in self.taken:
            self.groups.move(group, State.TRAINED)
        self.taken = []
        self.version += 1
        self.patience_ends = now + self.config.patience_seconds
        before = self.staleness
        self.add_batch(record)
        if self.controller is not None and self.staleness != before:
            self.window_moves[self.controller.state.reason.split()[0].strip(":")] += 1

    def add_batch(self, record: BatchRecord) -> None:
        """Add the newest trained batch; the controller continues from its statistics."""
        self.batches.append(record)
        self.use_of_window = {}
        if self.controller is not None:
            self.controller.restore(record.statistics)

    def _new_group(self, prompt: Prompt, evaluation: str | None = None) -> Group:
        group = Group(
            number=self.next_number,
            group_id=f"{'g' if evaluation is None else 'e'}{self.next_number:08d}",
            prompt=prompt,
            evaluation=evaluation,
        )
        self.next_number += 1
        self.groups.add(group)
        return group

    def _fail(self, group: Group, reason: str) -> None:
        self.groups.move(group, State.FAILED, reason=reason)
        if (run := self._evaluation(group)) is not None:
            run.ended += 1

    def choose_batch(self) -> Choice:
        """Decide by `admission.choose_batch`, as things are now, whether a batch may be taken."""
        leased = self.groups.leased_due
        ended = self.ended and not self.prompts and not leased
        if len(self.results) < self.bounds.groups_per_batch and not ended:
            return Choice(0)  # the usual case after a put
        ready = [group.due for group in self.results if group.due is not None]
        return choose_batch(ready, leased, version=self.version, bounds=self.bounds, ended=ended)

    def _pop_train(self, capacity: int, version: int) -> list[Group]:
        """Remove from the queue the train groups that an engine of this version may lease."""
        rollouts = rollouts_at_once(self.spec.group_size, self.spec.greedy_baseline)
        wanted = min(capacity // rollouts, len(self.prompts))
        if not wanted:
            return []
        room = self.bounds.window(self.version) - self.groups.live
        allowed = 0
        if room > 0:  # many engines ask in vain while the window is full
            allowed = leases_allowed(
                self.groups.due,
                version=self.version,
                start_version=version,
                bounds=self.lease_bounds,
                overdue=self.groups.overdue,
            )
        if allowed < wanted:
            full = allowed >= room and self.bounds.most_live_binds
            self.use_of_window["window_full" if full else "leases_held"] = 1.0
        return self.prompts.pop_train(min(wanted, allowed))

    def _drop_unfitting(self, group: Group, version: int, *, others: int) -> None:
        """Leave out what was saved or noted if it is too old for the group to be trained in time.

        The engine serves `version`, and `others` groups are leased after it at the same time.
        """
        if group.begun is not None and not fits(
            self.groups.due,
            [min(group.begun, version)] + [version] * others,
            version=self.version,
            bounds=self.lease_bounds,
            overdue=self.groups.overdue,
        ):
            group.saved = group.noted = None

    def _lease(self, group: Group, engine_id: str, version: int, expires: float) -> Lease:
        run = self._evaluation(group)
        group.attempt += 1
        group.overdue = False
        start = version if group.begun is None else min(version, group.begun)
        group.engine_id, group.start_version, group.expires = engine_id, start, expires
        deadline = self.lease_bounds.deadline(start) if run is None else None
        self.groups.move(group, State.LEASED, due=deadline)
        return Lease(
            group_id=group.group_id,
            attempt=group.attempt,
            prompt=group.prompt,
            group_size=self.spec.group_size if run is None else 1,
            purpose=group.purpose,
            temperature=None if run is None else run.temperature,
            start_version=start,
            deadline_version=deadline,
            greedy_baseline=self.spec.greedy_baseline and run is None,
        )

    def _evaluation(self, group: Group) -> EvaluationRun | None:
        return None if group.evaluation is None else self.evaluations[group.evaluation]
