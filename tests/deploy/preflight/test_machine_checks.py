"""What this machine lacks for a recipe: folders, CUDA, threads."""

import os
import resource
import tempfile
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from deploy.config.loader import load_recipe
from deploy.preflight import machine_checks
from deploy.preflight.machine_checks import (
    backup_warning,
    check_cuda,
    check_machine,
    check_run_folders,
    check_tasks,
)
from headway.errors import InputError


def test_a_backup_on_the_disk_of_the_run_is_said(tmp_path: Path) -> None:
    assert backup_warning(tmp_path, tmp_path / "none") is None
    assert backup_warning(tmp_path, Path("/proc")) is None
    warning = backup_warning(tmp_path, tmp_path)
    assert warning is not None
    assert "is on the disk of" in warning


def test_a_run_is_refused_on_a_network_file_system_and_its_checkpoints_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = tmp_path / "far"
    far.mkdir()
    mounts = [("/", "ext4"), (str(far), "nfs4"), (f"{far}-other", "ext4")]
    partitions = [SimpleNamespace(mountpoint=path, fstype=kind) for path, kind in mounts]
    monkeypatch.setattr("psutil.disk_partitions", lambda **_: partitions)
    with pytest.raises(InputError, match=r"deploy\.runs_dir = .* is on nfs4, .* a local disk"):
        check_run_folders(load_recipe("demo", [f"deploy.runs_dir={far}"]))
    apart = load_recipe("demo", [f"deploy.runs_dir={tmp_path}", f"deploy.checkpoint_dir={far}"])
    assert check_run_folders(apart) == {"runs_dir": tmp_path, "checkpoint_dir": far}


@pytest.mark.parametrize(
    ("cgroup", "limits", "error"),
    [
        ("0::/pod/box", {"pod/box": "200 150", "pod": "max 9"}, r"box/pids.max = 200 leaves 50 "),
        ("0::/pod/box", {"pod": "400 150"}, "pod/pids.max = 400 leaves 250 "),
        ("1:cpu:/pod\n8:pids:/pod", {"pids/pod": "20 30", "pod": "9 9"}, "pids/pod.* leaves 0 "),
        ("0::/not/mounted", {".": "400 81"}, "leaves 319 processes and threads, .* needs 320 at"),
        ("0::/", {".": "400 80"}, None),
        ("0::/", {}, None),
        ("0::/", {"user": "400 100"}, "ulimit -Hu = 400 leaves 300 "),
    ],
)
def test_too_few_processes_are_refused_by_the_limit_that_allows_the_fewest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cgroup: str, limits: dict[str, str], error: str
) -> None:
    """The limits are of cgroups, by their folder, and of a user, each with what it has in use."""
    (tmp_path / "own").write_text(f"{cgroup}\n")
    monkeypatch.setattr(machine_checks, "CGROUPS", tmp_path)
    monkeypatch.setattr(machine_checks, "OWN_CGROUPS", tmp_path / "own")
    most, used = map(int, limits.pop("user", "-1 0").split())
    own = {"uids": SimpleNamespace(real=os.getuid()), "num_threads": used}
    others = [{"uids": SimpleNamespace(real=-7), "num_threads": 900}, {"uids": None}]
    processes = [SimpleNamespace(info=info) for info in (own, *others)]
    monkeypatch.setattr("psutil.process_iter", lambda _: processes)
    monkeypatch.setattr(os, "geteuid", lambda: 7)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (most, most))
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    for folder, numbers in limits.items():
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        for name, number in zip(("max", "current"), numbers.split(), strict=True):
            (tmp_path / folder / f"pids.{name}").write_text(f"{number}\n")
    expected = pytest.raises(InputError, match=error) if error else nullcontext()
    with expected:
        check_tasks(load_recipe("demo", ["actors.count=1", 'actors.cores=["0"]']))
    check_tasks(load_recipe("demo", ["deploy.ray_address=10.0.0.1:6379"]))


def test_an_optimizer_on_the_cpus_of_a_cluster_wants_threads(tmp_path: Path) -> None:
    settings = [
        f"deploy.runs_dir={tmp_path}", "deploy.ray_address=127.0.0.1:1",
        "learner.offload_optimizer=true", "deploy.metrics=false",
    ]  # fmt: skip
    with pytest.raises(InputError, match=r"on another cluster with one thread a rank .* set learn"):
        check_machine(load_recipe("demo", settings).updated(learner={"cores": None}))


def test_a_folder_of_temporary_files_that_is_too_long_for_sockets_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", f"/tmp/{'x' * 66}")
    with pytest.raises(InputError, match=r"/tmp/x+, .* 71 bytes, must have at most 70; .*TMPDIR="):
        check_machine(load_recipe("demo", [f"deploy.runs_dir={tmp_path}", "deploy.metrics=false"]))


def test_a_machine_without_cuda_is_told_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    direct = ["weight_sync.transport=nccl", "learner.gpus=1", "actors.gpus=1"]
    config = load_recipe("demo", direct)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match='"nccl" needs a CUDA device, and this machine has none'):
        check_cuda(config)
    check_cuda(load_recipe("demo", [*direct, "deploy.ray_address=10.0.0.1:6379"]))
    check_cuda(load_recipe("demo"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    check_cuda(config)
