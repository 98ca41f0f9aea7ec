"""A broker that is killed at any moment: what was answered survives, and nothing is done twice."""

import asyncio
import sqlite3
import threading

import pytest

from headway.errors import InputError
from queues.broker.broker import Broker
from queues.errors import LedgerError, ProtocolError, QueueClosed
from queues.readers.accounting import failed_prompts
from queues.readers.open_run import is_open, open_ledger
from queues.records import Prompt, PutStatus
from queues.schema import decode
from queues.storage.ledger_schema import FILE_NAME, LOCK_NAME, sessions_of
from tests.queues.conftest import (
    WAIT,
    answer,
    begin_work,
    make_broker,
    make_prompts,
    opened,
    put_all,
    train_a_batch,
)


async def test_leases_are_void_and_their_groups_stand_at_the_front(tmp_path):
    async with opened(make_broker(tmp_path)) as broker:
        leases = await begin_work(broker, 4, capacity=6)
        await broker.put("a", answer(leases[1]))
    async with opened(make_broker(tmp_path)) as broker:
        await broker.serving("b", 0)
        again = await broker.lease("b", 4, WAIT)
        assert [(x.group_id, x.attempt) for x in again] == [
            (leases[0].group_id, 2),
            (leases[2].group_id, 2),
        ]
        assert await broker.put("a", answer(leases[0])) is PutStatus.FENCED
        assert await broker.put("a", answer(leases[1])) is PutStatus.DUPLICATE
        assert await broker.put("b", answer(again[0])) is PutStatus.ACCEPTED
        await broker.issue(make_prompts(1, 4), cursor="5")
        batch = await broker.take(0, WAIT)
        ready = [leases[0].group_id, leases[1].group_id]
        group_ids = [decode(payload).group_id for payload in batch.payloads]
        assert group_ids == ready, "in the order of issue, though the second came first"


async def test_a_broker_that_is_made_again_goes_on_with_the_leases_of_the_last(tmp_path):
    async with opened(make_broker(tmp_path, owner="one", session="{}")) as broker:
        await broker.issue(make_prompts(4), cursor="4")
        await broker.evaluate("e", make_prompts(1), temperature=0.5, min_version=0)
        await broker.serving("a", 0)
        await broker.serving("b", 0)
        leases = await broker.lease("a", 7, WAIT)
    async with opened(make_broker(tmp_path, owner="one", session="{}")) as broker:
        status = await broker.status()
        assert (status.engines, status.live, status.depth["leased"]) == ({"a": 0, "b": 0}, 3, 3)
        evaluation, first, second, lost = leases
        held = [(x.group_id, x.attempt) for x in (evaluation, first, second)]
        assert await broker.heartbeat("a", held) == []
        assert await broker.put("a", answer(evaluation)) is PutStatus.ACCEPTED
        assert await broker.put("a", answer(first)) is PutStatus.ACCEPTED
        (again,) = await broker.lease("b", 2, WAIT)
        assert (again.group_id, again.attempt) == (lost.group_id, 2), "its holder had no answer"
        assert await broker.heartbeat("a", [(lost.group_id, 1)]) == [(lost.group_id, 1)]
        assert await broker.put("a", answer(lost)) is PutStatus.FENCED
        assert await broker.put("a", answer(second)) is PutStatus.ACCEPTED
        assert (await broker.status()).given_back == {"unclaimed": 1}
    assert len(sessions(tmp_path)) == 1


def sessions(directory):
    with open_ledger(directory) as database:
        return sessions_of(database)


async def test_leases_that_nobody_claims_of_a_broker_that_is_made_again_expire(tmp_path):
    settings = {"owner": "one", "lease_seconds": 0.4, "heartbeat_seconds": 0.1}

    async with opened(make_broker(tmp_path, **settings)) as broker:
        leases = await begin_work(broker, 1, capacity=2)
    async with opened(make_broker(tmp_path, **settings)) as broker:
        await broker.serving("b", 0)
        (again,) = await broker.lease("b", 2, WAIT)
        assert (again.group_id, again.attempt) == (leases[0].group_id, 2)


