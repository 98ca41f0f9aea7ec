"""The Ray cluster of a run: started on this machine, or an existing one joined."""

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray

from deploy.config import RunConfig
from deploy.errors import InputError, RunFailed
from deploy.interrupt import deferred
from deploy.leftovers import ending_workers
from learner.cores import cpus_of


@contextmanager
def cluster(config: RunConfig, logs: Path) -> Iterator[None]:
    """Connects to Ray for the block; a cluster that was started here ends with it.

    Args:
        config: The recipe: the cluster's address, or `local`, and what its processes need.
        logs: Where the output of the processes is copied to at the end.

    Raises:
        InputError: No cluster answers at the address, or it is too small.
    """
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")
    address = config.deploy.ray_address
    local = address == "local"
    try:
        with deferred():
            context = ray.init(
                address=address,
                include_dashboard=False if local else None,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
    except KeyboardInterrupt:
        ray.shutdown()
        raise
    except Exception as error:  # Ray raises what it likes, bare Exceptions too
        ray.shutdown()
        if local:
            raise RunFailed(f"Ray did not start on this machine: {error}") from error
        raise InputError(f"deploy.ray_address = {address!r}: {error}") from None
    try:
        _check_resources(config)
        yield
    finally:
        with deferred():
            with ending_workers():  # none of another machine's, nor of a cluster that was joined
                ray.shutdown()
            if local:
                _copy_logs(Path(context.address_info["session_dir"]) / "logs", logs)


def _copy_logs(session: Path, logs: Path) -> None:
    for file in session.glob("worker-*"):
        if file.stat().st_size:
            shutil.copy(file, logs)


def _check_resources(config: RunConfig) -> None:
    """Compares what the processes reserve with what the cluster has in all."""
    actors, learner = config.actors, config.learner
    judging = actors.reward_model.gpus if actors.asks_reward_models else 0.0
    needed = {
        "CPU": learner.ranks * cpus_of(learner) + actors.count * actors.cpus,
        "GPU": learner.ranks * learner.gpus + actors.count * actors.gpus + judging,
    }
    there = ray.cluster_resources()
    for kind, amount in needed.items():
        if amount > there.get(kind, 0.0):
            raise InputError(
                f"the learner and {actors.count} actor(s) reserve {amount:g} {kind}, but the Ray "
                f"cluster at {config.deploy.ray_address!r} has {there.get(kind, 0.0):g}; lower "
                f"actors.count, actors.{kind.lower()}s, or the learner's"
            )
