"""Random operations and crashes of a broker agree with a model, step by step.

A crash copies the run's folder, in the middle of a commit or between two, and a new broker goes on
from the copy. The clock stands still unless it is moved, so leases expire when the test says so.
"""

import asyncio
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from queues.errors import ProtocolError, QueueClosed, SchemaError
from queues.readers.accounting import read_accounting
from queues.readers.checkpoints import newest_checkpoint
from queues.readers.open_run import open_ledger
from queues.readers.recorded_batches import read_batch
from queues.records import Lease, Prompt, PutStatus
from queues.storage.ledger_schema import REMOVED_SEGMENT
from queues.storage.state_counts import count_rows, kept_counts
from tests.queues.conftest import CONFIG, SIZES, answer, make_broker, unfinished
from tests.queues.model import Model

T = TypeVar("T")
STEPS = 220
MOST_ARMED = 10
"""Steps for which a crash waits for its point; some operations do not commit, some wait for it."""
ENGINES = st.sampled_from(["a", "b", "c"])
PICK = st.integers(0, 2**16)
LEASE_SECONDS = CONFIG["lease_seconds"]
CRASH_POINTS = [
    ("journal", "append", "after"),
    ("journal", "commit", "before"),
    ("ledger", "commit", "before"),
    ("ledger", "commit", "after"),
]
CRASHES = st.tuples(
    st.integers(10, 60), st.sampled_from([*CRASH_POINTS, None]), st.booleans(), st.booleans()
)
"""Steps before a crash, its point or None between commits, a takeover, and a close before it."""


class StoppedClock(asyncio.SelectorEventLoop):
    """An event loop whose time moves only when it is told to."""

    now = 1000.0

    def time(self):
        return self.now


