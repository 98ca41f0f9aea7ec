"""Whole runs whose learner or broadcaster is killed or stopped: they go on by themselves."""

import json
import signal
import time

import pytest

from learner.diagnostics.trained_log import VARIABLE
from tests.deploy.conftest import FinishedRun, read_rows
from tests.deploy.processes import titled
from tests.deploy.runs.test_actors_die import restarts as all_roles

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.deepspeed, pytest.mark.timeout(900)]

WAIT_SECONDS = 300.0
RANK, BROADCASTER = "ray::RankActor", "ray::Broadcaster"


class Going:
    """A run of the small recipe in a process, with the learner's own log."""

    def __init__(self, headway, name, *settings):
        self.headway, self.name, self.folder = headway, name, headway.run_folder(name)
        self.log = headway.folder / f"{name}.trained"
        self.arguments = [
            "run", f"name={name}", "learner.checkpoint_every=10",
            "actors.scripted_options={tokens_per_second=40.0}", *settings,
        ]  # fmt: skip

    def __enter__(self):
        self.headway.environment[VARIABLE] = str(self.log)
        try:
            self.process = self.headway.start(*self.arguments)
        finally:
            del self.headway.environment[VARIABLE]
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.terminate()
            self.process.communicate(timeout=60)

    def until(self, happened):
        """Wait until `happened` returns something true, and return it; the run has to live."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not (found := happened()):
            assert self.process.poll() is None, self.process.stdout.read()
            assert time.monotonic() < deadline, self.log_of_driver()
            time.sleep(0.05)
        return found

    def log_of_driver(self):
        log = self.folder / "logs" / "driver.log"
        return "not in time; " + (log.read_text()[-2000:] if log.exists() else "no driver.log")

    def trains(self, batches):
        """Wait until so many batches are trained."""
        self.until(lambda: len(read_rows(self.folder / "metrics.jsonl")) >= batches)

    def strike(self, title, how):
        """Send a signal to a process; return the seconds until another batch is trained.

        Batches that were trained before, and those of which the record was late, do not count.
        """
        process = self.until(lambda: titled(self.process.pid, title))[0]
        struck, restarts = time.time(), len(read_rows(self.folder / "restarts.jsonl"))
        process.send_signal(how)
        self.until(lambda: len(read_rows(self.folder / "restarts.jsonl")) > restarts)
        [*_, restart] = read_rows(self.folder / "restarts.jsonl")

        def trained():
            rows = read_rows(self.folder / "metrics.jsonl")
            return [row for row in rows if row["step_started_at"] > restart["at"]]

        again = self.until(trained)[0]["published_at"] - struck
        print(f"{title}, {how.name}: noticed after {restart['at'] - struck:.1f} s, "
              f"the next batch is trained after {again:.1f} s")  # fmt: skip
        return again

    def end(self):
        """Wait for the end of the run and return it."""
        output, _ = self.process.communicate(timeout=WAIT_SECONDS)
        assert self.process.returncode == 0, output
        return FinishedRun(self.folder, output)

    def check(self, steps, *, groups=2, **restarts):
        """Check a run that ended by itself: its accounts, and the learner's own log."""
        run = self.end()
        summary = run.summary
        assert (summary["status"], summary["version"]) == ("done", steps)
        assert summary["restarts"] == all_roles(**restarts)
        assert summary["max_lag_trained"] <= 2
        return run, self.check_accounts(steps, groups)

    def check_accounts(self, steps, groups=2):
        """Check the accounts and the learner's log; return how many batches were trained again."""
        accounts = self.headway.accounting(self.name)
        assert accounts["balanced"]
        assert (accounts["trained"], accounts["trained_twice"]) == (steps * groups, 0)
        rows = read_rows(self.folder / "metrics.jsonl")
        assert [row["version"] for row in rows] == list(range(steps))
        batches = {}
        for row in read_rows(self.log):
            assert batches.setdefault(row["version"], row["groups"]) == row["groups"]
        trained = [group for rows in batches.values() for _, group, _ in rows]
        assert len(trained) == len(set(trained)) == steps * groups
        for version, rows in batches.items():
            assert all(version - oldest <= 2 for *_, oldest in rows)
        return len(read_rows(self.log)) - steps


