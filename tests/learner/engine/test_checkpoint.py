"""Checkpoints appear whole or not at all, and go when they are old."""

import json
import pickle
import random
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore

from headway import folder_checksums
from headway.errors import InputError
from headway.folder_checksums import damage_of
from learner.engine import checkpoint
from learner.engine.checkpoint import (
    State,
    capture,
    check_shared,
    checkpoint_path,
    expired,
    finish,
    load,
    prepare,
    prune,
)


class Engine:
    """Saves a file; keeps what it is asked to load."""

    rank, ranks = 0, 1

    def __init__(self, *, fail=False):
        self.fail = fail
        self.loaded = None

    def capture(self):
        def write(folder):
            (folder / "model.safetensors").write_text("weights")
            if self.fail:
                raise OSError("No space left on device")

        return write

    def load(self, folder):
        self.loaded = folder

    def sum_over_ranks(self, values):
        return values


def state(version, **changes):
    fields = {
        "version": version,
        "saved_at": 0.0,
        "optimizer_steps": 2 * version,
        "ranks": 1,
        "zero_stage": 1,
        "dtype": "float32",
        "cursor": "prompt 9",
        "objective_state": {"ema": 0.5},
        "totals": {"rollouts": 8, "tokens": 100},
    }
    return State(**{**fields, **changes})


def save(root, version, *, engine=None, **changes):
    write = capture(engine or Engine())
    write(prepare(root, version))
    return finish(root, state(version, **changes))


def test_a_checkpoint_holds_the_engine_and_the_state(tmp_path):
    folder = save(tmp_path, 60)
    assert folder == checkpoint_path(tmp_path, 60) == tmp_path / "v000060"
    assert (folder / "model.safetensors").read_text() == "weights"
    engine = Engine()
    assert load(engine, folder) == state(60)
    assert engine.loaded == folder
    assert json.loads((folder / "state.json").read_text())["cursor"] == "prompt 9"


def test_random_numbers_go_on_as_they_would_have(tmp_path):
    def draw():
        return torch.rand(3).tolist(), np.random.rand(), np.random.randn(), random.random()

    np.random.randn()  # leaves the second of a pair behind
    folder = save(tmp_path, 1)
    expected = draw()
    assert draw() != expected
    load(Engine(), folder)
    assert draw() == expected


def test_a_failed_save_leaves_no_checkpoint_and_the_next_one_removes_its_rest(tmp_path):
    with pytest.raises(OSError, match="No space"):
        save(tmp_path, 5, engine=Engine(fail=True))
    assert [path.name for path in tmp_path.iterdir()] == [".v000005.tmp"]
    save(tmp_path, 6)
    assert [path.name for path in tmp_path.iterdir()] == ["v000006"]


def test_the_same_version_is_replaced(tmp_path):
    save(tmp_path, 5, cursor="one")
    assert checkpoint.read_state(save(tmp_path, 5, cursor="two")).cursor == "two"
    assert [path.name for path in tmp_path.iterdir()] == ["v000005"]


def test_a_rank_that_is_new_goes_on_with_the_random_numbers_of_one_that_was_there(tmp_path):
    folder = save(tmp_path, 5, ranks=1)
    expected = torch.rand(3).tolist()
    engine = Engine()
    engine.rank = 3
    assert load(engine, folder).ranks == 1
    assert torch.rand(3).tolist() == expected


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"cannot be loaded: checksums\.json is missing"):
        load(Engine(), tmp_path)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), "is damaged"),
        (lambda file: file.write_bytes(bytes(file.stat().st_size)), "is damaged"),
        (lambda file: file.write_bytes(flipped(file.read_bytes())), "is damaged"),
        (lambda file: file.unlink(), "is missing"),
        (lambda file: file.with_name("more.safetensors").touch(), "was added"),
    ],
    ids=["cut", "zeroed", "flipped", "removed", "added"],
)
@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer/random/rank-0.json", "state.json", "checksums.json"]
)
def test_a_checkpoint_with_any_damage_is_refused_by_its_file(tmp_path, name, change, problem):
    folder = save(tmp_path, 5)
    change(folder / name)
    with pytest.raises(InputError, match="v000005 cannot be loaded: ") as refused:
        load(Engine(), folder)
    if name != "checksums.json" or problem == "is missing":
        assert problem in str(refused.value)
        assert (name in str(refused.value)) == (problem != "was added")


