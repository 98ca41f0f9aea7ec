"""The disk space that a new and a resumed run are said to need."""

from pathlib import Path

import pytest

from deploy.config.loader import load_recipe
from deploy.config.run_config import RunConfig
from deploy.planner.byte_counts import TOKEN, checkpoint_bytes
from deploy.preflight.machine_checks import check_free_space, check_run_folders
from headway.errors import InputError
from learner.config.learner import LearnerConfig

SHAPES = {"weight": (1000, 1000)}
STEPS, EVERY, KEEP = 12, 5, 2
CRITIC = {"advantage": "gae", "critic": {}}


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    changes = [f"steps={STEPS}", f"learner.checkpoint_every={EVERY}"]
    return load_recipe("demo", [f"deploy.runs_dir={tmp_path}", *changes])


def check(config: RunConfig, free: int | dict[Path, int], resumed: Path | None = None) -> None:
    """Check as if so many bytes were free, everywhere or by folder with ample space elsewhere."""
    left = free if isinstance(free, dict) else {}
    ample = 10**12 if isinstance(free, dict) else free
    check_free_space(
        config, SHAPES, check_run_folders(config), resumed=resumed,
        free=lambda path: left.get(path, ample),
    )  # fmt: skip


def least(config: RunConfig, resumed: Path | None = None) -> int:
    """Find the free bytes below which the check refuses, by bisection."""
    low, high = -1, 10**12
    while high - low > 1:
        free = (low + high) // 2
        try:
            check(config, free, resumed)
        except InputError:
            low = free
        else:
            high = free
    return high


def store(checkpoints: Path, *names: str, size: int) -> Path:
    for name in names:
        (checkpoints / name).mkdir(parents=True)
        with (checkpoints / name / "weights").open("wb") as file:
            file.truncate(size)
    return checkpoints


@pytest.mark.parametrize(
    ("settings", "bytes_a_weight"),
    [
        ({}, 16),
        (CRITIC, 32),
        ({"advantage": "gae", "critic": {"shared": True}}, 16),
        ({"kl": {"refresh_every": 5}}, 20),
        ({"kl": {"refresh_every": 5}, "dtype": "bfloat16", "zero_stage": 1}, 16),
        (
            {"kl": {"refresh_every": 5, "refresh_mix": 0.1}, "dtype": "bfloat16", "zero_stage": 1},
            18,
        ),
        ({"lora": {}}, 0),
        ({"lora": {}, **CRITIC}, 16),
    ],
)
def test_a_checkpoint_weighs_what_it_holds(settings: dict, bytes_a_weight: int) -> None:
    assert checkpoint_bytes(LearnerConfig(**settings), 1) == bytes_a_weight


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
    config: RunConfig, tmp_path: Path, there: list[str], new: int, batches: int
) -> None:
    """At most KEEP + 1 of them are on the disk at once."""
    checkpoint = checkpoint_bytes(config.learner, 10**6)
    rollouts = config.prompts.groups_per_batch * config.prompts.group_size
    batch = TOKEN * rollouts * config.actors.max_new_tokens
    assert (config.learner.keep_checkpoints, least(config)) == (KEEP, 3 * checkpoint + 5 * batch)
    resumed = store(tmp_path / "checkpoints", *there, size=checkpoint)
    assert least(config, resumed) == new * checkpoint + batches * batch


def test_what_is_there_already_is_said(config: RunConfig, tmp_path: Path) -> None:
    resumed = store(tmp_path / "checkpoints", "v000005", size=3_000_000)
    with pytest.raises(InputError, match=r"has 1.0 kB free.* of which 3.0 MB are there"):
        check(config, 1000, resumed)


def test_checkpoints_on_another_disk_need_its_space_and_the_journal_that_of_the_run(
    tmp_path: Path,
) -> None:
    runs, apart = f"deploy.runs_dir={tmp_path}", tmp_path / "disk"
    apart.mkdir()
    config = load_recipe("demo", [runs, f"deploy.checkpoint_dir={apart / 'new'}"])
    with pytest.raises(InputError, match=r"disk has 1.0 kB free.*set deploy.checkpoint_dir to"):
        check(config, {apart: 1000})
    with pytest.raises(InputError, match=r"B: [\d.]+ .B of rollouts .*deploy.runs_dir"):
        check(config, {tmp_path: 1000})
    (tmp_path / "run").symlink_to(store(apart / "made", "v000002", size=8))
    with pytest.raises(InputError, match=r"made has 1.0 kB free.* of which 8 bytes are there"):
        check(load_recipe("demo", [runs]), {apart / "made": 1000}, tmp_path / "run")


def test_a_backup_needs_space_for_the_journal_and_for_checkpoints_that_are_nowhere_else(
    tmp_path: Path,
) -> None:
    apart, shared = tmp_path / "apart", tmp_path / "shared"
    keys = {"runs_dir": tmp_path, "checkpoint_dir": apart, "backup_dir": shared}
    for folder in (apart, shared):
        folder.mkdir()
    config = load_recipe("demo", [f"deploy.{key}={folder}" for key, folder in keys.items()])
    with pytest.raises(InputError, match=r"shared has.*: [\d.]+ .B of rollouts.*deploy.backup_dir"):
        check(config, {shared: 1000})
    with pytest.raises(InputError, match=r"apart has.*checkpoint_every; .*deploy.checkpoint_dir"):
        check(config, {apart: 1000})
    config = config.updated(deploy={"checkpoint_dir": None})
    with pytest.raises(InputError, match=r"checkpoint_every, and .* of rollouts.*backup_dir"):
        check(config, {shared: 1000})
