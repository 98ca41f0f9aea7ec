"""What a run goes on from: a checkpoint that is whole, its ledger and its journal; `salvage`."""

import shutil
import sqlite3
from contextlib import closing

import pytest

from deploy.config.loader import load_recipe
from deploy.storage.jsonl import rewrite_rows
from deploy.storage.repair.salvage import last_whole
from deploy.storage.repair.whole_checkpoints import find_checkpoint
from deploy.storage.run_directory import RunDirectory
from deploy.storage.sessions import begin_session
from headway.errors import InputError
from queues.errors import JournalError, LedgerError
from queues.readers.accounting import read_accounting
from queues.readers.checkpoints import LostGroup, last_save_seconds, read_progress
from queues.storage import row_checksums
from tests.deploy.conftest import call_main
from tests.deploy.trained import create, train


@pytest.fixture
def directory(tmp_path, request):
    """Provide a run of 4 batches with checkpoints of versions 2, 3 and 4."""
    settings = [f"deploy.runs_dir={tmp_path / 'runs'}", "name=mine"]
    if getattr(request, "param", "here") == "elsewhere":
        settings.append(f"deploy.checkpoint_dir={tmp_path / 'disk'}")
    config = load_recipe("demo", settings)
    made = create(config)
    row = begin_session(made, made.config(), {"started_at": 1.0}, version=0)
    rows = [{"loss": 0.5, "weights_checksum": f"w{version + 1}"} for version in range(4)]
    train(made, rows, session=row, saved=(2, 3, 4))
    made.write_summary({"status": "failed", "version": 4, "heldout": [], "heldout_sampled": []})
    return made


def spoil(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def segment(directory, number):
    return directory.path / f"journal/{number:08d}.segment"


def test_the_newest_checkpoint_serves_if_it_is_whole(directory):
    assert find_checkpoint(directory, pytest.fail) == (4, directory.checkpoints / "v000004")


def test_a_run_that_has_nothing_yet_has_no_checkpoint(tmp_path):
    assert find_checkpoint(RunDirectory(tmp_path), pytest.fail) is None


@pytest.mark.parametrize("directory", ["elsewhere"], indirect=True)
def test_checkpoints_whose_disk_is_not_there_are_not_taken_for_lost(directory, tmp_path):
    (tmp_path / "disk").rename(tmp_path / "unmounted")
    for command in (["salvage"], ["export", "--to", tmp_path / "model"]):
        result = call_main([command[0], directory.path, *command[1:]], tmp_path)
        assert result.returncode == 2
        assert "which is missing: mount its disk" in " ".join(result.stderr.split())
    with pytest.raises(InputError, match="which is missing: mount its disk"):
        find_checkpoint(directory, pytest.fail)
    (tmp_path / "unmounted").rename(tmp_path / "disk")
    spoil(directory.checkpoints / "v000004" / "state.json")
    given_up = []
    chosen = find_checkpoint(directory, given_up.append)
    assert chosen == (3, directory.checkpoints / "v000003")
    assert "checkpoint 4 is damaged" in given_up[0]


@pytest.mark.parametrize(("took", "counts"), [(40, 40.0), (86400, 1800.0)])
def test_an_interrupted_learner_gets_time_by_how_long_the_last_checkpoint_took(
    directory, took, counts
):
    with closing(sqlite3.connect(directory.ledger)) as ledger, ledger:
        row_checksums.register(ledger)
        ledger.execute(
            "UPDATE checkpoints SET at = ? + (SELECT acked_at FROM batches"
            " WHERE batches.version = checkpoints.version - 1) WHERE version = 4",
            (took,),
        )
    assert last_save_seconds(directory.path) == pytest.approx(counts)


def other_weights(folder):
    """Put another checkpoint into its place, whose checksums fit its files."""
    shutil.rmtree(folder)
    shutil.copytree(folder.with_name("v000003"), folder)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda folder: spoil(folder / "model.safetensors"), "model.safetensors is damaged"),
        (lambda folder: spoil(folder / "state.json"), "state.json is damaged"),
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors is missing"),
        (shutil.rmtree, "v000004 is missing"),
        (other_weights, "it has version 3 with weights of checksum 'w3', and the ledger 'w4'"),
    ],
    ids=["weights", "state", "file", "folder", "other"],
)
def test_a_damaged_newest_checkpoint_is_set_aside_and_the_one_before_serves(
    directory, change, problem
):
    said = []
    folder = directory.checkpoints / "v000004"
    change(folder)
    kept = folder.exists()
    assert find_checkpoint(directory, said.append) == (3, directory.checkpoints / "v000003")
    [line] = said
    assert line.startswith("checkpoint 4 is damaged: ")
    assert line.endswith("; the one before is taken")
    assert problem in line
    assert (directory.checkpoints / "aside-v000004").exists() == kept
    assert ("aside-v000004" in line) == kept
    assert find_checkpoint(directory, pytest.fail)[0] == 3


def test_without_any_checkpoint_that_is_whole_the_initial_weights_serve(directory):
    said = []
    for folder in [*directory.checkpoints.iterdir()]:
        spoil(folder / "model.safetensors")
    assert find_checkpoint(directory, said.append) is None
    assert [line.split()[1] for line in said] == ["4", "3", "2"]
    segment(directory, 1).unlink()
    with pytest.raises(JournalError, match=r"00000001\.segment.*part of batch 0.*salvage"):
        find_checkpoint(directory, said.append)


