"""The recorder of a run: what it keeps and shows, and the runs that it ends."""

import asyncio
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

from deploy.driver import recorder
from deploy.driver.recorder import Recorder, describe
from deploy.errors import RunFailed
from deploy.observability.trackers import Trackers
from learner.diagnostics.batch_report import TrainedBatch
from tests.deploy.driver.contexts import make_context, output
from tests.deploy.trained import train
from tests.queues.conftest import WAIT, begin_work, make_broker, opened
from weight_sync.announcements import WeightUpdateReport

BATCH = {
    "weights_checksum": "",
    "version": 0, "reward_mean": 0.5, "max_lag": 1, "lag_mean": 0.25, "response_length_mean": 40.0,
    "step_finished_at": 10.0, "tokens_trained": 100, "wait_started_at": 8.0,
    "wait_finished_at": 9.0, "step_started_at": 9.0,
}  # fmt: skip


class Processes:
    """A broker with one status, and nothing else that reports."""

    def __init__(self, **status):
        self.status = {"version": 1, "steps": 9, "depth": {"failed": 0}, "batches": [],
                       "last_error": None, **status}  # fmt: skip
        self.broker = SimpleNamespace(status=self.ask, accounting=asyncio.Event().wait)
        self.broadcaster = SimpleNamespace(reports=self.reports, probes=self.probes)
        self.fleet, self.swaps, self.scored = SimpleNamespace(actors=[]), [], []

    async def ask(self, after):
        self.after = after
        return SimpleNamespace(**self.status)

    async def reports(self, since):
        return self.swaps[since:]

    async def probes(self):
        return self.scored


def trackers_of(context):
    return Trackers(context.config, context.directory.path, context.console.say)


async def no_checkpoint():
    """Save nothing before the run ends."""


def follow(context, processes, seconds=10.0, save=no_checkpoint, **intervals):
    recorder = Recorder(context, processes, trackers_of(context), poll_seconds=0.01, **intervals)

    async def main():
        async with asyncio.timeout(seconds):
            await recorder.follow(save)

    asyncio.run(main())


def trained(**figures):
    return SimpleNamespace(version=0, statistics={**BATCH, **figures})


def test_a_batch_above_the_bound_ends_the_run(tmp_path):
    context = make_context(tmp_path)
    with pytest.raises(RunFailed, match=r"lag 3, above queues.max_staleness = 2"):
        follow(context, Processes(batches=[trained(max_lag=3)]))
    assert [row["version"] for row in context.directory.rows("metrics.jsonl")] == [0]


COUNTS = dict.fromkeys(
    ("optimizer_steps", "rollouts_trained", "multi_version_rollouts", "tokens_fresh",
     "tokens_crossed", "tokens_stale"), 0,
)  # fmt: skip


def conclude(context, trackers):
    """Gather two batches and the summary that ends a run."""
    second = {**COUNTS, "version": 1, "step_finished_at": 12.0}
    batches = [trained(**COUNTS), trained(**second)]
    made = Recorder(context, Processes(batches=batches), trackers, accounting_seconds=0.01)
    asyncio.run(made.conclude("done"))


def watching(folder, on_hacking):
    """Make the context of a run with a gold reward."""
    folder.mkdir(exist_ok=True)
    context = make_context(folder)
    context.config.actors.gold = SimpleNamespace(on_hacking=on_hacking)
    return context


def hacked(versions):
    """Return processes with batches in which the reward rises, and the gold reward does not."""
    batches = []
    for version in versions:
        groups = [(0.2 + 0.02 * version, 0.5 + 0.1 * (group % 3)) for group in range(8)]
        gold = {"groups": groups, "length": 9.0, "finished": 1.0, "distinct": 0.5}
        own = {"version": version, "gold": gold, "step_finished_at": 10.0 + version}
        batches.append(SimpleNamespace(version=version, statistics={**BATCH, **COUNTS, **own}))
    return Processes(batches=batches)


def test_a_reward_that_is_hacked_ends_the_run_with_a_checkpoint(tmp_path):
    context, saved = watching(tmp_path, "stop"), []

    async def save():
        saved.append(context.record.version)

    with pytest.raises(RunFailed, match="the reward is hacked") as end:
        follow(context, hacked(range(40)), save=save)
    assert f"go on with: headway resume {tmp_path}" in str(end.value)
    assert saved == [40]


