"""A sandboxed process that reads completions; `verifier_main` forks it.

It may compute, read calls from one pipe and answer on another, and nothing else: seccomp
(`compute_filter`) refuses files, processes, network and signals, and memory has a limit. After a
call in which the interpreter evaluated code, or tried anything that it audits, or in which the
verifier failed, or whose memory has grown, the process ends, so that nothing a text did reaches the
next one.
"""

import gc
import json
import os
import resource
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from typing import Any, NoReturn

from actors.errors import RewardFailed
from actors.rewards.find_reward import RewardFunction
from actors.rewards.server import write_line
from actors.sandbox.linux import end_with_parent
from actors.sandbox.system_calls import install
from headway.user_code import describe_error

READY = b"ready\n"
"""Written once the prompt's answer is read, before the completion is."""
HARMLESS = frozenset({"builtins.id", "compile", "object.__getattr__", "sys._getframe"})
"""Audited events that change nothing; `compile` is that of `ast.parse`, before any evaluation."""


class Imports(MetaPathFinder):
    """Refuses imports, which need files, and takes note of their names."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> None:
        """Raise ModuleNotFoundError."""
        self.names.append(name)
        raise ModuleNotFoundError(f"{name} is not loaded here", name=name)


def run_child(
    calls: int, answers: int, rewards: Mapping[str, RewardFunction], memory: int, program: bytes
) -> NoReturn:
    """Serve calls from one pipe until it is closed or a call has spent the process."""
    try:
        for stream in (1, 2):
            os.dup2(0, stream)  # the null device
        os.dup2(calls, 3)
        os.dup2(answers, 4)
        os.closerange(5, 1 << 16)
        end_with_parent()
        gc.enable()  # what the parent loaded is frozen
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
        install(program)
        imports, seen = Imports(), [False]
        sys.meta_path[:] = [imports]

        def audit(event: str, arguments: tuple[Any, ...]) -> None:
            if event not in HARMLESS:
                seen[0] = True

        sys.addaudithook(audit)
        for line in _lines(3):
            result = _score(json.loads(line), rewards, imports)
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 > memory / 2
            spent = seen[0] or grown or "score" not in result
            write_line(4, {**result, "spent": spent})
            if spent:
                break
    finally:
        os._exit(0)


def _lines(descriptor: int) -> Any:
    rest = b""
    while block := os.read(descriptor, 1 << 20):
        *lines, rest = (rest + block).split(b"\n")
        yield from lines


def _score(
    message: dict[str, Any], rewards: Mapping[str, RewardFunction], imports: Imports
) -> dict[str, Any]:
    result: dict[str, Any]
    try:
        prompt, completion, answer, metadata = message["arguments"]
        verify = rewards[json.dumps(message["call"])](prompt, answer, metadata)
        os.write(4, READY)
        result = {"score": verify(completion)}
    except RewardFailed as error:
        result = {"error": str(error), "failed": True}
    except BaseException as error:  # noqa: BLE001  (SystemExit too: the caller gets it)
        result = {"error": describe_error(error)}
    if imports.names:
        result["import"] = imports.names
    return result