def test_a_segment_is_missed_if_it_is_needed_and_then_at_once(directory):
    segment(directory, 1).unlink()
    assert find_checkpoint(directory, pytest.fail)[0] == 4
    for version in (3, 4):
        spoil(directory.checkpoints / f"v00000{version}" / "model.safetensors")
    spoil(segment(directory, 3))
    with pytest.raises(JournalError, match=r"00000003\.segment: the frame at byte 0 is") as lost:
        find_checkpoint(directory, print)
    assert "which is part of batch 2" in str(lost.value)


def test_a_ledger_that_lost_its_end_or_itself_is_refused(directory):
    directory.checkpoints.joinpath("v000004").rename(directory.checkpoints / "v000009")
    with pytest.raises(LedgerError, match=r"ledger\.sqlite ends at version 4, but .*/v000009 was"):
        find_checkpoint(directory, pytest.fail)
    directory.ledger.unlink()
    with pytest.raises(LedgerError, match=r"ledger\.sqlite is missing, but there is .*/v000009"):
        find_checkpoint(directory, pytest.fail)
    shutil.rmtree(directory.checkpoints)
    with pytest.raises(LedgerError, match=r"is missing, but there is .*/00000001\.segment"):
        find_checkpoint(directory, pytest.fail)


@pytest.mark.parametrize(
    ("checkpoints", "lost", "expected"),
    [
        ([], [], (0, 8)),
        ([2, 6], [], (6, 8)),
        ([2, 6], [3], (6, 8)),
        ([2], [3], (2, 3)),
        ([2, 6], [7], (6, 7)),
        ([2, 8], [7], (8, 8)),
        ([], [0], (0, 0)),
        ([2], [8], (2, 8)),
        ([2], [None], (2, 8)),
    ],
)
def test_the_last_whole_state_is_the_last_that_recorded_batches_lead_to(
    checkpoints, lost, expected
):
    groups = [LostGroup("g", version, "") for version in lost]
    assert last_whole(checkpoints, 8, groups) == expected


def salvage(directory):
    result = call_main(["salvage", "mine"], directory.path.parents[1])
    assert (result.returncode, result.stderr) == (0, "")
    assert f"go on with: headway resume {directory.path}" in result.stdout
    return result.stdout


def test_salvage_of_a_whole_run_changes_nothing(directory):
    before = directory.ledger.read_bytes()
    assert "mine is at version 4, which checkpoint 4 leads to" in salvage(directory)
    assert directory.ledger.read_bytes() == before
    assert find_checkpoint(directory, pytest.fail)[0] == 4


def test_salvage_leaves_alone_what_nothing_needs(directory):
    segment(directory, 3).unlink()
    spoil(directory.checkpoints / "v000004" / "model.safetensors")
    before = read_accounting(directory.path)
    said = salvage(directory)
    assert "given up: checkpoint 4 is damaged" in said
    assert "mine is at version 4, which checkpoint 3 leads to" in said
    assert "rollouts" not in said
    assert read_accounting(directory.path) == before


def test_salvage_goes_back_to_the_last_whole_state_and_says_what_is_given_up(directory):
    for version in (3, 4):
        spoil(directory.checkpoints / f"v00000{version}" / "model.safetensors")
    segment(directory, 4).unlink()
    scores = [{"version": version, "score": 0.5} for version in (0, 3, 4)]
    directory.write_summary({"status": "failed", "heldout": scores, "heldout_sampled": []})
    rewrite_rows(directory.path / "metrics.jsonl", [{"version": version} for version in (0, 2, 3)])
    said = salvage(directory)
    assert "mine is at version 3, which checkpoint 2 leads to" in said
    assert directory.rows("metrics.jsonl") == [{"version": 0}, {"version": 2}]
    assert "given up: checkpoint 4 is damaged" in said
    assert "given up: batches 3 to 3, the rollouts of 1 groups" in said
    assert "00000004.segment" in said
    assert (directory.path / "aside-ledger.sqlite").exists()
    accounts = read_accounting(directory.path)
    assert (accounts.trained, accounts.queued, accounts.balanced) == (3, 1, True)
    assert [row["version"] for row in directory.summary()["heldout"]] == [0, 3]
    assert find_checkpoint(directory, pytest.fail) == (2, directory.checkpoints / "v000002")
    assert [saved.version for saved in read_progress(directory.path).checkpoints] == [2]


def test_salvage_writes_the_recipe_again(directory):
    text = directory.recipe_file.read_text()
    directory.recipe_file.write_text(text[: text.index("steps = ") + 3])
    assert "recipe.toml is that of the last session again" in salvage(directory)
    assert directory.recipe_file.read_text() == text
    directory.recipe_file.unlink()
    refused = call_main(["resume", "mine"], directory.path.parents[1])
    assert refused.returncode == 2
    assert f"{directory.recipe_file} is missing" in refused.stderr
    salvage(directory)
    assert directory.recipe_file.read_text() == text


def test_salvage_of_a_damaged_ledger_names_what_is_left(directory):
    spoil(directory.ledger)
    refused = call_main(["salvage", "mine"], directory.path.parents[1])
    assert refused.returncode == 1
    assert "ledger.sqlite" in refused.stderr
    assert "v000004 is whole: a model folder that a run of its own can begin with" in refused.stderr


def test_a_damaged_checkpoint_is_not_exported(directory, tmp_path):
    spoil(directory.checkpoints / "v000004" / "model.safetensors")
    export = ["export", "mine", "--to", tmp_path / "model"]
    refused = call_main(export, directory.path.parents[1])
    assert refused.returncode == 2
    assert "model.safetensors is damaged" in refused.stderr
    salvage(directory)
    exported = call_main(export, directory.path.parents[1])
    assert "version 3 in" in exported.stdout
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["model.safetensors"]
