"""Imports of the process that engines are forks of (`vllm_processes`); nothing else imports it.

Collecting garbage meanwhile would take a fifth of the time, and engines never collect what they
have inherited.
"""

import gc
import importlib
import os

ENGINE = ("v1.engine.core", "v1.executor.uniproc_executor", "v1.worker.cpu_worker")

os.register_at_fork(after_in_child=gc.enable)
gc.disable()
for name in ENGINE:
    importlib.import_module(f"vllm.{name}")
gc.freeze()
