"""The folder of weights: readable by others, atomic, and limited to the newest version."""

import os
import threading
from pathlib import Path

import pytest
from safetensors.torch import load_file

from headway.errors import InputError
from tests.weight_sync.conftest import Sender, open_files, same
from tests.weight_sync.serving import newest_version
from weight_sync.errors import StagingError
from weight_sync.manifest import Manifest
from weight_sync.receive.staging import stage
from weight_sync.transports.filesystem import MANIFEST, FilesystemTransport, claim


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "weights"


def publish(folder, weights, *versions: int) -> Manifest:
    with Sender(FilesystemTransport(folder)) as sender:
        return [sender.send(version, weights(version)) for version in versions][-1]


def test_the_files_are_safetensors_with_the_tensors_of_the_model(folder, weights) -> None:
    publish(folder, weights, 3)
    (version,) = folder.iterdir()
    files = version.glob("*.safetensors")
    assert same([item for file in files for item in load_file(file).items()], weights(3))


def test_a_version_without_its_manifest_does_not_exist(folder, weights) -> None:
    publish(folder, weights, 7)
    later = FilesystemTransport(folder)
    later.write(8, 4, [])
    assert newest_version(folder).version == 7
    (next(folder.glob("00000007-*")) / MANIFEST).unlink()
    assert newest_version(folder) is None


@pytest.mark.parametrize("versions", [(0, 1, 9), (5,)])
def test_only_what_the_latest_publisher_published_last_stays_beside_other_files(
    folder, weights, versions
) -> None:
    publish(folder, weights, 8)
    (folder / "notes").write_text("mine")
    FilesystemTransport(folder).write(9, 4, [])  # what a killed publisher leaves
    publish(folder, weights, *versions)
    assert newest_version(folder).version == versions[-1]
    (version,) = folder.glob("0*")
    assert not [name for name in os.listdir(version) if name.startswith(".")]
    assert (folder / "notes").read_text() == "mine"


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "header", "other"])
def test_a_damaged_file_is_refused(folder, weights, damage: str) -> None:
    manifest = publish(folder, weights, 0)
    first = manifest.buckets[0]
    content, other = (bytearray(Path(b.location).read_bytes()) for b in manifest.buckets[:2])
    if damage == "flipped":
        content[-1] ^= 1
    elif damage == "header":
        content[9] ^= 255
    whole = {"truncated": content[:-1], "empty": b"", "other": other}
    Path(first.location).write_bytes(whole.get(damage, content))
    before = open_files()
    with pytest.raises(StagingError, match=first.location):
        FilesystemTransport(folder).open(first)
    assert open_files() == before


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
            if not same(staged.tensors(), weights(manifest.version)):
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


def test_a_folder_that_cannot_be_made_or_claimed_is_the_users_error(tmp_path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"weight_sync\.folder cannot be made"):
        FilesystemTransport(tmp_path / "file" / "weights")
    with pytest.raises(InputError, match=r"weight_sync\.folder cannot be used"):
        claim(tmp_path / "file", "/runs/one")
