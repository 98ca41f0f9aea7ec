"""The state of a run in memory, and every decision about it.

No disk and no event loop: the broker calls, makes durable what was decided, and answers. The moves
are those of `groups`, the rules those of `admission`, the order of the lines that of
`prompt_queue` and `results_queue`. `recovery` fills a book from a ledger.
"""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from queues.errors import ProtocolError, QueueClosed
from queues.policy.admission import Bounds, Choice, choose_batch, leases_allowed
from queues.policy.dynamic_sampling import TieFilter, Verdict
from queues.policy.prompt_retirement import Retirement
from queues.policy.staleness_controller import StalenessController
from queues.records import (
    REWARD_MODEL_LOST,
    BatchRecord,
    Lease,
    Prompt,
    Purpose,
    PutStatus,
    Summary,
)
from queues.state.evaluations import EvaluationRun
from queues.state.groups import FILTERED, OVERDUE, Acceptance, Group, Groups, Reissue, State
from queues.state.partial_groups import fits
from queues.state.prompt_queue import PromptQueue
from queues.state.results_queue import ResultsQueue

BATCHES_KEPT = 100
ENGINE_LOST = "engine_lost"
"""Why leases end whose engine is gone."""
EXCUSED = frozenset({ENGINE_LOST, REWARD_MODEL_LOST})
"""Why attempts fail by no doing of their group; however often, it is queued again."""
MOST_DOUBLINGS = 5
UNREACHABLE = "version_not_reached"
"""Why groups fail whose evaluation wants a version after the last one."""


