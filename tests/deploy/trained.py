"""Run folders with trained batches, made without starting processes."""

import asyncio

from tests.queues.conftest import answer, make_broker, make_prompts


def train(directory, rows):
    """Train a batch of one group for each row of statistics."""

    async def main():
        broker = make_broker(directory.path, steps=9, groups_per_batch=1)
        for version, row in enumerate(rows):
            await broker.serving("a", version)
            await broker.issue(make_prompts(1, version), cursor=str(version + 1))
            [lease] = await broker.lease("a", 2, 5.0)
            await broker.put("a", answer(lease))
            await broker.take(version, 5.0)
            await broker.ack(version, {"weights_checksum": "", **row})
        await broker.close()

    asyncio.run(main())
