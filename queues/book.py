"""The state of a run in memory, and every decision about it.

No disk and no event loop: the broker calls, makes durable what was decided, and answers. The moves
are those of `groups`, the rules those of `admission`, the order of the lines that of
`prompt_queue` and `results_queue`. `recovery` fills a book from a ledger.
"""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from queues.admission import Bounds, Choice, choose_batch, leases_allowed
from queues.errors import ProtocolError, QueueClosed, SchemaError
from queues.evaluations import EvaluationRun
from queues.groups import FILTERED, Acceptance, Group, Groups, State
from queues.prompt_queue import PromptQueue
from queues.records import REWARD_MODEL_LOST, Lease, Prompt, Summary
from queues.results_queue import ResultsQueue
from queues.retirement import Retirement
from queues.tie_filter import TieFilter, Verdict

BATCHES_KEPT = 100
ENGINE_LOST = "engine_lost"
"""Why leases end whose engine is gone."""
EXCUSED = frozenset({ENGINE_LOST, REWARD_MODEL_LOST})
"""Why attempts fail by no doing of their group; however often, it is queued again."""
UNREACHABLE = "version_not_reached"
"""Why groups fail whose evaluation wants a version after the last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRecord:
    """One trained batch; made at its acknowledgement, for whoever watches the run."""

    version: int
    """That it was trained at."""
    acked_at: float
    """Epoch seconds."""
    statistics: Mapping[str, Any]
    """As the learner acknowledged it."""


@dataclass(slots=True, kw_only=True)
class Book:
    """Who holds what, at which version the learner is, and what may happen next."""

    bounds: Bounds
    group_size: int
    queued_batches: int
    max_attempts: int
    greedy_baseline: bool = False
    """Whether every train group is generated with a greedy rollout beside it."""
    tie_filter: TieFilter | None = None
    retirement: Retirement | None = None
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
    refused: int = 0
    """Results that were refused since then."""
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
    def selection(self) -> dict[str, int]:
        """What was left out of training so far, by what is configured to leave it out."""
        figures = {}
        if self.tie_filter is not None:
            figures["groups_filtered"] = self.groups.filtered
            figures["groups_let_through"] = self.tie_filter.let_through
        if self.retirement is not None:
            figures["prompts_retired"] = len(self.retirement.names)
        return figures

    # --- prompts

    def select(self, prompts: Sequence[Prompt]) -> tuple[Sequence[Prompt], bool]:
        """The prompts that may be issued, and whether the source has none that is left.

        Raises:
            InputError: An id by which a prompt cannot be known again.
        """
        return (prompts, False) if self.retirement is None else self.retirement.select(prompts)

    def issue(self, prompts: Sequence[Prompt], evaluation: str | None = None) -> list[Group]:
        """Queue a group for each prompt."""
        groups = []
        for prompt in prompts:
            group = Group(
                number=self.next_number,
                group_id=f"{'g' if evaluation is None else 'e'}{self.next_number:08d}",
                prompt=prompt,
                evaluation=evaluation,
            )
            self.next_number += 1
            self.groups.add(group)
            self.prompts.append(group)
            groups.append(group)
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
        queued, line = len(self.prompts), self.queued_batches * size
        trainable = (self.bounds.steps - self.version) * size - self.groups.live - queued
        wanted = min(line - queued, trainable)
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

    def lease(self, engine_id: str, room: int, *, now: float, expires: float) -> list[Lease]:
        """Lease what this engine may generate now: evaluations first, then training.

        The leased groups have at most `room` rollouts together, baselines included. Training waits
        for the weights of an engine that lags, while there is patience.

        Raises:
            QueueClosed: Nothing will ever be leased again.
        """
        if self.over:
            raise QueueClosed("lease: the run is over")
        version = self.engines.get(engine_id)
        if version is None:
            return []
        allowed = leases_allowed(
            self.groups.due, version=self.version, start_version=version, bounds=self.bounds
        )
        if version < self.version and now < self.patience_ends:
            allowed = 0
        groups = self.prompts.pop_evaluations(room, version)  # of 1 rollout each
        each = self.group_size + self.greedy_baseline
        groups += self.prompts.pop_train(min((room - len(groups)) // each, allowed))
        return [self._lease(group, engine_id, version, expires) for group in groups]

    def accept(self, group: Group, result: Summary, *, now: float) -> Acceptance:
        """The one result of a leased group is in: a train group is ready, or filtered.

        Raises:
            SchemaError: It is not what was leased; the lease stays.
        """
        self._check_result(group, result)
        run = self._evaluation(group)
        if run is not None:
            self.groups.move(group, State.SCORED)
            run.score(result)
            self._close_evaluation(run)
            return Acceptance(State.SCORED)
        rewards, retires, verdict = result.task_rewards, None, Verdict.KEPT
        if self.retirement is not None:
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

    def give_back(self, group: Group, reason: str) -> State:
        """A lease ended without a result: the group is queued again, or failed for good.

        The loss of an engine, or of the reward models, is not held against its groups.
        """
        self.given_back[reason] += 1
        group.failures += reason not in EXCUSED
        if group.failures < self.max_attempts:
            self.groups.move(group, State.QUEUED)
            self.prompts.redeliver(group)
            return State.QUEUED
        self._fail(group, reason)
        return State.FAILED

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
        if self.tie_filter is not None:
            self.tie_filter.next_batch()
        return [group.group_id for group in self.taken]

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
        self.batches.append(record)

    # --- inside

    def _fail(self, group: Group, reason: str) -> None:
        self.groups.move(group, State.FAILED, reason=reason)
        if (run := self._evaluation(group)) is not None:
            run.fail()
            self._close_evaluation(run)

    def _choose(self) -> Choice:
        leased = Counter(group.due for group in self.groups.leased() if group.due is not None)
        return choose_batch(
            self.results.deadlines(),
            leased,
            version=self.version,
            bounds=self.bounds,
            ended=self.ended and not self.prompts and not leased,
        )

    def _lease(self, group: Group, engine_id: str, version: int, expires: float) -> Lease:
        run = self._evaluation(group)
        if run is not None:
            run.start()
        group.attempt += 1
        group.engine_id, group.start_version, group.expires = engine_id, version, expires
        deadline = self.bounds.deadline(version) if run is None else None
        self.groups.move(group, State.LEASED, due=deadline)
        return Lease(
            group_id=group.group_id,
            attempt=group.attempt,
            prompt=group.prompt,
            group_size=self.group_size if run is None else 1,
            purpose=group.purpose,
            temperature=None if run is None else run.temperature,
            start_version=version,
            deadline_version=deadline,
            greedy_baseline=self.greedy_baseline and run is None,
        )

    def _check_result(self, group: Group, result: Summary) -> None:
        where = f"of group {group.group_id}"
        size = self.group_size if group.evaluation is None else 1
        if result.rollouts != size:
            raise SchemaError(f"rollouts: {result.rollouts} {where}, must be {size}")
        if result.prompt_id != group.prompt.prompt_id:
            raise SchemaError(
                f"prompt_id: {result.prompt_id!r} {where}, must be {group.prompt.prompt_id!r}"
            )
        start, oldest = group.start_version, result.oldest_version
        if start is not None and oldest is not None and oldest < start:
            raise SchemaError(
                f"versions: a token {where} is of version {oldest}, but it was leased at version"
                f" {start}, so its deadline would not hold"
            )

    def _evaluation(self, group: Group) -> EvaluationRun | None:
        return None if group.evaluation is None else self.evaluations[group.evaluation]

    def _close_evaluation(self, run: EvaluationRun) -> None:
        if run.finished:
            self.prompts.close_evaluation(run.name)