async def test_a_broker_that_is_made_again_refuses_learners_that_the_last_refused(tmp_path):
    async with opened(make_broker(tmp_path, owner="one")) as broker:
        await train_a_batch(broker, 4)
        await broker.begin_learner(3)
    for owner, epoch in (("one", 3), ("two", 0)):
        async with opened(make_broker(tmp_path, owner=owner)) as broker:
            assert (await broker.status()).learner == (epoch, -1)
            await broker.begin_learner(epoch)
            await broker.begin_learner(epoch + 1)
            with pytest.raises(ProtocolError, match=f"learner of epoch {epoch} calls"):
                await broker.take(0, WAIT, epoch=epoch)
            assert await broker.take(0, WAIT, epoch=epoch + 1) is not None


async def test_a_copy_of_a_call_of_issue_that_comes_after_the_next_one_changes_nothing(tmp_path):
    async with opened(make_broker(tmp_path)) as broker:
        await broker.issue(make_prompts(4), cursor="4", token="first")
        await broker.issue(make_prompts(4, 4), cursor="8", token="second")
        await broker.issue(make_prompts(4), cursor="4", token="first")
        assert await broker.cursor() == "8"
        assert (await broker.status()).depth["queued"] == 8


async def test_calls_whose_answer_was_lost_may_be_repeated_to_the_next_broker(tmp_path):
    """Each call of a run twice, with a new broker between the two: nothing happens twice."""
    now: list[Broker] = []

    async def twice(method, *arguments, **options):
        answers = []
        for _ in range(2):
            if now:
                await now.pop().close()
            now.append(make_broker(tmp_path, owner="one"))
            answers.append(await getattr(now[0], method)(*arguments, **options))
        return answers

    await twice("issue", make_prompts(4), cursor="4", token="t")
    await twice("evaluate", "e", make_prompts(1, 9), temperature=0.0, min_version=1)
    await twice("serving", "a", 0)
    first, second, third = await now[0].lease("a", 6, WAIT)
    assert await twice("heartbeat", "a", [(x.group_id, 1) for x in (first, second, third)]) == [
        [], [],
    ]  # fmt: skip
    put = await twice("put", "a", answer(first))
    assert put == [PutStatus.ACCEPTED, PutStatus.DUPLICATE]
    await twice("put", "a", answer(second))
    await twice("fail", "a", third.group_id, 1, reason="reward", error="E")
    first_batch, again_batch = await twice("take", 0, WAIT)
    assert first_batch == again_batch
    await twice("ack", 0, {"weights_checksum": "x"})
    assert (await now[0].status()).diverged == 0
    await twice("commit_checkpoint", 1, "checkpoints/v000001")
    (again, _) = await now[0].lease("a", 4, WAIT)
    assert await twice("release", "a") == [2, 0]
    accounts = await now[0].accounting()
    assert (accounts.issued, accounts.trained, accounts.queued) == (4, 2, 2)
    assert (accounts.balanced, accounts.trained_twice) == (True, 0)
    assert again.attempt == 1 + (again.group_id == third.group_id)
    await now[0].close()


def test_a_broker_that_is_made_again_waits_for_the_end_of_the_last(tmp_path):
    broker: Broker = make_broker(tmp_path, owner="one")
    ending = threading.Timer(1.0, lambda: asyncio.run(broker.close()))
    ending.start()
    asyncio.run(make_broker(tmp_path, owner="one").close())
    ending.join()


async def test_a_batch_trained_again_is_held_against_what_was_recorded_of_it(tmp_path, caplog):
    async with opened(make_broker(tmp_path)) as broker:
        await train_a_batch(broker, 4, weights_checksum="a", loss=0.5)
        await broker.take(0, WAIT)
        await broker.ack(0, {"weights_checksum": "a", "loss": 0.5})
        assert (await broker.status()).diverged == 0
        await broker.ack(0, {"weights_checksum": "b", "loss": 0.5})
        status = await broker.status()
        assert (status.diverged, status.version) == (1, 1)
        assert status.batches[0].statistics["weights_checksum"] == "a"
    assert "batch 0, trained again, gave other weights than before" in caplog.text


async def test_evaluations_that_were_never_reached_stay_settled(tmp_path):
    async with opened(make_broker(tmp_path)) as broker:
        await broker.evaluate("ended", make_prompts(1), temperature=0.0, min_version=1)
        await broker.issue([], cursor="0", last=True)
    database = sqlite3.connect(tmp_path / FILE_NAME)
    rows = database.execute("SELECT state, reason, error FROM groups").fetchall()
    database.close()
    assert rows == [("failed", "version_not_reached", "training ended at version 0")]
    async with opened(make_broker(tmp_path)) as broker:
        outcome = await broker.evaluation("ended", 0.0)
        assert (outcome.failed, outcome.score) == (1, None)
        assert (await broker.accounting()).balanced


