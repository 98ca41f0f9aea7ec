"""Output and errors of vLLM: kept out of the user's terminal, and told in the terms of a recipe.

vLLM starts its model in processes of its own, whose errors reach this one only as text.
"""

import logging
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from actors.errors import EngineDied
from headway.errors import HeadwayError, InputError

STREAMS = (1, 2)
"""Descriptors of standard output and standard error."""
CAUSE = re.compile(r"\b((?:[\w.]*Error|[\w.]*Exception): \S.*)$", re.MULTILINE)
"""The last line of a traceback."""
FATAL = "EngineCore encountered a fatal error"
"""Text that vLLM prints before the traceback that ends an engine."""
LAST_BYTES = 2**20
"""End of the output that is searched for it."""
GIB = r"([\d.]+)"
_WRONG_PATH = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)


@contextmanager
def captured(log: Path | None) -> Iterator[Callable[[], str]]:
    """Send what this process prints in the block, and for good what it starts there, to a file.

    Without `log` the output stays where it is. Yields a function that returns what was printed in
    the block, as far as it went to files.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    kept = {stream: os.dup(stream) for stream in STREAMS}
    try:
        if log is not None:
            with log.open("ab") as file:
                for stream in STREAMS:
                    os.dup2(file.fileno(), stream)
        files = {
            (status.st_dev, status.st_ino): (stream, status.st_size)
            for stream in STREAMS
            if stat.S_ISREG((status := os.fstat(stream)).st_mode)
        }

        def printed() -> str:
            texts = []
            for stream, begin in files.values():
                with open(f"/proc/self/fd/{stream}", "rb") as file:
                    file.seek(begin)
                    texts.append(file.read().decode(errors="replace"))
            return "\n".join(texts)

        yield printed
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for stream, before in kept.items():
            os.dup2(before, stream)
            os.close(before)


@contextmanager
def same_log() -> Iterator[None]:
    """Keep the levels of the log, from which a library of vLLM's app takes warnings when loaded."""
    loggers: list[logging.Logger | logging.Handler] = [logging.root, *logging.root.handlers]
    levels = [logger.level for logger in loggers]
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def died() -> str:
    """Return that the engine is gone, with its last words where this process prints to files."""
    message = "a process of the vLLM engine is gone"
    for stream in STREAMS:
        if stat.S_ISREG(os.fstat(stream).st_mode):
            with open(f"/proc/self/fd/{stream}", "rb") as file:
                file.seek(max(0, os.fstat(stream).st_size - LAST_BYTES))
                text = file.read().decode(errors="replace")
            _, fatal, after = text.rpartition(FATAL)
            if fatal and (cause := cause_in(after)):
                return f"{message}: {cause}"
    return message


def log_to(log: Path) -> None:
    """Let what vLLM logs in this process go to a file."""
    for handler in logging.getLogger("vllm").handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(log.open("a"))


def memory_problem(text: str, *, cpu: bool) -> tuple[str, bool] | None:
    """Return what vLLM says about memory in the terms of a recipe; None if it says nothing.

    `text` is its error, or all that its processes printed. Beside the message stands True if
    another try at the same settings cannot succeed either.
    """
    cache = "actors.kv_cache_gib" if cpu else "actors.gpu_memory_utilization"
    if match := re.search(rf"max seq len \((\d+)\), \({GIB} GiB.*?memory \({GIB} GiB\)", text):
        length, needed, available = match.groups()
        return (
            f"one rollout of actors.max_model_len = {length} tokens needs {needed} GiB of KV cache,"
            f" and the engine has {available} GiB; lower actors.max_model_len, or raise {cache}"
        ), True
    if "No available memory for the cache blocks" in text:
        return (
            "there is no memory for the KV cache of one block of tokens; raise "
            f"{cache}, or take a smaller actors.dtype or model"
        ), True
    if match := re.search(rf"\({GIB}/{GIB} GiB\) on kv cache allocation.*?\({GIB}", text):
        free, total, needed = match.groups()
        return (
            f"the KV cache of an engine takes {needed} GiB, and {free} of {total} GiB of memory "
            "are free; lower actors.kv_cache_gib or actors.count, or end other processes"
        ), float(needed) > float(total)
    if match := re.search(
        rf"\({GIB}/{GIB} GiB\) on startup is less than desired .*?\({GIB}, {GIB} GiB\)", text
    ):
        free, total, share, needed = match.groups()
        return (
            f"actors.gpu_memory_utilization = {share} wants {needed} GiB, and {free} of {total} "
            "GiB are free; lower it, or end what else uses that memory"
        ), False
    if "OutOfMemoryError" in text or "can't allocate memory" in text:
        more = "" if cpu else ", or raise actors.gpus and actors.tensor_parallel_size"
        return (
            f"there is not enough memory for the model; lower {cache} or "
            f"actors.max_concurrent_rollouts, or take a smaller actors.dtype or model{more}"
        ), False
    if re.search(r"'[\w-]*': -9\b", text):
        return (
            "the system killed a process of vLLM, most likely since memory ran out; lower "
            f"{cache} or actors.count, or take a smaller actors.dtype or model"
        ), False
    return None


def cause_in(text: str) -> str | None:
    """Return the first error whose traceback a process printed, on one line; None without any."""
    match = CAUSE.search(text)
    return match.group(1).strip() if match else None


def start_error(model_path: str, error: Exception, printed: str) -> HeadwayError:
    """Return the error of an engine that raised `error` as it started, and printed a text."""
    from vllm.platforms import current_platform

    problem = memory_problem(f"{printed}\n{error}", cpu=current_platform.is_cpu())
    if problem is not None:
        message, permanent = problem
        return (InputError if permanent else EngineDied)(f"model {model_path!r}: {message}")
    numbered = isinstance(error, OSError) and error.errno is not None  # a model hub's have none
    of_system = numbered and not isinstance(error, _WRONG_PATH)
    if not (isinstance(error, RuntimeError) or of_system):
        return InputError(f"vLLM cannot serve {model_path!r}: {error}")
    return EngineDied(f"vLLM did not start for {model_path!r}: {cause_in(printed) or error}")


@contextmanager
def typed_errors() -> Iterator[None]:
    """Translate vLLM's errors into those of `actors.errors`."""
    from vllm.exceptions import VLLMClientError
    from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

    try:
        yield
    except EngineDeadError as error:
        raise EngineDied(died()) from error
    except (VLLMClientError, ValueError) as error:
        raise InputError(f"vLLM refused a request: {error}") from error
    except EngineGenerateError as error:
        raise HeadwayError(f"vLLM failed a request: {error.__cause__ or error}") from error
