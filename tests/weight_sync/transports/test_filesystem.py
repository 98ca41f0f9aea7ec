"""The folder of weights: readable by others, atomic, and limited to the newest version."""

import os
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from headway.errors import InputError
from tests.weight_sync.serving import newest_version
from weight_sync.errors import StagingError
from weight_sync.manifest import Manifest
from weight_sync.publish.staged_publisher import StagedPublisher
from weight_sync.receive.staging import stage
from weight_sync.transports.filesystem import MANIFEST, FilesystemTransport, claim


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "weights"


def publish(folder, weights, *versions: int) -> Manifest:
    manifests: list[Manifest] = []
    with StagedPublisher(FilesystemTransport(folder), manifests.append, 1024) as publisher:
        for version in versions:
            publisher.publish(version, weights(version).items())
            publisher.flush(30)
    return manifests[-1]


def test_the_files_are_safetensors_with_the_tensors_of_the_model(folder, weights) -> None:
    publish(folder, weights, 3)
    (version,) = folder.iterdir()
    loaded: dict[str, torch.Tensor] = {}
    for file in sorted(version.glob("*.safetensors")):
        loaded |= load_file(file)
    expected = weights(3)
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_only_the_newest_version_stays_and_no_unfinished_file(folder, weights) -> None:
    publish(folder, weights, 0, 1, 2)
    (version,) = folder.iterdir()
    assert version.name.startswith("00000002-")
    assert not [name for name in os.listdir(version) if name.startswith(".")]


def test_a_version_without_its_manifest_does_not_exist(folder, weights) -> None:
    publish(folder, weights, 7)
    later = FilesystemTransport(folder)
    later.write(8, 4, [])
    assert newest_version(folder).version == 7
    (next(folder.glob("00000007-*")) / MANIFEST).unlink()
    assert newest_version(folder) is None


def test_a_later_publisher_takes_the_folder_over_even_with_a_lower_version(folder, weights) -> None:
    publish(folder, weights, 8)
    FilesystemTransport(folder).write(9, 4, [])  # what a killed publisher leaves
    publish(folder, weights, 5)
    assert newest_version(folder).version == 5
    assert len(list(folder.iterdir())) == 1


def test_other_files_in_the_folder_are_left_alone(folder, weights) -> None:
    folder.mkdir()
    (folder / "notes").write_text("mine")
    publish(folder, weights, 0, 1)
    assert (folder / "notes").read_text() == "mine"


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "header", "other"])
def test_a_damaged_file_is_refused(folder, weights, damage: str) -> None:
    manifest = publish(folder, weights, 0)
    first = manifest.buckets[0]
    content = bytearray(Path(first.location).read_bytes())
    if damage == "truncated":
        content = content[:-1]
    elif damage == "flipped":
        content[-1] ^= 1
    elif damage == "empty":
        content = bytearray()
    elif damage == "header":
        content[9] ^= 255
    elif damage == "other":
        content = bytearray(Path(manifest.buckets[1].location).read_bytes())
    Path(first.location).write_bytes(content)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(StagingError, match=first.location):
        FilesystemTransport(folder).open(first)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_folder_that_cannot_be_made_is_an_input_error(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be made"):
        FilesystemTransport(tmp_path / "file" / "weights")


def test_a_reader_sees_whole_versions_while_they_are_replaced(folder, weights) -> None:
    publish(folder, weights, 0)
    stop, seen, errors = threading.Event(), set(), []

    def follow() -> None:
        reader = FilesystemTransport(folder)
        while not stop.is_set():
            manifest = newest_version(folder)
            if manifest is None:
                continue  # replaced while it was read
            try:
                staged = stage(manifest, reader)
            except StagingError:
                continue  # replaced while it was staged
            expected = weights(manifest.version)
            if not all(torch.equal(t, expected[name]) for name, t in staged.tensors()):
                errors.append(manifest.version)
            seen.add(manifest.version)
            staged.close()

    thread = threading.Thread(target=follow)
    thread.start()
    publish(folder, weights, *range(1, 40))
    stop.set()
    thread.join(30)
    assert errors == []
    assert seen
    assert newest_version(folder).version == 39


def test_a_folder_belongs_to_the_run_that_claimed_it_whenever_that_goes_on(tmp_path) -> None:
    folder = tmp_path / "shared" / "weights"
    claim(folder, "/runs/one")
    claim(folder, "/runs/one")
    with pytest.raises(InputError, match=r"belongs to the run /runs/one; choose another folder"):
        claim(folder, "/runs/two")


def test_a_folder_that_cannot_be_claimed_is_the_users_error(tmp_path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"weight_sync\.folder cannot be used"):
        claim(tmp_path / "file", "/runs/one")
