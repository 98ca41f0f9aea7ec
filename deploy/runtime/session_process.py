"""The process of a session and its parent, which starts it again when it crashes.

    headway run ─▶ parent ──fork──▶ session: the recipe, Ray and everything else
                      ├────socket─────╯
                      ╰───fork──▶ standby: the next session, which has imported what it needs

The user starts the parent: it is small, so that a system without memory ends the session first, and
whoever waits for the command gets the exit code of the true end. A session that ends on purpose
sends its exit code first; any other end is a crash, also that of a session which was started again
and could not begin. A session whose parent is killed starts another one, so that killing either of
them ends nothing. A session that is stopped (SIGSTOP) while its parent is not is killed, as is one
that has said how it ends and does not. Both end by an interrupt, or if they are killed together, as
by SIGKILL of their process group. The lock of the run keeps two sessions from working on it at
once.

A standby has no threads, no lock and no recipe, and does nothing but import once the session works.
The kernel ends it with its parent, until it becomes the session.
"""

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NoReturn, TypedDict

from deploy.errors import Interrupted, RayDied
from deploy.runtime.restart_budget import FIRST_WAIT_SECONDS, SETTLED_SECONDS, RestartBudget
from deploy.runtime.signals import FORWARDED, interrupts, raise_interrupts, received
from headway import clock
from headway.roles import Role

INHERITED = "HEADWAY_SESSION"
"""Environment variable by which a session tells its next parent what the last one knew."""
LAUNCHER = sys.orig_argv[: len(sys.orig_argv) - len(sys.argv) + 1]
MARK = "HEADWAY_RUN"
"""Environment variable of everything that a session starts: the folder of its run."""
STOPPED_SECONDS = 15.0
"""A session that is stopped for so long, by a signal to it alone, is killed."""
LOOKS = 6
"""Looks at a session in that time."""
EXIT_SECONDS = 30.0
"""A session that has not ended so long after it said how it ends is killed."""
ERROR_LENGTH = 2000
"""Characters of an error that a session sends to its parent."""
FIRST_LIMIT = 5
"""Restarts in a row before the recipe is read: the default of `deploy.max_restarts`."""
PIPELINE = "HEADWAY_PIPELINE"
"""Environment variable of the commands of a pipeline: the command that goes on with all of it."""
PROGRESS = "metrics.jsonl"
"""File in the folder of a run that grows with every batch that is trained for the first time."""
DRIVER_LOCK = "driver.lock"
"""File there that the command which works on the run locks; it names its process and host."""
PARENT_LOCK = "parent.lock"
"""File there that the parent locks, so that a run is not taken for ended between two sessions."""


IMPORT = b"import"
"""Message of a parent to a standby; any other is what it begins with."""
PR_SET_PDEATHSIG = 1


class Message(TypedDict, total=False):
    """Message of a session to its parent, as JSON; methods of `Session` send a part each."""

    limit: int
    again: list[str]
    worked: bool
    recorded: bool
    code: int
    error: str


@dataclass(slots=True, kw_only=True)
class History(RestartBudget):
    """Knowledge that a session, or its next parent, has of the sessions before."""

    limit: int = FIRST_LIMIT
    crashes: list[str] = field(default_factory=list)
    """Reasons of crashes that are not in the record of the run, the oldest first."""
    lost_since: float | None = None
    """Monotonic moment of the crash of the last session that worked, or of the first."""
    pid: int | None = None
    """Process of a session that has lost its parent, and its socket."""
    socket: int | None = None


