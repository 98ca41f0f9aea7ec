"""Run folders with trained batches, made without starting processes."""

import asyncio

from deploy.storage.run_directory import RunDirectory
from learner.engine import checkpoint
from tests.queues.conftest import answer, make_broker, make_prompts

TIMES = {
    "session_started_at": 10.0, "wait_started_at": 10.0, "wait_finished_at": 11.0,
    "step_started_at": 11.0, "step_finished_at": 12.0, "published_at": 40.0,
}  # fmt: skip


def create(config, *, replace=False):
    """Create the folder of a recipe's run, and return it."""
    directory = RunDirectory.of(config)
    with directory.created(config, replace=replace):
        pass
    return directory


def save(root, version, weights_checksum, *, parts=("model.safetensors",), text=None):
    """Write a checkpoint that only looks like one, and return its folder."""
    partial = checkpoint.prepare(root, version)
    for part in parts:
        (partial / part).write_text(text or f"weights {version}")
    return checkpoint.finish(
        root,
        checkpoint.State(
            version=version, saved_at=0.0, optimizer_steps=version, ranks=1, zero_stage=0,
            dtype="float32", cursor=None, weights_checksum=weights_checksum,
        ),
    )  # fmt: skip


def train(directory, rows, *, first=0, session=None, saved=()):
    """Train a batch of one group for each row of statistics, in a session if it is given.

    The `first` batch is that of the run's version. Checkpoints of the versions `saved` are
    committed. Each group has its own journal segment.
    """
    sizes = {"steps": 9, "groups_per_batch": 1, "segment_bytes": 1}
    if directory.backup.is_symlink():
        sizes["backup"] = directory.backup.resolve()

    async def main():
        broker = make_broker(directory.path, session=session, **sizes)
        for version, row in enumerate(rows, start=first):
            await broker.serving("a", version)
            await broker.issue(make_prompts(1, version), cursor=str(version + 1))
            [lease] = await broker.lease("a", 2, 5.0)
            await broker.put("a", answer(lease))
            await broker.take(version, 5.0)
            await broker.ack(version, {"weights_checksum": "", **TIMES, **row})
            if version + 1 in saved:
                folder = save(directory.checkpoints, version + 1, row.get("weights_checksum", ""))
                await broker.commit_checkpoint(version + 1, f"checkpoints/{folder.name}")
        await broker.close()

    asyncio.run(main())