def test_a_reward_that_is_hacked_is_named_alike_whether_the_run_was_resumed_or_not(tmp_path):
    def findings(name, *sessions):
        context = watching(tmp_path / name, "warn")
        for versions in sessions:
            processes, trackers = hacked(versions), trackers_of(context)
            recorder = Recorder(context, processes, trackers, accounting_seconds=0.01)
            asyncio.run(recorder.conclude("done"))
        rows = context.directory.rows("hacking.jsonl")
        assert context.record.hackings == len(rows)
        assert all(row["text"] in output(context) for row in rows)
        return [(row["since"], row["version"]) for row in rows]

    unbroken = findings("unbroken", range(40))
    assert len(unbroken) > 1
    assert unbroken[1][0] > unbroken[0][1], "the watch begins anew"
    assert findings("resumed", range(17), range(17, 40)) == unbroken


def test_two_rollouts_of_every_batch_are_kept_as_text_and_sent_to_the_trackers(
    tmp_path, monkeypatch
):
    decode = SimpleNamespace(decode=lambda ids, **_: f"{len(ids)} tokens")
    monkeypatch.setattr(recorder, "load_tokenizer", lambda path: {"m": decode}[path])
    context = replace(make_context(tmp_path), inputs=SimpleNamespace(model_path="m"))
    train(context.directory, [{"loss": 0.5}, {"loss": 0.25}])
    sent = []
    trackers = SimpleNamespace(batch=lambda row: None, samples=sent.append)
    conclude(context, trackers)
    rows = context.directory.rows("samples.jsonl")
    assert [(row["version"], row["reward"]) for row in rows] == [
        (0, 2.0), (0, 1.0), (1, 2.0), (1, 1.0),
    ]  # fmt: skip
    assert rows[0]["prompt"] == "3 tokens"
    assert [sample.version for sample in sent[0]] == [1, 1]


def test_rows_of_a_cancelled_gathering_precede_those_of_the_end(tmp_path, monkeypatch):
    reading, read = threading.Event(), threading.Event()

    def load_slowly(path):
        reading.set()
        assert read.wait(60)
        return SimpleNamespace(decode=lambda ids, **_: "")

    monkeypatch.setattr(recorder, "load_tokenizer", load_slowly)
    context = replace(make_context(tmp_path), inputs=SimpleNamespace(model_path="m"))
    train(context.directory, [{"loss": 0.5}, {"loss": 0.25}])
    processes = Processes(batches=[trained(**COUNTS)], steps=1)
    trackers = SimpleNamespace(batch=lambda row: None, samples=lambda samples: None)

    async def main():
        made = Recorder(context, processes, trackers, poll_seconds=0.01, accounting_seconds=0.01)
        following = asyncio.create_task(made.follow(no_checkpoint))
        await asyncio.to_thread(reading.wait, 60)
        following.cancel()
        await asyncio.wait([following])
        processes.status["batches"] = [trained(**COUNTS, version=1, step_finished_at=12.0)]
        concluding = asyncio.create_task(made.conclude("done"))
        await asyncio.wait([concluding], timeout=0.1)
        read.set()
        await concluding

    asyncio.run(main())
    versions = [row["version"] for row in context.directory.rows("samples.jsonl")]
    assert versions == [0, 0, 1, 1]


def test_rollouts_that_cannot_be_read_do_not_end_the_run(tmp_path, caplog):
    context = make_context(tmp_path)
    conclude(context, trackers_of(context))
    assert context.directory.rows("samples.jsonl") == []
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "no rollouts of batch 0 are kept as text" in caplog.text


ERROR = 'raised KeyError("lost")\n  File "/home/me/task.py", line 3, in score'


async def write_failures(folder, count):
    """Leave the ledger of a run in which so many groups failed for good."""
    async with opened(make_broker(folder, max_attempts=1)) as broker:
        await begin_work(broker, 8)
        for _ in range(count):
            (lease,) = await broker.lease("a", 2, WAIT)
            await broker.fail("a", lease.group_id, 1, reason="reward", error=ERROR)


