"""A whole run in simulated time, for property tests: the real state decides.

Engines, learner and feeder are events with random durations: lognormal generation, updates that
lag, lost engines, failures, ties, groups that a policy drops, and a window of staleness that
changes.
"""

import heapq
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from queues.broker.batch_queue import broker_statistics
from queues.config import QueuesConfig, RunSpec
from queues.errors import QueueClosed
from queues.policy.admission import choose_batch, feasible
from queues.policy.prompt_retirement import split
from queues.policy.staleness_controller import StalenessController, WindowState
from queues.records import BatchRecord, Lease, Prompt, Purpose, Summary
from queues.state.broker_state import BrokerState
from queues.state.groups import ENGINE_LOST, FILTERED, OVERDUE, State

GROUP_SIZE = 2
HEARTBEAT = 0.3
"""How late an engine learns that a group is not wanted any more."""


def shuffled_epochs(prompts, chance):
    """Return a source that comes back to its prompts, each time in another order."""
    epoch = 0
    while True:
        for index in chance.sample(range(prompts), prompts):
            yield Prompt(prompt_id=f"sums/{epoch}/{index}", text=str(index))
        epoch += 1


@dataclass(frozen=True)
class Fact:
    """What became of one lease that ended in a result, or was cut off."""

    group_id: str
    start_version: int
    deadline: int
    seconds: float
    """Of generation, had nobody cut it off."""
    versions: range
    """Of its tokens."""


