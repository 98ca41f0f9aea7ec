"""A whole run in simulated time, with filtering and retirement: nothing starves, nothing is lost.

The real book decides; engines, learner and feeder are events with random durations.
"""

import heapq
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from queues.admission import Bounds, feasible
from queues.book import ENGINE_LOST, BatchRecord, Book
from queues.errors import QueueClosed
from queues.groups import FILTERED, Group, State
from queues.records import Lease, Prompt, Purpose, Summary
from queues.retirement import Retirement, split
from queues.tie_filter import TieFilter

GROUP_SIZE = 2
RATES = st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.99, 1.0])


def shuffled_epochs(prompts: int, chance: random.Random) -> Iterator[Prompt]:
    """A source that comes back to its prompts, each time in another order."""
    epoch = 0
    while True:
        for index in chance.sample(range(prompts), prompts):
            yield Prompt(prompt_id=f"sums/{epoch}/{index}", text=str(index))
        epoch += 1


@dataclass
class Run:
    """Engines with lognormal generation times, updates that lag, deaths, failures and ties."""

    book: Book
    seed: int
    tie_rate: float
    prompts: int | None = None
    """The source ends after so many; None: it does not."""
    distinct: int = 50
    """Prompts in an epoch of the source."""
    fail_rate: float = 0.05
    death_rate: float = 0.05
    issued: list[str] = field(default_factory=list)
    """Prompt ids."""
    batches: list[list[str]] = field(default_factory=list)
    lags: list[int] = field(default_factory=list)
    dropped: Counter[int] = field(default_factory=Counter)
    """Filtered groups by the number of batches that were taken before."""
    tied_trained: int = 0

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.room = {
            f"engine-{number}": self.chance.randint(self.needed, 24)
            for number in range(self.chance.randint(1, 4))
        }
        self.delay = {engine: self.chance.choice([0.01, 0.3, 3.0]) for engine in self.room}
        self.source = shuffled_epochs(self.distinct, self.chance)
        self.now = 0.0
        self.events: list[tuple[float, int, str, tuple]] = []
        self.order = 0
        self.tied: set[str] = set()
        for engine in self.room:
            self.book.serving(engine, 0)

    @property
    def needed(self) -> int:
        return GROUP_SIZE + self.book.greedy_baseline

    def after(self, seconds: float, what: str, *values: object) -> None:
        self.order += 1
        heapq.heappush(self.events, (self.now + seconds, self.order, what, values))

    def feed(self) -> None:
        while not self.book.ended:
            try:
                wanted = self.book.wanted()
            except QueueClosed:
                return
            if wanted is None:
                return
            last = self.prompts is not None and len(self.issued) + wanted >= self.prompts
            if last:
                wanted = self.prompts - len(self.issued)
            drawn = [next(self.source) for _ in range(wanted)]
            kept, exhausted = self.book.select(drawn)
            names = self.book.retirement.names if self.book.retirement else set()
            assert not {split(prompt.prompt_id)[0] for prompt in kept} & names
            self.book.issue(kept)
            self.issued += [prompt.prompt_id for prompt in kept]
            self.book.ended = last or exhausted

    def lease(self) -> None:
        for engine, room in self.room.items():
            if self.book.over or room < 1:
                continue
            leases = self.book.lease(engine, room, now=self.now, expires=0.0)
            assert sum(lease.room for lease in leases) <= room
            for lease in leases:
                self.room[engine] -= lease.room
                luck = self.chance.random()
                what = "die" if luck < self.death_rate else "finish"
                if self.death_rate <= luck < self.death_rate + self.fail_rate:
                    what = "fail"
                self.after(self.chance.lognormvariate(0, 1.2), what, engine, lease)

    def take(self) -> None:
        if self.book.taken or self.book.training_over:
            return
        batch = self.book.take(self.book.version)
        if batch is not None:
            self.batches.append(batch)
            self.lags += [self.book.version - group.start_version for group in self.book.taken]
            self.tied_trained += len(self.tied & set(batch))
            self.after(self.chance.uniform(0.2, 2.0), "train")

    def handle(self, what: str, values: tuple) -> None:
        if what == "train":
            self.book.ack(BatchRecord(version=self.book.version, acked_at=0.0, statistics={}))
            for engine, delay in self.delay.items():
                self.after(delay, "update", engine, self.book.version)
        elif what == "update":
            engine, version = values
            self.book.serving(engine, max(version, self.book.engines[engine]))
        else:
            engine, lease = values
            self.room[engine] += lease.room
            group = self.book.groups.in_flight[lease.group_id]
            if what == "finish":
                self.finish(group, lease)
            else:
                self.book.give_back(group, ENGINE_LOST if what == "die" else "reward")

    def finish(self, group: Group, lease: Lease) -> None:
        rewards = [0.0, 1.0]
        if self.chance.random() < self.tie_rate:
            rewards = [float(self.chance.random() < 0.5)] * 2
            self.tied.add(group.group_id)
        result = Summary(
            group_id=group.group_id, prompt_id=group.prompt.prompt_id, attempt=lease.attempt,
            rollouts=GROUP_SIZE, tokens=4, reward=0.0, task_rewards=rewards,
            oldest_version=lease.start_version, newest_version=lease.start_version,
        )  # fmt: skip
        accepted = self.book.accept(group, result, now=self.now)
        if accepted.state is State.DROPPED:
            assert accepted.reason == FILTERED
            assert group.group_id in self.tied
            self.dropped[len(self.batches)] += 1

    def run(self) -> None:
        self.feed()
        self.lease()
        while self.events:
            self.now, _, what, values = heapq.heappop(self.events)
            self.handle(what, values)
            self.check()
            self.take()
            self.feed()
            self.lease()
        self.account()

    def check(self) -> None:
        book = self.book
        size = book.bounds.groups_per_batch
        assert feasible(book.groups.due, version=book.version, groups_per_batch=size)
        assert book.groups.live <= book.bounds.window(book.version)
        assert sum(book.groups.counts.values()) == len(self.issued)

    def account(self) -> None:
        """Nothing can happen any more: the run has to be over, and every group in its place."""
        book, counts = self.book, self.book.groups.counts
        assert book.training_over, "it hangs"
        trained = [group_id for batch in self.batches for group_id in batch]
        assert len(set(trained)) == len(trained), "a group is trained once"
        assert book.groups.train(State.TRAINED) == len(trained)
        assert book.groups.filtered == sum(self.dropped.values())
        assert set(counts) <= {
            (Purpose.TRAIN, State.TRAINED, ""),
            (Purpose.TRAIN, State.DROPPED, FILTERED),
            (Purpose.TRAIN, State.FAILED, "reward"),
            (Purpose.TRAIN, State.QUEUED, ""),
        }
        assert max(self.lags, default=0) <= book.bounds.max_staleness
        if book.tie_filter is not None:
            assert max(self.dropped.values(), default=0) <= book.tie_filter.limit
            assert book.tie_filter.let_through == self.tied_trained, "what is let through trains"


