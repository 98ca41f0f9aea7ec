"""The disk space that a new and a resumed run are said to need."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from deploy.config.loader import load_recipe
from deploy.config.run_config import RunConfig
from deploy.preflight import disk_space as disk
from deploy.preflight.disk_space import (
    backup_warning,
    check_free_space,
    check_runs_dir,
    parameter_bytes,
)
from deploy.preflight.machine import check_machine
from headway.errors import InputError

SHAPES = {"weight": (1000, 1000)}
STEPS, EVERY, KEEP = 12, 5, 2


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    changes = [f"steps={STEPS}", f"learner.checkpoint_every={EVERY}"]
    return load_recipe("demo", [f"deploy.runs_dir={tmp_path}", *changes])


def least(config: RunConfig, monkeypatch: pytest.MonkeyPatch, resumed: Path | None = None) -> int:
    """Find the free bytes below which the check refuses, by bisection."""
    low, high = -1, 10**12
    while high - low > 1:
        free = (low + high) // 2
        usage = SimpleNamespace(disk_usage=lambda _, free=free: SimpleNamespace(total=1, free=free))
        monkeypatch.setattr(disk, "shutil", usage)
        try:
            check_free_space(config, SHAPES, resumed=resumed)
        except InputError:
            low = free
        else:
            high = free
    return high


def store(checkpoints: Path, *names: str, size: int) -> Path:
    for name in names:
        (checkpoints / name).mkdir(parents=True)
        (checkpoints / name / "weights").write_bytes(b"")
        with (checkpoints / name / "weights").open("r+b") as file:
            file.truncate(size)
    return checkpoints


@pytest.mark.parametrize(
    ("there", "new", "batches"),
    [
        ([], 3, 5),
        (["v000005"], 2, 5),
        (["v000005", "v000010"], 1, 2),
        (["v000003"], 2, 5),
        (["v000005", "v000007"], 1, 5),
        ([".v000005.tmp"], 2, 5),
        (["v000000", "v000005", "v000010"], 0, 2),
        (["v000010", "v000012"], 0, 0),
    ],
)
def test_a_run_that_goes_on_needs_room_for_what_it_adds_to_the_checkpoints_that_are_there(
    config: RunConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    there: list[str],
    new: int,
    batches: int,
) -> None:
    """At most KEEP + 1 of them are on the disk at once."""
    checkpoint = parameter_bytes(config.learner) * 10**6
    rollouts = config.prompts.groups_per_batch * config.prompts.group_size
    batch = disk.TOKEN_BYTES * rollouts * config.actors.max_new_tokens
    whole = least(config, monkeypatch)
    assert (config.learner.keep_checkpoints, whole) == (KEEP, 3 * checkpoint + EVERY * batch)
    resumed = store(tmp_path / "checkpoints", *there, size=checkpoint)
    assert least(config, monkeypatch, resumed) == new * checkpoint + batches * batch


def test_what_is_there_already_is_said(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = SimpleNamespace(disk_usage=lambda _: SimpleNamespace(total=1, free=1000))
    monkeypatch.setattr(disk, "shutil", usage)
    resumed = store(tmp_path / "checkpoints", "v000005", size=3_000_000)
    with pytest.raises(InputError, match=r"has 1.0 kB free.* of which 3.0 MB are there"):
        check_free_space(config, SHAPES, resumed=resumed)


def test_checkpoints_on_another_disk_need_its_space_and_the_journal_that_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apart = tmp_path / "disk"
    apart.mkdir()
    config = load_recipe(
        "demo", [f"deploy.runs_dir={tmp_path}", f"deploy.checkpoint_dir={apart / 'new'}"]
    )
    free = {tmp_path: 10**12, apart: 1000}
    usage = SimpleNamespace(disk_usage=lambda path: SimpleNamespace(total=1, free=free[path]))
    monkeypatch.setattr(disk, "shutil", usage)
    with pytest.raises(InputError, match=r"disk has 1.0 kB free.*set deploy.checkpoint_dir to"):
        check_free_space(config, SHAPES)
    free[tmp_path], free[apart] = 1000, 10**12
    with pytest.raises(InputError, match=r"B: [\d.]+ .B of rollouts .*deploy.runs_dir"):
        check_free_space(config, SHAPES)
    (tmp_path / "run").symlink_to(store(apart / "made", "v000002", size=8))
    free[tmp_path], free[apart / "made"] = 10**12, 1000
    with pytest.raises(InputError, match=r"made has 1.0 kB free.* of which 8 bytes are there"):
        check_free_space(load_recipe("demo", [f"deploy.runs_dir={tmp_path}"]), SHAPES,
                         resumed=tmp_path / "run")  # fmt: skip


def test_a_backup_needs_space_for_the_journal_and_for_checkpoints_that_are_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apart, shared = tmp_path / "apart", tmp_path / "shared"
    keys = {"runs_dir": tmp_path, "checkpoint_dir": apart, "backup_dir": shared}
    for folder in (apart, shared):
        folder.mkdir()
    config = load_recipe("demo", [f"deploy.{key}={folder}" for key, folder in keys.items()])
    free = dict.fromkeys(keys.values(), 10**12)
    usage = SimpleNamespace(disk_usage=lambda path: SimpleNamespace(total=1, free=free[path]))
    monkeypatch.setattr(disk, "shutil", usage)
    free[shared] = 1000
    with pytest.raises(InputError, match=r"shared has.*: [\d.]+ .B of rollouts.*deploy.backup_dir"):
        check_free_space(config, SHAPES)
    free[shared], free[apart] = 10**12, 1000
    with pytest.raises(InputError, match=r"apart has.*checkpoint_every; .*deploy.checkpoint_dir"):
        check_free_space(config, SHAPES)
    config = config.updated(deploy={"checkpoint_dir": None})
    free[shared] = 1000
    with pytest.raises(InputError, match=r"checkpoint_every, and .* of rollouts.*backup_dir"):
        check_free_space(config, SHAPES)


def test_a_backup_on_the_disk_of_the_run_is_said(tmp_path: Path) -> None:
    assert backup_warning(tmp_path, tmp_path / "none") is None
    assert backup_warning(tmp_path, Path("/proc")) is None
    warning = backup_warning(tmp_path, tmp_path)
    assert warning is not None
    assert "is on the disk of" in warning


def test_a_run_is_refused_on_a_network_file_system_and_its_checkpoints_are_not(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mounted(kind: str) -> None:
        mounts = [("/", "ext4"), (str(tmp_path.parent), kind), (f"{tmp_path}-other", "ext4")]
        found = [SimpleNamespace(mountpoint=place, fstype=fstype) for place, fstype in mounts]
        monkeypatch.setattr(disk.psutil, "disk_partitions", lambda **_: found)

    mounted("nfs4")
    with pytest.raises(InputError, match=r"deploy\.runs_dir = .* is on nfs4, .* a local disk"):
        check_runs_dir(config)
    apart = load_recipe("demo", [f"deploy.checkpoint_dir={tmp_path}"])
    assert disk.check_other_dirs(apart) == {"checkpoint_dir": tmp_path}
    mounted("xfs")
    assert check_runs_dir(config) == tmp_path


def test_an_optimizer_on_the_cpus_of_a_cluster_wants_threads(tmp_path: Path) -> None:
    settings = [
        f"deploy.runs_dir={tmp_path}", "deploy.ray_address=127.0.0.1:1",
        "learner.offload_optimizer=true", "deploy.metrics=false",
    ]  # fmt: skip
    with pytest.raises(InputError, match=r"on another cluster with one thread a rank .* set learn"):
        check_machine(load_recipe("demo", settings).updated(learner={"cores": None}))
