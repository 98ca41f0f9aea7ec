"""Copies of folders at addresses: complete, compared, tried again, and left out where damaged."""

import json

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from deploy.storage import remote_folder
from deploy.storage.remote_folder import ATTEMPTS, RemoteFolder, UploadFailed
from headway.errors import InputError
from headway.folder_checksums import FILE_NAME, compute, damage_of, files_of

pytestmark = pytest.mark.usefixtures("empty_store")


@pytest.fixture
def empty_store():
    """Empty the store of the process, before and after a test."""
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    yield MemoryFileSystem.store
    MemoryFileSystem.store.clear()


@pytest.fixture
def folder(tmp_path):
    """Make a folder of three files with checksums, as a checkpoint has."""
    (tmp_path / "v000004/optimizer").mkdir(parents=True)
    for name, text in (("a.bin", "weights" * 99), ("b.json", ""), ("optimizer/c", "state")):
        (tmp_path / "v000004" / name).write_text(text)
    return with_checksums(tmp_path / "v000004")


def with_checksums(folder):
    (folder / FILE_NAME).write_text(json.dumps(compute(folder, files_of(folder))))
    return folder


@pytest.fixture(autouse=True)
def pauses(monkeypatch):
    """Collect the pauses between attempts, and make none."""
    made = []
    monkeypatch.setattr(remote_folder.time, "sleep", made.append)
    return made


def remote(address="memory://bucket/run"):
    return RemoteFolder(address)


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_a_copy_is_whole_and_is_made_once(folder, tmp_path, kind):
    address = "memory://bucket/run" if kind == "memory" else f"file://{tmp_path}/store"
    store = remote(address)
    store.check()
    assert store.upload(folder, "v000004")
    assert not store.upload(folder, "v000004")
    back = tmp_path / "back"
    store._store.get(f"{store._path}/v000004", str(back), recursive=True)
    assert damage_of(back) is None
    (folder / "a.bin").write_text("trained again")
    assert store.upload(with_checksums(folder), "v000004")
    assert store._store.cat_file(f"{store._path}/v000004/a.bin") == b"trained again"


@pytest.mark.parametrize("fault", ["raises", "truncates", "flips"])
@pytest.mark.parametrize("times", [1, ATTEMPTS - 1, ATTEMPTS])
def test_what_fails_or_arrives_damaged_is_tried_again_and_never_called_done(
    folder, empty_store, monkeypatch, pauses, fault, times
):
    put, failures = MemoryFileSystem.put_file, []

    def faulty(self, path, target, **options):
        put(self, path, target, **options)
        if target.endswith("a.bin") and len(failures) < times:
            failures.append(target)
            content = self.cat_file(target)
            if fault == "raises":
                raise ConnectionResetError("gone")
            self.pipe_file(target, content[:-1] if fault == "truncates" else b"W" + content[1:])

    monkeypatch.setattr(MemoryFileSystem, "put_file", faulty)
    if times == ATTEMPTS:
        with pytest.raises(UploadFailed, match=r"a\.bin failed in 5 attempts, at last by"):
            remote().upload(folder, "v000004")
        assert f"/bucket/run/v000004/{FILE_NAME}" not in empty_store
        times -= 1
    else:
        assert remote().upload(folder, "v000004")
        assert f"/bucket/run/v000004/{FILE_NAME}" in empty_store
    assert pauses == [2.0**number for number in range(times)]


def test_a_folder_that_differs_from_its_checksums_is_not_copied_as_whole(folder, empty_store):
    (folder / "a.bin").write_text("rotten")
    with pytest.raises(UploadFailed, match="has arrived of"):
        remote().upload(folder, "v000004")
    (folder / "a.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"a\.bin"):
        remote().upload(folder, "v000004")
    assert f"/bucket/run/v000004/{FILE_NAME}" not in empty_store


def test_only_copies_of_checkpoints_that_the_run_has_stay(folder):
    store = remote()
    for name in ("v000002", "v000004", "notes"):
        store.upload(folder, name)
    store.keep_only({"v000004"})
    names = [path.rpartition("/")[2] for path in store._store.ls("/bucket/run", detail=False)]
    assert sorted(names) == ["notes", "v000004"]


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("s4://bucket/x", "Protocol not known"),
        ("abfs://bucket/x", "adlfs"),
        ("file:///proc/none/x", "cannot be written"),
    ],
)
def test_an_address_that_cannot_be_used_is_refused_with_the_reason(address, words):
    with pytest.raises(InputError, match=words):
        RemoteFolder(address).check()


def test_an_address_that_has_a_folder_is_no_place_for_an_export(folder):
    remote().upload(folder)
    with pytest.raises(InputError, match="exists; name a folder that does not"):
        remote().check(absent=True)
