"""Runs one Python program at a time in a sandbox, and returns its outcome.

The barriers are those of `launcher`. They need Linux 5.12 on x86-64, and either root with
CAP_SYS_ADMIN or unprivileged user namespaces; without them nothing is run. An attacker is left with
the kernel behind the allowed system calls, and side channels.
"""

import glob
import json
import os
import platform
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from actors.errors import ServiceAway
from actors.sandbox.system_calls import MACHINE
from headway.errors import InputError

LAUNCHER = Path(__file__).with_name("launcher.py")
FILTERS = Path(__file__).with_name("system_calls.py")
LOADER = "/lib64/ld-linux-x86-64.so.2"
"""Program that loads shared libraries, and lists those that a file needs."""
START_SECONDS = 30.0
"""Default of `Sandbox.start_seconds`."""

PROBE = """
import os, socket
attempts = {
    "a socket": (socket.socket, PermissionError),
    "a second process": (os.fork, PermissionError),
    "a file in /": (lambda: open("/mark", "w"), OSError),
}
seen = []
for name, (attempt, refusal) in attempts.items():
    try:
        attempt()
        seen.append(name)
    except refusal:
        pass
seen += [path for path in ("/etc", "/proc", "/home", "/root/.ssh", "/sys") if os.path.exists(path)]
for path in (os.path.join(os.path.dirname(os.__file__), "site-packages"), "/usr/share", "/opt"):
    seen += [path] if os.path.exists(path) and os.listdir(path) not in ([], ["recipe.pth"]) else []
seen += [] if os.getppid() == 1 else ["other processes"]
print("walls stand" if not seen else f"the program had {seen}")
"""


