"""The client of a process that calls rewards; `pool` starts and ends such processes.

What it prints is forwarded up to a limit, and an answer that cannot be read ends it.
"""

import asyncio
import itertools
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from headway.clean_text import is_secret, without_secrets
from headway.output_limits import RateLimit

VARIABLES = """
PATH HOME USER LOGNAME SHELL LANG LANGUAGE TZ TMPDIR LD_LIBRARY_PATH VIRTUAL_ENV CONDA_PREFIX
HF_HOME HF_HUB_CACHE HF_HUB_OFFLINE HF_DATASETS_OFFLINE TRANSFORMERS_OFFLINE XDG_CACHE_HOME
CUDA_VISIBLE_DEVICES CUDA_HOME SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE NLTK_DATA
PYTHONUTF8 OMP_NUM_THREADS OPENBLAS_NUM_THREADS MKL_NUM_THREADS TOKENIZERS_PARALLELISM
"""
"""Variables that a process gets, besides LC_…, HEADWAY_… and those that a recipe names."""
LONGEST_ANSWER = 1 << 20
"""Most bytes of an answer."""
FROM_OUTSIDE = -signal.SIGKILL, -signal.SIGTERM
"""Exit codes of a process that somebody else has killed, such as the kernel for its memory."""


def scrubbed(environment: Mapping[str, str], names: Iterable[str] = ()) -> dict[str, str]:
    """Return the variables that hold no secret, and those of `names`."""
    kept = {*VARIABLES.split(), *names}

    def is_kept(name: str) -> bool:
        return name in kept or (name.startswith(("LC_", "HEADWAY_")) and not is_secret(name))

    return {name: value for name, value in environment.items() if is_kept(name)}


class ProcessEnded(Exception):
    """The process ended before it answered; the message names its exit code or signal."""


class ProcessLost(ProcessEnded):
    """The process was killed from outside, or none could be started; the message says why."""


class Unanswered(Exception):
    """The process did not answer within the deadline."""


def since(kills: int) -> str:
    """Say how many processes the kernel has ended for lack of memory since it had ended `kills`."""
    count = memory_kills() - kills
    return f"processes that the kernel has ended for lack of memory since it began: {count}"


def memory_kills(statistics: Path = Path("/proc/vmstat")) -> int:
    """Return how many processes of the machine the kernel has ended for lack of memory, if known.

    0 where it does not count them.
    """
    with suppress(OSError):
        if count := re.search(r"(?m)^oom_kill (\d+)$", statistics.read_text(encoding="utf-8")):
            return int(count[1])
    return 0


class RewardProcess:
    """A running `process_main` or `verifier_main`, which several event loops may ask at once.

    It ends with this object and the thread of it. Its private memory is limited to `memory_bytes`
    (RLIMIT_DATA). It runs on `cores`, with the variables of `environment`, and what it prints is
    forwarded to the standard error of this one up to `output_limit`.
    Raises OSError or RuntimeError if the system has no memory, process, thread or descriptor left.
    """

    def __init__(
        self,
        module: str,
        memory_bytes: int,
        cores: Iterable[int],
        environment: Mapping[str, str],
        output_limit: RateLimit,
        *arguments: str,
    ) -> None:
        path = os.pathsep.join(folder or "." for folder in sys.path)
        given = str(memory_bytes), str(os.getpid()), ",".join(map(str, sorted(cores)))
        self.kills = memory_kills()
        """Processes that the kernel had ended for lack of memory when it was started."""
        self._popen = subprocess.Popen(
            [sys.executable, "-m", f"actors.rewards.{module}", *given, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
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
        self._finalizer = weakref.finalize(self, _end, self._popen, self._outbox, self._pending)
        popen = self._popen
        calls = (
            (_write, (popen, self._outbox)),
            (_read, (popen, self._pending, self.ended, self.kills)),
            (_forward, (popen, output_limit)),
        )
        threads = [threading.Thread(target=work, args=args, daemon=True) for work, args in calls]
        try:
            for thread in threads:
                thread.start()
        except RuntimeError:
            self._finalizer()
            streams = (popen.stdin, popen.stdout, popen.stderr)
            for thread, stream in zip(threads, streams, strict=True):
                if thread.ident is None and stream is not None:
                    stream.close()  # else the thread does
            raise

    @property
    def asked(self) -> int:
        """Number of messages without an answer."""
        return len(self._pending)

    async def ask(self, message: dict[str, Any], timeout: float) -> Any:
        """Send a message to the process and return the answer.

        Raises ProcessEnded, and Unanswered past `timeout` seconds.
        """
        number = next(self._numbers)
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._pending[number] = future
        if self.ended.is_set():
            self._pending.pop(number, None)
            raise _ending(self._popen, self.kills)
        try:
            self._send({**message, "id": number})
            if not (await asyncio.wait([future], timeout=timeout))[0]:
                raise Unanswered
            answer = future.result()
        finally:
            self._pending.pop(number, None)
            future.cancel()  # nobody waits for its exception
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


def _forward(popen: subprocess.Popen[bytes], limit: RateLimit) -> None:
    assert popen.stderr is not None
    with popen.stderr, suppress(OSError):
        while block := os.read(popen.stderr.fileno(), 1 << 16):
            allowed, note = limit.allow(len(block))
            if note or allowed:
                text = block[:allowed].decode(errors="surrogateescape")
                os.write(2, note.encode() + without_secrets(text).encode(errors="surrogateescape"))


def _read(
    popen: subprocess.Popen[bytes],
    pending: dict[int, asyncio.Future[dict[str, Any]]],
    ended: threading.Event,
    kills: int,
) -> None:
    assert popen.stdout is not None
    broken = False
    with popen.stdout:
        while line := popen.stdout.readline(LONGEST_ANSWER):
            answer = _answer(line)
            if broken := answer is None:
                break
            if answer["id"] in pending:  # else nobody waits for it
                _resolve(pending[answer["id"]], answer)
    if broken:
        _kill(popen)
    popen.wait()
    ended.set()
    wrote = ProcessEnded("wrote to the channel of its process")
    _fail(pending, wrote if broken else _ending(popen, kills))


def _answer(line: bytes) -> dict[str, Any] | None:
    """Parse an answer; None for anything else."""
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError):
        return None
    valid = isinstance(answer, dict) and all(
        isinstance(answer.get(key), int) for key in ("id", "resident")
    )
    return answer if valid else None


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


def _fail(pending: Mapping[int, asyncio.Future[dict[str, Any]]], error: Exception) -> None:
    for future in list(pending.values()):
        _resolve(future, error)


def _end(
    popen: subprocess.Popen[bytes],
    outbox: queue.SimpleQueue[bytes | None],
    pending: Mapping[int, asyncio.Future[dict[str, Any]]],
) -> None:
    outbox.put(None)
    _fail(pending, ProcessEnded("lost its process, which was replaced"))  # not by others
    _kill(popen)
    popen.wait()


def _kill(popen: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(popen.pid, signal.SIGKILL)


def _ending(popen: subprocess.Popen[bytes], kills: int) -> ProcessEnded:
    """Return the error of a process that has ended; `kills` are `memory_kills` at its start."""
    code = popen.returncode
    if code is None or code >= 0:
        return ProcessEnded(f"ended its process (exit code {code})")
    name = signal.Signals(-code).name
    if code not in FROM_OUTSIDE:
        return ProcessEnded(f"ended its process ({name})")
    return ProcessLost(f"lost its process, killed from outside ({name}); {since(kills)}")