@dataclass
class Run:
    """One run to its end; what happened is in its fields."""

    state: BrokerState
    seed: int
    tie_rate: float
    prompts: int | None = None
    """The source ends after so many; None: it does not."""
    distinct: int = 50
    """Prompts in an epoch of the source."""
    fail_rate: float = 0.05
    death_rate: float = 0.05
    changes_window: bool = False
    """Whether a controller changes the window of staleness at random."""
    ess: Callable[[Sequence[int]], float] | None = None
    """What the learner measures of a batch with these lags."""
    issued: list[str] = field(default_factory=list)
    """Prompt ids, as the source gave them."""
    batches: list[list[str]] = field(default_factory=list)
    lags: list[int] = field(default_factory=list)
    """Of the oldest and the newest token of each group that the loss sees."""
    results: dict[str, Fact] = field(default_factory=dict)
    """The one result of each group."""
    cut_off: list[tuple[Fact, float]] = field(default_factory=list)
    """What was dropped while it was generated, and after how many seconds."""
    late: set[str] = field(default_factory=set)
    """Groups that were taken after their deadline."""
    reissued: dict[str, str] = field(default_factory=dict)
    """By the group that was dropped, the one that took its place."""
    dropped: Counter[int] = field(default_factory=Counter)
    """Filtered groups by the number of batches that were taken before."""
    tied_trained: int = 0

    def __post_init__(self):
        self.chance = random.Random(self.seed)
        self.free = {
            f"engine-{number}": self.chance.randint(self.needed, 24)
            for number in range(self.chance.randint(1, 4))
        }
        self.delay = {engine: self.chance.choice([0.01, 0.3, 3.0]) for engine in self.free}
        self.source = shuffled_epochs(self.distinct, self.chance)
        self.now = 0.0
        self.events: list[tuple[float, int, str, tuple]] = []
        self.order = 0
        self.tied: set[str] = set()
        if self.changes_window:
            most = self.state.bounds.max_staleness
            self.state.controller = StalenessController(target=0.5, most=most, batches=1)
        self.held: dict[str, tuple[str, Lease, float]] = {}
        """Engine, lease and its beginning, by group: what engines generate."""
        self.needs: dict[str, float] = {}
        """Seconds of generation by group, of its latest lease."""
        self.statistics: list[dict[str, Any]] = []
        """Statistics of every batch."""
        self.batch_lags: list[int] = []
        self.first_leases: list[int] = []
        for engine in self.free:
            self.state.serving(engine, 0)

    @property
    def needed(self):
        return GROUP_SIZE + self.state.spec.greedy_baseline

    @property
    def policy(self):
        return self.state.bounds.on_overdue

    def after(self, seconds, what, *values):
        self.order += 1
        heapq.heappush(self.events, (self.now + seconds, self.order, what, values))

    def feed(self):
        while not self.state.ended:
            try:
                wanted = self.state.wanted()
            except QueueClosed:
                return
            if wanted is None:
                return
            last = self.prompts is not None and len(self.issued) + wanted >= self.prompts
            if last:
                wanted = self.prompts - len(self.issued)
            drawn = [next(self.source) for _ in range(wanted)]
            kept, exhausted = self.state.retirement.select(drawn)
            gone = self.state.retirement.names | self.state.retirement.failed
            assert not {split(prompt.prompt_id)[0] for prompt in kept} & gone
            self.state.issue(kept)
            self.issued += [prompt.prompt_id for prompt in kept]
            self.state.ended = last or exhausted

    def lease(self):
        for engine, free in self.free.items():
            if self.state.over or free < 1:
                continue
            leases = self.state.lease(engine, free, now=self.now, expires=0.0)
            assert sum(lease.capacity for lease in leases) <= free
            for lease in leases:
                self.begin(engine, lease)

    def begin(self, engine, lease):
        assert lease.deadline_version <= lease.start_version + self.state.bounds.max_staleness
        assert lease.deadline_version >= self.state.version + bool(self.state.taken)
        if lease.attempt == 1 and lease.group_id not in self.reissued.values():
            self.first_leases.append(int(lease.group_id[1:]))
        self.free[engine] -= lease.capacity
        self.held[lease.group_id] = engine, lease, self.now
        luck = self.chance.random()
        what = "die" if luck < self.death_rate else "finish"
        if self.death_rate <= luck < self.death_rate + self.fail_rate:
            what = "fail"
        seconds = self.chance.lognormvariate(0, 1.2)
        self.needs[lease.group_id] = seconds
        self.after(seconds, what, lease)

    def fact(self, lease):
        engine = self.state.engines[self.held[lease.group_id][0]]
        return Fact(
            group_id=lease.group_id,
            start_version=lease.start_version,
            deadline=lease.deadline_version,
            seconds=self.needs[lease.group_id],
            versions=range(lease.start_version, engine + 1),
        )

    def take(self):
        state = self.state
        if state.taken or state.training_over:
            return
        batch = state.take(state.version)
        if batch is None:
            return
        self.batches.append(batch)
        self.batch_lags = []
        for group in state.taken:
            fact = self.results[group.group_id]
            lags = [state.version - version for version in fact.versions]
            if self.policy == "mask":
                lags = [lag for lag in lags if lag <= state.bounds.max_staleness]
            self.lags += lags
            self.batch_lags += lags
            if state.version > fact.deadline:
                self.late.add(group.group_id)
        self.tied_trained += len(self.tied & set(batch))
        self.pass_over()
        self.after(self.chance.uniform(0.2, 2.0), "train")

    def pass_over(self):
        for dropped, anew in self.state.pass_over():
            assert dropped.prompt == anew.prompt
            self.reissued[dropped.group_id] = anew.group_id
            if dropped.group_id in self.held:
                self.after(HEARTBEAT, "abort", dropped.group_id)
                _, lease, began = self.held[dropped.group_id]
                self.cut_off.append((self.fact(lease), self.now - began))

    def handle(self, what, values):
        if what == "train":
            measured = {} if self.ess is None else {"ess": self.ess(self.batch_lags)}
            self.statistics.append({**measured, **broker_statistics(self.state, measured)})
            self.state.ack(
                BatchRecord(
                    version=self.state.version, acked_at=0.0, statistics=self.statistics[-1]
                ),
                now=self.now,
            )
            if self.changes_window:
                window = self.chance.randint(0, self.state.bounds.max_staleness)
                self.state.controller.state = WindowState(window=window)
            for engine, delay in self.delay.items():
                self.after(delay, "update", engine, self.state.version)
        elif what == "update":
            engine, version = values
            self.state.serving(engine, max(version, self.state.engines[engine]))
        elif what == "abort":
            self.release(*values)
        elif what != "retry":
            self.end(what, *values)

    def release(self, group_id):
        """Note that the engine has capacity again; None where it was told to stop before."""
        held = self.held.pop(group_id, None)
        if held is not None:
            self.free[held[0]] += held[1].capacity
        return held

    def end(self, what, lease):
        fact = self.fact(lease) if lease.group_id in self.held else None
        held = self.release(lease.group_id)
        group = self.state.groups.in_flight.get(lease.group_id)
        if held is None or group is None:
            assert lease.group_id in self.reissued, "only what was dropped is not wanted any more"
            return
        engine, *_ = held
        assert self.state.groups.leased_to(engine, group.group_id, lease.attempt) is group
        if what == "finish":
            self.finish(group, fact)
            return
        reason = ENGINE_LOST if what == "die" else "reward"
        self.state.give_back(group, reason, now=self.now)
        if group.not_before > self.now:
            self.after(group.not_before - self.now, "retry")

    def finish(self, group, fact):
        rewards = [0.0, 1.0]
        if self.chance.random() < self.tie_rate:
            rewards = [float(self.chance.random() < 0.5)] * 2
            self.tied.add(group.group_id)
        result = Summary(
            group_id=group.group_id, prompt_id=group.prompt.prompt_id, attempt=group.attempt,
            rollouts=GROUP_SIZE, tokens=4, reward=0.0, task_rewards=rewards,
            oldest_version=fact.versions[0], newest_version=fact.versions[-1],
        )  # fmt: skip
        assert group.group_id not in self.results, "at most one result"
        self.results[group.group_id] = fact
        accepted = self.state.accept(group, result, now=self.now)
        if accepted.state is State.DROPPED:
            assert group.group_id in self.tied
            self.dropped[len(self.batches)] += 1

    def run(self):
        self.feed()
        self.lease()
        while self.events:
            self.now, _, what, values = heapq.heappop(self.events)
            self.handle(what, values)
            self.check()
            self.take()
            self.check()
            self.feed()
            self.check_line()
            self.lease()
            self.check_engines()
        self.account()

    def check(self):
        """Recount everything from the groups themselves."""
        state, version, bounds = self.state, self.state.version, self.state.bounds
        groups, in_flight = state.groups, state.groups.in_flight.values()
        assert sum(groups.counts.values()) == len(self.issued) + len(self.reissued)
        in_state = {
            kind: [group for group in in_flight if group.state is kind]
            for kind in (State.QUEUED, State.LEASED, State.READY, State.TAKEN)
        }
        for kind, members in in_state.items():
            assert groups.train(kind) == len(members)
        assert len(state.prompts) == len(in_state[State.QUEUED])
        assert len(state.results) == len(in_state[State.READY])
        assert groups.live == sum(group.due is not None for group in in_flight)
        assert groups.live <= bounds.window(version)
        waiting = [*in_state[State.LEASED], *in_state[State.READY]]
        assert groups.overdue == sum(group.overdue for group in waiting)
        first = version + bool(state.taken)
        assert all(group.due >= first for group in waiting if not group.overdue), (
            "none missed its batch unnoticed"
        )
        if self.policy == "wait":
            assert feasible(groups.due, version=version, groups_per_batch=bounds.groups_per_batch)
            assert not groups.overdue
        leased = Counter(group.due for group in in_state[State.LEASED])
        assert groups.leased_due == leased
        ended = state.ended and not state.prompts and not leased
        ready = [group.due for group in state.results]
        rule = choose_batch(ready, leased, version=version, bounds=bounds, ended=ended)
        assert state.choose_batch() == rule

    def check_line(self):
        """Whatever is filtered, dropped or fails, there are prompts, while more can be trained."""
        state, bounds = self.state, self.state.bounds
        on_their_way = state.groups.live + len(state.prompts)
        enough = on_their_way >= (bounds.steps - state.version) * bounds.groups_per_batch
        assert state.prompts.available or state.ended or enough, "the line is empty"

    def check_engines(self):
        """Nor is there ever less than a batch on its way, while an engine could generate more."""
        state, size = self.state, self.state.bounds.groups_per_batch
        if state.training_over:
            return
        idle = [
            engine
            for engine, free in self.free.items()
            if free >= self.needed and state.engines[engine] >= state.version
        ]
        starves = state.groups.live < size and state.prompts.available and idle
        assert not starves, "a batch short of groups, and nobody generates them"

    def account(self):
        """Nothing can happen any more: the run has to be over, and every group in its place."""
        state, counts = self.state, self.state.groups.counts
        assert state.training_over, "it hangs"
        trained = [group_id for batch in self.batches for group_id in batch]
        assert len(set(trained)) == len(trained), "a group is trained once"
        assert set(trained) <= set(self.results)
        assert not set(trained) & set(self.reissued), "what was dropped is not trained"
        assert state.groups.train(State.TRAINED) == len(trained)
        assert state.groups.dropped(FILTERED) == sum(self.dropped.values())
        assert state.groups.dropped(OVERDUE) == len(self.reissued)
        assert self.first_leases == sorted(self.first_leases), "nobody is overtaken in the line"
        assert set(counts) <= {
            (Purpose.TRAIN, State.TRAINED, ""),
            (Purpose.TRAIN, State.DROPPED, FILTERED),
            (Purpose.TRAIN, State.DROPPED, OVERDUE),
            (Purpose.TRAIN, State.FAILED, "reward"),
            (Purpose.TRAIN, State.FAILED, ENGINE_LOST),
            (Purpose.TRAIN, State.QUEUED, ""),
        }
        self.account_for_lateness()
        if state.tie_filter.limit is not None:
            assert max(self.dropped.values(), default=0) <= state.tie_filter.limit
            assert state.tie_filter.let_through == self.tied_trained, "what is let through trains"

    def account_for_lateness(self):
        state, bound = self.state, self.state.bounds.max_staleness
        assert state.late == len(self.late)
        if self.policy == "train":
            older = {x.group_id for x in self.results.values() if x.group_id in self.late}
            assert self.late == older
        else:
            assert max(self.lags, default=0) <= bound
        if self.policy in ("wait", "drop"):
            assert not self.late
        if self.policy != "drop":
            assert not self.reissued
        overdue = broker_statistics(state, {}).get("groups_overdue", 0)
        assert overdue == len(self.late) + len(self.reissued)


def make_state(max_staleness, size, steps, limit, *, baseline=False, policy="wait", most_live=None):
    return BrokerState(
        config=QueuesConfig(
            max_staleness=max_staleness, on_overdue=policy, window=most_live, max_attempts=2,
            retry_seconds=0.5, filter_tied=True, max_filtered_batches=limit, patience_seconds=0.0,
        ),
        spec=RunSpec(
            groups_per_batch=size, group_size=GROUP_SIZE, steps=steps, greedy_baseline=baseline
        ),
    )  # fmt: skip