async def test_a_run_that_goes_on_with_fewer_steps_ends_without_the_later_evaluations(tmp_path):
    async with opened(make_broker(tmp_path)) as broker:
        await broker.evaluate("third", make_prompts(1), temperature=0.0, min_version=3)
        await train_a_batch(broker)
    async with opened(make_broker(tmp_path, steps=1)) as broker:
        assert (await broker.evaluation("third", 0.0)).failed == 1
        assert (await broker.accounting()).balanced
        with pytest.raises(QueueClosed):
            await broker.lease("a", 1, WAIT)


async def test_the_end_of_the_source_and_failures_are_remembered(tmp_path):
    async with opened(make_broker(tmp_path, max_attempts=1)) as broker:
        hostile = Prompt(prompt_id="s/0/1", text="\ud800", answer="\udc00", metadata={"\ud800": 1})
        await broker.issue([*make_prompts(1), hostile], cursor="2", last=True)
        await broker.serving("a", 0)
        lease, other = await broker.lease("a", 4, WAIT)
        await broker.fail("a", lease.group_id, 1, reason="reward", error="\udcff" + 20_000 * "x")
    with open_ledger(tmp_path) as ledger:
        [failed] = failed_prompts(ledger)
    assert failed.error == "?" + 15_999 * "x"
    async with opened(make_broker(tmp_path, max_attempts=1)) as broker:
        await broker.serving("a", 0)
        (again,) = await broker.lease("a", 2, WAIT)
        assert (again.group_id, again.prompt) == (other.group_id, hostile)
        await broker.put("a", answer(again))
        with pytest.raises(QueueClosed):
            await broker.prompts_wanted(WAIT)
        assert len((await broker.take(0, WAIT)).payloads) == 1
        await broker.ack(0, {})
        accounting = await broker.accounting()
        assert (accounting.trained, accounting.failed) == (1, {"reward": 1})
        assert accounting.balanced


@pytest.mark.parametrize(("before", "after"), [(0, 2), (1, 3)])
async def test_a_run_goes_on_with_a_larger_bound_and_trains_every_group_within_it(
    tmp_path, before, after
):
    async with opened(make_broker(tmp_path, steps=3, max_staleness=before)) as broker:
        await begin_work(broker, 14)
        await put_all(broker, (await broker.lease("a", 8, WAIT))[:2])
    async with opened(make_broker(tmp_path, steps=7, max_staleness=after)) as broker:
        lags = []
        for version in range(7):
            await put_all(broker, await broker.lease("a", 12, 0.01))
            batch = await broker.take(version, WAIT)
            assert batch is not None
            groups = [decode(payload) for payload in batch.payloads]
            oldest = [min(rollout.versions[-2:]) for group in groups for rollout in group.rollouts]
            lags.append(version - min(oldest))
            await broker.ack(version, {})
            await broker.serving("a", version + 1)
        assert max(lags) in (after - 1, after)
        accounts = await broker.accounting()
        assert (accounts.trained, accounts.trained_twice) == (14, 0)


async def test_a_run_goes_on_only_with_the_shape_that_it_was_begun_with(tmp_path):
    await make_broker(tmp_path).close()
    with pytest.raises(InputError, match="group_size = 3, but this run was begun with 2"):
        make_broker(tmp_path, group_size=3)
    with pytest.raises(InputError, match="groups_per_batch = 1, but"):
        make_broker(tmp_path, groups_per_batch=1)
    await make_broker(tmp_path, steps=9, max_staleness=0).close()


async def test_a_run_has_one_broker_at_a_time(tmp_path):
    async with opened(make_broker(tmp_path)):
        with pytest.raises(LedgerError, match="another broker of this run is alive"):
            make_broker(tmp_path)
    await make_broker(tmp_path).close()


async def test_a_run_is_open_as_long_as_its_broker_lives(tmp_path):
    run = tmp_path / "run"
    assert not is_open(run)
    async with opened(make_broker(run)):
        assert is_open(run)
        assert is_open(run), "asking changes nothing"
    assert not is_open(run)
    assert (run / LOCK_NAME).exists(), "the file says nothing, its lock does"
