"""Recorded batches behind the broker's client, as `headway replay` serves them to several ranks."""

import sqlite3
from contextlib import closing

import pytest

from queues.errors import QueueClosed
from queues.ray_broker import BrokerClient
from queues.readers.recorded_batches import RecordedBatches
from queues.schema import decode
from queues.storage.ledger_schema import FILE_NAME
from tests.queues.conftest import WAIT, InProcess, make_broker, opened, train_a_batch


async def record_a_batch(directory):
    async with opened(make_broker(directory)) as broker:
        await train_a_batch(broker)


async def test_a_recorded_batch_is_taken_through_the_client(tmp_path):
    await record_a_batch(tmp_path)
    client = BrokerClient(InProcess(RecordedBatches(tmp_path)))
    batch = await client.take(0, WAIT)
    assert [decode(x).group_id for x in batch.payloads] == ["g00000001", "g00000002"]
    with pytest.raises(QueueClosed, match="no batch 1 is recorded"):
        await client.take(1, WAIT)


async def test_a_batch_that_takes_longer_to_read_than_an_answer_may_is_waited_for(tmp_path):
    class Asked(RecordedBatches):
        """Ends the other's lock on the ledger once the client has asked why it has to wait."""

        async def paused(self):
            writer.rollback()
            return await super().paused()

    await record_a_batch(tmp_path)
    with closing(sqlite3.connect(tmp_path / FILE_NAME, isolation_level=None)) as writer:
        writer.execute("PRAGMA journal_mode = DELETE")  # in WAL mode readers wait for nobody
        writer.execute("BEGIN EXCLUSIVE")
        client = BrokerClient(InProcess(Asked(tmp_path)), answer_seconds=0.05)
        assert len((await client.take(0, 0.0)).payloads) == 2