class Session:
    """The session of a run in this process, below a parent.

    It begins after `wait` seconds: a parent that is killed between two sessions ends the run.
    """

    def __init__(
        self, parent: socket.socket, again: list[str], history: History, wait: float
    ) -> None:
        self._parent, self._again, self._lost_since = parent, again, history.lost_since
        self._wait = wait
        self.budget: RestartBudget = history
        self.began_at = clock.now()
        """Time stamp of its begin, long after that of its process."""
        self.crashes = [*history.crashes]
        """Reasons of crashes that no session has recorded yet."""
        self.is_again = bool(self.crashes)
        """True for a session that was started again after a crash."""
        self.has_worked = False
        """True once the loop of its run has begun."""
        self.has_failed = False
        """True once it has told the parent of an error that counts as a crash."""
        threading.Thread(target=self._follow, name="parent", daemon=True).start()

    def begin(self) -> None:
        """Wait until the session may begin."""
        time.sleep(self._wait)

    def allow(self, max_restarts: int) -> None:
        """Say how often in a row the session may be started again."""
        self.budget.limit = max_restarts
        self._send(Message(limit=max_restarts))

    def goes_on(self, folder: Path) -> None:
        """Say that the run has its folder, by which it is resumed after a crash."""
        self._again = ["resume", str(folder)]
        os.environ[MARK] = str(folder)
        self._send(Message(again=self._again))

    def works(self) -> float | None:
        """Say that the loop begins; return the seconds since a crash ended the last one, if any."""
        self.has_worked = True
        self._send(Message(worked=True))
        since, self._lost_since = self._lost_since, None
        return None if since is None else time.monotonic() - since

    @property
    def hint(self) -> str:
        """Line that says how to go on with the run, once it has its folder; else empty."""
        return _hint(self._again)

    def has_recorded(self) -> None:
        """Say that `crashes` are in the record of the run."""
        self.crashes.clear()
        self._send(Message(recorded=True))

    def ends(self, code: int) -> None:
        """Say that the session ends on purpose; its process has EXIT_SECONDS left for that."""
        self._send(Message(code=code))

    def may_pass(self, error: Exception) -> bool:
        """Return True if another session may have no such error, and no interrupt has come."""
        is_early = self.is_again and not self.has_worked
        return (is_early or isinstance(error, RayDied)) and not received.any()

    def fails(self, error: str) -> None:
        """Say that the session ends by an error which counts as a crash, as `ends` otherwise."""
        self.has_failed = True
        self._send(Message(error=error[:ERROR_LENGTH]))

    def _send(self, message: Message) -> None:
        with suppress(OSError):  # the parent was killed, and the next one has not begun
            self._parent.send(json.dumps(message).encode())

    def _follow(self) -> None:
        """Start another parent whenever one is killed, unless an interrupt has come."""
        while True:
            with suppress(OSError):
                self._parent.recv(1)  # it sends nothing
            if received.any():
                return
            ours, theirs = _socket_pair()
            known = History(
                limit=self.budget.limit,
                in_a_row=self.budget.in_a_row,
                crashes=[*self.crashes],
                lost_since=self._lost_since,
                pid=os.getpid(),
                socket=theirs.fileno(),
            )
            environment = {name: value for name, value in os.environ.items() if name != MARK}
            environment[INHERITED] = json.dumps(asdict(known))
            with theirs, suppress(OSError):  # without memory there is a next attempt
                subprocess.Popen(
                    [*LAUNCHER, *self._again], env=environment, pass_fds=[theirs.fileno()]
                )
            self._parent = ours
            if self._again[0] == "resume":  # it may have changed meanwhile
                self._send(Message(again=self._again, worked=self.has_worked))
            time.sleep(FIRST_WAIT_SECONDS)


def begin_session(end_leftovers: Callable[[Path], None], import_all: Callable[[], None]) -> Session:
    """Return in the process of a session, and never in its parent, which exits as it does.

    `end_leftovers` ends what a killed session has left, by the folder of its run; `import_all`
    imports what a session needs, in the process that stands by for the next one.
    """
    history = History(**json.loads(os.environ.pop(INHERITED, "{}")))
    return Parent(history, end_leftovers, import_all).watch()