@dataclass(slots=True, kw_only=True)
class BrokerState:
    """Who holds what, at which version the learner is, and what may happen next."""

    bounds: Bounds
    group_size: int
    queued_batches: int
    max_attempts: int
    retry_seconds: float = 0.0
    """Wait after a failed attempt; doubled with each further one, at most MOST_DOUBLINGS times."""
    greedy_baseline: bool = False
    """Whether every train group is generated with a greedy rollout beside it."""
    steering: StalenessController | None = None
    """Of the window of staleness; None keeps it at its widest."""
    tie_filter: TieFilter | None = None
    retirement: Retirement = field(default_factory=Retirement)
    groups: Groups = field(default_factory=Groups)
    prompts: PromptQueue = field(default_factory=PromptQueue)
    results: ResultsQueue = field(default_factory=ResultsQueue)
    evaluations: dict[str, EvaluationRun] = field(default_factory=dict)
    engines: dict[str, int] = field(default_factory=dict)
    """The version that each engine serves."""
    version: int = 0
    """The learner's: batches trained."""
    taken: list[Group] = field(default_factory=list)
    """The batch being trained."""
    batches: deque[BatchRecord] = field(default_factory=lambda: deque(maxlen=BATCHES_KEPT))
    """The newest trained ones."""
    accepted: int = 0
    """Results, evaluations included, over the whole run."""
    late: int = 0
    """Groups that were taken after their deadline, over the whole run."""
    next_number: int = 1
    """Of the next group, in the order of issue."""
    cursor: str | None = None
    """Where the source of prompts goes on."""
    ended: bool = False
    """The source has no more prompts."""
    patience_ends: float = 0.0
    """Monotonic seconds until which engines that lag get no training groups."""
    given_back: Counter[str] = field(default_factory=Counter)
    """Leases that ended without a result since the broker began, by reason."""
    refused: Counter[PutStatus] = field(default_factory=Counter)
    """Results that were refused since then, by what was answered."""
    diverged: int = 0
    """Batches since then that were trained again and gave other weights than before."""
    last_error: str | None = None
    """The latest failed attempt, for whoever watches the run."""

    @property
    def training_over(self) -> bool:
        """Whether no batch can come any more."""
        exhausted = self.ended and not self.prompts and not self.groups.live
        return self.version >= self.bounds.steps or exhausted

    @property
    def over(self) -> bool:
        """Whether nothing is left to generate, evaluations included."""
        return self.training_over and all(run.finished for run in self.evaluations.values())

    @property
    def staleness(self) -> int:
        """w: new groups are due so many versions after their start."""
        return self.bounds.max_staleness if self.steering is None else self.steering.state.window

    def additions(self, statistics: Mapping[str, Any]) -> dict[str, Any]:
        """What is said of the taken batch beside the learner's statistics of it, where configured.

        What was left out of training or trained late so far, and the window of staleness after it.
        """
        figures: dict[str, Any] = {}
        if self.tie_filter is not None:
            figures["groups_filtered"] = self.groups.dropped(FILTERED)
            figures["groups_let_through"] = self.tie_filter.let_through
        if self.retirement.cap is not None:
            figures["prompts_retired"] = len(self.retirement.names)
        if self.bounds.on_overdue != "wait":
            figures["groups_overdue"] = self.late + self.groups.dropped(OVERDUE)
        if self.steering is not None:
            figures |= self.steering.after(statistics)
        return figures

    # --- prompts

    def issue(self, prompts: Sequence[Prompt], evaluation: str | None = None) -> list[Group]:
        """Queue a group for each prompt."""
        groups = [self._new_group(prompt, evaluation) for prompt in prompts]
        for group in groups:
            self.prompts.append(group)
        return groups

    def evaluate(self, run: EvaluationRun, prompts: Sequence[Prompt]) -> list[Group]:
        """Queue an evaluation's groups."""
        self.evaluations[run.name] = run
        self.prompts.open_evaluation(run.name, run.min_version)
        return self.issue(prompts, run.name)

    def wanted(self) -> int | None:
        """How many prompts to issue now; None while the line is long enough.

        Raises:
            QueueClosed: None will be wanted any more.
        """
        if self.training_over or self.ended:
            raise QueueClosed("prompts_wanted: no more prompts will be wanted")
        size = self.bounds.groups_per_batch
        line, waiting = self.queued_batches * size, len(self.prompts)
        trainable = (self.bounds.steps - self.version) * size - self.groups.live - waiting
        wanted = min(line - self.prompts.in_line, trainable)
        # Half a line at a time, rather than one prompt for each lease: every issue is a commit.
        return wanted if wanted > 0 and wanted >= min((line + 1) // 2, trainable) else None

    # --- leases and results

    def serving(self, engine_id: str, version: int) -> None:
        """The engine serves this version from now on."""
        known = self.engines.get(engine_id, 0)
        if version < known:
            raise ProtocolError(
                f"serving: engine {engine_id!r} reports version {version} after {known}, but"
                " versions never go backwards"
            )
        self.engines[engine_id] = version

    def lease(
        self, engine_id: str, room: int, *, now: float, expires: float,
        purpose: Purpose | None = None,
    ) -> list[Lease]:  # fmt: skip
        """Lease what this engine may generate now: evaluations first, then training.

        The leased groups have at most `room` rollouts together, baselines included, and are for
        `purpose` where it is given. Training waits for the weights of an engine that lags, while
        there is patience.

        Raises:
            QueueClosed: Nothing will ever be leased again.
        """
        if self.over:
            raise QueueClosed("lease: the run is over")
        version = self.engines.get(engine_id)
        if version is None:
            return []
        self.prompts.advance(now)
        evaluates, trains = purpose is not Purpose.TRAIN, purpose is not Purpose.EVALUATE
        groups = self.prompts.pop_evaluations(room * evaluates, version)  # of 1 rollout each
        each = self.group_size + self.greedy_baseline
        wanted = min((room - len(groups)) // each, len(self.prompts)) * trains
        lags = version < self.version and now < self.patience_ends
        # In a full window many ask in vain at once.
        if wanted and not lags and self.groups.live < self.bounds.window(self.version):
            allowed = leases_allowed(
                self.groups.due,
                version=self.version,
                start_version=version,
                bounds=self.bounds.within(self.staleness),
                overdue=self.groups.overdue,
            )
            groups += self.prompts.pop_train(min(wanted, allowed))
        leases = []
        for others, group in zip(range(len(groups))[::-1], groups, strict=True):
            self._drop_unfitting(group, version, others)
            leases.append(self._lease(group, engine_id, version, expires))
        return leases

    def save(self, group: Group, result: Summary) -> None:
        """There are tokens of a leased group, without its result."""
        group.saved = result.oldest_version

    def accept(self, group: Group, result: Summary, *, now: float) -> Acceptance:
        """The one result of a leased group is in: a train group is ready, or filtered.

        Raises:
            SchemaError: It is not what was leased; the lease stays.
        """
        group.check(result, self.group_size)
        self.accepted += 1
        run = self._evaluation(group)
        if run is not None:
            self.groups.move(group, State.SCORED)
            run.score(result)
            self._close_evaluation(run)
            return Acceptance(State.SCORED)
        rewards, verdict = result.task_rewards, Verdict.KEPT
        retires = self.retirement.retire(result.prompt_id, rewards)
        if self.tie_filter is not None:
            verdict = self.tie_filter.judge(rewards)
        if verdict is Verdict.DROPPED:
            self.groups.move(group, State.DROPPED, reason=FILTERED)
            return Acceptance(State.DROPPED, FILTERED, retires=retires)
        group.ready_at = now
        self.groups.move(group, State.READY, due=group.due)
        self.results.add(group)
        let_through = verdict is Verdict.LET_THROUGH
        return Acceptance(State.READY, let_through=let_through, retires=retires)

    def give_back(self, group: Group, reason: str, *, now: float) -> State:
        """A lease ended without a result: the group is queued again, or failed for good.

        The loss of an engine, or of the reward models, is not held against its groups: they are
        first in line, and so are evaluations, which one version is to answer. After any other
        failure a group waits, and after the last one its prompt does not come again.
        """
        self.given_back[reason] += 1
        excused = reason in EXCUSED
        group.failures += not excused
        if group.failures >= self.max_attempts:
            self._fail(group, reason)
            if group.evaluation is None:
                self.retirement.poison(group.prompt.prompt_id)
            return State.FAILED
        self.groups.move(group, State.QUEUED)
        if excused or not self.retry_seconds or group.evaluation is not None:
            self.prompts.redeliver(group)
        else:
            doublings = min(group.failures - 1, MOST_DOUBLINGS)
            group.not_before = now + self.retry_seconds * 2**doublings
            self.prompts.set_back(group, group.not_before)
        return State.QUEUED

    def settle(self) -> list[Group]:
        """Once training is over: fail what waits for a version that will never come.

        Those are evaluations; without it the run would wait for them and never end.
        """
        groups = self.prompts.pop_unreachable(self.version) if self.training_over else []
        for group in groups:
            self._fail(group, UNREACHABLE)
        return groups

    # --- batches

    def take(self, version: int) -> list[str] | None:
        """Take the batch of `version`: its group ids, or None while the learner has to wait.

        Raises:
            QueueClosed: That batch will never come.
            ProtocolError: It is not the turn of that batch.
        """
        if self.training_over:
            raise QueueClosed(f"take: no batch {version} will come, {self.version} are trained")
        if version != self.version or self.taken:
            raise ProtocolError(f"take: batch {version}, but the learner is at {self.version}")
        choice = self._choose()
        if not choice.count:
            return None
        self.taken = self.results.pop(choice.count)
        for group in self.taken:
            self.groups.move(group, State.TAKEN, due=version)
            self.late += group.overdue
        if self.tie_filter is not None:
            self.tie_filter.next_batch()
        return [group.group_id for group in self.taken]

    def pass_over(self) -> list[Reissue]:
        """To be called after every take: what becomes of the groups that were due and not taken.

        Where nothing is to be older than the bound they are dropped, and their prompts are first in
        line again.
        """
        last = self.version if self.taken else self.version - 1
        if sum(n for due, n in self.groups.due.items() if due <= last) == len(self.taken):
            return []
        missed = self.groups.missed(last)
        if self.bounds.on_overdue in ("mask", "train"):
            for group in missed:
                self.groups.pass_over(group)
            return []
        reissues = [Reissue(group, self._new_group(group.prompt)) for group in missed]
        for dropped, anew in reversed(reissues):
            if dropped.state is State.READY:
                self.results.remove(dropped)
            self.groups.move(dropped, State.DROPPED, reason=OVERDUE)
            anew.failures = dropped.failures
            self.prompts.redeliver(anew)
        return reissues

    def waits_for(self) -> list[Group]:
        """The leased groups that the learner cannot do without; empty where it need not wait."""
        if self.taken or self.training_over:
            return []
        until = self._choose().waits_until_due
        if until is None:
            return []
        leased = self.groups.leased()
        return [group for group in leased if group.due is not None and group.due <= until]

    def ack(self, record: BatchRecord) -> None:
        """The taken batch is trained.

        Raises:
            ProtocolError: That batch is not taken.
        """
        if record.version != self.version or not self.taken:
            raise ProtocolError(f"ack: batch {record.version} is not taken, next is {self.version}")
        for group in self.taken:
            self.groups.move(group, State.TRAINED)
        self.taken = []
        self.version += 1
        self.add_batch(record)

    def add_batch(self, record: BatchRecord) -> None:
        """A batch is trained, now or before this broker began; the newest one comes last."""
        self.batches.append(record)
        if self.steering is not None:
            self.steering.go_on(record.statistics)

    # --- inside

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
            run.fail(group.prompt.prompt_id)
            self._close_evaluation(run)

    def _choose(self) -> Choice:
        leased = self.groups.leased_due
        ended = self.ended and not self.prompts and not leased
        if len(self.results) < self.bounds.groups_per_batch and not ended:
            return Choice(0)  # as it is after most puts
        return choose_batch(
            self.results.deadlines(),
            leased,
            version=self.version,
            bounds=self.bounds,
            ended=ended,
        )

    def _drop_unfitting(self, group: Group, version: int, others: int) -> None:
        """Leaves saved tokens that are too old for the group to be trained in time with them."""
        if group.saved is not None and not fits(
            self.groups.due,
            saved_version=group.saved,
            others=others,
            version=self.version,
            engine_version=version,
            bounds=self.bounds.within(self.staleness),
            overdue=self.groups.overdue,
        ):
            group.saved = None

    def _lease(self, group: Group, engine_id: str, version: int, expires: float) -> Lease:
        run = self._evaluation(group)
        if run is not None:
            run.start()
        group.attempt += 1
        group.overdue = False
        start = version if group.saved is None else min(version, group.saved)
        group.engine_id, group.start_version, group.expires = engine_id, start, expires
        deadline = self.bounds.within(self.staleness).deadline(start) if run is None else None
        self.groups.move(group, State.LEASED, due=deadline)
        return Lease(
            group_id=group.group_id,
            attempt=group.attempt,
            prompt=group.prompt,
            group_size=self.group_size if run is None else 1,
            purpose=group.purpose,
            temperature=None if run is None else run.temperature,
            start_version=start,
            deadline_version=deadline,
            greedy_baseline=self.greedy_baseline and run is None,
        )

    def _evaluation(self, group: Group) -> EvaluationRun | None:
        return None if group.evaluation is None else self.evaluations[group.evaluation]

    def _close_evaluation(self, run: EvaluationRun) -> None:
        if run.finished:
            self.prompts.close_evaluation(run.name)