def make_book(
    max_staleness: int, size: int, steps: int, limit: int, *, baseline: bool = False
) -> Book:
    bounds = Bounds(max_staleness=max_staleness, groups_per_batch=size, steps=steps)
    return Book(
        bounds=bounds,
        group_size=GROUP_SIZE,
        queued_batches=2,
        max_attempts=2,
        greedy_baseline=baseline,
        tie_filter=TieFilter(limit=limit * size),
    )


@given(
    st.integers(0, 2**32), RATES, st.integers(0, 4), st.integers(1, 5), st.integers(1, 8),
    st.integers(1, 4), st.booleans(),
)  # fmt: skip
@settings(max_examples=120, deadline=None)
def test_every_batch_is_full_and_within_the_bound_however_much_is_filtered(
    seed: int, tie_rate: float, staleness: int, size: int, steps: int, limit: int, baseline: bool
) -> None:
    run = Run(make_book(staleness, size, steps, limit, baseline=baseline), seed, tie_rate)
    run.run()
    assert [len(batch) for batch in run.batches] == [size] * steps
    if tie_rate == 1.0:
        assert run.tied_trained == size * steps
        assert run.dropped[0] == limit * size, "what is let through early leaves less to drop"
    if tie_rate == 0.0:
        assert not run.dropped


@given(
    st.integers(0, 2**32), RATES, st.integers(0, 4), st.integers(1, 5), st.integers(1, 40),
    st.integers(1, 4),
)  # fmt: skip
@settings(max_examples=120, deadline=None)
def test_a_finite_source_ends_with_every_prompt_trained_filtered_or_failed(
    seed: int, tie_rate: float, staleness: int, size: int, prompts: int, limit: int
) -> None:
    run = Run(make_book(staleness, size, 100, limit), seed, tie_rate, prompts=prompts)
    run.run()
    assert len(run.issued) == prompts
    assert run.book.groups.train(State.QUEUED) == 0
    sizes = [len(batch) for batch in run.batches]
    assert all(found == size for found in sizes[:-1])
    failed = run.book.groups.train(State.FAILED)
    assert sum(sizes) + run.book.groups.filtered + failed == prompts


@given(
    st.integers(0, 2**32), st.sampled_from([0.2, 0.8, 1.0]), st.integers(0, 4), st.integers(1, 5),
    st.integers(1, 12), st.sampled_from([0.5, 1.0]),
)  # fmt: skip
@settings(max_examples=120, deadline=None)
def test_a_source_of_epochs_ends_when_all_its_prompts_are_mastered(
    seed: int, tie_rate: float, staleness: int, size: int, distinct: int, cap: float
) -> None:
    book = make_book(staleness, size, 60, 2)
    book.retirement = Retirement(cap=cap, threshold=1.0)
    run = Run(book, seed, tie_rate, distinct=distinct)
    run.run()
    sizes = [len(batch) for batch in run.batches]
    assert all(found == size for found in sizes[:-1])
    if book.version < 60:
        assert book.ended
        assert len(book.retirement.names) == distinct
    if cap == 0.5:  # half of every group passes, or more, or none
        assert len(book.retirement.names) == distinct or sum(sizes) >= 60 * size
