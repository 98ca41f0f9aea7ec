"""Damage to a real run that was killed: `headway resume` names what is needed, or it is salvaged.

`headway replay` trains all batches again from the initial weights and compares the weights after
each: only a run that trained from what it had can pass.
"""

import os
import shutil
import signal

import pytest

from queues.readers.accounting import read_batches
from queues.readers.checkpoints import committed_checkpoints, newest_checkpoint
from queues.readers.open_run import open_ledger
from tests.deploy.processes import wait_for_end
from tests.red_team.damage import files_of
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.deepspeed, pytest.mark.timeout(900)]
STEPS = 24
DERIVED = ("swaps.jsonl", "sessions.jsonl", "metrics.jsonl", "samples.jsonl")


@pytest.fixture(scope="module")
def killed(headway):
    """Return the folder of a run with two checkpoints, killed after more batches."""
    process = headway.start(
        "run", "name=base", f"steps={STEPS}", "heldout.every=12", "learner.checkpoint_every=3",
        "learner.keep_checkpoints=2", "queues.segment_bytes=4000",
        "actors.scripted_options={tokens_per_second=60.0}", 'actors.reward=["varied:score"]',
    )  # fmt: skip
    headway.wait_for_batches("base", 8, process)
    folder = headway.run_folder("base")
    until(lambda: all((folder / name).exists() for name in DERIVED), process=process)
    first_after_checkpoint = lambda: len(read_batches(folder)) % 3 == 1  # noqa: E731
    until(first_after_checkpoint, process=process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=180)
    wait_for_end(headway, seconds=180)
    assert len({*checksums(folder)}) >= 8, "every batch teaches something"
    assert len(committed_checkpoints(folder)) == 2
    return folder


def remove_a_needed_segment(folder):
    with open_ledger(folder) as database:
        (segment,) = database.execute(
            "SELECT segment FROM results JOIN batch_groups USING (group_id) WHERE version = ?",
            (newest_checkpoint(folder)[0],),
        ).fetchone()
    (folder / f"journal/{segment:08d}.segment").unlink()


def checksums(folder):
    return [row["weights_checksum"] for row in read_batches(folder)]


def test_what_is_needed_is_missed_before_anything_starts_and_salvaged(headway, killed):
    folder = shutil.copytree(killed, headway.run_folder("salvaged"))
    recipe = folder / "recipe.toml"
    recipe.write_text(recipe.read_text().replace('name = "base"', 'name = "salvaged"', 1))
    remove_a_needed_segment(folder)
    for named in (".segment: cannot be read", "recipe.toml is missing"):
        refused = headway("resume", folder.name)
        assert refused.returncode in (1, 2)
        assert named in refused.stderr
        assert "starting Ray" not in refused.stdout
        assert "salvage" in refused.stderr or "recipe" in named
        recipe.unlink(missing_ok=True)
    salvaged = headway("salvage", folder.name)
    assert salvaged.returncode == 0, salvaged.stderr
    assert "given up: batches" in salvaged.stdout
    for arguments in (("resume", "salvaged"), ("replay", "salvaged", "--steps", f"0:{STEPS}")):
        done = headway(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr
    assert len(checksums(folder)) == STEPS
    accounts = headway.accounting("salvaged")
    assert (accounts["balanced"], accounts["trained_twice"]) == (True, 0)
    assert accounts["trained"] == STEPS * 2


def test_every_kind_of_file_of_a_run_is_known(killed):
    """Files that appear with a new feature belong into `test_damage`."""
    kinds = {path.parts[0] for path in files_of(killed)}
    assert kinds <= {
        "checkpoints", "driver.lock", "journal", "ledger.lock", "ledger.sqlite",
        "ledger.sqlite-shm", "ledger.sqlite-wal", "logs", "metrics.jsonl", "recipe.toml",
        "report.html", "restarts.jsonl", "samples.jsonl", "sessions.jsonl", "summary.json",
        "swaps.jsonl", "targets.json", "waits.jsonl", "drift.jsonl", "probes.jsonl",
    }  # fmt: skip