def flipped(content):
    """Flip one bit in the middle."""
    changed = bytearray(content)
    changed[len(changed) // 2] ^= 4
    return bytes(changed)


def test_every_rank_checks_its_share_of_the_files_and_all_refuse(tmp_path):
    folder = save(tmp_path, 5)
    (folder / "state.json").write_bytes(flipped((folder / "state.json").read_bytes()))
    problems = [damage_of(folder, part=rank, parts=3) for rank in range(3)]
    assert [problem and problem.split()[0] for problem in problems] == [None, None, "state.json"]
    engine = Engine()
    engine.rank, engine.ranks = 0, 3
    engine.sum_over_ranks = lambda values: values + 1.0  # another rank's
    with pytest.raises(InputError, match="another rank found damage"):
        load(engine, folder)


@pytest.mark.parametrize("shared", [True, False])
def test_ranks_that_do_not_see_the_folder_of_checkpoints_are_named_by_all(tmp_path, shared):
    roots = [tmp_path / "one", tmp_path / ("one" if shared else "two")]
    store, told = HashStore(), [None, None]

    def run(rank):
        try:
            check_shared(roots[rank], store, rank, 2)
        except InputError as error:
            told[rank] = str(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(text is None if shared else "1 of the learner's 2 ranks" in text for text in told)
    assert list(roots[0].iterdir()) == []


def test_no_file_of_a_checkpoint_is_unpickled(tmp_path, monkeypatch):
    folder = save(tmp_path, 5)
    monkeypatch.setattr(torch, "load", None)
    monkeypatch.setattr("pickle.Unpickler", None)
    load(Engine(), folder)
    suffixes = {path.suffix for path in folder.rglob("*") if path.is_file()}
    assert suffixes == {".json", ".safetensors"}


class Runs:
    """A pickle that makes a file when it is loaded."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("name", ["optimizer/random/rank-0.json", "state.json", "checksums.json"])
def test_a_pickle_of_a_stranger_is_refused_and_not_run_though_its_checksum_fits(tmp_path, name):
    folder, mark = save(tmp_path, 5), tmp_path / "mark"
    for protocol in (0, pickle.HIGHEST_PROTOCOL):
        (folder / name).write_bytes(pickle.dumps(Runs(mark), protocol))
        if name != folder_checksums.FILE_NAME:
            files = folder_checksums.files_of(folder)
            text = json.dumps(folder_checksums.compute(folder, files))
            (folder / folder_checksums.FILE_NAME).write_text(text)
        with pytest.raises(InputError, match="v000005"):
            load(Engine(), folder)
    assert not mark.exists()


VERSIONS = st.dictionaries(st.integers(1, 50), st.floats(0, 1000), min_size=1)


@given(saved_at=VERSIONS, keep=st.integers(1, 5), seconds=st.floats(0, 1000), data=st.data())
def test_the_newest_and_the_young_are_kept_and_what_was_never_committed_is_not(
    saved_at, keep, seconds, data
):
    newest = data.draw(st.sampled_from(sorted(saved_at)))
    gone = expired(saved_at, newest=newest, keep=keep, keep_seconds=seconds, now=1000.0)
    committed = sorted(version for version in saved_at if version <= newest)
    assert newest not in gone
    assert not set(gone) & set(committed[-keep:])
    assert {version for version in saved_at if version > newest} <= set(gone)
    for version in committed[:-keep]:
        assert (version in gone) == (1000.0 - saved_at[version] >= seconds)


@pytest.mark.parametrize(
    ("newest", "seconds", "left"),
    [(30, 0.0, ["v000020", "v000030"]), (0, 3600.0, [])],
    ids=["the last was not committed", "before the first commit"],
)
def test_old_and_uncommitted_checkpoints_are_removed_whole(tmp_path, newest, seconds, left):
    for version in (10, 20, 30, 40):
        save(tmp_path, version)
    prune(tmp_path, newest=newest, keep=2, keep_seconds=seconds)
    assert sorted(path.name for path in tmp_path.iterdir()) == left


def test_a_checkpoint_that_was_never_committed_takes_no_place_of_one_that_was(tmp_path):
    for version in (10, 20):  # training went back to 10, since 20 lacked its commit
        save(tmp_path, version)
    prune(tmp_path, newest=10, keep=2, keep_seconds=0.0)
    save(tmp_path, 30)
    prune(tmp_path, newest=30, keep=2, keep_seconds=0.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v000010", "v000030"]


def test_what_cannot_be_read_or_removed_is_told_and_left_and_the_rest_pruned(tmp_path, caplog):
    for version in (10, 20, 30):
        save(tmp_path, version)
    save(tmp_path, 5)
    (tmp_path / "v000005/state.json").write_text("{")
    (tmp_path / ".v000010.old").mkdir()
    (tmp_path / ".v000010.old/stays").touch()
    prune(tmp_path, newest=30, keep=1, keep_seconds=0.0)
    left = sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("v"))
    assert left == ["v000005", "v000010", "v000030"]
    assert "left alone: no checkpoint can be read from" in caplog.text
    assert "v000010 cannot be removed" in caplog.text
