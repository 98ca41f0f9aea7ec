"""Checks that the weight transport of a recipe can connect its learner and its actors."""

from deploy.config.recipe_keys import RecipeKeys
from headway.errors import InputError
from weight_sync.config import WeightSyncConfig

STAGED = '"shared_memory", "object_store" or "filesystem"'


def check_transport(config: RecipeKeys) -> None:
    """Refuse a transport that cannot work between the learner and the actors of a recipe.

    Raises:
        InputError: They are on different nodes, or the engine or the GPUs are not what it needs, or
            it would round an adapter.
    """
    weight_sync, placement = config.weight_sync, config.deploy.placement
    learner, actors, transport = config.learner, config.actors, config.weight_sync.transport
    if weight_sync.one_node and (placement.learner or placement.actors):
        role = "learner" if placement.learner else "actors"
        raise InputError(
            f"deploy.placement.{role} may put actors and learner on different nodes, and "
            f'weight_sync.transport = "{transport}" stays within a node; set it to '
            '"object_store" or "filesystem"'
        )
    if weight_sync.staged:
        if learner.lora is not None and weight_sync.wire_dtype != "as_trained":
            raise InputError(
                f'weight_sync.wire_dtype = "{weight_sync.wire_dtype}" would round the factors of '
                "[learner.lora], which alone are sent; leave it out"
            )
        return
    if actors.engine != "vllm":
        raise InputError(
            f'weight_sync.transport = "{transport}" is vLLM\'s own, and actors.engine = '
            f"{actors.engine!r}; set the transport to {STAGED}"
        )
    if not (learner.gpus and actors.gpus):
        raise InputError(
            f'weight_sync.transport = "{transport}" goes from a CUDA device of the learner to '
            f"those of the engines, and learner.gpus = {learner.gpus:g}, actors.gpus = "
            f"{actors.gpus:g}; give both a GPU, or set the transport to {STAGED}"
        )
    shares = learner.gpus + actors.count * actors.gpus
    if transport == "ipc" and (learner.ranks > 1 or shares > 1):
        raise InputError(
            'weight_sync.transport = "ipc" needs learner and engines on one GPU, and '
            f"learner.ranks = {learner.ranks}, learner.gpus = {learner.gpus:g} and "
            f"{actors.count} × actors.gpus = {actors.gpus:g} take {shares:g}; set one rank and "
            'shares that are at most 1 together, or weight_sync.transport = "nccl"'
        )
    if transport == "nccl" and (learner.gpus < 1 or actors.gpus < 1):
        raise InputError(
            'weight_sync.transport = "nccl" needs learner and engines on different GPUs, and '
            f"learner.gpus = {learner.gpus:g}, actors.gpus = {actors.gpus:g} may share one; set "
            'both to at least 1, or weight_sync.transport = "ipc"'
        )


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
