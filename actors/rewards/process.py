"""The client of a process that calls rewards; `pool` starts and ends such processes."""

import asyncio
import itertools
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any


class ProcessEnded(Exception):
    """The process ended before it answered; the message names its exit code or signal."""


class Unanswered(Exception):
    """The process did not answer within the deadline."""


class RewardProcess:
    """A running `actors.rewards.process_main`.

    Several event loops may call `ask` at once. It ends with this object and the thread of it.
    Its private memory is limited to `memory_bytes` (RLIMIT_DATA). It runs on `cores`, with the
    variables of `environment`.
    """

    def __init__(
        self, memory_bytes: int, cores: Iterable[int], environment: Mapping[str, str]
    ) -> None:
        path = os.pathsep.join(folder or "." for folder in sys.path)
        self._popen = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "actors.rewards.process_main",
                str(memory_bytes),
                str(os.getpid()),
                ",".join(map(str, sorted(cores))),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**environment, "PYTHONPATH": path},
            start_new_session=True,
        )
        self._numbers = itertools.count()
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._pending: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.resident = 0
        """Resident memory in bytes after its last answer."""
        self.loaded: set[str] = set()
        """Rewards that it has loaded; updated by the caller."""
        self.ended = threading.Event()
        for work, arguments in (
            (_write, (self._popen, self._outbox)),
            (_read, (self._popen, self._pending, self.ended)),
        ):
            threading.Thread(target=work, args=arguments, daemon=True).start()
        self._finalizer = weakref.finalize(self, _end, self._popen, self._outbox)

    @property
    def asked(self) -> int:
        """Number of messages without an answer."""
        return len(self._pending)

    async def ask(self, message: dict[str, Any], timeout: float, *, grace: float = 0) -> Any:
        """Send a message to `process_main` and return the answer.

        With `grace` above 0 the call is cancelled at its deadline, `timeout` seconds, and has that
        time to confirm it.

        Raises:
            ProcessEnded: The process has ended.
            TimeoutError: The deadline passed, and the process is responsive.
            Unanswered: The deadline passed, and this call or another blocks the process.
        """
        number = next(self._numbers)
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._pending[number] = future
        if self.ended.is_set():
            self._pending.pop(number, None)
            raise ProcessEnded(_how(self._popen))
        try:
            self._send({**message, "id": number})
            done, _ = await asyncio.wait([future], timeout=timeout)
            if not done and grace:
                self._send({"cancel": number})
                if (await asyncio.wait([future], timeout=grace))[0]:
                    raise TimeoutError
            if not future.done():
                raise Unanswered
            answer = future.result()
        finally:
            self._pending.pop(number, None)
        self.resident = answer["resident"]
        return answer

    def close(self) -> None:
        """Kill the process and the other processes of its session."""
        self._finalizer()

    def _send(self, message: dict[str, Any]) -> None:
        self._outbox.put(json.dumps(message).encode() + b"\n")


def _write(popen: subprocess.Popen[bytes], outbox: queue.SimpleQueue[bytes | None]) -> None:
    assert popen.stdin is not None
    with suppress(OSError):
        while (line := outbox.get()) is not None:
            popen.stdin.write(line)
            popen.stdin.flush()
    with suppress(OSError):
        popen.stdin.close()


def _read(
    popen: subprocess.Popen[bytes],
    pending: dict[int, asyncio.Future[dict[str, Any]]],
    ended: threading.Event,
) -> None:
    assert popen.stdout is not None
    with popen.stdout:
        for line in popen.stdout:
            with suppress(ValueError, KeyError):  # no answer, or nobody waits for it
                answer = json.loads(line)
                _resolve(pending[answer["id"]], answer)
    popen.wait()
    ended.set()
    for future in list(pending.values()):
        _resolve(future, ProcessEnded(_how(popen)))


def _resolve(future: asyncio.Future[dict[str, Any]], result: dict[str, Any] | Exception) -> None:
    def resolve() -> None:
        if future.done():
            return
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)

    with suppress(RuntimeError):  # the loop is closed
        future.get_loop().call_soon_threadsafe(resolve)


def _end(popen: subprocess.Popen[bytes], outbox: queue.SimpleQueue[bytes | None]) -> None:
    outbox.put(None)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(popen.pid, signal.SIGKILL)
    popen.wait()


def _how(popen: subprocess.Popen[bytes]) -> str:
    code = popen.returncode
    if code is not None and code < 0:
        return f"ended its process ({signal.Signals(-code).name})"
    return f"ended its process (exit code {code})"
