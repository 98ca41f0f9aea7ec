"""A run in simulated time: the broker's own state decides, engines and learner are rates.

    engine     leases what the broker's state allows into its free slots; its rollouts share its
               speed; a slot is free again when its rollout ends
    learner    takes the batches that the broker's state gives, trains, publishes, acknowledges
    update     staged while the engine generates, then swapped while it stands still; only so many
               engines swap at once, and one that missed a version takes the newest

Admission, deadlines and the window are therefore the code that runs, not a model of it. Time is a
heap of events; an engine's rollouts are a heap too, so an event costs O(log slots).
"""

import heapq
import random
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count, cycle, islice
from math import exp
from typing import Any

import numpy as np

from deploy.planner.rates import EngineRates, Pace, Rates
from deploy.report.summary import WARM_UP
from headway.errors import InputError
from queues.broker.batch_queue import broker_statistics
from queues.config import QueuesConfig, RunSpec
from queues.errors import QueueClosed
from queues.records import BatchRecord, Lease, Prompt, Summary, rollouts_at_once
from queues.state.broker_state import BrokerState
from queues.state.groups import State

FOREVER = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The part of a recipe that decides how a simulated run goes."""

    queues: QueuesConfig
    spec: RunSpec
    engines: int
    slots: int
    """Rollouts that an engine generates at once."""
    swaps_at_once: int = 1
    warm_up: int = WARM_UP
    """Batches at the beginning that the figures leave out."""
    beyond: int = 0
    """Batches at the end that the figures leave out: a run leases less and less near its end."""

    @property
    def last(self) -> int:
        """Number of batches that are trained."""
        return self.spec.steps - self.beyond


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Figures of a simulated run after its first batches."""

    samples_per_second: float
    """Rollouts trained."""
    learner_idle: float
    """Share of the time in which the learner waited for a batch."""
    actors_idle: float
    """Share of the time in which an engine had no rollout."""
    lag_mean: float
    """Over trained tokens, in versions."""
    lag_square_mean: float
    lag_p50: int
    lag_p95: int
    lag_max: int
    lag_shares: Mapping[str, float]
    """Share of the trained tokens by their lag."""


@dataclass(slots=True)
class SimulatedEngine:
    """Rollouts that share an engine's speed, and the version that samples each of their tokens."""

    name: str
    rates: EngineRates
    free_slots: int
    pace: float = 1.0
    """It takes so many times as long as its rates say."""
    version: int = 0
    now: float = 0.0
    token: float = 0.0
    """Tokens that a rollout which always ran would have by now."""
    stalled: float = 0.0
    """Seconds of other work before the next token, by its rates."""
    paused: float = 0.0
    """Seconds before it works again."""
    running: list[tuple[float, int, float, Lease]] = field(default_factory=list)
    """Heap of rollouts: the token at its end, a serial number, that at its beginning, its lease."""
    swaps: list[tuple[float, int]] = field(default_factory=lambda: [(0.0, 0)])
    """Versions with the token from which each of them samples."""
    updating: bool = False
    valid_event: int = 0
    """Number of the planned end that is still valid; earlier ones are ignored."""
    idle_seconds: float = 0.0

    def advance(self, now: float) -> None:
        """Let time pass with the rollouts that are running."""
        passed, self.now = now - self.now, now
        if not self.running:
            self.idle_seconds += passed
        paused = min(passed, self.paused)
        self.paused -= paused
        worked = (passed - paused) / self.pace
        stalled = min(worked, self.stalled)
        self.stalled -= stalled
        if self.running:
            self.token += (worked - stalled) / self.rates.token_seconds(len(self.running))

    def next_end(self) -> float:
        """Return the time at which the next rollout ends if nothing else happens."""
        if not self.running:
            return FOREVER
        left = max(0.0, self.running[0][0] - self.token)
        work = self.stalled + left * self.rates.token_seconds(len(self.running))
        return self.now + self.paused + self.pace * work

    def sampled(self, began: float, length: int) -> dict[int, int]:
        """Count the tokens of a rollout by the version that sampled them."""
        tokens: dict[int, int] = {}
        index = bisect_right(self.swaps, began, key=lambda swap: swap[0]) - 1
        done = 0
        while done < length:
            version = self.swaps[index][1]
            index += 1
            until = self.swaps[index][0] - began if index < len(self.swaps) else FOREVER
            upto = length if until >= length else max(done, round(until))
            if upto > done:
                tokens[version] = tokens.get(version, 0) + upto - done
            done = upto
        return tokens


