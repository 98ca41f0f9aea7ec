"""Damage to a real run that was killed: `headway resume` goes on exactly, or is salvaged.

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


def spoil(path):
    """Invert up to a page in the middle of a file."""
    content = bytearray(path.read_bytes())
    part = slice(len(content) // 2, len(content) // 2 + min(4096, len(content) // 4))
    content[part] = bytes(255 - value for value in content[part])
    path.write_bytes(content)


def newest(folder):
    return newest_checkpoint(folder)[1]


def spoil_optimizer_and_derived(folder):
    """Spoil a file of the newest checkpoint, and all that can be made again; remove the logs."""
    spoil(next((newest(folder) / "optimizer").glob("*.safetensors")))
    for name in DERIVED:
        spoil(folder / name)
    (folder / "summary.json").write_text("{")  # a run that goes on writes it late
    shutil.rmtree(folder / "logs")


def remove_a_needed_segment(folder):
    with open_ledger(folder) as database:
        (segment,) = database.execute(
            "SELECT segment FROM results JOIN batch_groups USING (group_id) WHERE version = ?",
            (newest_checkpoint(folder)[0],),
        ).fetchone()
    (folder / f"journal/{segment:08d}.segment").unlink()


def copy_of(headway, killed, name):
    folder = shutil.copytree(killed, headway.run_folder(name))
    recipe = folder / "recipe.toml"
    recipe.write_text(recipe.read_text().replace('name = "base"', f'name = "{name}"', 1))
    return folder


def checksums(folder):
    return [row["weights_checksum"] for row in read_batches(folder)]


def expect_exact(headway, folder, before, *, salvaged=False):
    """Resume a run to its end, and have it trained again from its beginning."""
    resumed = headway("resume", folder.name)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    after = checksums(folder)
    assert len(after) == STEPS
    if not salvaged:
        assert after[: len(before)] == before
    accounts = headway.accounting(folder.name)
    assert (accounts["balanced"], accounts["trained_twice"]) == (True, 0)
    assert accounts["trained"] == STEPS * 2
    replayed = headway("replay", folder.name, "--steps", f"0:{STEPS}")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    return resumed.stdout


def test_a_damaged_run_goes_on_exactly_and_says_so(headway, killed):
    folder = copy_of(headway, killed, "damaged")
    before = checksums(folder)
    spoil_optimizer_and_derived(folder)
    output = expect_exact(headway, folder, before)
    for words in (
        "the one before is taken", ".safetensors is damaged", "summary.json is damaged",
        "swaps.jsonl, line",
    ):  # fmt: skip
        assert words in output


def test_what_is_needed_is_missed_before_anything_starts_and_salvaged(headway, killed):
    folder = copy_of(headway, killed, "salvaged")
    before = checksums(folder)
    remove_a_needed_segment(folder)
    for named in (".segment: cannot be read", "recipe.toml is missing"):
        refused = headway("resume", folder.name)
        assert refused.returncode in (1, 2)
        assert named in refused.stderr
        assert "starting Ray" not in refused.stdout
        assert "salvage" in refused.stderr or "recipe" in named
        (folder / "recipe.toml").unlink(missing_ok=True)
    salvaged = headway("salvage", folder.name)
    assert salvaged.returncode == 0, salvaged.stderr
    assert "given up: batches" in salvaged.stdout
    expect_exact(headway, folder, before, salvaged=True)


def test_every_kind_of_file_of_a_run_is_known(killed):
    """Files that appear with a new feature belong into one of the cases above."""
    kinds = {path.parts[0] for path in files_of(killed)}
    assert kinds <= {
        "checkpoints", "driver.lock", "journal", "ledger.lock", "ledger.sqlite",
        "ledger.sqlite-shm", "ledger.sqlite-wal", "logs", "metrics.jsonl", "recipe.toml",
        "report.html", "restarts.jsonl", "samples.jsonl", "sessions.jsonl", "summary.json",
        "swaps.jsonl", "targets.json", "waits.jsonl", "drift.jsonl",
    }  # fmt: skip
