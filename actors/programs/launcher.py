"""Starts programs of agents, each under a guard of its own.

    actor ─connection, a line of JSON─▶ launcher ─fork─▶ guard ─fork─▶ program ─▶ its processes
          ◀──────── a line of JSON: how it ended ──────────┘

It runs as `PYTHON launcher.py DESCRIPTOR MODULE…` by the interpreter of the agent, accepts
connections at a socket that it was given, and imports nothing but the standard library, the files
of the sandbox and the modules. These are loaded once: a Python program that is a fork begins with
them in milliseconds.
The guard ends a program, with all processes that came from it, when it has ended, at a limit, and
when the actor has shut the connection or is gone. The launcher ends when its input is closed. In a
sandbox (`agent_walls`) two more processes are between guard and program.
"""

import gc
import importlib
import json
import os
import resource
import runpy
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or __package__:
    from actors.sandbox import agent_walls, linux
else:  # a foreign interpreter has no package of ours, nor may a program that is a fork
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(__file__)), "sandbox"))
    import agent_walls
    import linux

    del sys.path[0], sys.modules["agent_walls"], sys.modules["linux"], sys.modules["system_calls"]

PR_SET_CHILD_SUBREAPER = 36
LONGEST_RESULT = 1 << 20
"""Bytes of a result; one more is read, which says that there are more."""
TAIL = 4000
"""Bytes of standard error that are kept."""


def main() -> str | None:
    """Accept connections until the input ends; in a Python program, return its script."""
    server = socket.socket(fileno=int(sys.argv[1]))
    sys.path.pop(0)  # the folder of this file, which the script's takes the place of
    for name in sys.argv[2:]:
        importlib.import_module(name)
    if len(threads := threading.enumerate()) > 1:
        sys.exit(f"cannot be forked with the threads of {sys.argv[2:]}: {threads[1:]}")
    gc.collect()
    gc.freeze()  # what was loaded is not copied for forks that end
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # which leaves no zombies of guards
    with selectors.DefaultSelector() as selector:
        selector.register(server, selectors.EVENT_READ)
        selector.register(0, selectors.EVENT_READ)
        while True:
            ready = [key.fd for key, _ in selector.select()]
            if 0 in ready:
                os._exit(0)
            connection, _ = server.accept()
            if os.fork() == 0:
                break
            connection.close()
    server.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    linux.prctl("adopt orphans", PR_SET_CHILD_SUBREAPER, 1)
    with connection.makefile("rb") as lines:
        request = json.loads(lines.readline())
    return Guard(connection, request).run()


