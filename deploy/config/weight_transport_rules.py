"""Checks that the weight transport of a recipe can connect its learner and its actors."""

from pathlib import Path

from actors.config import ActorsConfig
from deploy.config.deploy_config import Placements
from deploy.errors import InputError
from learner.config.learner import LearnerConfig
from weight_sync.config import WeightSyncConfig

STAGED = '"shared_memory", "object_store" or "filesystem"'


def refusal(
    weight_sync: WeightSyncConfig,
    learner: LearnerConfig,
    actors: ActorsConfig,
    placement: Placements,
) -> str | None:
    """Return why the transport cannot work between these processes; None if it can."""
    transport = weight_sync.transport
    if weight_sync.one_node and (placement.learner or placement.actors):
        role = "learner" if placement.learner else "actors"
        return (
            f"deploy.placement.{role} may put actors and learner on different nodes, and "
            f'weight_sync.transport = "{transport}" stays within a node; set it to '
            '"object_store" or "filesystem"'
        )
    if weight_sync.staged:
        return None
    if actors.engine != "vllm":
        return (
            f'weight_sync.transport = "{transport}" is vLLM\'s own, and actors.engine = '
            f"{actors.engine!r}; set the transport to {STAGED}"
        )
    if not (learner.gpus and actors.gpus):
        return (
            f'weight_sync.transport = "{transport}" goes from a CUDA device of the learner to '
            f"those of the engines, and learner.gpus = {learner.gpus:g}, actors.gpus = "
            f"{actors.gpus:g}; give both a GPU, or set the transport to {STAGED}"
        )
    shares = learner.gpus + actors.count * actors.gpus
    if transport == "ipc" and (learner.ranks > 1 or shares > 1):
        return (
            'weight_sync.transport = "ipc" needs learner and engines on one GPU, and '
            f"learner.ranks = {learner.ranks}, learner.gpus = {learner.gpus:g} and "
            f"{actors.count} × actors.gpus = {actors.gpus:g} take {shares:g}; set one rank and "
            'shares that are at most 1 together, or weight_sync.transport = "nccl"'
        )
    if transport == "nccl" and (learner.gpus < 1 or actors.gpus < 1):
        return (
            'weight_sync.transport = "nccl" needs learner and engines on different GPUs, and '
            f"learner.gpus = {learner.gpus:g}, actors.gpus = {actors.gpus:g} may share one; set "
            'both to at least 1, or weight_sync.transport = "ipc"'
        )
    return None


def check_devices(weight_sync: WeightSyncConfig, ray_address: str) -> None:
    """Check that this machine has the device that the transport needs, if the run will be on it.

    Raises:
        InputError: There is no such device.
    """
    if weight_sync.staged or ray_address != "local":
        return
    import torch

    if not torch.cuda.is_available():
        raise InputError(
            f'weight_sync.transport = "{weight_sync.transport}" needs a CUDA device, and this '
            f"machine has none that torch can use; set it to {STAGED}"
        )


def claim_folder(weight_sync: WeightSyncConfig, run: Path) -> None:
    """Claim the folder through which weights travel for the run in `run`, if it uses one.

    Raises:
        InputError: The folder belongs to another run, or cannot be written.
    """
    if weight_sync.transport != "filesystem" or weight_sync.folder is None:
        return
    from weight_sync.transports.filesystem import claim

    claim(Path(weight_sync.folder), str(run))