class Parent:
    """The parent of a session in this process."""

    def __init__(
        self,
        history: History,
        end_leftovers: Callable[[Path], None],
        import_all: Callable[[], None],
    ) -> None:
        self._history, self._end_leftovers, self._import_all = history, end_leftovers, import_all
        self._standby: tuple[int, socket.socket] | None = None
        """Process and socket of the next session; None where there was no memory for it."""
        self._is_importing = False
        """True once the standby was told to import."""
        self._again = sys.argv[1:]
        self._is_resumed = False
        """True once a session has named the run to resume."""
        self._is_held = False
        """True once this process has locked the folder of that run."""
        self._pidfd: int | None = None
        """The process of the present session."""
        self._has_worked = False
        """True if the loop of the last session's run had begun."""
        self._trained = 0
        self._interrupted = False
        for number in interrupts():
            signal.signal(number, lambda number, _: self._forward(number))

    def watch(self) -> Session:
        """Start sessions until one ends on purpose, and return in their processes alone."""
        pid, descriptor = self._history.pid, self._history.socket
        wait = 0.0
        while True:
            began = time.monotonic()
            is_child = pid is None or descriptor is None
            signal.pthread_sigmask(signal.SIG_BLOCK, interrupts())
            if pid is not None and descriptor is not None:
                channel = socket.socket(fileno=descriptor)
            else:
                self._exit_if_interrupted()
                pid, channel = self._standby = self._standby or _fork()
                if pid == 0:
                    return self._begin(channel)
                try:
                    channel.send(json.dumps([self._again, asdict(self._history), wait]).encode())
                except ConnectionError:  # it was killed, and another takes its place
                    channel.close()
                    os.waitpid(pid, 0)
                    pid = self._standby = None
                    continue
            self._pidfd = _open(pid)
            self._standby, self._is_importing = None, False
            with suppress(OSError):  # no memory
                self._standby = _fork()
            if self._standby is not None and self._standby[0] == 0:
                channel.close()
                return self._begin(self._standby[1])
            signal.pthread_sigmask(signal.SIG_UNBLOCK, interrupts())
            crash = self._await_crash(pid, channel, is_child=is_child)
            self._history.crashes.append(crash)
            wait = self._next_wait(crash, worked=time.monotonic() - began)
            pid = None

    def _begin(self, channel: socket.socket) -> Session:
        """Wait in a process that has been forked until it is to be the session, and return that."""
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if self._pidfd is not None:
            os.close(self._pidfd)
        with suppress(ConnectionError):
            while (message := channel.recv(2**18)) == IMPORT:
                with suppress(Exception):  # the session will meet it again, and say so
                    self._import_all()
        if not message:
            os._exit(0)  # its parent was gone before the kernel was asked
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 0)
        raise_interrupts()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, interrupts())  # in all that it starts
        sys.argv[1:], history, wait = json.loads(message)
        return Session(channel, sys.argv[1:], History(**history), wait)

    def _await_crash(self, pid: int, channel: socket.socket, *, is_child: bool) -> str:
        """Wait for the end of a session and return how it crashed; exit if it did not."""
        sent = Message()
        with channel:
            was_stopped = self._await_end(pid, channel, sent)
            _receive(channel, sent)
        self._keep(sent)
        if self._history.lost_since is None or sent.get("worked"):
            self._history.lost_since = time.monotonic() - (STOPPED_SECONDS if was_stopped else 0.0)
        if (descriptor := self._pidfd) is not None:
            self._pidfd = None  # first, since an interrupt may come at any moment
            os.close(descriptor)
        ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) if is_child else None
        if "code" in sent:
            if ended == -signal.SIGKILL or self._history.crashes:  # it did not take over
                self._clear_away()
            self._exit(sent["code"])
        self._exit_if_interrupted()
        if was_stopped:
            return f"its process was stopped for {STOPPED_SECONDS:g} s"
        if "error" in sent:
            return f"its process ended by an error: {sent['error']}"
        if ended is not None and ended >= 0 and not self._is_resumed:
            self._exit(ended)  # an error before the run began, whose traceback is printed
        return _described(ended)

    def _exit_if_interrupted(self) -> None:
        if self._interrupted:
            self._clear_away()
            if self._is_resumed:
                _print(f"stopped by the user{_hint(self._again)}")
            self._exit(Interrupted.exit_code)

    def _exit(self, code: int) -> NoReturn:
        """Exit once the standby is gone too: nobody reaps what is left in a container."""
        if self._standby is not None:
            pid, _ = self._standby
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        os._exit(code)

    def _keep(self, sent: Message) -> None:
        """Keep what holds for the next session of that which one had sent."""
        if "limit" in sent:
            self._history.limit = sent["limit"]
        if sent.get("recorded"):
            self._history.crashes.clear()
        self._has_worked = bool(sent.get("worked"))
        if "again" in sent:
            self._again, self._is_resumed = sent["again"], True

    def _await_end(self, pid: int, channel: socket.socket, sent: Message) -> bool:
        """Wait for the end of a session, and keep what it has `sent`; kill it if it does not end.

        Returns True if it was killed since it was stopped. Looks are counted, not seconds: Ctrl-Z
        stops the parent too, and they go on together.
        """
        stops, late, interval, is_open = 0, 0, STOPPED_SECONDS / LOOKS, True
        while self._pidfd is not None and stops <= LOOKS and late * interval <= EXIT_SECONDS:
            waiting = [self._pidfd, channel.fileno()] if is_open else [self._pidfd]
            ready = select.select(waiting, [], [], interval)[0]
            if self._pidfd in ready:
                return False
            is_open = is_open and _receive(channel, sent)
            if not ready:
                self._have_imported(sent)
                stops = stops + 1 if _is_stopped(pid) else 0
                late += "code" in sent or "error" in sent
        if self._pidfd is None:
            return False
        if stops <= LOOKS:
            _print(f"the session does not end within {EXIT_SECONDS:g} s of its work, and is killed")
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        select.select([self._pidfd], [], [])
        return stops > LOOKS

    def _have_imported(self, sent: Message) -> None:
        """Have the standby import, once the session has said that it works."""
        if self._standby is not None and sent.get("worked") and not self._is_importing:
            self._is_importing = True
            with suppress(OSError):  # it was killed, and another takes its place when needed
                self._standby[1].send(IMPORT)

    def _next_wait(self, crash: str, *, worked: float) -> float:
        """Return how long the next session waits; exit if there is to be none."""
        trained = self._trained
        with suppress(OSError):
            self._trained = (Path(self._again[-1]) / PROGRESS).stat().st_size
        settled = worked >= SETTLED_SECONDS and self._has_worked
        settled = settled or self._trained > trained
        seconds = self._history.next_wait(settled=settled)
        if seconds is None:
            _print(self._history.exhausted(Role.DRIVER, crash))
            self._clear_away()
            self._exit(1)
        if self._is_resumed and not self._is_held:
            # Not before it is known that no folder of the user shadows the package.
            from headway.file_lock import MAKE, take

            with suppress(OSError):
                take(os.open(Path(self._again[-1]) / PARENT_LOCK, MAKE, 0o666))
                self._is_held = True
        return seconds

    def _clear_away(self) -> None:
        """End what the last session has left, such as workers that it had stopped to end them."""
        if self._is_resumed:
            self._end_leftovers(Path(self._again[-1]))

    def _forward(self, number: int) -> None:
        """Pass an interrupt on, unless a pipeline has already passed on the same one."""
        self._interrupted = True
        if received.is_new(number) and self._pidfd is not None:
            passed_on = number in FORWARDED.values()
            sent = number if passed_on else FORWARDED[signal.Signals(number)]
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, sent)


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _fork() -> tuple[int, socket.socket]:
    """Return the id of a new process, which is 0 there, and this end of its socket."""
    ours, theirs = _socket_pair()
    pid = os.fork()
    (theirs if pid else ours).close()
    return pid, ours if pid else theirs