Ended = Literal["exit", "signal", "timeout", "output"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a program, and its output."""

    ended: Ended
    """`timeout` and `output`: it was stopped at its limit."""
    code: int
    """Exit code, or the number of the signal."""
    stdout: str
    """Its standard output, up to the limit."""
    stderr: str
    seconds: float
    """Duration of the program alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sandbox:
    """Limits of a program."""

    seconds: float = 10.0
    """Time limit, with the start of the program's interpreter but not that of the sandbox."""
    memory_mib: int = 256
    """Address space."""
    disk_mib: int = 16
    """Size of its folder /work, which is in memory too."""
    output_kib: int = 1024
    """Limit of standard output, and another of standard error."""
    threads: int = 16
    folders: tuple[str, ...] = ()
    """Folders that the program may read, and import from, beside the standard library; everybody
    must have the right to read them."""
    start_seconds: float = START_SECONDS
    """Time for the sandbox to start its program, and to end after it."""

    def run(self, program: str, stdin: str = "") -> Outcome:
        """Run a program of Python's standard library; blocks until it has ended.

        Raises InputError, before anything was run, if the sandbox is unavailable, and ServiceAway
        if it was killed from outside, did not begin within `start_seconds` or could not be started,
        as on a full disk.
        """
        try:
            return self._run(program, stdin)
        except OSError as error:
            raise ServiceAway(f"the sandbox could not be started: {error}") from error

    def _run(self, program: str, stdin: str) -> Outcome:
        status_read, status_write = os.pipe()
        with open(status_read, "rb", buffering=0) as pipe:
            with (
                open(status_write, "wb", buffering=0) as reports,
                tempfile.TemporaryFile("w+", encoding="utf-8", errors="surrogatepass") as config,
                tempfile.NamedTemporaryFile("wb") as given,
            ):
                json.dump(self.launcher_config(program), config)
                config.flush()
                config.seek(0)
                given.write(stdin.encode(errors="replace"))
                given.flush()
                descriptors = (config.fileno(), reports.fileno())
                with open(given.name, "rb") as read_only:
                    process = subprocess.Popen(
                        [sys.executable, "-I", "-S", "-B", str(LAUNCHER), *map(str, descriptors)],
                        stdin=read_only,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE,
                        pass_fds=descriptors,
                        start_new_session=True,
                        cwd="/",
                        env={},
                    )
            with process:
                status = _Status(self.seconds, self.start_seconds)
                try:
                    stopped, outputs = self._collect(process, pipe.fileno(), status)
                finally:
                    process.terminate()  # which ends init, and so everything in the sandbox
                try:
                    process.wait(self.start_seconds)
                except subprocess.TimeoutExpired:
                    process.kill()
        stdout, stderr = (output.decode(errors="replace") for output in outputs)
        reported, ends = status.reported, {"exit", "signal", "error"}
        if stopped is None and process.returncode <= 0 and ends.isdisjoint(reported):
            raise ServiceAway("the sandbox was killed from outside")
        if "started" not in reported:
            raise InputError(unavailable(reported.get("error", stderr)))
        ended: Ended = stopped or ("exit" if "exit" in reported else "signal")
        code = 0 if stopped else reported.get(ended, signal.SIGKILL)
        return Outcome(ended, code, stdout, stderr, status.seconds())

    def launcher_config(self, program: str) -> dict[str, Any]:
        """Return the CONFIG that `launcher` reads."""
        prefix = os.path.realpath(sys.base_prefix)
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        library = os.path.realpath(os.path.dirname(os.__file__))
        interpreter = f"{prefix}/bin/{version}"
        packages = [f"{library}/{name}" for name in ("site-packages", "dist-packages")]
        bytes_of_disk = self.disk_mib * 2**20
        return {
            "parent": os.getpid(),
            "program": program,
            "command": [interpreter, "-I", "-B", "/work/program.py"],
            "environment": {"PATH": "", "HOME": "/work", "LD_LIBRARY_PATH": f"{prefix}/lib"},
            "paths": [library, *shared_libraries(interpreter, library), *self.folders],
            "packages": [path for path in packages if os.path.isdir(path)],
            "more_paths": list(self.folders),
            "seconds": self.start_seconds + self.seconds,
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

    def _collect(
        self, process: subprocess.Popen[bytes], pipe: int, status: "_Status"
    ) -> tuple[Literal["timeout", "output"] | None, list[bytearray]]:
        """Read output and status of the program, up to the limits."""
        outputs = [bytearray(), bytearray()]
        with selectors.DefaultSelector() as selector:
            for stream, output in zip((process.stdout, process.stderr), outputs, strict=True):
                assert stream is not None
                selector.register(stream, selectors.EVENT_READ, output)
            selector.register(pipe, selectors.EVENT_READ, status)
            while selector.get_map():
                deadline = status.deadline
                late = time.monotonic() >= deadline
                for key, _ in selector.select(max(0.0, deadline - time.monotonic())):
                    if not (block := os.read(key.fd, 65536)):
                        selector.unregister(key.fileobj)
                    elif key.data is status:
                        status.take(block)
                    else:
                        key.data.extend(block)
                most = self.output_kib * 1024
                if max(map(len, outputs)) > most:
                    return "output", [output[:most] for output in outputs]
                if late and status.deadline == deadline:  # and no status line has moved it
                    return status.late(), outputs
        return None, outputs


class _Status:
    """The status lines of the launcher, and the deadline of the next."""

    def __init__(self, seconds: float, start_seconds: float) -> None:
        self.reported: dict[str, Any] = {}
        self.deadline = time.monotonic() + start_seconds
        self._limit, self._start_seconds = seconds, start_seconds
        self._text = b""

    def take(self, block: bytes) -> None:
        """Parse more status; a line moves the deadline."""
        *lines, self._text = (self._text + block).split(b"\n")
        for line in lines:
            event = json.loads(line)
            if event.get("started"):
                self.reported["started"] = event["at"]
                self.deadline = event["at"] + self._limit
            else:
                self.reported |= event
                if "started" in event:  # it did not begin after all
                    del self.reported["started"]
                self.deadline = time.monotonic() + self._start_seconds

    def seconds(self) -> float:
        """Return the duration of the program, until its end or now."""
        seconds: float = self.reported.get("at", time.monotonic()) - self.reported["started"]
        return seconds

    def late(self) -> Literal["timeout"] | None:
        """Return "timeout" if the program still runs, None after its end; raise if not begun."""
        if "at" in self.reported:
            return None
        if "started" in self.reported:
            return "timeout"
        raise ServiceAway(
            f"the sandbox did not start a program within {self._start_seconds:g} s, and nothing "
            "was run; give this machine less to do at once"
        )


@lru_cache(maxsize=1)
def shared_libraries(interpreter: str, library: str) -> list[str]:
    """Return an interpreter with the shared libraries that it and its standard library need."""
    paths = {LOADER, interpreter}
    for file in [interpreter, *glob.glob(f"{library}/lib-dynload/*.so")]:
        if "_tkinter" in file:  # it needs those of X
            continue
        environment = {"LD_LIBRARY_PATH": f"{os.path.dirname(library)}"}
        listed = subprocess.run(
            [LOADER, "--list", file], capture_output=True, text=True, env=environment
        ).stdout
        paths |= {word for word in listed.split() if word.startswith("/")}
    (libc,) = [path for path in paths if os.path.basename(path) == "libc.so.6"] or [LOADER]
    unwinder = os.path.join(os.path.dirname(libc), "libgcc_s.so.1")  # loaded when a thread ends
    return sorted(path for path in (*paths, unwinder) if os.path.exists(path))


def check_code_execution(setting: str, allowed: str) -> None:
    """Raise InputError if a setting may not run a model's programs, or there is no sandbox."""
    if allowed == "off":
        raise InputError(
            f"{setting} runs programs that the model writes, which is off; set "
            'actors.code_execution = "sandbox" to allow it'
        )
    check_sandbox()


@lru_cache(maxsize=1)
def check_sandbox() -> None:
    """Run a program that tests the barriers; raise InputError if one is missing."""
    if platform.system() != "Linux" or platform.machine() != MACHINE:
        raise InputError(unavailable(f"it needs Linux on {MACHINE}"))
    if not os.path.exists(LOADER):
        raise InputError(unavailable(f"there is no {LOADER}"))
    outcome = Sandbox(seconds=START_SECONDS).run(PROBE)
    if outcome.stdout.strip() != "walls stand":
        how = f"{outcome.ended} {outcome.code}"
        raise InputError(unavailable(f"{outcome.stdout or outcome.stderr or how}".strip()))


@lru_cache(maxsize=1)
def check_compute_sandbox(setting: str) -> None:
    """Raise InputError if a process here cannot be kept from all but computing."""
    program = [sys.executable, "-I", "-S", "-B", str(FILTERS), "probe"]
    done = subprocess.run(program, capture_output=True, text=True, env={}, timeout=START_SECONDS)
    if done.stdout.strip() != "walls stand":
        reason = (done.stdout or done.stderr.strip().rpartition("\n")[2]).strip()
        raise InputError(
            f"{setting} reads completions in a sandbox, which this machine has not ({reason}); it "
            "needs Linux with seccomp filters (CONFIG_SECCOMP_FILTER) on x86-64 or aarch64"
        )


def unavailable(reason: str) -> str:
    """Return the message for a sandbox that is unavailable."""
    return (
        f"no sandbox for programs that models write on this machine ({reason}); it needs Linux "
        "5.12 on x86-64 and either user namespaces (sysctl kernel.unprivileged_userns_clone=1, "
        "kernel.apparmor_restrict_unprivileged_userns=0; in a container a seccomp profile that "
        "allows unshare) or root with CAP_SYS_ADMIN; without it no program is run"
    )
