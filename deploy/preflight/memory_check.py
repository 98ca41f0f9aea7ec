"""The check that a recipe fits into memory, for `headway run`, `validate` and `plan`."""

import psutil
from rich.console import Console

from deploy.config.devices import visible_gpus
from deploy.config.run_config import RunConfig
from deploy.planner.byte_counts import GIB
from deploy.planner.model_sizes import measure
from deploy.planner.node_memory import Capacity, Prediction, described, gib
from deploy.planner.process_memory import total
from deploy.planner.remedies import fitting
from deploy.preflight.models import check_workers, find_model, model_path
from headway.errors import HeadwayError, InputError


def check_memory(config: RunConfig, console: Console) -> Prediction | None:
    """Predict the memory of a recipe and print it; None where its models cannot be measured here.

    Raises InputError, with settings that would do, if the run cannot fit.
    """
    prediction = predict_memory(config)
    if isinstance(prediction, str):
        console.print(f"memory is not predicted: {prediction}", markup=False, soft_wrap=True)
        return None
    show(prediction, console)
    return prediction


def predict_memory(config: RunConfig) -> Prediction | str:
    """Return the memory of a recipe, or why its models cannot be measured here.

    Raises InputError, with settings that would do, if the run cannot fit.
    """
    capacity = capacity_of(config)
    try:
        path = find_model(config.model.path) if config.model.path else model_path(config)
        measure(config, path)
    except HeadwayError as error:
        return str(error)
    check_workers(config, path)
    return fitting(config, lambda changed: measure(changed, path), capacity)


def capacity_of(config: RunConfig) -> Capacity:
    """Return what `[deploy.node]` gives, but no more than this machine has if the run is on it."""
    node, actors, learner = config.deploy.node, config.actors, config.learner
    gpus, gpu = node.gpus, node.gpu_gib and node.gpu_gib * GIB
    host = node.memory_gib and node.memory_gib * GIB
    needed = actors.count * actors.gpus + learner.ranks * learner.gpus
    here = visible_gpus()
    if config.deploy.ray_address != "local" or needed > here:
        return Capacity(gpus=gpus, gpu=gpu, host=host)
    if needed:
        own = memory_of_gpu()
        gpu = own if gpu is None else min(gpu, own)
    memory = psutil.virtual_memory().total
    return Capacity(
        gpus=here if gpus is None else min(gpus, here),
        gpu=gpu,
        host=memory if host is None else min(host, memory),
    )


def memory_of_gpu() -> float:
    """Return the bytes of memory of the first GPU of this machine.

    Raises InputError if torch cannot use it, as with a driver that is too old.
    """
    import torch

    try:
        return float(torch.cuda.get_device_properties(0).total_memory)
    except (RuntimeError, AssertionError) as error:  # the latter without CUDA in torch's build
        raise InputError(
            f"this machine has {visible_gpus()} GPU(s) that torch {torch.__version__} cannot use: "
            f"{str(error).strip().splitlines()[0]}; CUDA 13 and a driver of NVIDIA of version 580 "
            "or newer are needed (nvidia-smi shows it)"
        ) from error


def show(prediction: Prediction, console: Console) -> None:
    """Print the memory of each process and node in GiB."""
    capacity = prediction.capacity
    lines = ["memory at its peak, predicted, in GiB:"]
    for process in prediction.processes:
        lines.append(
            f"  {process.role} × {process.count}: host {gib(total(process.resident))} "
            f"({described(process.resident)})"
        )
        if process.device:
            lines.append(
                f"    each GPU {gib(total(process.device))}{_of(capacity.gpu)} "
                f"({described(process.device)}){process.note and '; ' + process.note}"
            )
    lines += [
        f"  {node.name}: {gib(total(node.parts))}{_of(capacity.host)} ({described(node.parts)})"
        for node in prediction.nodes
    ]
    lines.append(
        f"  disk: checkpoints {gib(prediction.checkpoints)}, journal up to "
        f"{gib(prediction.journal)}"
    )
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def _of(capacity: float | None) -> str:
    return "" if capacity is None else f" of {gib(capacity)}"