def _receive(channel: socket.socket, sent: Message) -> bool:
    """Add the messages that a session has sent to `sent`; return False if there can be no more."""
    with suppress(BlockingIOError):
        with suppress(ConnectionError):
            while message := channel.recv(2**16, socket.MSG_DONTWAIT):
                sent |= json.loads(message)
        return False
    return True


def _hint(again: list[str]) -> str:
    """Return the line that says how to go on with a run, from the arguments for it; else empty."""
    is_known = len(again) == 2 and again[0] == "resume"
    return resume_hint(again[1]) if is_known else ""


def resume_hint(run: object) -> str:
    """Return the line that says how to go on with a run; empty in a pipeline, which has its own."""
    return "" if PIPELINE in os.environ else f"\ngo on with: headway resume {run}"


def _print(message: str) -> None:
    with suppress(OSError):
        os.write(2, f"headway: {message}\n".encode())


def _described(ended: int | None) -> str:
    """Return how a session crashed, by its exit code; None if that is not known."""
    if ended is None:
        return "its process was killed"
    if ended < 0:
        return f"its process was ended by {signal.Signals(-ended).name}"
    return f"its process ended with exit code {ended}"


def _is_stopped(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def _open(pid: int) -> int | None:
    """Return a descriptor that is readable when a process has ended; None if it is gone."""
    with suppress(ProcessLookupError):
        return os.pidfd_open(pid)
    return None
