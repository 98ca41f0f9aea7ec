"""Capsules: what is packed, what is refused before anything is written, and a step elsewhere."""

import json
import shutil
import subprocess
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile

import pytest

from deploy.offline.capsule import (
    DESCRIPTION,
    _differences,
    _without_folders,
    opened,
    pack,
    unpack,
)
from deploy.storage.run_directory import RunDirectory
from headway.errors import InputError
from headway.folder_checksums import checksum_in, checksum_of
from tests.deploy.conftest import ENVIRONMENT, HEADWAY

CONTENT = {
    "recipe.toml": b"steps = 4\n",
    "model/config.json": b"{}",
    "journal/1.segment": b"abc" * 99,
}


def capsule(file, content=CONTENT, *, compression=ZIP_STORED, **changed):
    """Write a capsule of some files, with other values of keys of its description."""
    with ZipFile(file, "w", compression) as archive:
        for name, data in content.items():
            archive.writestr(name, data)
    with ZipFile(file) as archive:
        checksums = {name: checksum_in(archive.open(name)) for name in content}
    with ZipFile(file, "a", compression) as archive:
        description = {"format": 1, "checksums": checksums, **changed}
        archive.writestr(DESCRIPTION, json.dumps(description))
    return file


def test_a_whole_capsule_unpacks_to_the_files_that_were_packed(tmp_path):
    description = unpack(capsule(tmp_path / "whole"), tmp_path / "to")
    assert {name: (tmp_path / "to" / name).read_bytes() for name in CONTENT} == CONTENT
    assert description["checksums"]["recipe.toml"] == checksum_of(tmp_path / "to/recipe.toml")


def truncated(file):
    capsule(file)
    file.write_bytes(file.read_bytes()[:-40])


def with_other_bytes(file):
    capsule(file)
    file.write_bytes(file.read_bytes().replace(b"abcabc", b"abcabd", 1))


def with_another_file(file):
    capsule(file)
    with ZipFile(file, "a") as archive:
        archive.writestr("more", b"")


def with_a_bomb(file):
    """Have three entries share the bytes of the largest."""
    capsule(file)
    with ZipFile(file, "a") as archive:
        first = archive.getinfo("journal/1.segment")
        archive.filelist += [first] * 30
        archive._didModify = True


BROKEN = {
    "no ZIP": (lambda file: file.write_bytes(b"steps" * 99), "not a zip file"),
    "truncated": (truncated, "not a zip file"),
    "damaged": (with_other_bytes, "journal/1.segment"),
    "another file": (with_another_file, "more is missing, or was added"),
    "a missing file": (
        lambda file: capsule(file, checksums={"model/weights": "1-a"}),
        "journal/1.segment is missing, or was added",
    ),
    "another checksum": (
        lambda file: capsule(file, checksums=dict.fromkeys(CONTENT, "1-a")),
        "recipe.toml is not as it was packed",
    ),
    "no description": (lambda file: ZipFile(file, "w").close(), DESCRIPTION),
    "another format": (lambda file: capsule(file, format=2), "format is 2, this Headway reads 1"),
    "compressed": (lambda file: capsule(file, compression=ZIP_DEFLATED), "is compressed"),
    "above": (lambda file: capsule(file, {"../there": b"x"}), "would be written elsewhere"),
    "absolute": (lambda file: capsule(file, {"/there": b"x"}), "would be written elsewhere"),
    "within above": (lambda file: capsule(file, {"a/../../b": b"x"}), "would be written elsewhere"),
    "of another system": (lambda file: capsule(file, {"..\\b": b"x"}), "would be written elsewh"),
    "a bomb": (with_a_bomb, "larger than itself"),
    "no checksums": (lambda file: capsule(file, checksums=None), "not iterable"),
}


@pytest.mark.parametrize(("make", "problem"), BROKEN.values(), ids=BROKEN)
def test_what_is_wrong_with_a_capsule_is_named_before_anything_is_written(tmp_path, make, problem):
    file, there = tmp_path / "a.capsule", tmp_path / "to"
    make(file)
    with pytest.raises(InputError) as refused:
        unpack(file, there)
    assert str(refused.value).startswith(f"{file} is no whole capsule, and was not unpacked: ")
    assert problem in str(refused.value)
    assert [*tmp_path.iterdir()] == [file]


def test_what_cannot_be_opened_is_named(tmp_path):
    file = capsule(tmp_path / "a.capsule", steps=[0, 1], model={})
    for name, model, message in (
        (file, "other", "--model other: .*a.capsule has its model"),
        (tmp_path / "b.capsule", None, "b.capsule is no file"),
    ):
        with (
            pytest.raises(InputError, match=message),
            opened(str(name), tmp_path, None, model, print),
        ):
            pass


