"""Runs one Python program at a time in a sandbox, and tells how it ended.

The walls are those of `launcher`. They need Linux 5.12 on x86-64, and either root with
CAP_SYS_ADMIN or user namespaces that everybody may make; where they cannot be had nothing is run.
What is left to an attacker is the kernel behind the allowed system calls, and side channels.
"""

import json
import os
import platform
import selectors
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from actors.errors import InputError
from actors.sandbox.system_calls import MACHINE

LAUNCHER = Path(__file__).with_name("launcher.py")
FOLDERS = ("/usr/lib", "/usr/lib64", "/lib", "/lib64")
"""What a Python interpreter needs beside its own folder, where it is there."""
START_SECONDS = 30.0
"""What a sandbox gets to start its program, and to end after it; apart from the program's time."""

PROBE = """
import os, socket
seen = []
try:
    socket.socket()
    seen.append("a socket")
except PermissionError:
    pass
try:
    os.fork()
    seen.append("a second process")
except PermissionError:
    pass
try:
    open("/mark", "w")
    seen.append("a file in /")
except OSError:
    pass
seen += [path for path in ("/etc", "/proc", "/home", "/root/.ssh", "/sys") if os.path.exists(path)]
seen += [] if os.getppid() == 1 else ["other processes"]
print("walls stand" if not seen else f"the program had {seen}")
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a program ended."""

    ended: Literal["exit", "signal", "timeout", "output"]
    """`timeout` and `output`: it was stopped at its limit."""
    code: int
    """Exit code, or the number of the signal."""
    stdout: str
    """What it wrote, up to the limit."""
    stderr: str
    seconds: float
    """Of the program alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sandbox:
    """Limits of a program."""

    seconds: float = 10.0
    """Of the clock, the start of the program's interpreter included, that of the sandbox not."""
    memory_mib: int = 256
    """Address space."""
    disk_mib: int = 16
    """Of its folder /work, which lies in memory too."""
    output_kib: int = 1024
    """Of standard output, and as many of standard error."""
    threads: int = 16

    def run(self, program: str, stdin: str = "") -> Outcome:
        """Runs a program of Python's standard library; blocks until it has ended.

        Args:
            program: Source text.
            stdin: What it can read.

        Raises:
            InputError: The sandbox cannot be had, or not within `START_SECONDS`; names what is
                missing. Nothing was run.
        """
        status_read, status_write = os.pipe()
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="surrogatepass") as config:
            json.dump(self._config(program), config)
            config.flush()
            config.seek(0)
            handed = (config.fileno(), status_write)
            try:
                process = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-B", str(LAUNCHER), *map(str, handed)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    pass_fds=handed,
                    start_new_session=True,
                    cwd="/",
                    env={},
                )
            finally:
                os.close(status_write)
        with process, open(status_read, "rb", buffering=0) as pipe:
            status = _Status(self.seconds)
            try:
                stopped, outputs = self._exchange(
                    process, stdin.encode(errors="replace"), pipe.fileno(), status
                )
            finally:
                process.kill()  # and so init, and so all that is in it
            process.wait(START_SECONDS)
        texts = [output.decode(errors="replace") for output in outputs]
        said = status.said
        if "error" in said:
            raise InputError(unavailable(said["error"]))
        if stopped is not None:
            return Outcome(stopped, 0, texts[0], texts[1], status.seconds())
        if "signal" in said:
            return Outcome("signal", said["signal"], texts[0], texts[1], status.seconds())
        if "exit" in said:
            return Outcome("exit", said["exit"], texts[0], texts[1], status.seconds())
        raise InputError(unavailable(f"the launcher did not say how it ended: {texts[1]}"))

    def _config(self, program: str) -> dict[str, Any]:
        prefix = os.path.realpath(sys.base_prefix)
        folders = [path for path in FOLDERS if os.path.lexists(path)]
        folders = [path for path in folders if not path.startswith(prefix + "/")] + [prefix]
        interpreter = f"{prefix}/bin/python{sys.version_info.major}.{sys.version_info.minor}"
        bytes_of_disk = self.disk_mib * 2**20
        return {
            "parent": os.getpid(),
            "program": program,
            "command": [interpreter, "-I", "-B", "/work/program.py"],
            "environment": {"PATH": "", "HOME": "/work", "LD_LIBRARY_PATH": f"{prefix}/lib"},
            "folders": folders,
            "seconds": START_SECONDS + self.seconds,
            "disk_bytes": bytes_of_disk,
            "files": 1024,
            "limits": {
                "RLIMIT_AS": self.memory_mib * 2**20,
                "RLIMIT_CPU": int(self.seconds) + 1,
                "RLIMIT_FSIZE": bytes_of_disk,
                "RLIMIT_NOFILE": 64,
                "RLIMIT_NPROC": self.threads + 1,
                "RLIMIT_CORE": 0,
                "RLIMIT_MEMLOCK": 0,
                "RLIMIT_MSGQUEUE": 0,
            },
        }

    def _exchange(
        self, process: subprocess.Popen[bytes], stdin: bytes, pipe: int, status: "_Status"
    ) -> tuple[Literal["timeout", "output"] | None, list[bytearray]]:
        """Feeds the program and takes what it writes and what is told of it, up to the limits."""
        outputs = [bytearray(), bytearray()]
        assert process.stdin is not None
        with selectors.DefaultSelector() as selector:
            for stream, output in zip((process.stdout, process.stderr), outputs, strict=True):
                assert stream is not None
                selector.register(stream, selectors.EVENT_READ, output)
            os.set_blocking(process.stdin.fileno(), False)
            selector.register(process.stdin, selectors.EVENT_WRITE)
            selector.register(pipe, selectors.EVENT_READ, status)
            while selector.get_map():
                deadline = status.deadline
                late = time.monotonic() >= deadline
                for key, _ in selector.select(max(0.0, deadline - time.monotonic())):
                    if key.data is None:
                        stdin = _feed(key.fd, stdin)
                        if not stdin:
                            selector.unregister(key.fileobj)
                            process.stdin.close()
                    elif not (block := os.read(key.fd, 65536)):
                        selector.unregister(key.fileobj)
                    elif key.data is status:
                        status.take(block)
                    else:
                        key.data.extend(block)
                most = self.output_kib * 1024
                if max(map(len, outputs)) > most:
                    return "output", [output[:most] for output in outputs]
                if late and status.deadline == deadline:  # nor was it told just now
                    return status.late(), outputs
        return None, outputs


