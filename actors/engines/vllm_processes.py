"""Starts vLLM's engine on a CPU as a fork of a process that has imported vLLM.

In an actor of Ray, vLLM would start the engine as a new interpreter, which imports vLLM after the
actor has: ten seconds of a core. The fork server of `multiprocessing` does it at the same time, and
is there for the next engine too. It has no model and no threads and ends with this process; engines
have the variables of the environment that were set when it began. With a GPU vLLM starts the engine
as usual: whether a fork may inherit what CUDA has loaded was not tried.
"""

import multiprocessing
from multiprocessing import forkserver

PRELOADED = [
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
]


def import_beside() -> None:
    """Start the fork server, which begins to import vLLM; where it runs already, do nothing.

    The variables of the environment, and where its output goes, are those of this process now.
    """
    multiprocessing.set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()


def start_as_forks() -> None:
    """Let vLLM start its engines from the fork server."""
    from vllm.v1.engine import utils

    utils.get_mp_context = lambda: multiprocessing.get_context("forkserver")
