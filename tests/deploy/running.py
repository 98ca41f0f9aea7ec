"""A run of the small recipe in a process of its own, which tests watch, hurt and stop."""

import os
import signal
import sqlite3
import subprocess
import time
from contextlib import closing, suppress

from learner.diagnostics.trained_log import VARIABLE
from tests.deploy.conftest import HEADWAY, RECIPE, FinishedRun, read_rows
from tests.deploy.processes import titled
from tests.waiting import until

WAIT_SECONDS = 300.0
ACTOR, RANK, BROKER = "ray::RolloutActor", "ray::RankActor", "ray::BrokerActor"
BROADCASTER, ENGINE = "ray::Broadcaster", "VLLM::EngineCore"
ENDLESS = ("steps=100000", "heldout.every=100000", "learner.checkpoint_every=100000")
"""Settings of a run that is stopped before it ends."""
ROLES = ("actors", "reward_models", "learner", "broker", "broadcaster", "driver")


def restarts(**counts):
    """Return what a summary has of restarts, of which all but these are 0."""
    return dict.fromkeys(ROLES, 0) | counts


class Running:
    """A run that begins with a `with` block, and is ended with it at the latest.

    Its output goes to a file, and the learner's own log of what it trains to another, `log`.
    `cores` takes the place of the recipe's core for its actor.
    """

    def __init__(self, headway, name, *settings, cores=None, log=None):
        self.headway, self.name, self.folder = headway, name, headway.run_folder(name)
        self.file = headway.folder / f"{name}.out"
        self.log = log or headway.folder / f"{name}.trained"
        recipe = RECIPE
        if cores is not None:
            text = recipe.read_text()
            assert 'cores = ["0"]' in text
            recipe = headway.folder / f"{name}.toml"
            recipe.write_text(text.replace('cores = ["0"]', cores))
        changes = [part for s in (f"name={name}", *settings) for part in ("--set", s)]
        self.arguments = [HEADWAY, "run", recipe, *changes]
        self.environment = {**headway.environment, VARIABLE: str(self.log)}

    def __enter__(self):
        return self.start(self.arguments)

    def start(self, arguments):
        """Start the command of the run, or another one that goes on with it."""
        with self.file.open("a") as output:
            self.process = subprocess.Popen(
                arguments, cwd=self.headway.folder, env=self.environment, start_new_session=True,
                stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait(30)

    def output(self):
        return self.file.read_text()

    def rows(self, name):
        return read_rows(self.folder / name)

    def query(self, sql):
        """Return what a query of the ledger returns; nothing before the ledger has tables."""
        with suppress(sqlite3.OperationalError):
            database = sqlite3.connect(f"file:{self.folder / 'ledger.sqlite'}?mode=ro", uri=True)
            with closing(database):
                return database.execute(sql).fetchall()
        return []

    def until(self, happened, seconds=WAIT_SECONDS):
        """Wait until `happened` returns something true, and return it; the run has to live."""
        return until(happened, seconds, process=self.process, output=self.output)

    def trains(self, batches):
        """Wait until so many batches are trained."""
        self.until(lambda: len(self.rows("metrics.jsonl")) >= batches)

    def trains_more(self, batches):
        """Wait until so many more batches are trained."""
        self.trains(len(self.rows("metrics.jsonl")) + batches)

    def titled(self, title):
        """Return the processes of the run with a title, the oldest first."""
        return sorted(titled(self.process.pid, title), key=lambda process: process.create_time())

    def first(self, title):
        """Return the oldest process with a title, as soon as there is one."""
        return self.until(lambda: self.titled(title))[0]

    def served(self, engine, after=0.0):
        """Return the versions that an engine began to serve after a time."""
        return [
            row["version"]
            for row in self.rows("swaps.jsonl")
            if row["engine_id"] == engine and not row["error"] and row["swap_finished_at"] > after
        ]

    def serves_again(self, count):
        """Return the engine of the newest of `count` restarts, once it has new weights."""
        if len(self.rows("restarts.jsonl")) < count:
            return None
        *_, restart = self.rows("restarts.jsonl")
        engine = restart["actor"].replace("actor", "engine")
        return engine if self.served(engine, restart["at"]) else None

    def strike(self, title, how, *others):
        """Signal a process, and `others` by SIGKILL before; wait until another batch is trained.

        Batches that were trained before, and those of which the record was late, do not count.
        """
        processes = [self.first(each) for each in (*others, title)]
        struck, before = time.time(), len(self.rows("restarts.jsonl"))
        for process in processes[:-1]:
            process.kill()
        processes[-1].send_signal(how)
        self.until(lambda: len(self.rows("restarts.jsonl")) > before + len(others))
        [*_, restart] = self.rows("restarts.jsonl")

        def trained():
            rows = self.rows("metrics.jsonl")
            return [row for row in rows if row["step_started_at"] > restart["at"]]

        again = self.until(trained)[0]["published_at"] - struck
        print(f"{title}, {how.name}: noticed after {restart['at'] - struck:.1f} s, "
              f"the next batch is trained after {again:.1f} s")  # fmt: skip

    def interrupt(self):
        """Stop the run as Ctrl-C does, and return what it printed."""
        self.process.send_signal(signal.SIGINT)
        return self.ends(130)

    def ends(self, code=0):
        """Wait for the end of the run with an exit code, and return what it printed."""
        self.process.wait(WAIT_SECONDS)
        assert self.process.returncode == code, self.output()
        return self.output()

    def check(self, steps, *, groups=2, oldest=2, **counts):
        """Check a run that ends by itself, and return how many batches were trained again."""
        self.ends()
        summary = self.summary
        assert (summary["status"], summary["version"]) == ("done", steps)
        assert summary["restarts"] == restarts(**counts)
        assert summary["max_lag_trained"] <= 2
        return self.check_accounts(steps, groups, oldest=oldest)

    @property
    def summary(self):
        return FinishedRun(self.folder, "").summary

    def check_accounts(self, steps, groups=2, *, oldest=2):
        """Check the accounts and the learner's log; return how many batches were trained again.

        No token of a group lags by more than `oldest`, those that are masked included.
        """
        accounts = self.headway.accounting(self.name)
        assert accounts["balanced"]
        assert (accounts["trained"], accounts["trained_twice"]) == (steps * groups, 0)
        assert [row["version"] for row in self.rows("metrics.jsonl")] == list(range(steps))
        batches = {}
        for row in read_rows(self.log):
            assert batches.setdefault(row["version"], row["groups"]) == row["groups"]
        trained = [group for rows in batches.values() for _, group, _ in rows]
        assert len(trained) == len(set(trained)) == steps * groups
        for version, rows in batches.items():
            assert all(version - sampled <= oldest for *_, sampled in rows)
        return len(read_rows(self.log)) - steps
