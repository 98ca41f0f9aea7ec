"""One Ray cluster for a session of tests, and a whole machine for each of its modules."""

import os
from collections.abc import Iterator
from contextlib import suppress

import pytest


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module", autouse=True)
def whole_machine() -> Iterator[None]:
    """Gives back the cores and the environment that an engine in this process has taken."""
    cores, environment = os.sched_getaffinity(0), dict(os.environ)
    yield
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # it has just ended
            os.sched_setaffinity(int(thread), cores)
    os.environ.clear()
    os.environ.update(environment)