@pytest.mark.parametrize("recorded", [True, False])
def test_failures_of_this_session_end_the_run_with_the_last_error(tmp_path, recorded):
    processes = Processes(depth={"failed": 5})
    asyncio.run(write_failures(tmp_path, 6 * recorded))

    async def ask(after):
        processes.status["depth"] = {"failed": processes.status["depth"]["failed"] + 1}
        return SimpleNamespace(**{**processes.status, "last_error": "a reward raised"})

    processes.broker.status = ask
    with pytest.raises(RunFailed, match=r"^3 of the last 640 groups failed for good") as caught:
        follow(make_context(tmp_path, max_failed_groups=2), processes)
    if recorded:  # attempts of other groups may have failed since
        assert f"of prompt sums/0/5: {ERROR}\n" in str(caught.value)
        again = f"headway requeue {tmp_path}, then headway resume {tmp_path}"
        assert str(caught.value).endswith(again)
    else:
        assert str(caught.value).endswith("; a reward raised")


@pytest.mark.parametrize(
    ("trained", "failing", "ends"),
    [(0, 7, "failed"), (3, 2, "failed"), (9, 2, "done"), (3, 0, "done"), (0, 0, "failed")],
)
async def test_a_run_that_trained_less_than_asked_as_prompts_failed_has_failed(
    tmp_path, trained, failing, ends
):
    await write_failures(tmp_path, failing)
    context = make_context(tmp_path)
    processes = Processes(version=trained, depth={"failed": failing})
    checked = Recorder(context, processes, trackers_of(context)).check_complete()
    if ends == "done":
        await checked
        return
    with pytest.raises(RunFailed) as caught:
        await checked
    message = str(caught.value)
    assert message.startswith(f"{trained} of 9 steps are trained, and no prompt is left to train")
    if failing:
        named = ", ".join(f"sums/0/{n}" for n in range(min(failing, 5)))
        more = f" and {failing - 5} more" if failing > 5 else ""
        assert f"{failing} training groups, of prompts {named}{more}; the last" in message
        assert f"of prompt sums/0/{failing - 1}: {ERROR}\n" in message
        assert f"headway requeue {tmp_path}, then headway resume {tmp_path}" in message


def test_a_summary_is_written_though_the_broker_keeps_its_accounting(tmp_path):
    context = make_context(tmp_path)
    with pytest.raises(TimeoutError):
        follow(context, Processes(), 0.5, summary_seconds=0.0, accounting_seconds=0.01)
    assert context.directory.summary_file.exists()


def test_a_batch_is_shown_with_the_newest_scores_and_the_speed(tmp_path):
    context = make_context(tmp_path)
    record = context.record
    record.heldout.append({"version": 0, "score": 0.5, "scored": 20, "failed": 0})
    first = TrainedBatch.from_dict(BATCH)
    second = TrainedBatch.from_dict({**BATCH, "version": 1, "step_finished_at": 12.0})
    record.batches += [first, second]
    with context.console.bar(3, "waiting"):
        context.console.advance(1, describe(first, record))
    line = "step 1/3 · reward 0.500 · held-out greedy 0.500 · lag 0.25 (max 1) · length 40 · 50 tok"
    assert line in output(context)


def test_a_batch_whose_tokens_were_all_too_old_has_no_lag(tmp_path):
    masked = {**BATCH, "max_lag": None, "lag_mean": None, "response_length_mean": None}
    batch = TrainedBatch.from_dict(masked)
    assert describe(batch, make_context(tmp_path).record) == "reward 0.500 · every token masked"


def test_the_reports_of_a_broadcaster_that_was_restarted_are_taken_from_the_first(tmp_path):
    context, processes = make_context(tmp_path), Processes()
    recorder = Recorder(context, processes, trackers_of(context), accounting_seconds=0.01)
    update = WeightUpdateReport(engine_id="e", version=0, published_at=1.0, bytes=7)

    async def main():
        for swaps, restarts in (([0, 1], 0), ([0, 1, 2], 0), ([3], 1), ([3, 4], 1)):
            processes.swaps = [replace(update, version=version) for version in swaps]
            context.record.restarts["broadcaster"] = restarts
            await recorder.conclude("running")

    asyncio.run(main())
    assert [row["version"] for row in context.directory.rows("swaps.jsonl")] == [0, 1, 2, 3, 4]
