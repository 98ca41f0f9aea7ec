"""Damage to a real run that was killed: `headway resume` goes on exactly, or names the file.

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
from tests.deploy.conftest import headway  # noqa: F401  (a fixture)
from tests.deploy.runs.test_actors_die import until
from tests.deploy.runs.test_resume import wait_for_end
from tests.red_team.damage import files_of

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.deepspeed, pytest.mark.timeout(900)]
STEPS = 24
DERIVED = ("swaps.jsonl", "sessions.jsonl", "metrics.jsonl", "samples.jsonl")


@pytest.fixture(scope="module")
def killed(headway):  # noqa: F811
    """Return the folder of a run with two checkpoints, killed after more batches."""
    process = headway.start(
        "run", "name=base", f"steps={STEPS}", "heldout.every=12", "learner.checkpoint_every=3",
        "learner.keep_checkpoints=2", "queues.segment_bytes=4000",
        "actors.scripted_options={tokens_per_second=60.0}", 'actors.reward=["varied:score"]',
    )  # fmt: skip
    headway.wait_for_batches("base", 8, process)
    folder = headway.run_folder("base")
    until(lambda: all((folder / name).exists() for name in DERIVED), process)
    until(lambda: len(read_batches(folder)) % 3 == 1, process)  # the first after a checkpoint
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


def spoil_optimizer(folder):
    spoil(next((newest(folder) / "optimizer").glob("*.safetensors")))


def spoil_derived(folder):
    """Spoil every file that can be made again, and remove the logs."""
    for name in DERIVED:
        spoil(folder / name)
    (folder / "summary.json").write_text("{")  # a run that goes on writes it late
    shutil.rmtree(folder / "logs")


def take_the_one_before(folder):
    """Put the checkpoint before into the place of the newest, with all that belongs to it."""
    *_, before, last = sorted((folder / "checkpoints").glob("v*"))
    shutil.rmtree(last)
    shutil.copytree(before, last)


def remove_a_needed_segment(folder):
    with open_ledger(folder) as database:
        (segment,) = database.execute(
            "SELECT segment FROM results JOIN batch_groups USING (group_id) WHERE version = ?",
            (newest_checkpoint(folder)[0],),
        ).fetchone()
    (folder / f"journal/{segment:08d}.segment").unlink()


def copy_of(headway, killed, name):  # noqa: F811
    folder = shutil.copytree(killed, headway.run_folder(name))
    recipe = folder / "recipe.toml"
    recipe.write_text(recipe.read_text().replace('name = "base"', f'name = "{name}"', 1))
    return folder


def checksums(folder):
    return [row["weights_checksum"] for row in read_batches(folder)]


def expect_exact(headway, folder, before, *, salvaged=False):  # noqa: F811
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


@pytest.mark.parametrize(
    ("spoiled", "words"),
    [
        (lambda folder: None, []),
        (spoil_optimizer, ["the one before is taken", ".safetensors is damaged"]),
        (lambda folder: spoil(newest(folder) / "model.safetensors"), ["model.safetensors is"]),
        (lambda folder: shutil.rmtree(newest(folder)), ["is missing"]),
        (take_the_one_before, ["and the ledger"]),
        (spoil_derived, ["summary.json is damaged", "swaps.jsonl, line"]),
    ],
    ids=["none", "optimizer", "weights", "folder", "another", "derived"],
)
def test_a_damaged_run_goes_on_exactly_and_says_so(headway, killed, spoiled, words, request):  # noqa: F811
    folder = copy_of(headway, killed, request.node.callspec.id)
    before = checksums(folder)
    spoiled(folder)
    said = expect_exact(headway, folder, before)
    assert [word for word in words if word not in said] == []
    assert ("damaged" in said) == bool(words)


@pytest.mark.parametrize(
    ("spoiled", "named"),
    [
        (remove_a_needed_segment, ".segment: cannot be read"),
        (lambda folder: (folder / "recipe.toml").unlink(), "recipe.toml is missing"),
        (lambda folder: spoil(folder / "recipe.toml"), "recipe.toml"),
    ],
    ids=["segment", "no-recipe", "recipe"],
)
def test_what_is_needed_is_missed_before_anything_starts_and_salvaged(
    headway,  # noqa: F811
    killed,
    spoiled,
    named,
    request,
):
    folder = copy_of(headway, killed, request.node.callspec.id)
    before = checksums(folder)
    spoiled(folder)
    refused = headway("resume", folder.name)
    assert refused.returncode in (1, 2)
    assert named in refused.stderr
    assert "starting Ray" not in refused.stdout
    assert "salvage" in refused.stderr or "recipe" in named
    salvaged = headway("salvage", folder.name)
    assert salvaged.returncode == 0, salvaged.stderr
    lost = "segment" in named
    assert ("given up: batches" in salvaged.stdout) == lost
    expect_exact(headway, folder, before, salvaged=lost)


def test_every_kind_of_file_of_a_run_is_known(killed):
    """Files that appear with a new feature belong into one of the cases above."""
    kinds = {path.parts[0] for path in files_of(killed)}
    assert kinds <= {
        "checkpoints", "driver.lock", "journal", "ledger.lock", "ledger.sqlite",
        "ledger.sqlite-shm", "ledger.sqlite-wal", "logs", "metrics.jsonl", "recipe.toml",
        "report.html", "restarts.jsonl", "samples.jsonl", "sessions.jsonl", "summary.json",
        "swaps.jsonl", "targets.json", "waits.jsonl", "drift.jsonl",
    }  # fmt: skip
