"""`headway salvage` in the ledger: what is given up is queued again, and the accounts balance."""

import asyncio
import json

import pytest

from queues.errors import LedgerError
from queues.readers.accounting import read_accounting, read_batches
from queues.readers.checkpoints import lost_groups, read_progress
from queues.readers.open_run import open_ledger
from queues.readers.recorded_batches import read_batch
from queues.records import Prompt
from queues.storage.ledger import Ledger
from queues.storage.ledger_repair import GivenUp, go_back
from queues.storage.ledger_schema import sessions_of
from tests.queues.conftest import make_broker, make_prompts, opened, put_all

SIZES = {"steps": 9, "segment_bytes": 1, "patience_seconds": 0.0}
"""Every group has a journal segment of its own."""
TRAINED = 4


async def train(broker, first, last):
    """Train batches of two groups; prompts are issued as they are wanted."""
    for version in range(first, last):
        await broker.serving("a", version)
        while (batch := await broker.take(version, 0.0)) is None:
            leases = await broker.lease("a", 9, 0.0)
            if not leases:
                issued = int(await broker.cursor() or 0)
                await broker.issue(make_prompts(2, issued), cursor=str(issued + 2))
            await put_all(broker, leases)
        assert len(batch.payloads) == 2
        await broker.ack(version, {"weights_checksum": f"w{version + 1}"})
        await broker.commit_checkpoint(version + 1, f"checkpoints/v{version + 1:06d}")


async def begin(folder):
    """Train four batches and score two evaluations; then one is taken, and two groups are ready."""
    async with opened(make_broker(folder, session=json.dumps({"version": 0}), **SIZES)) as broker:
        for version in (0, 3):
            held_out = [Prompt(prompt_id=f"h/0/{version}", text="1+1=", answer="2")]
            await broker.evaluate(str(version), held_out, temperature=0.0, min_version=version)
        await train(broker, 0, 3)
    async with opened(make_broker(folder, session=json.dumps({"version": 3}), **SIZES)) as broker:
        await train(broker, 3, TRAINED)
        await broker.serving("a", TRAINED)
        await broker.issue(make_prompts(5, 90), cursor="95")
        await put_all(broker, (await broker.lease("a", 8, 0.0))[:4])
        assert await broker.take(TRAINED, 0.0) is not None


@pytest.fixture
def run(tmp_path):
    asyncio.run(begin(tmp_path))
    return tmp_path


def remove(folder, where):
    """Remove the journal segments of some groups; return their ids in the order of issue."""
    with open_ledger(folder) as database:
        rows = database.execute(
            "SELECT group_id, segment FROM results JOIN groups USING (group_id)"
            f" LEFT JOIN batch_groups USING (group_id) WHERE {where} ORDER BY number"
        ).fetchall()
    for _, segment in rows:
        (folder / f"journal/{segment:08d}.segment").unlink()
    return [group_id for group_id, _ in rows]


def note(folder, group_id):
    """Note a turn of a group, as a broker does."""
    ledger = Ledger(folder, synchronous="normal")
    ledger.begin()
    assert ledger.keep_note((group_id, 0, "turn/0", 0, b"said")) == b"said"
    ledger.commit()
    ledger.close()


def finish(folder):
    """Train the rest of the run; return the group ids of all batches."""

    async def main():
        async with opened(make_broker(folder, **SIZES)) as broker:
            await train(broker, (await broker.status()).version, 9)
            assert (await broker.accounting()).balanced

    asyncio.run(main())
    accounts = read_accounting(folder)
    assert (accounts.trained, accounts.trained_twice, accounts.balanced) == (18, 0, True)
    assert all(len(read_batch(folder, version)) == 2 for version in range(9))


def test_lost_groups_are_named_from_a_version_on(run):
    assert lost_groups(run, since=0) == []
    [first, _] = remove(run, "version = 1")
    [_, ready] = remove(run, "state = 'ready'")
    assert {(group.group_id, group.version) for group in lost_groups(run, since=0)} >= {
        (first, 1), (ready, None),
    }  # fmt: skip
    assert {group.version for group in lost_groups(run, since=2)} == {None}
    assert all(str(run / "journal") in group.error for group in lost_groups(run, since=0))


@pytest.mark.parametrize("lost", ["state = 'ready'", "version = 4 AND position = 1"])
def test_groups_that_are_lost_before_they_are_trained_cost_only_themselves(run, lost):
    ids = remove(run, lost)
    before = read_accounting(run)
    assert go_back(run, version=TRAINED, lost=ids) == GivenUp(0, len(ids), 0)
    after = read_accounting(run)
    assert (after.balanced, after.trained) == (True, before.trained)
    assert after.queued == before.queued + len(ids)
    assert after.taken == (2 if "ready" in lost else 0)
    assert after.ready == (0 if "ready" in lost else 3)
    assert lost_groups(run, since=0) == []
    finish(run)


def test_a_lost_batch_takes_everything_with_it_that_later_weights_may_have_sampled(run):
    [lost] = remove(run, "version = 2 AND position = 0")
    note(run, lost)
    given_up = go_back(run, version=2, lost=[lost])
    assert given_up == GivenUp(batches=2, groups=8, scores=1)
    accounts = read_accounting(run)
    assert (accounts.balanced, accounts.trained) == (True, 4)
    assert accounts.taken == accounts.ready == accounts.leased == 0
    assert [row["version"] for row in read_batches(run)] == [0, 1]
    assert [checkpoint.version for checkpoint in read_progress(run).checkpoints] == [1, 2]
    with open_ledger(run) as database:
        assert [row["version"] for row in sessions_of(database)] == [0, 2]
        states = dict(
            database.execute("SELECT evaluation, state FROM groups WHERE purpose = 'evaluate'")
        )
        assert database.execute("SELECT count(*) FROM notes").fetchone()[0] == 0
    assert states == {"0": "scored", "3": "queued"}
    finish(run)


async def test_a_run_that_is_going_on_is_left_alone(run):
    async with opened(make_broker(run, **SIZES)):
        with pytest.raises(LedgerError, match="another broker of this run is alive"):
            go_back(run, version=2)