def test_a_capsule_is_not_packed_into_a_folder_that_does_not_exist(tmp_path):
    with pytest.raises(InputError, match=r"--out .*there is no folder .*nowhere"):
        pack(RunDirectory(tmp_path), (0, 1), tmp_path / "nowhere" / "a", by_value=True, say=print)


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        ("/home/ada/runs/model", "model"),
        ("~/data.jsonl", "data.jsonl"),
        ("org/model", "org/model"),
        ({"a": ["/x/y", 1, None, True]}, {"a": ["y", 1, None, True]}),
        ("", ""),
    ],
)
def test_settings_keep_the_last_name_of_an_absolute_path(value, kept):
    assert _without_folders(value) == kept


def test_other_versions_and_processors_are_said_and_the_same_are_not():
    there = {
        "python": "3.11", "machine": {"cpu": "A", "gpus": []},
        "packages": {"torch": "2.1", "numpy": "2.0"},
    }  # fmt: skip
    here = {
        **there,
        "machine": {"cpu": "B", "gpus": []},
        "packages": {"torch": "2.2", "numpy": "2.0"},
    }
    assert _differences(there, there) == []
    assert _differences(there, here) == ["processor: A there, B here", "torch: 2.1 there, 2.2 here"]


def elsewhere(folder, *arguments):
    return subprocess.run(
        [HEADWAY, *map(str, arguments)],
        cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=600,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.deepspeed
def test_a_capsule_trains_the_steps_elsewhere_though_the_run_is_gone(headway, copied_run, tmp_path):
    file = tmp_path / "step.capsule"
    packed = headway("capsule", "copied", "--steps", "3-4", "--out", file)
    assert packed.returncode == 0, packed.stdout + packed.stderr
    assert f"{file.stat().st_size:,} bytes" in packed.stdout
    again = headway("capsule", "copied", "--steps", "3-4", "--out", file)
    assert again.returncode == 2
    assert "exists; name another file by --out" in again.stderr
    with ZipFile(file) as archive:
        for name in archive.namelist():
            assert str(headway.folder).encode() not in archive.read(name), name
    kept = copied_run.rename(tmp_path / "kept")
    (there := tmp_path / "there").mkdir()
    equal = elsewhere(there, "replay", file)
    assert equal.returncode == 0, equal.stdout + equal.stderr
    words = " ".join(equal.stdout.split())
    assert "training batches 3 to 4 again from checkpoint 2, first the 1 before them" in words
    assert "the weights after batches 3 to 4 are those of the run" in words
    assert "bits may differ" not in words
    other = elsewhere(there, "replay", file, "--set", "learner.learning_rate=2e-6", "--json")
    assert other.returncode == 0, other.stdout + other.stderr
    assert json.loads(other.stdout)["equal"]
    assert [*there.iterdir()] == []
    shutil.move(kept, copied_run)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.deepspeed
def test_a_capsule_that_names_its_model_trains_all_batches_since_the_first(
    headway, finished, tmp_path
):
    file = tmp_path / "named.capsule"
    packed = headway("capsule", "small", "--steps", "1-1", "--weights", "reference", "--out", file)
    assert packed.returncode == 0, packed.stdout + packed.stderr
    with ZipFile(file) as archive:
        assert not [name for name in archive.namelist() if name.startswith(("model", "checkp"))]
    absent = elsewhere(tmp_path, "replay", file)
    assert absent.returncode == 2
    assert "name its folder by --model" in absent.stderr
    model = headway.run_folder("small-sft") / "model"
    equal = elsewhere(tmp_path, "replay", file, "--model", model)
    assert equal.returncode == 0, equal.stdout + equal.stderr
    assert "again from the initial weights, first the 1" in " ".join(equal.stdout.split())


@pytest.mark.slow
@pytest.mark.ray
def test_rollouts_that_the_journal_does_not_keep_are_named(headway, copied_run, tmp_path):
    from tests.deploy.offline.test_replay import alter

    alter(copied_run, "INSERT INTO meta VALUES ('removed_segment_1', '0')")
    gone = headway.call("capsule", "copied", "--steps", "1-2", "--out", tmp_path / "a.capsule")
    assert gone.returncode == 2
    assert 'queues.keep_rollouts = "all" keeps every group' in gone.stderr
    assert [*tmp_path.iterdir()] == []
