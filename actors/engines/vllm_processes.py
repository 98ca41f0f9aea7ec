"""Starts vLLM's engine on a CPU as a fork of a process that has imported vLLM.

In an actor of Ray, vLLM would start the engine as a new interpreter, which imports vLLM after the
actor has: ten seconds of a core. The fork server of `multiprocessing` does it at the same time, and
is there for the next engine too. It has no model and no threads and ends with this process; engines
have the variables of the environment that were set when it began. With a GPU vLLM starts the engine
as usual: whether a fork may inherit what CUDA has loaded was not tried.
"""

import multiprocessing
import os
from multiprocessing import forkserver

from actors.engines.protocol import EngineSpec
from actors.engines.vllm_arguments import process_variables

PRELOADED = ["actors.engines.vllm_preloaded"]
"""What the fork server imports: vLLM's engine."""


def import_beside(spec: EngineSpec) -> None:
    """Set vLLM's variables, and start the fork server, unless it runs, which begins to import vLLM.

    Its variables of the environment, and where its output goes, are those of this process now.
    """
    os.environ.update(process_variables(spec))
    if spec.config.gpus:
        return
    multiprocessing.set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()


def start_as_forks() -> None:
    """Let vLLM start its engines from the fork server."""
    from vllm.v1.engine import utils

    utils.get_mp_context = lambda: multiprocessing.get_context("forkserver")
