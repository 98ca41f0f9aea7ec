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
from contextlib import suppress
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
"""What a sandbox gets to start and to end, apart from the time of its program."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Sandbox:
    """Limits of a program."""

    seconds: float = 10.0
    """Of the clock, the start of the interpreter included."""
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
            InputError: The sandbox cannot be had; names what is missing. Nothing was run.
        """
        began = time.monotonic()
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
        with process, open(status_read, "rb") as status:
            try:
                stopped, outputs = self._exchange(process, stdin.encode(errors="replace"))
            finally:
                process.kill()  # and so init, and so all that is in it
            process.wait(START_SECONDS)
            said = status.readline()
        texts = [output.decode(errors="replace") for output in outputs]
        seconds = time.monotonic() - began
        if stopped is not None:
            return Outcome(stopped, 0, texts[0], texts[1], seconds)
        found: dict[str, Any] = (
            json.loads(said) if said else {"error": f"the launcher said nothing: {texts[1]}"}
        )
        if "error" in found:
            raise InputError(unavailable(found["error"]))
        if "signal" in found:
            return Outcome("signal", found["signal"], texts[0], texts[1], seconds)
        return Outcome("exit", found["exit"], texts[0], texts[1], seconds)

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
            "seconds": self.seconds,
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
        self, process: subprocess.Popen[bytes], stdin: bytes
    ) -> tuple[Literal["timeout", "output"] | None, list[bytearray]]:
        """Feeds the program and takes what it writes, up to the limits."""
        deadline = time.monotonic() + self.seconds
        outputs = [bytearray(), bytearray()]
        assert process.stdin is not None
        with selectors.DefaultSelector() as selector:
            for stream, output in zip((process.stdout, process.stderr), outputs, strict=True):
                assert stream is not None
                selector.register(stream, selectors.EVENT_READ, output)
            os.set_blocking(process.stdin.fileno(), False)
            selector.register(process.stdin, selectors.EVENT_WRITE)
            while selector.get_map():
                left = deadline - time.monotonic()
                if left <= 0:
                    return "timeout", outputs
                for key, _ in selector.select(left):
                    if key.data is None:
                        stdin = _feed(key.fd, stdin)
                        if not stdin:
                            selector.unregister(key.fileobj)
                            process.stdin.close()
                    elif not (block := os.read(key.fd, 65536)):
                        selector.unregister(key.fileobj)
                    else:
                        key.data.extend(block)
                        if len(key.data) > self.output_kib * 1024:
                            del key.data[self.output_kib * 1024 :]
                            return "output", outputs
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        return ("timeout" if process.returncode is None else None), outputs


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