class Guard:
    """The process above one program."""

    def __init__(self, connection: socket.socket, request: dict[str, Any]) -> None:
        self._connection, self._request = connection, request
        self._tail = b""
        self._printed = 0

    def run(self) -> str | None:
        """Run the program, and report how it ended; in the program itself, return its script."""
        request, sandbox = self._request, self._request["sandbox"]
        folder = self._make_folder()
        outputs, inputs = zip(os.pipe(), os.pipe(), strict=True)
        status, of_keeper = socket.socketpair()
        program = os.fork()
        if program == 0:
            return self._become(os.path.join(folder, "folder"), inputs, of_keeper.detach())
        of_keeper.close()
        for descriptor in inputs:
            os.close(descriptor)
        if sandbox:
            agent_walls.serve(status, sandbox["gateway"])
        stopped = self._watch(program, outputs)
        code = end_all(program)
        if sandbox:
            code = agent_walls.reported(status)
            shutil.rmtree(os.path.join(folder, "tmp"), ignore_errors=True)
        answer = {"stopped": stopped, "code": code, "result": read(os.path.join(folder, "result"))}
        answer["stderr"] = self._tail.decode(errors="replace")
        if request["keep"] is None:
            shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):
            self._connection.sendall(json.dumps(answer).encode() + b"\n")
        os._exit(0)

    def _make_folder(self) -> str:
        """Make the folder of the rollout, with its task; return its path."""
        request, sandbox = self._request, self._request["sandbox"]
        folder: str = tempfile.mkdtemp(prefix=request["name"], dir=request["keep"])
        folder = os.path.realpath(folder)
        for name in ("task", "folder", "result"):
            request["environment"][f"HEADWAY_{name.upper()}"] = os.path.join(folder, name)
        os.mkdir(os.path.join(folder, "folder"))
        with open(os.path.join(folder, "task"), "w", encoding="utf-8") as file:
            json.dump(request["task"], file)
        if sandbox:
            sandbox |= {"folder": folder, "user": linux.own_user()}
            os.mkdir(os.path.join(folder, "tmp"))
            if sandbox["user"] is not None:
                for path in (folder, *(os.path.join(folder, name) for name in os.listdir(folder))):
                    os.chown(path, sandbox["user"], sandbox["user"])
        return folder

    def _become(self, folder: str, streams: tuple[int, ...], status: int) -> str:
        """Turn this process into the program; return the script of a Python program."""
        request = self._request
        os.setsid()
        linux.end_with_parent()
        for target, source in enumerate((os.open(os.devnull, os.O_RDONLY), *streams)):
            os.dup2(source, target)
        self._connection.detach()
        os.closerange(3, status)
        os.closerange(status + 1, 1 << 16)
        if request["sandbox"]:
            agent_walls.enter(request["sandbox"], status)
        os.closerange(3, 1 << 16)  # those to the files of the machine too
        memory = request["memory_bytes"]
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.chdir(folder)
        if request["sandbox"]:
            agent_walls.close_doors()
        command = request["command"]
        if not request["forks"]:
            try:
                os.execvpe(command[0], command, request["environment"])
            except OSError as error:
                os.write(2, f"{command[0]}: {error.strerror}\n".encode())
                os._exit(127)
        os.environ.clear()
        os.environ.update(request["environment"])
        sys.argv = command[1:]
        sys.path.insert(0, os.path.dirname(command[1]))
        return str(command[1])

    def _watch(self, program: int, outputs: tuple[int, ...]) -> str | None:
        """Read what a program prints until it has ended; return the limit that it reached."""
        ended, checked = os.pidfd_open(program), time.monotonic()
        with selectors.DefaultSelector() as selector:
            for descriptor in (ended, self._connection.fileno(), *outputs):
                selector.register(descriptor, selectors.EVENT_READ)
            while True:
                ready = [key.fd for key, _ in selector.select(1.0)]
                if self._connection.fileno() in ready:
                    return "its end"
                for descriptor in {*outputs}.intersection(ready):
                    if not self._read(descriptor, is_error=descriptor == outputs[1]):
                        selector.unregister(descriptor)
                if self._printed > self._request["output_bytes"]:
                    return f"the limit of its output, {self._request['output_bytes']} bytes"
                if ready == [ended]:
                    return None
                if time.monotonic() >= checked + 1.0:
                    checked = time.monotonic()
                    if (limit := self._exceeded()) is not None:
                        return limit

    def _read(self, descriptor: int, *, is_error: bool) -> int:
        """Read what was printed, and keep the end of errors; return how many bytes there were."""
        block = os.read(descriptor, 1 << 16)
        self._printed += len(block)
        if is_error:
            self._tail = (self._tail + block)[-TAIL:]
        return len(block)

    def _exceeded(self) -> str | None:
        """Return the limit of memory or processes that the program exceeds now."""
        processes = descendants(os.getpid())[2 if self._request["sandbox"] else 0 :]
        if len(processes) > self._request["processes"]:
            return f"the limit of {self._request['processes']} processes"
        pages = 0
        for process in processes:
            with suppress(OSError), open(f"/proc/{process}/statm", encoding="ascii") as file:
                pages += int(file.read().split()[1])
        if pages * resource.getpagesize() > self._request["memory_bytes"]:
            return f"the limit of its memory, {self._request['memory_bytes'] / 2**30:g} GiB"
        return None


def descendants(process: int) -> list[int]:
    """Return the processes below one, as far as they can be seen."""
    below = [process]
    for parent in below:  # to which its children are added
        with suppress(OSError):
            for thread in os.listdir(f"/proc/{parent}/task"):
                with open(f"/proc/{parent}/task/{thread}/children", encoding="ascii") as file:
                    below += map(int, file.read().split())
    return below[1:]


def end_all(program: int) -> int:
    """Kill every process below this one; return the exit code of `program`, or minus its signal."""
    code = 0
    while True:
        for process in descendants(os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        try:
            process, status = os.waitpid(-1, 0)
        except ChildProcessError:
            return code
        if process == program:
            code = os.waitstatus_to_exitcode(status)


def read(path: str) -> str | None:
    """Return a result, or its beginning if it is too long; None without one."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)  # a pipe, a link
        with open(descriptor, "rb") as file:
            return file.read(LONGEST_RESULT + 1).decode(errors="surrogateescape")
    except OSError:
        return None


if __name__ == "__main__" and (script := main()) is not None:
    runpy.run_path(script, run_name="__main__")
