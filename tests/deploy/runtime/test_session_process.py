"""A session and its parent: what ends one, what starts another, and what passes between them.

The sessions are those of a script, each of which does what the script was told for it.
"""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from deploy.cli import app, main
from deploy.errors import Interrupted, RayDied, RunFailed
from deploy.runtime import session_process
from deploy.runtime.session_process import Message
from deploy.runtime.signals import FORWARDED
from deploy.storage.run_directory import RunDirectory
from headway.errors import InputError
from tests.waiting import until

SCRIPT = """
import atexit, json, os, pathlib, signal, subprocess, sys, threading, time
from deploy.runtime import session_process, signals
from deploy.runtime.signals import raise_interrupts

folder = pathlib.Path(sys.argv[-1])
session_process.STOPPED_SECONDS, session_process.EXIT_SECONDS = 0.6, 0.6
session_process.SETTLED_SECONDS = float(os.environ.get("SETTLED_SECONDS", "600"))
if "INTERRUPTED" in os.environ:  # between two sessions
    session_process.History.next_wait = lambda *_, **__: os.kill(os.getpid(), signal.SIGINT) or 0.0
raise_interrupts()
session = session_process.begin_session(
    lambda run: (run / "cleared").touch(),
    lambda: (folder / "imported").write_text(str(os.getpid())),
)
session.begin()
log = folder / "sessions"
number = log.read_text().count("\\n") if log.exists() else 0
with log.open("a") as file:
    row = {"pid": os.getpid(), "arguments": sys.argv[1:], "crashes": [*session.crashes],
           "in_a_row": session.budget.in_a_row, "at": time.monotonic()}
    file.write(json.dumps(row) + "\\n")
interrupts = 0
for action, *more in json.loads((folder / "plan").read_text())[number]:
    try:
        if action == "goes on":
            session.allow(*more)
            session.goes_on(folder)
        elif action == "trains":
            with (folder / "metrics.jsonl").open("a") as file:
                file.write("{}\\n")
        elif action == "waits":
            (folder / f"waits-{number}").touch()
            for _ in range(1200):
                time.sleep(0.05)  # an interrupt just before a sleep is heeded after it
        elif action == "ends":
            session.ends(*more)
            sys.exit(7)
        elif action == "records":
            session.has_recorded()
        elif action == "works":
            with (folder / "lost").open("a") as file:
                file.write(f"{session.works()}\\n")
        elif action == "fails":
            session.fails("no node is free")
            sys.exit(2)
        elif action == "says":
            getattr(session, more[0])(more[1])
        elif action == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        elif action == "stops":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif action == "lacks memory":
            start = subprocess.Popen
            def fail(*_, **__):
                subprocess.Popen = start
                raise OSError("no memory")
            subprocess.Popen = fail
        elif action == "raises":
            raise ValueError("a bug")
    except KeyboardInterrupt:
        interrupts += 1
        (folder / "interrupts").write_text(str(interrupts))
        try:
            time.sleep(0.3)  # for a second one, which there must not be
        except KeyboardInterrupt:
            (folder / "interrupts").write_text("2")
"""
LIMIT = 2


