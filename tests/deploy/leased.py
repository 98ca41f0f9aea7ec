"""A run whose groups are leased as early as its bound allows, without processes."""

import asyncio
from datetime import UTC, datetime, timedelta

from deploy.storage.jsonl import append_rows
from headway import clock
from tests.queues.conftest import make_broker, make_prompts, make_rollout, payload_of

TOKEN = timedelta(milliseconds=10)


def payload(lease, tokens):
    """Return an encoded group of two rollouts of `tokens` tokens each that begin now."""
    began = datetime.now(UTC)
    times = {"created_at": began, "finished_at": began + tokens * TOKEN}
    versions = [lease.start_version] * tokens
    return payload_of(lease, [make_rollout(number, versions, **times) for number in range(2)])


def train_early(directory, *, steps, staleness, row=lambda version: {}):
    """Train batches of one group each, and record their statistics.

    A group is leased as soon as the bound allows, and its rollouts have 4 tokens more than the
    version of its batch. `row` returns further statistics of a version.
    """

    async def main():
        rows = []
        config = {"groups_per_batch": 1, "steps": steps, "max_staleness": staleness}
        broker = make_broker(directory.path, **config)
        await broker.issue(make_prompts(steps), cursor=str(steps))
        leased = 0
        for version in range(steps):
            await broker.serving("engine-0", version)
            while leased < min(version + staleness + 1, steps):
                [lease] = await broker.lease("engine-0", 2, 5.0)
                await broker.put("engine-0", payload(lease, 4 + leased))
                leased += 1
            asked = clock.now()
            await broker.take(version, 5.0)
            began = clock.now()
            tokens = 2 * (4 + version)
            rows.append(
                {
                    "lag_mean": 0.0, "lag_histogram": {"0": tokens}, "max_lag": 0, "ess": 1.0,
                    **row(version), "version": version, "weights_checksum": "",
                    "wait_started_at": asked, "wait_finished_at": began,
                    "step_started_at": began, "step_finished_at": clock.now(),
                    "tokens_trained": tokens, "rollouts_trained": 2,
                }
            )  # fmt: skip
            await broker.ack(version, {})
        await broker.close()
        return rows

    rows = asyncio.run(main())
    append_rows(directory.path / "metrics.jsonl", rows)
    return rows
