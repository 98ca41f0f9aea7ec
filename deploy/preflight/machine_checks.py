"""Checks that this machine has the folders, space, cores, GPUs, files and addresses of a recipe.

Each raises InputError that names the setting, what the machine has, and what would do.
"""

import math
import os
import resource
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import psutil
from rich.filesize import decimal

from deploy.config.devices import visible_gpus
from deploy.config.rules import STAGED
from deploy.config.run_config import RunConfig
from deploy.observability import trackers
from deploy.observability.exporter import check_address, metrics_access
from deploy.planner.byte_counts import checkpoint_bytes, journal_bytes, most_checkpoints
from deploy.preflight.gpu_checks import check_kernels
from headway.cpu_cores import parse_cores
from headway.errors import InputError
from weight_sync.open_files import RAISE_LIMIT, allow_open_files

DESCRIPTORS = 256
"""Files, pipes and sockets that a process of a run may need; about 80 were counted at most."""
DESCRIPTORS_OF_PEER = 8
"""Files, pipes and sockets for each actor and each rank that such a process talks to."""
TASKS = 240
"""Processes and threads of a run on this machine at least, Ray's included."""
TASKS_OF_PEER = 40
"""Those of each actor and each rank; 322 were counted with two of them, 415 with three and vLLM."""
CGROUPS, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
LONGEST_TMPDIR = 70
"""Bytes of the path of temporary files, to which vLLM adds 37; a path of a socket has 107."""
CONNECT_SECONDS = 5.0
"""Deadline of a connection to a cluster."""


def check_machine(config: RunConfig) -> None:
    """Check open files, processes, cores, devices, addresses and trackers."""
    deploy = config.deploy
    check_descriptors(config)
    check_tasks(config)
    _check_cores(config)
    check_gpus(config, gpus := visible_gpus())
    if gpus and deploy.ray_address == "local" and config.actors.gpus + config.learner.gpus:
        check_kernels()
    _check_offload(config)
    check_cuda(config)
    _check_temporary_folder()
    _check_address(deploy.ray_address)
    if deploy.metrics:
        metrics_access(deploy)
        check_address(deploy.metrics_host, deploy.metrics_port)
    trackers.check(deploy.trackers)


def check_descriptors(config: RunConfig) -> None:
    """Raise the limit of open files of this process, and so of all that it starts."""
    needed = DESCRIPTORS + DESCRIPTORS_OF_PEER * (config.actors.count + config.learner.ranks)
    if (allowed := allow_open_files()) < needed:
        raise InputError(
            f"this machine lets a process open {allowed} files (ulimit -Hn), and those of the run "
            f"need {needed}, by actors.count = {config.actors.count} and learner.ranks = "
            f"{config.learner.ranks}; {RAISE_LIMIT}"
        )


def check_tasks(config: RunConfig) -> None:
    """Refuse a limit of processes and threads under which Ray would hang as it starts."""
    actors, ranks = config.actors.count, config.learner.ranks
    needed = TASKS + TASKS_OF_PEER * (actors + ranks)
    if config.deploy.ray_address != "local":
        return
    for limit, free in _free_tasks():
        if free < needed:
            raise InputError(
                f"{limit} leaves {max(0, free)} processes and threads, and a run needs {needed} at "
                f"least, by actors.count = {actors} and learner.ranks = {ranks}; raise it "
                "(TasksMax= of systemd, --pids-limit of docker, podPidsLimit of Kubernetes)"
            )


def _free_tasks() -> Iterator[tuple[str, int]]:
    """Yield each limit of processes and threads, with how many may still be added under it."""
    _, most = resource.getrlimit(resource.RLIMIT_NPROC)
    if os.geteuid() != 0 and most != resource.RLIM_INFINITY:  # root has no such limit
        resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
        known = psutil.process_iter(["uids", "num_threads"])
        own = [p.info for p in known if p.info["uids"] and p.info["uids"].real == os.getuid()]
        yield f"ulimit -Hu = {most}", most - sum(info["num_threads"] or 0 for info in own)
    for line in OWN_CGROUPS.read_text().splitlines():
        _, controller, path = line.split(":", 2)
        if controller in ("", "pids"):  # cgroup versions 2 and 1
            group = CGROUPS / controller / path[1:]
            for folder in (group, *group.parents):
                with suppress(OSError, ValueError):  # none is there, or it is "max"
                    file = folder / "pids.max"
                    limit, used = (int(f.read_text()) for f in (file, folder / "pids.current"))
                    yield f"{file} = {limit}", limit - used