class _Status:
    """What the launcher has told, and when it must tell more.

    Args:
        seconds: Of the program, from when it was started.
    """

    def __init__(self, seconds: float) -> None:
        self.said: dict[str, Any] = {}
        self.deadline = time.monotonic() + START_SECONDS
        self._limit = seconds
        self._text = b""

    def take(self, block: bytes) -> None:
        """Reads on; a line moves the deadline."""
        *lines, self._text = (self._text + block).split(b"\n")
        for line in lines:
            told = json.loads(line)
            if "started" in told:
                self.said["started"] = told["at"]
                self.deadline = told["at"] + self._limit
            else:
                self.said |= told
                self.deadline = time.monotonic() + START_SECONDS

    def seconds(self) -> float:
        """Of the program, until its end or now."""
        seconds: float = self.said.get("at", time.monotonic()) - self.said["started"]
        return seconds

    def late(self) -> Literal["timeout"] | None:
        """Whose fault a missed deadline is: the program's, or nobody's once it has ended.

        Raises:
            InputError: The sandbox's, which had not started it.
        """
        if "at" in self.said:
            return None
        if "started" in self.said:
            return "timeout"
        raise InputError(
            f"the sandbox did not start a program within {START_SECONDS:g} s, and nothing was run; "
            "give this machine less to do at once"
        )


def _feed(descriptor: int, text: bytes) -> bytes:
    """Writes what fits; what is left, nothing where nobody reads."""
    try:
        return text[os.write(descriptor, text[:65536]) :] if text else b""
    except BlockingIOError:
        return text
    except BrokenPipeError:
        return b""


@lru_cache(maxsize=1)
def check_sandbox() -> None:
    """Runs a program that tries the walls.

    Raises:
        InputError: One is missing, or the sandbox cannot be had; names what would help.
    """
    if platform.system() != "Linux" or platform.machine() != MACHINE:
        raise InputError(unavailable(f"it needs Linux on {MACHINE}"))
    outcome = Sandbox(seconds=START_SECONDS).run(PROBE)
    if outcome.stdout.strip() != "walls stand":
        how = f"{outcome.ended} {outcome.code}"
        raise InputError(unavailable(f"{outcome.stdout or outcome.stderr or how}".strip()))


def unavailable(reason: str) -> str:
    """The one message of a sandbox that cannot be had."""
    return (
        f"no sandbox for programs that models write on this machine ({reason}); it needs Linux "
        "5.12 on x86-64 and either user namespaces (sysctl kernel.unprivileged_userns_clone=1, "
        "kernel.apparmor_restrict_unprivileged_userns=0; in a container a seccomp profile that "
        "allows unshare) or root with CAP_SYS_ADMIN; without it no program is run"
    )