@pytest.mark.parametrize(
    ("ranks", "how", "trained"),
    [
        *((ranks, how, ()) for ranks in (1, 2) for how in (signal.SIGKILL, signal.SIGSTOP)),
        (2, signal.SIGKILL, ("learner.lora.rank=4",)),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_run_outlives_a_rank_of_its_learner(headway, ranks, how, trained):
    settings = [f"learner.ranks={ranks}", "actors.cpus=0.0", *trained]
    name = f"rank-{ranks}-{how.name.lower()}-{len(trained)}"
    with Going(headway, name, "steps=40", "heldout.every=40", *settings) as going:
        going.trains(13)
        going.strike(f"{RANK} learner-{ranks - 1}", how)
        run, again = going.check(40, learner=1)
    assert again >= 2, "batches after the checkpoint are trained again"
    assert "learner is restarted (1 of 5 in a row)" in run.output
    assert "the learner goes on from version 10" in run.output


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=lambda how: how.name)
def test_a_run_outlives_its_broadcaster(headway, how):
    name = f"broadcaster-{how.name.lower()}"
    with Going(headway, name, "steps=80", "heldout.every=80") as going:
        going.trains(5)
        going.strike(BROADCASTER, how)
        run, again = going.check(80, broadcaster=1)
    assert again == 0
    assert "broadcaster is restarted (1 of 5 in a row)" in run.output


def test_a_run_outlives_both_at_once(headway):
    with Going(headway, "both", "steps=40", "heldout.every=40") as going:
        going.trains(7)
        [broadcaster] = going.until(lambda: titled(going.process.pid, BROADCASTER))
        broadcaster.send_signal(signal.SIGKILL)
        going.strike(f"{RANK} learner-0", signal.SIGKILL)
        going.check(40, learner=1, broadcaster=1)


def test_a_learner_that_dies_more_often_than_allowed_ends_the_run_with_its_name(headway):
    settings = ("steps=100000", "heldout.every=100000", "deploy.max_restarts=0")
    with Going(headway, "mortal-learner", *settings) as going:
        going.trains(3)
        [rank] = going.until(lambda: titled(going.process.pid, f"{RANK} learner-0"))
        rank.send_signal(signal.SIGKILL)
        output, _ = going.process.communicate(timeout=WAIT_SECONDS)
    assert going.process.returncode == 1, output
    assert "Traceback" not in output
    words = " ".join(output.split())
    assert "learner died 1 times in a row, more than deploy.max_restarts = 0 makes up for" in words
    assert "rank 0 died" in words
    assert json.loads((going.folder / "summary.json").read_text())["status"] == "failed"


@pytest.mark.parametrize("trained", [(), ("learner.lora.rank=4",)], ids=["weights", "adapter"])
def test_without_staleness_a_killed_learner_ends_with_the_same_weights(headway, trained):
    settings = (
        *trained,
        "steps=16", "heldout.every=16", "queues.max_staleness=0", "learner.threads=1",
        "learner.learning_rate=1e-2", "learner.checkpoint_every=4",
        'actors.reward=["varied:score"]',
    )  # fmt: skip
    with Going(headway, f"untouched-{len(trained)}", *settings) as going:
        untouched = going.end().rows("metrics.jsonl")
    with Going(headway, f"touched-{len(trained)}", *settings) as going:
        for batches in (2, 10):  # before the first checkpoint, and after two
            going.trains(batches)
            going.strike(f"{RANK} learner-0", signal.SIGKILL)
        run, again = going.check(16, learner=2)
    assert again >= 2
    weights = [row["weights_checksum"] for row in untouched]
    assert len(set(weights)) == 16, "every batch teaches something"
    assert [row["weights_checksum"] for row in run.rows("metrics.jsonl")] == weights