class Simulation:
    """One simulated run; `run` is called once."""

    def __init__(self, setting: Setting, rates: Rates, seed: int) -> None:
        if setting.queues.on_overdue != "wait":
            raise InputError(
                f'queues.on_overdue = "{setting.queues.on_overdue}" cannot be simulated; "wait" can'
            )
        if setting.last - setting.warm_up < 2:
            raise InputError(f"{setting.last} steps; at least {setting.warm_up + 2} are needed")
        self._setting, self._rates = setting, rates
        self._chance = random.Random(seed)
        self._broker = BrokerState(config=setting.queues, spec=setting.spec)
        names = [f"engine-{number}" for number in range(setting.engines)]
        self._engines = [SimulatedEngine(name, rates.engine, setting.slots) for name in names]
        self._serials = count()
        self._lengths = cycle(length for group in rates.lengths for length in group)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._now = 0.0
        self._unfinished: dict[str, int] = {}
        """Rollouts of a leased group that are still running."""
        self._sampled: dict[str, Counter[int]] = {}
        """Tokens of a live group by version."""
        self._tokens: dict[str, int] = {}
        self._waits_since: float | None = 0.0
        self._times: dict[str, float] = {}
        """When the wait for the batch began and ended, and its step ended."""
        self._swapping = 0
        self._permits: deque[tuple[SimulatedEngine, int]] = deque()
        """Engines that wait for others to swap, with the versions that they have staged."""
        self._lags: Counter[int] = Counter()
        self._ends: list[float] = []
        self._waits: list[float] = []
        self._idle_seconds: list[float] = []
        """Sums over engines after the warm-up and at the end."""

    def run(self) -> Outcome:
        """Simulate until the last batch is trained."""
        for engine in self._engines:
            self._broker.serving(engine.name, 0)
        self._pace_engines(self._pace()[1])
        self._feed()
        self._lease(self._engines)
        while len(self._ends) < self._setting.last:
            self._now, _, happen = heapq.heappop(self._events)
            happen()
        return self._outcome()

    def _after(self, seconds: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self._now + seconds, next(self._serials), happen))

    def _plan_end(self, engine: SimulatedEngine) -> None:
        """Plan the engine's next end anew, since its speed has changed."""
        engine.valid_event += 1
        end = engine.next_end()
        if end < FOREVER:
            self._after(end - self._now, partial(self._end, engine, engine.valid_event))

    def _end(self, engine: SimulatedEngine, event: int) -> None:
        """End the rollouts of an engine that have all of their tokens."""
        if event != engine.valid_event:
            return
        engine.advance(self._now)
        engine.token = max(engine.token, engine.running[0][0])  # whatever rounding says
        while engine.running and engine.running[0][0] <= engine.token:
            end, _, began, lease = heapq.heappop(engine.running)
            engine.stalled += self._rates.engine.turnover_seconds / 2
            engine.free_slots += 1
            group = lease.group_id
            self._sampled[group].update(engine.sampled(began, round(end - began)))
            self._unfinished[group] -= 1
            if not self._unfinished[group]:
                del self._unfinished[group]
                self._after(self._rates.engine.put_seconds, partial(self._put, engine, lease))
        self._plan_end(engine)
        self._lease([engine])

    def _put(self, engine: SimulatedEngine, lease: Lease) -> None:
        """Accept the result of a group, or drop it as tied."""
        group = self._broker.groups.in_flight[lease.group_id]
        sampled = self._sampled[lease.group_id]
        tied = self._chance.random() < self._rates.tied_share
        result = Summary(
            group_id=lease.group_id, prompt_id=lease.prompt.prompt_id, attempt=lease.attempt,
            rollouts=lease.group_size, tokens=sampled.total(), reward=0.0,
            task_rewards=[0.0, float(not tied)],
            oldest_version=min(sampled), newest_version=max(sampled),
        )  # fmt: skip
        if self._broker.accept(group, result, now=self._now).state is State.DROPPED:
            del self._sampled[lease.group_id], self._tokens[lease.group_id]
            self._feed()
            self._lease(self._engines)
        self._lease([engine])
        self._take()

    def _stage(self, engine: SimulatedEngine) -> None:
        """Begin to transfer the newest version to an engine."""
        engine.updating = True
        staged = partial(self._staged, engine, self._broker.version)
        self._after(self._rates.update.staging_seconds, staged)

    def _staged(self, engine: SimulatedEngine, version: int) -> None:
        """Swap the weights of an engine, or queue it for a permit."""
        if self._swapping == self._setting.swaps_at_once:
            self._permits.append((engine, version))
            return
        self._swapping += 1
        engine.advance(self._now)
        update = self._rates.update
        pause = update.pause_seconds + len(engine.running) * update.pause_rollout_seconds
        engine.paused += pause
        self._plan_end(engine)
        self._after(pause, partial(self._swapped, engine, version))

    def _swapped(self, engine: SimulatedEngine, version: int) -> None:
        """Let an engine generate with its new version."""
        engine.advance(self._now)
        engine.version = version
        engine.swaps.append((engine.token, version))
        engine.updating = False
        self._swapping -= 1
        self._broker.serving(engine.name, version)
        if version < self._broker.version:
            self._stage(engine)
        while self._permits and self._swapping < self._setting.swaps_at_once:
            waiting, staged = self._permits.popleft()
            if staged < self._broker.version:
                self._stage(waiting)
            else:
                self._staged(waiting, staged)
        self._lease([engine])

    def _train(self, tokens: int) -> None:
        """Begin a step of the learner."""
        assert self._waits_since is not None
        self._waits.append(self._now - self._waits_since)
        self._times = {"wait_started_at": self._waits_since, "wait_finished_at": self._now}
        self._waits_since = None
        rates, (own, of_engines) = self._rates.learner, self._pace()
        self._after(own * (rates.batch_seconds + rates.token_seconds * tokens), self._trained)
        self._pace_engines(of_engines * (1 + self._rates.engine.slowdown))

    def _pace_engines(self, pace: float) -> None:
        for engine in self._engines:
            engine.advance(self._now)
            engine.pace = pace
            self._plan_end(engine)

    def _pace(self) -> Pace:
        paces = self._rates.paces
        return paces[len(self._ends) % len(paces)] if paces else (1.0, 1.0)

    def _trained(self) -> None:
        """End a step of the learner."""
        self._ends.append(self._now)
        self._pace_engines(self._pace()[1])
        self._times["step_finished_at"] = self._now
        if len(self._ends) in (self._setting.warm_up, self._setting.last):
            for engine in self._engines:
                engine.advance(self._now)
            self._idle_seconds.append(sum(engine.idle_seconds for engine in self._engines))
        self._after(self._rates.learner.publish_seconds, self._ack)

    def _ack(self) -> None:
        """Acknowledge a batch and publish its version."""
        broker, statistics, loss = self._broker, {**self._times}, self._rates.ess_loss
        tokens: Counter[int] = Counter()
        for group in broker.taken:
            tokens.update(self._sampled.pop(group.group_id))
        if loss is not None:
            square = sum((broker.version - v) ** 2 * n for v, n in tokens.items()) / tokens.total()
            statistics["ess"] = exp(-loss * square)
        statistics |= broker_statistics(broker, statistics)
        record = BatchRecord(version=broker.version, acked_at=self._now, statistics=statistics)
        broker.ack(record, now=self._now)
        self._after(self._setting.queues.patience_seconds, partial(self._lease, self._engines))
        for engine in self._engines:
            if not engine.updating:
                self._stage(engine)
        self._waits_since = self._now
        self._feed()
        self._lease(self._engines)
        self._take()

    def _feed(self) -> None:
        try:
            wanted = self._broker.wanted()
        except QueueClosed:
            return
        new = islice(self._serials, wanted or 0)
        self._broker.issue([Prompt(prompt_id=f"simulated/0/{number}", text="") for number in new])

    def _lease(self, engines: Sequence[SimulatedEngine]) -> None:
        spec = self._setting.spec
        group_slots = rollouts_at_once(spec.group_size, spec.greedy_baseline)
        for engine in engines:
            slots = engine.free_slots
            if slots < group_slots or self._broker.over:
                continue
            if leases := self._broker.lease(engine.name, slots, now=self._now, expires=FOREVER):
                self._feed()
                engine.advance(self._now)
                for lease in leases:
                    self._begin(engine, lease)
                self._plan_end(engine)

    def _begin(self, engine: SimulatedEngine, lease: Lease) -> None:
        engine.free_slots -= lease.capacity
        self._unfinished[lease.group_id] = lease.capacity
        self._sampled[lease.group_id] = Counter()
        lengths = list(islice(self._lengths, lease.capacity))
        self._tokens[lease.group_id] = sum(lengths[: lease.group_size])
        engine.stalled += lease.capacity * self._rates.engine.turnover_seconds / 2
        for length in lengths:
            rollout = (engine.token + length, next(self._serials), engine.token, lease)
            heapq.heappush(engine.running, rollout)

    def _take(self) -> None:
        broker = self._broker
        ready = len(broker.results) >= self._setting.spec.groups_per_batch
        if self._waits_since is None or broker.taken or not ready or broker.training_over:
            return
        if (taken := broker.take(broker.version)) is None:
            return
        if len(self._ends) >= self._setting.warm_up:
            for group_id in taken:
                for version, tokens in self._sampled[group_id].items():
                    self._lags[broker.version - version] += tokens
        tokens = sum(self._tokens.pop(group_id) for group_id in taken)
        self._after(self._rates.learner.take_seconds, partial(self._train, tokens))

    def _outcome(self) -> Outcome:
        setting, ends, lags = self._setting, self._ends, self._lags
        warm_up = setting.warm_up
        seconds = ends[-1] - ends[warm_up - 1]
        idle_before, idle = self._idle_seconds
        samples = setting.spec.groups_per_batch * setting.spec.group_size
        return Outcome(
            samples_per_second=(setting.last - warm_up) * samples / seconds,
            learner_idle=sum(self._waits[warm_up:]) / seconds,
            actors_idle=(idle - idle_before) / seconds / setting.engines,
            lag_square_mean=sum(lag**2 * tokens for lag, tokens in lags.items()) / lags.total(),
            lag_shares={str(lag): lags[lag] / lags.total() for lag in sorted(lags)},
            **lag_figures(lags),
        )


def lag_figures(lags: Counter[int]) -> dict[str, Any]:
    """Return mean, median, 95th percentile and maximum of lags, by their numbers of tokens."""
    ordered, weights = zip(*sorted(lags.items()), strict=True)
    p50, p95 = np.quantile(ordered, (0.5, 0.95), weights=weights, method="inverted_cdf").tolist()
    mean = sum(lag * tokens for lag, tokens in lags.items()) / lags.total()
    return {"lag_mean": mean, "lag_p50": int(p50), "lag_p95": int(p95), "lag_max": ordered[-1]}


def simulate(setting: Setting, rates: Rates, *, seed: int = 0) -> Outcome:
    """Simulate one run, or raise InputError; the seed chooses tied groups."""
    return Simulation(setting, rates, seed).run()