def _check_temporary_folder() -> None:
    """Refuse a folder of temporary files in which vLLM could make no socket."""
    if (size := len(os.fsencode(folder := tempfile.gettempdir()))) > LONGEST_TMPDIR:
        raise InputError(
            f"the folder of temporary files, {folder}, is too long for sockets in it: {size} bytes,"
            f" must have at most {LONGEST_TMPDIR}; set a shorter one, as by export TMPDIR=/tmp"
        )


def _check_address(address: str) -> None:
    """Connect to the address of a cluster once, since Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise InputError(
            f"deploy.ray_address = {address!r}: no cluster answers there ({error}); start one with "
            '`ray start --head`, or use "local"'
        ) from None


def _check_cores(config: RunConfig) -> None:
    """Compare the cores of all roles with this machine's, if the run will be on it."""
    if config.deploy.ray_address != "local":
        return
    actors, available = config.actors, os.sched_getaffinity(0)
    entries = [
        *(("actors.cores has", entry) for entry in actors.cores or ()),
        ("learner.cores =", config.learner.cores),
        ("actors.reward_model.cores =", actors.asks_reward_models and actors.reward_model.cores),
    ]
    for setting, entry in entries:
        if entry and not available.issuperset(parse_cores(entry)):
            raise InputError(
                f"{setting} {entry!r}, but this machine's cores are "
                f"{', '.join(str(core) for core in sorted(available))}"
            )


def _check_offload(config: RunConfig) -> None:
    """Refuse an optimizer that would step on a single thread of a node of a cluster."""
    learner = config.learner
    given = (learner.threads, learner.cores) != (None, None)
    if config.deploy.ray_address != "local" and learner.offload_optimizer and not given:
        raise InputError(
            "learner.offload_optimizer = true steps on the CPU, and on another cluster with one "
            "thread a rank by default; set learner.threads, such as to half of a node's cores "
            "divided by its ranks"
        )


def check_gpus(config: RunConfig, available: int) -> None:
    """Refuse GPUs for one side alone by oversight, and engines without one of `available` here."""
    actors, learner = config.actors, config.learner
    if actors.engine != "vllm":
        return
    for section, key, other in ((learner, "learner", "actors"), (actors, "actors", "learner")):
        beside = actors.gpus if other == "actors" else learner.gpus
        if beside and "gpus" not in section.model_fields_set:
            raise InputError(
                f"{key}.gpus is not set beside {other}.gpus = {beside:g}; set it, such as to 1, to "
                "a share such as 0.5 of a GPU that both use, or to 0 to compute on CPUs"
            )
    if config.deploy.ray_address == "local" and available and actors.gpus == 0:
        workers = actors.count * actors.tensor_parallel_size
        raise InputError(
            f"actors.gpus = 0 and vLLM is built for GPUs, of which this machine has {available}: "
            f"learner.ranks = {learner.ranks} with actors.count = {actors.count} × "
            f"actors.tensor_parallel_size = {actors.tensor_parallel_size} would take "
            f"{learner.ranks} and {workers}; set learner.gpus and actors.gpus, which may be shares "
            "such as 0.5"
        )


def check_cuda(config: RunConfig) -> None:
    """Refuse a transport that needs a CUDA device on a machine without one."""
    if config.weight_sync.staged or config.deploy.ray_address != "local":
        return
    import torch

    if not torch.cuda.is_available():
        raise InputError(
            f'weight_sync.transport = "{config.weight_sync.transport}" needs a CUDA device, and '
            f"this machine has none that torch can use; set it to {STAGED}"
        )


NETWORK = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "lustre", "ceph", "gpfs", "beegfs", "afs", "fuse.sshfs",
     "fuse.glusterfs", "fuse.s3fs", "fuse.gcsfuse", "fuse.juicefs"}
)  # fmt: skip
"""File systems whose files several machines may write."""


