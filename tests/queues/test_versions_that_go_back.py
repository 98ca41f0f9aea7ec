"""A rollout that is continued after a resume from an older checkpoint: versions 4, 5, then 4."""

import io

import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deploy.observability.samples import decode_samples
from learner.batch.batch import read_batch
from learner.diagnostics.engine_comparison import units
from learner.diagnostics.off_policy import Origin, group_lag_histogram, origins
from learner.diagnostics.trained_log import oldest_version
from learner.losses.loss_inputs import LossInputs
from queues.readers.open_run import open_ledger
from queues.readers.selection_bias import report_bias
from queues.schema import decode, encode, summarize, write_parquet
from tests.queues.conftest import (
    WAIT,
    make_broker,
    make_group,
    make_rollout,
    opened,
    payload_of,
    train_a_batch,
    unfinished,
)

TRAINED = 6


class Letters:
    def decode(self, ids, **_):
        return "x" * len(ids)


@given(rows=st.lists(st.lists(st.integers(3, TRAINED), max_size=6), min_size=1, max_size=4))
def test_every_reader_sees_the_set_of_versions_and_never_their_order(rows):
    """Ages are those of the oldest token, wherever it stands in its rollout."""
    group = make_group(rollouts=[make_rollout(n, row) for n, row in enumerate(rows)])
    payload = encode(group)
    versions = [version for row in rows for version in row]
    oldest, newest = min(versions, default=None), max(versions, default=None)

    summary = summarize(payload)
    assert (summary.oldest_version, summary.newest_version) == (oldest, newest)
    read = decode(payload).rollouts
    assert [[*rollout.versions] for rollout in read] == [[-1] * 3 + row for row in rows]
    file = io.BytesIO()
    write_parquet([(payload, "trained", TRAINED)], file)
    exported = pq.read_table(file).column("versions").to_pylist()
    assert exported == [[-1] * 3 + row for row in rows]
    assert oldest_version(group) == oldest
    lags = [sample.lag for sample in decode_samples([payload], TRAINED, Letters())]
    assert lags == [TRAINED - min(row, default=TRAINED) for row in rows]

    batch = read_batch([group], oldest_version=5)
    tokens, sampled = batch.tokens, batch.sampled
    assert tokens.versions[tokens.mask].tolist() == [v for v in versions if v >= 5]
    zeros = torch.zeros(len(sampled))
    inputs = LossInputs(
        logprobs=zeros, behavior_logprobs=zeros, advantages=zeros, mask=sampled,
        sequence_ids=tokens.sequence_ids, versions=tokens.versions, version=TRAINED,
    )  # fmt: skip
    assert inputs.lags("a test")[sampled].tolist() == [TRAINED - v for v in versions]
    columns = tokens.versions, sampled, tokens.sequence_ids
    kinds = origins(*columns, version=TRAINED)
    for n, row in enumerate(rows):
        kind = Origin.CROSSED if len({*row}) > 1 else Origin.FRESH
        kind = Origin.STALE if {*row} and max(row) == min(row) < TRAINED else kind
        assert {*kinds[tokens.sequence_ids == n].tolist()} == {kind}
    lag = {} if oldest is None else {TRAINED - oldest: 1}
    by_group = group_lag_histogram(*columns[:2], tokens.group_ids, version=TRAINED)
    assert by_group == lag
    _, unit = units(*columns, tokens.group_ids, ["a"] * len(rows), version=TRAINED)
    compared = [version == min(row) for row in rows for version in row]
    assert (unit[sampled] >= 0).tolist() == compared


@pytest.mark.parametrize("staleness", [1, 2])
async def test_a_group_saved_by_a_newer_version_is_continued_by_an_older_one(tmp_path, staleness):
    """Version 1 saved tokens, the checkpoint is of version 0, and batch 0 is trained again."""
    sizes = {"steps": 5, "max_staleness": staleness}
    async with opened(make_broker(tmp_path, **sizes)) as broker:
        await train_a_batch(broker, 4, capacity=4)
        await broker.serving("a", 1)
        saved, _ = await broker.lease("a", 4, WAIT)
        await broker.save("a", unfinished(saved, 1, 1))
    async with opened(make_broker(tmp_path, **sizes)) as broker:
        await broker.serving("b", 0)
        assert await broker.take(0, WAIT) is not None
        lease, other = await broker.lease("b", 4, WAIT)
        assert (lease.group_id, lease.start_version) == (saved.group_id, 0)
        assert lease.deadline_version == staleness
        [begun] = decode(lease.saved).rollouts
        assert [*begun.versions] == [-1] * 3 + [1, 1]
        rollouts = [make_rollout(0, [1, 1, 0, 0]), make_rollout(1, [0], reward=2.0)]
        await broker.put("b", payload_of(lease, rollouts))
        await broker.put("b", payload_of(other, rollouts))
        await broker.ack(0, {})
        batch = await broker.take(1, WAIT)
        assert [{*decode(payload).rollouts[0].versions} for payload in batch.payloads] == [
            {-1, 0, 1}
        ] * 2
        await broker.ack(1, {})
    with open_ledger(tmp_path) as ledger:
        ages = report_bias(ledger).fates["trained"]["age"]
    assert (ages.count, ages.max) == (4, 1.0)
