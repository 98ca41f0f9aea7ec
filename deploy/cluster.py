"""The Ray cluster of a run: started on this machine, or an existing one joined."""

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray

from deploy.config import DeployConfig
from deploy.errors import InputError


@contextmanager
def cluster(config: DeployConfig, logs: Path) -> Iterator[None]:
    """Connects to Ray for the block; a cluster that was started here ends with it.

    Args:
        config: Address, or `local`.
        logs: Where the output of the processes is copied to at the end.

    Raises:
        InputError: No cluster answers at the address.
    """
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    local = config.ray_address == "local"
    try:
        context = ray.init(
            address=config.ray_address,
            include_dashboard=None if not local else False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=True,
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise InputError(f"deploy.ray_address = {config.ray_address!r}: {error}") from None
    session = Path(context.address_info["session_dir"]) / "logs"
    try:
        yield
    finally:
        ray.shutdown()
        if local:
            for file in session.glob("worker-*"):
                if file.stat().st_size:
                    shutil.copy(file, logs)