class Command:
    """The script, started as a terminal does: in a process group of its own."""

    def __init__(self, folder, *plan, **environment):
        self.folder = folder
        (folder / "plan").write_text(json.dumps(plan))
        (folder / "script.py").write_text(SCRIPT)
        self.process = subprocess.Popen(
            [sys.executable, folder / "script.py", "run", folder],
            cwd=os.getcwd(), env={**os.environ, "PYTHONPATH": os.getcwd(), **environment},
            stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    def sessions(self):
        log = self.folder / "sessions"
        lines = log.read_text().splitlines() if log.exists() else []
        return [SimpleNamespace(**json.loads(line)) for line in lines]

    def waits(self, number):
        """Wait until a session does nothing any more, and return it."""
        until(lambda: (self.folder / f"waits-{number}").exists())
        return self.sessions()[number]

    def end(self):
        """Return the exit code and what was printed to the standard error."""
        _, errors = self.process.communicate(timeout=30)
        return self.process.returncode, errors


@pytest.mark.parametrize(
    ("ends", "crash"),
    [
        ("dies", "its process was ended by SIGKILL"),
        ("stops", "its process was stopped for 0.6 s"),
    ],
)
def test_a_session_that_crashes_is_started_again_and_its_exit_code_counts(tmp_path, ends, crash):
    plan = [[("goes on", LIMIT), (ends,)], [("goes on", LIMIT), ("ends", 3)]]
    command = Command(tmp_path, *plan)
    assert command.end() == (3, "")
    first, second = command.sessions()
    assert (first.arguments, first.crashes) == (["run", str(tmp_path)], [])
    assert second.arguments == ["resume", str(tmp_path)]
    assert (second.crashes, second.in_a_row) == ([crash], 1)


def test_a_session_lives_as_long_stopped_as_its_crash_says(tmp_path):
    command = Command(tmp_path, [("goes on", LIMIT), ("stops",)], [("ends", 0)])
    assert command.end() == (0, "")
    first, second = command.sessions()
    stopped, wait = 0.6, 1.0  # before the first restart
    assert second.at - first.at >= stopped + wait


@pytest.mark.parametrize(
    ("method", "said", "code"), [("fails", "Ray's raylet died", 0), ("ends", 3, 3)]
)
def test_a_session_that_does_not_end_after_it_said_how_is_killed(tmp_path, method, said, code):
    hangs = [("goes on", LIMIT), ("says", method, said), ("waits",)]
    command = Command(tmp_path, hangs, [("ends", 0)])
    late = "the session does not end within 0.6 s of its work, and is killed"
    assert command.end() == (code, f"headway: {late}\n")
    crashes = [session.crashes for session in command.sessions()]
    again = [[f"its process ended by an error: {said}"]] if method == "fails" else []
    assert crashes == [[], *again]


def test_a_session_that_is_stopped_with_its_parent_goes_on_with_it(tmp_path):
    command = Command(tmp_path, [("goes on", LIMIT), ("waits",), ("ends", 0)])
    session = psutil.Process(command.waits(0).pid)
    for process in (session, session.parent()):
        process.suspend()
    time.sleep(1.8)  # three times as long as one that is stopped alone lives
    session.parent().resume()
    session.resume()
    time.sleep(1.0)
    assert session.is_running()
    session.send_signal(signal.SIGINT)
    assert command.end()[0] == 0
    assert len(command.sessions()) == 1


def test_a_session_whose_parent_is_killed_gets_another_and_both_may_die_again(tmp_path):
    command = Command(tmp_path, [("goes on", LIMIT), ("waits",)], [("ends", 0)])
    session = psutil.Process(command.waits(0).pid)
    second = kill_parent(session, session.parent())
    kill_parent(session, second)
    session.kill()
    until(lambda: len(command.sessions()) == 2)
    assert command.sessions()[1].arguments == ["resume", str(tmp_path)]
    assert command.sessions()[1].crashes == ["its process was killed"]
    assert command.end()[0] == -signal.SIGKILL


def standby_of(parent, session):
    [standby] = [child for child in parent.children() if child != session]
    return standby


def test_the_next_session_is_a_process_that_has_imported_since_the_last_one_worked(tmp_path):
    goes_on = ("goes on", LIMIT)
    command = Command(tmp_path, [goes_on, ("works",), ("waits",)], [goes_on, ("ends", 3)])
    session = psutil.Process(command.waits(0).pid)
    standby = standby_of(session.parent(), session)
    until(lambda: (tmp_path / "imported").exists() and (tmp_path / "imported").read_text())
    session.kill()
    assert command.end() == (3, "")
    assert (tmp_path / "imported").read_text() == str(standby.pid)
    assert command.sessions()[1].pid == standby.pid
    assert command.sessions()[1].crashes == ["its process was ended by SIGKILL"]


def test_the_death_of_a_process_that_stands_by_counts_as_none_and_another_begins(tmp_path):
    command = Command(tmp_path, [("goes on", LIMIT), ("waits",)], [("ends", 3)])
    session = psutil.Process(command.waits(0).pid)
    standby = standby_of(session.parent(), session)
    standby.kill()
    until(lambda: standby.status() == psutil.STATUS_ZOMBIE)
    session.kill()
    assert command.end() == (3, "")
    assert (command.sessions()[1].in_a_row, len(command.sessions()[1].crashes)) == (1, 1)


def test_a_process_that_stands_by_ends_with_its_parent_but_not_once_it_is_the_session(tmp_path):
    waits = [("goes on", LIMIT), ("waits",)]
    command = Command(tmp_path, waits, [*waits, ("ends", 0)])
    parent, first = psutil.Process(command.process.pid), psutil.Process(command.waits(0).pid)
    first.kill()
    session = psutil.Process(command.waits(1).pid)
    standby = standby_of(parent, session)
    kill_parent(session, parent)
    until(lambda: not standby.is_running())
    assert session.is_running()
    session.send_signal(signal.SIGINT)
    until(lambda: not session.is_running())
    command.end()


def test_a_parent_that_cannot_be_started_is_tried_again_and_passes_interrupts_on(tmp_path):
    command = Command(tmp_path, [("goes on", LIMIT), ("lacks memory",), ("waits",), ("ends", 0)])
    session = psutil.Process(command.waits(0).pid)
    kill_parent(session, session.parent()).terminate()
    until(lambda: not session.is_running())
    assert (tmp_path / "interrupts").read_text() == "1"
    assert len(command.sessions()) == 1
    command.end()


def test_an_interrupt_before_a_restart_ends_the_command(tmp_path):
    died = json.dumps({"in_a_row": 4})  # so that the wait is 16 s
    plan = [[("goes on", 9), ("dies",)], [("ends", 0)]]
    command = Command(tmp_path, *plan, HEADWAY_SESSION=died)
    until(lambda: not RunDirectory(tmp_path).lock.rests())  # it goes on soon
    command.process.send_signal(signal.SIGINT)
    code, errors = command.end()
    assert (code, len(command.sessions())) == (130, 1)
    assert errors.count("Traceback") <= 1, "the script's own"
    assert RunDirectory(tmp_path).lock.rests()


@pytest.mark.parametrize("takes_over", [False, True])
def test_what_a_crash_left_is_cleared_away_if_the_next_session_ends_before_it_does(
    tmp_path, takes_over
):
    """As by an interrupt soon after a kill."""
    ends = [*[("records",)] * takes_over, ("ends", 130)]
    command = Command(tmp_path, [("goes on", LIMIT), ("dies",)], ends)
    assert command.end()[0] == 130
    assert (tmp_path / "cleared").exists() != takes_over


def kill_parent(session, parent):
    """Kill the parent of a session, and return the next one as soon as it watches the session."""
    parent.kill()
    [new] = until(lambda: [child for child in session.children() if child != parent])
    folder = Path(f"/proc/{new.pid}/fd")
    until(lambda: "anon_inode:[pidfd]" in {*links(folder)})
    return new


def links(folder):
    for link in folder.iterdir():
        with suppress(FileNotFoundError):
            yield str(link.readlink())


@pytest.mark.parametrize("passed_on", [True, False])
@pytest.mark.parametrize("directly", [os.killpg, os.kill, None])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_reaches_the_session_once_however_it_is_sent(
    tmp_path, number, directly, passed_on
):
    command = Command(tmp_path, [("waits",), ("ends", 130)])
    command.waits(0)
    if directly is not None:
        directly(command.process.pid, number)
    if passed_on or directly is None:  # by a pipeline
        command.process.send_signal(FORWARDED[number])
    assert command.end() == (130, "")
    assert (tmp_path / "interrupts").read_text() == "1"
    assert len(command.sessions()) == 1


@pytest.mark.parametrize("begins", [False, True])
def test_a_session_that_crashes_after_an_interrupt_leaves_nothing_and_is_not_started_again(
    tmp_path, begins
):
    command = Command(tmp_path, [*[("goes on", 9)] * begins, ("waits",), ("dies",)])
    command.waits(0)
    command.process.send_signal(signal.SIGTERM)
    hint = f"headway: stopped by the user\ngo on with: headway resume {tmp_path}\n"
    assert command.end() == (130, hint if begins else "")
    assert (tmp_path / "cleared").exists() == begins


def test_an_interrupt_between_two_sessions_leaves_nothing_and_says_how_to_go_on(tmp_path):
    command = Command(tmp_path, [("goes on", LIMIT), ("dies",)], INTERRUPTED="1")
    hint = f"headway: stopped by the user\ngo on with: headway resume {tmp_path}\n"
    assert command.end() == (130, hint)
    assert (tmp_path / "cleared").exists()


def test_a_session_that_dies_too_often_without_progress_ends_the_run(tmp_path):
    dies = [("goes on", LIMIT), ("dies",)]
    trains = [("goes on", LIMIT), ("trains",), ("dies",)]
    command = Command(tmp_path, dies, trains, dies, [("goes on", LIMIT), ("raises",)])
    code, errors = command.end()
    assert code == 1
    assert errors.endswith(
        "headway: driver died 3 times in a row, more than deploy.max_restarts = 2 makes up for; "
        "the last error: its process ended with exit code 1\n"
    )
    assert [session.in_a_row for session in command.sessions()] == [0, 1, 1, 2]
    assert (tmp_path / "cleared").exists()


def test_a_session_that_fails_to_begin_is_started_again_and_names_its_error_in_the_end(tmp_path):
    """The time of sessions that never worked begins no new count, however long they wait."""
    fails = [("goes on", LIMIT), ("fails",)]
    command = Command(tmp_path, [("goes on", LIMIT), ("dies",)], *[fails] * 2, SETTLED_SECONDS="0")
    code, errors = command.end()
    assert (code, len(command.sessions())) == (1, 3)
    assert command.sessions()[2].crashes[-1] == "its process ended by an error: no node is free"
    assert errors == (
        "headway: driver died 3 times in a row, more than deploy.max_restarts = 2 makes up for; "
        "the last error: its process ended by an error: no node is free\n"
    )


def test_a_session_that_worked_for_long_before_its_error_counts_anew(tmp_path):
    fails = [("goes on", 1), ("works",), ("fails",)]
    command = Command(tmp_path, fails, fails, [("ends", 0)], SETTLED_SECONDS="0")
    assert command.end() == (0, "")


def test_the_time_that_crashes_cost_is_counted_from_the_last_session_that_worked(tmp_path):
    """It contains that of a stopped process before it was killed, and of sessions in vain."""
    begin = ("goes on", LIMIT)
    plan = [[begin, ("works",), ("stops",)], [begin, ("dies",)], [begin, ("works",), ("ends", 0)]]
    began = time.monotonic()
    assert Command(tmp_path, *plan).end() == (0, "")
    first, second = (tmp_path / "lost").read_text().split()
    stopped, waits = 0.6, 1.0 + 2.0  # of two restarts in a row
    assert first == "None"
    assert stopped + waits <= float(second) <= time.monotonic() - began


def test_a_session_is_told_of_every_crash_that_none_has_recorded(tmp_path):
    goes_on = ("goes on", 3)
    plan = [[goes_on, ("dies",)], [goes_on, ("raises",)], [goes_on, ("records",), ("dies",)]]
    command = Command(tmp_path, *plan, [("ends", 0)])
    assert command.end()[0] == 0
    killed, raised = "its process was ended by SIGKILL", "its process ended with exit code 1"
    assert [session.crashes for session in command.sessions()] == [
        [], [killed], [killed, raised], [killed],
    ]  # fmt: skip


def test_an_error_before_the_run_has_its_folder_ends_the_command_at_once(tmp_path):
    code, errors = Command(tmp_path, [("raises",)]).end()
    assert (code, errors.count("ValueError: a bug")) == (1, 1)


class Sent(session_process.Session):
    """A session without a process, which keeps what it sends to its parent."""

    def __init__(self, crash, has_worked):
        self.is_again = crash is not None
        self.has_worked, self.has_failed = has_worked, False
        self.sent, self._wait, self._again = [], 0.0, ["resume", "mine"]

    def _send(self, message):
        self.sent.append(message)


KILLED = "its process was killed"


@pytest.mark.parametrize(
    ("crash", "has_worked", "error", "code", "sent"),
    [
        (None, False, InputError("bad"), 2, Message(code=2)),
        (None, True, RunFailed("lost"), 1, Message(code=1)),
        (KILLED, False, InputError("no node\nis free"), 2, Message(error="no node")),
        (KILLED, False, BlockingIOError("held"), 1, Message(error="held")),
        (KILLED, False, Interrupted("stopped"), 130, Message(code=130)),
        (KILLED, False, KeyboardInterrupt(), 130, Message(code=130)),
        (KILLED, True, RunFailed("lost"), 1, Message(code=1)),
        (None, True, RayDied("gone"), 1, Message(error="gone")),
    ],
)
def test_an_error_ends_the_run_unless_it_may_pass(
    monkeypatch, capsys, crash, has_worked, error, code, sent
):
    def fail(**_):
        raise error

    session = Sent(crash, has_worked)
    monkeypatch.setattr(session_process, "received", SimpleNamespace(any=lambda: False))
    monkeypatch.setattr(session_process, "begin_session", lambda *_: session)
    monkeypatch.setattr(app, "app", fail)
    monkeypatch.setattr(sys, "argv", ["headway", "resume", "mine"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == code
    assert session.sent == [sent]
    monkeypatch.setattr(session_process, "received", SimpleNamespace(any=lambda: True))
    assert not session.may_pass(error), "an interrupt has come"
    printed = capsys.readouterr().err
    assert printed.startswith("headway: ")
    assert ("go on with: headway resume mine" in printed) == (type(error) is KeyboardInterrupt)