class QueueMachine(RuleBasedStateMachine):
    """Every rule does one operation, in the broker and in the model, and compares the answers."""

    root: ClassVar[Path]
    clock: ClassVar[StoppedClock]
    steps_done: ClassVar[int]
    crashes: ClassVar[int]
    seen: ClassVar[Counter[str]]
    """Groups by the state and the reason that they ended in, and what happened on the way."""

    @initialize(
        steps=st.sampled_from([5, 10**6, 10**6]),
        staleness=st.integers(0, 2),
        limit=st.sampled_from([None, 1, 2]),
        keep=st.sampled_from(["all", "needed", "needed"]),
        on_overdue=st.sampled_from(["wait", "drop", "mask", "train"]),
        crashes=st.lists(CRASHES, min_size=3, max_size=6),
    )
    def begin(self, steps, staleness, limit, keep, on_overdue, crashes):
        self.options: dict[str, Any] = {
            "steps": steps,
            "max_staleness": staleness,
            "filter_tied": limit is not None,
            "max_filtered_batches": limit or 1,
            "patience_seconds": 0.0,
            "segment_bytes": 9_000,
            "keep_rollouts": keep,
            "on_overdue": on_overdue,
        }
        self.model = Model(
            size=SIZES["groups_per_batch"],
            staleness=staleness,
            group_size=SIZES["group_size"],
            steps=steps,
            max_attempts=CONFIG["max_attempts"],
            limit=None if limit is None else 2 * limit,
            on_overdue=on_overdue,
        )
        self.leases: list[tuple[str, Lease]] = []
        self.expires: dict[str, float] = {}
        self.prompts = self.puts = 0
        self.owner, self.takes_over = "0", False
        self.planned, self.calm = crashes, 0
        self.issued: tuple[list[str], bool] | None = None
        self.armed: tuple[str, str, str] | None = None
        self.open(Path(tempfile.mkdtemp(dir=self.root)))

    def teardown(self):
        if hasattr(self, "broker"):
            self.run(self.broker.close())
            assert read_accounting(self.folder).to_dict() == self.model.accounts()
            newest = max(self.model.checkpoints.items(), default=None)
            expected = None if newest is None else (newest[0], self.folder / newest[1])
            assert newest_checkpoint(self.folder) == expected
            for version in range(self.oldest_needed, self.model.version):
                expected = [group.payload for group in self.model.batches[version]]
                assert read_batch(self.folder, version) == expected
            self.seen.update(group.state for group in self.model.groups)
            self.seen.update(group.reason for group in self.model.groups)
            with open_ledger(self.folder) as database:
                keys = [key for (key,) in database.execute("SELECT key FROM meta")]
            self.seen["removed segments"] += sum(key.startswith(REMOVED_SEGMENT) for key in keys)
            shutil.rmtree(self.folder)

    @invariant()
    def the_accounts_agree(self):
        if not hasattr(self, "broker"):
            return
        type(self).steps_done += 1
        self.model.fail_unreachable()
        if self.snapshot is not None:
            if self.armed != ("ledger", "commit", "after"):
                self.model = self.before
            self.restart(self.snapshot)
        elif self.armed is not None:
            self.before = deepcopy(self.model)
        armed, self.armed = self.armed, None
        assert self.run(self.broker.accounting()).to_dict() == self.model.accounts()
        self.kept_counts_agree(self.broker.commits.ledger.database)
        if self.model.on_overdue == "wait":
            assert self.model.feasible([g.due for g in self.model.live], self.model.version)
        self.armed = armed
        self.calm += 1
        if self.armed is not None and self.calm >= MOST_ARMED:
            self.crash(None, self.takes_over, close=False)
        elif self.armed is None and self.planned and self.calm >= self.planned[0][0]:
            self.crash(*self.planned.pop(0)[1:])

    def kept_counts_agree(self, database):
        assert kept_counts(database, newest=self.model.version - 1) == count_rows(database)

    # --- crashes

    def crash(self, point, takes_over, close):
        """Crash at a point of the next commit that comes to it, or here and now."""
        self.calm, self.takes_over, self.armed = 0, takes_over, None
        if takes_over and not self.model.over:
            self.issue(2, last=False)
            self.lease("a", 8, fresh=True)
        if point is not None:
            self.armed, self.before = point, deepcopy(self.model)
            return
        if close:
            self.run(self.broker.close())
        self.restart(self.copied())

    def open(self, folder):
        self.folder, self.snapshot = folder, None
        self.broker = make_broker(folder, owner=self.owner, **self.options)
        self.run(self.broker.heartbeat("nobody", []))  # from here on leases expire
        for owner, method, when in CRASH_POINTS:
            self.spy(getattr(self.broker.commits, owner), method, (owner, method, when))

    def spy(self, owner, method, point):
        """Make a copy of the folder at this point, in the thread that writes, where it is armed.

        Once: an operation that looks at the accounts at its end commits twice, as a rule.
        """
        original: Callable[..., Any] = getattr(owner, method)

        def spied(*args):
            armed = self.armed == point and self.snapshot is None
            if armed and point[2] == "before":
                self.snapshot = self.copied()
            result = original(*args)
            if armed and point[2] == "after":
                self.snapshot = self.copied()
            return result

        setattr(owner, method, spied)

    def copied(self):
        folder = Path(tempfile.mkdtemp(dir=self.root))
        return Path(shutil.copytree(self.folder, folder, dirs_exist_ok=True))

    def restart(self, folder):
        """Kill the broker; the holders of its leases do not know."""
        type(self).crashes += 1
        self.armed = None
        self.run(self.broker.close())
        shutil.rmtree(self.folder)
        if not self.takes_over:
            self.owner = str(self.crashes)
        self.seen["taken over"] += self.takes_over and any(
            group.state == "leased" for group in self.model.groups
        )
        self.model.restart(takes_over=self.takes_over)
        for group in self.model.groups:
            self.expires[group.group_id] = self.clock.now + LEASE_SECONDS
        self.model.fail_unreachable()
        with open_ledger(folder, verify=False) as database:
            self.kept_counts_agree(database)
        self.open(folder)

    # --- the feeder

    @rule(count=st.integers(1, 4), last=st.integers(0, 99).map(lambda x: x == 99))
    def issue(self, count, last):
        ids = [f"sums/0/{self.prompts + index}" for index in range(count)]
        self.prompts += count
        self.issued = ids, last
        self.issue_again()

    @precondition(lambda self: self.issued)
    @rule()
    def issue_again(self):
        """Repeat the last call, whose answer may have been lost with the broker."""
        assert self.issued is not None
        (ids, last), model = self.issued, self.model
        cursor = token = ids[-1]
        call = self.broker.issue(self.made(ids), cursor=cursor, last=last, token=token)
        if model.ended and model.token != token:
            self.refused(ProtocolError, call)
            return
        self.run(call)
        if model.token != token:
            model.issue(ids)
            model.cursor, model.ended, model.token = cursor, last, token

    @rule(count=st.integers(1, 2), ahead=st.integers(0, 2))
    def evaluate(self, count, ahead):
        model, name = self.model, f"e{len(self.model.evaluations)}"
        least = min(model.version + ahead, model.steps)
        ids = [f"held/0/{index}" for index in range(count)]
        call = self.broker.evaluate(name, self.made(ids), temperature=0.0, min_version=least)
        if model.over:
            self.refused(QueueClosed, call)
            return
        self.run(call)
        model.evaluations[name] = least
        model.issue(ids, name)

    # --- the workers

    @rule(engine=ENGINES, ahead=st.integers(0, 1))
    def serve(self, engine, ahead):
        newest = self.model.version + (ahead and bool(self.model.taken))
        version = max(newest, self.model.engines.get(engine, 0))
        self.run(self.broker.serving(engine, version))
        self.model.engines[engine] = version

    @rule(engine=ENGINES, room=st.integers(1, 8), fresh=st.booleans())
    def lease(self, engine, room, fresh):
        if fresh and self.armed is None:
            self.serve(engine, 0)
        call = self.broker.lease(engine, room, 0.0)
        if self.model.over:
            self.refused(QueueClosed, call)
            return
        leases = self.run(call)
        expected = self.model.lease(engine, room) if engine in self.model.engines else []
        assert [(x.group_id, x.prompt.prompt_id, x.attempt) for x in leases] == [
            (g.group_id, g.prompt_id, g.attempt) for g in expected
        ]
        assert [(x.start_version, x.deadline_version, (x.saved, x.notes)) for x in leases] == [
            (g.start, g.due, g.carried) for g in expected
        ]
        self.seen["continued"] += sum(lease.saved is not None for lease in leases)
        self.seen["continued by notes"] += sum(bool(lease.notes) for lease in leases)
        for lease in leases:
            self.leases.append((engine, lease))
            self.expires[lease.group_id] = self.clock.now + LEASE_SECONDS

    @rule(engine=ENGINES)
    def renew(self, engine):
        own = [(x.group_id, x.attempt) for owner, x in self.leases[-12:] if owner == engine]
        held = list(dict.fromkeys(own))
        self.model.claim(engine, held)
        kept = [
            (group_id, attempt)
            for group_id, attempt in held
            if (group := self.group(group_id)).state in ("leased", "ready", "taken")
            and (group.engine, group.attempt) == (engine, attempt)
        ]
        lost = self.run(self.broker.heartbeat(engine, held))
        assert Counter(lost) == Counter(held) - Counter(kept)
        for group_id, _ in kept:
            self.expires[group_id] = self.clock.now + LEASE_SECONDS

    @rule(seconds=st.sampled_from([1.0, 11.0, 31.0]))
    def time_passes(self, seconds):
        now = self.clock.now = self.clock.now + seconds
        leased = [g for g in self.model.groups if g.state == "leased"]
        expired = [g for g in leased if self.expires[g.group_id] <= now]
        self.run(self.expiry([group.group_id for group in expired]))
        for group in expired:
            self.model.give_back(group, "lease_expired")

    async def expiry(self, group_ids):
        """Wait until these leases have ended."""
        for _ in range(1000):
            leased = {group.group_id for group in self.broker.commits.state.groups.leased()}
            if not leased & set(group_ids):
                break
            await asyncio.sleep(0)
        else:
            raise AssertionError(f"{group_ids} do not expire")
        await self.broker.accounting()  # commits keep their order, so the end of leases is durable

    @precondition(lambda self: self.leases)
    @rule(pick=PICK, tied=st.booleans())
    def put(self, pick, tied):
        """Put a result of any lease there ever was: the right one, a late one, the same again."""
        self.deliver(*self.one_lease(pick), tied=tied)

    def deliver(self, engine, lease, *, tied):
        group = self.group(lease.group_id)
        self.puts += 1
        payload = answer(lease, reward=float(self.puts), tied=tied)
        accepted = self.holds(engine, lease)
        if accepted:
            expected = PutStatus.ACCEPTED
        else:
            expected = PutStatus.FENCED if group.payload is None else PutStatus.DUPLICATE
        assert self.run(self.broker.put(engine, payload)) is expected
        if accepted:
            self.model.put(group, payload, tied=tied)
        else:
            self.model.duplicates += 1

    @precondition(lambda self: self.leases)
    @rule(pick=PICK, latest=st.booleans())
    def save(self, pick, latest):
        """Tokens without a result, of any lease; the oldest of its start or of a later version."""
        engine, lease = self.one_lease(pick)
        version = lease.start_version
        if latest:
            version = max(version, self.model.engines.get(engine, 0))
        self.keep(engine, lease, version)

    def keep(self, engine, lease, version):
        self.puts += 1
        payload = unfinished(lease, version, reward=float(self.puts))
        self.run(self.broker.save(engine, payload))
        group = self.group(lease.group_id)
        self.model.save(group, engine, lease.attempt, (version, payload))

    @precondition(lambda self: self.leases)
    @rule(pick=PICK, number=st.integers(0, 2), index=st.integers(0, 1), ahead=st.booleans())
    def note(self, pick, number, index, ahead):
        """Note a turn of any lease, which may have been noted before."""
        engine, lease = self.one_lease(pick)
        version = lease.start_version
        if ahead:
            version = max(version, self.model.engines.get(engine, 0))
        self.keep_note(engine, lease, (index, f"turn/{number}"), version)

    def keep_note(self, engine, lease, name, version):
        self.puts += 1
        payload = f"{self.puts}".encode()
        call = self.broker.note(engine, lease.group_id, lease.attempt, *name, payload, version)
        group = self.group(lease.group_id)
        stays = self.model.note(group, engine, lease.attempt, name, (version, payload))
        assert self.run(call) == stays

    @precondition(lambda self: self.leases)
    @rule(pick=PICK)
    def put_what_was_not_leased(self, pick):
        engine, lease = self.one_lease(pick)
        if self.holds(engine, lease):
            larger = replace(lease, group_size=lease.group_size + 1)
            self.refused(SchemaError, self.broker.put(engine, answer(larger)))

    @precondition(lambda self: self.leases)
    @rule(pick=PICK, reason=st.sampled_from(["boom", "boom", "reward_model_lost"]))
    def fail(self, pick, reason):
        engine, lease = self.one_lease(pick)
        group = self.group(lease.group_id)
        self.run(
            self.broker.fail(engine, lease.group_id, lease.attempt, reason=reason, error="E: e")
        )
        if self.holds(engine, lease):
            self.model.give_back(group, reason)

    @rule(engine=ENGINES)
    def release(self, engine):
        leased = [g for g in self.model.groups if (g.state, g.engine) == ("leased", engine)]
        self.model.engines.pop(engine, None)
        for group in leased:
            self.model.give_back(group, "engine_lost")
        call = self.broker.release(engine)
        if self.model.over:
            self.refused(QueueClosed, call)
        else:
            assert self.run(call) == len(leased)

    @precondition(lambda self: self.armed is None and not self.model.over)
    @rule(
        engine=ENGINES,
        kept=st.integers(0, 2),
        tied=st.booleans(),
        batches=st.integers(1, 4),
        checkpoints=st.booleans(),
    )
    def work_and_learn(self, engine, kept, tied, batches, checkpoints):
        """Complete a batch, which by chance alone would hardly ever happen."""
        for left in range(batches)[::-1]:
            if self.model.over:
                return
            if not self.model.line and not self.model.ended:
                self.issue(4, last=False)
            self.newly_leased(engine)
            held = [x for x in self.leases if self.holds(*x)]
            for holder, lease in held[kept if left else 0 :]:  # the oldest are late
                self.deliver(holder, lease, tied=tied)
            self.take()
            if self.model.taken:
                self.ack()
                if checkpoints:
                    self.checkpoint()

    @precondition(lambda self: self.armed is None and not self.model.over)
    @rule(engine=ENGINES)
    def leave_one_behind(self, engine):
        """Let a group straggle for longer than the bound allows."""
        batches = self.model.staleness + 3
        self.work_and_learn(engine, kept=1, tied=False, batches=batches, checkpoints=False)

    @precondition(lambda self: self.armed is None and not self.model.over)
    @rule(engine=ENGINES)
    def save_and_be_lost(self, engine):
        """As an engine does that is stopped, or dies."""
        for lease in self.newly_leased(engine):
            self.keep(engine, lease, lease.start_version)
            self.keep_note(engine, lease, (1, "turn/0"), lease.start_version)
        self.release(engine)

    def newly_leased(self, engine):
        before = len(self.leases)
        self.lease(engine, 8, fresh=True)
        return [lease for _, lease in self.leases[before:]]

    # --- the learner

    @rule()
    def take(self):
        model = self.model
        call = self.broker.take(model.version, 0.0)
        if model.training_over and not model.taken:
            self.refused(QueueClosed, call)
            return
        expected = model.taken or model.take()
        batch = self.run(call)
        if expected is None:
            assert batch is None
        else:
            assert batch is not None
            assert batch.payloads == [group.payload for group in expected]
            lags = [model.version - group.start for group in expected]
            late = sum(lag > model.staleness for lag in lags)
            assert not late or model.on_overdue in ("mask", "train")
            self.seen["late"] += late

    @precondition(lambda self: self.oldest_needed < self.model.version)
    @rule(pick=PICK)
    def take_a_trained_batch_again(self, pick):
        """One that a rollback to a checkpoint could train again: those have to be there."""
        version = self.oldest_needed + pick % (self.model.version - self.oldest_needed)
        batch = self.run(self.broker.take(version, 0.0))
        assert batch is not None
        assert batch.payloads == [group.payload for group in self.model.batches[version]]
        self.run(self.broker.ack(version, {}))

    @rule()
    def ack(self):
        call = self.broker.ack(self.model.version, {"loss": 0.5})
        if self.model.taken:
            self.run(call)
            self.model.ack()
        else:
            self.refused(ProtocolError, call)

    @rule()
    def checkpoint(self):
        version = self.model.version
        path = f"checkpoints/v{version:06d}"
        (self.folder / path).mkdir(parents=True, exist_ok=True)
        self.run(self.broker.commit_checkpoint(version, path))
        self.model.checkpoints[version] = path

    @precondition(lambda self: len(self.model.checkpoints) > 1)
    @rule()
    def remove_the_oldest_checkpoint(self):
        (self.folder / self.model.checkpoints.pop(min(self.model.checkpoints))).rmdir()

    # --- inside

    @property
    def oldest_needed(self):
        """Of the trained batches: from which one on all can be taken again."""
        return (
            0 if self.options["keep_rollouts"] == "all" else min(self.model.checkpoints, default=0)
        )

    def run(self, call):
        return self.clock.run_until_complete(asyncio.ensure_future(call, loop=self.clock))

    def refused(self, error, call):
        with pytest.raises(error):
            self.run(call)

    def one_lease(self, pick):
        """Half of the time one of the latest, which is likely to be held."""
        latest = self.leases[-6:] if pick % 4 else self.leases
        return latest[pick // 4 % len(latest)]

    def holds(self, engine, lease):
        return self.model.holds(self.group(lease.group_id), engine, lease.attempt)

    def group(self, group_id):
        return self.model.groups[int(group_id[1:]) - 1]

    def made(self, ids):
        return [Prompt(prompt_id=name, text="1+1=") for name in ids]


@pytest.mark.hypothesis
def test_random_steps_and_crashes_agree_with_the_model(tmp_path, monkeypatch, caplog):
    caplog.set_level("CRITICAL")
    clock = StoppedClock()
    time = SimpleNamespace(monotonic=clock.time, time=clock.time)
    for module in ("work_queue", "batch_queue", "result_intake", "recovery"):
        monkeypatch.setattr(f"queues.broker.{module}.time", time)
    memory = Path("/dev/shm")  # thousands of syncs: on a disk they would take most of the time
    if os.access(memory, os.W_OK):
        tmp_path = Path(tempfile.mkdtemp(dir=memory))
    QueueMachine.root = tmp_path
    QueueMachine.clock = clock
    QueueMachine.seen = Counter()
    QueueMachine.steps_done = QueueMachine.crashes = 0
    runs = settings().max_examples // 2
    try:
        run_state_machine_as_test(
            QueueMachine,
            settings=settings(
                max_examples=runs,
                stateful_step_count=STEPS,
                deadline=None,
                derandomize=True,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=[*HealthCheck],
            ),
        )
    finally:
        clock.run_until_complete(clock.shutdown_default_executor())
        clock.close()
        shutil.rmtree(tmp_path)
    assert QueueMachine.steps_done >= 125 * runs
    assert QueueMachine.crashes >= runs
    least = {"trained": runs, "taken over": runs // 8}
    if runs >= 200:  # rare states do not occur in every run of a small profile
        least |= {"continued": runs // 2, "continued by notes": runs // 2}
        least |= {"removed segments": runs // 8}
        least |= {"overdue": runs // 80, "late": runs // 80}
    assert {
        name: QueueMachine.seen[name] for name in least if QueueMachine.seen[name] < least[name]
    } == {}