def check_runs_dir(config: RunConfig) -> Path:
    """Return `deploy.runs_dir`, or the nearest of its parents that exists.

    A file, a network file system and what cannot be written are refused.
    """
    folder = _existing("deploy.runs_dir", config.deploy.runs_dir)
    if (kind := file_system(folder)) in NETWORK:
        raise InputError(
            f"deploy.runs_dir = {str(config.deploy.runs_dir)!r} is on {kind}, where the ledger's "
            "SQLite cannot work; take a local disk, and deploy.checkpoint_dir for what machines "
            "share"
        )
    return folder


def check_run_folders(config: RunConfig) -> dict[str, Path]:
    """Return the folders of [deploy] that are set, by key, as `check_runs_dir` its own."""
    keys = ("checkpoint_dir", "backup_dir")
    paths = {key: getattr(config.deploy, key) for key in keys}
    others = {key: _existing(f"deploy.{key}", path) for key, path in paths.items() if path}
    return {"runs_dir": check_runs_dir(config), **others}


def file_system(folder: Path) -> str:
    """Return the type of the file system of a folder, such as "ext4"; "" if it is not known."""
    mounts = psutil.disk_partitions(all=True)
    above = [mount for mount in mounts if folder.resolve().is_relative_to(mount.mountpoint)]
    return max(above, key=lambda mount: len(mount.mountpoint)).fstype if above else ""


def backup_warning(run: Path, backup: Path) -> str | None:
    """Return a warning if a run and its backup, which may not exist, are on the same disk."""
    if not backup.exists() or run.stat().st_dev != backup.stat().st_dev:
        return None
    return f"{backup.resolve()} is on the disk of {run}, whose loss it does not outlive"


def _existing(key: str, folder: Path) -> Path:
    folder = folder.absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir():
        raise InputError(f"{key} = {str(folder)!r}: {existing} is a file, not a folder")
    real = shutil.disk_usage(existing).total > 0  # /proc and the like hold no files
    if not (real and os.access(existing, os.W_OK | os.X_OK)):
        raise InputError(f"{key} = {str(folder)!r}: {existing} cannot be written")
    return existing


def check_free_space(
    config: RunConfig,
    shapes: Mapping[str, tuple[int, ...]],
    folders: Mapping[str, Path],
    *,
    resumed: Path | None = None,
    free: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free,
) -> None:
    """Compare the free space with the least that a run of a model will need.

    `shapes` are those of the model's weights, `folders` those of the run that exist, by their keys
    in [deploy], `resumed` the checkpoint folder of a resumed run; `free` returns the free bytes of
    a disk.
    """
    folders = dict(folders)
    saved_in = next((key for key in ("checkpoint_dir", "backup_dir") if key in folders), "runs_dir")
    if resumed is not None and not resumed.is_symlink():
        saved_in = "runs_dir"
    elif resumed is not None:
        saved_in = saved_in.replace("runs_dir", "checkpoint_dir")
        folders[saved_in] = resumed.resolve()
    names = [path.name[1:] for path in resumed.glob("v*")] if resumed else []
    made = [int(name) for name in names if name.isdigit()]
    version = max(made, default=0)
    files = resumed.rglob("*") if resumed else ()
    stored = sum(path.stat().st_size for path in files if path.is_file())
    weights = sum(math.prod(shape) for shape in shapes.values())
    checkpoint = checkpoint_bytes(config.learner, weights)
    checkpoints = most_checkpoints(config, version, len(made))
    remaining = max(0, config.steps - version)
    journal = journal_bytes(config, min(remaining, config.learner.checkpoint_every))
    already = f", of which {decimal(stored)} are there" if stored else ""
    kept = (
        f"{checkpoints} checkpoint(s) of {decimal(checkpoint)}, by learner.keep_checkpoints and "
        f"checkpoint_every{already}"
    )
    rollouts = f"{decimal(journal)} of rollouts between two"
    growth = max(0, checkpoints * checkpoint - stored)
    for key, folder in folders.items():
        parts = {kept: growth} if key == saved_in else {}
        if key != "checkpoint_dir":
            parts[rollouts] = journal
        needed = sum(parts.values())
        if (left := free(folder)) < needed:
            raise InputError(
                f"{folder} has {decimal(left)} free, and the run needs about {decimal(needed)}: "
                f"{', and '.join(parts)}; free some, or set deploy.{key} to a larger disk"
            )
