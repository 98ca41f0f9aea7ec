"""Folders at S3 addresses, on a local server; `make test-s3` installs moto and s3fs."""

import json

import httpx
import pytest

from deploy.offline.export import export_folder
from deploy.storage.remote_folder import RemoteFolder
from headway.errors import InputError
from headway.folder_checksums import FILE_NAME, compute, damage_of, files_of

pytestmark = pytest.mark.slow


@pytest.fixture
def store(monkeypatch):
    """Serve an S3 store with one bucket, and return its file system."""
    s3fs, moto = pytest.importorskip("s3fs"), pytest.importorskip("moto.server")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "DEFAULT_REGION"):
        monkeypatch.setenv(f"AWS_{name}", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    httpx.post(f"http://{host}:{port}/moto-api/reset").raise_for_status()
    s3fs.S3FileSystem.clear_instance_cache()
    system = s3fs.S3FileSystem()
    system.mkdir("bucket")
    yield system
    s3fs.S3FileSystem.clear_instance_cache()
    server.stop()


def test_checkpoints_are_copied_whole_completed_and_removed(store, tmp_path):
    folder = tmp_path / "v000002"
    (folder / "optimizer").mkdir(parents=True)
    for name, content in (("model.safetensors", b"w" * (6 << 20)), ("optimizer/0.pt", b"state")):
        (folder / name).write_bytes(content)
    (folder / FILE_NAME).write_text(json.dumps(compute(folder, files_of(folder))))
    remote = RemoteFolder("s3://bucket/runs/small")
    remote.check()
    assert remote.upload(folder, "v000002")
    assert not remote.upload(folder, "v000002")
    store.rm_file(f"bucket/runs/small/v000002/{FILE_NAME}")
    assert remote.upload(folder, "v000002"), "a copy without checksums is incomplete"
    store.get("bucket/runs/small/v000002", str(tmp_path / "back"), recursive=True)
    assert damage_of(tmp_path / "back") is None
    remote.upload(folder, "v000004")
    remote.keep_only({"v000004"})
    store.invalidate_cache()
    assert store.ls("bucket/runs/small", detail=False) == ["bucket/runs/small/v000004"]


def test_an_export_is_copied_to_an_address_that_has_no_folder(store):
    with export_folder("s3://bucket/model") as folder:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
    assert store.cat_file("bucket/model/config.json") == b"{}"
    for address, words in (("s3://bucket/model", "exists"), ("s3://none/model", "be written")):
        with pytest.raises(InputError, match=words), export_folder(address):
            pytest.fail("the export would be made")
