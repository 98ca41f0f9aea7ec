"""Attacks on the sandbox: each program says ESCAPED if it gets through, and HELD if it does not."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from sandboxes import needs_sandbox

from actors.errors import ServiceAway
from actors.sandbox import sandbox as module
from actors.sandbox.sandbox import Sandbox
from tests.waiting import until

pytestmark = needs_sandbox

PRELUDE = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def held(attack, *errors):
    try:
        result = attack()
    except (errors or (OSError,)) as error:
        print("HELD", type(error).__name__)
    else:
        print("ESCAPED", result)
def call(number, *arguments):
    if libc.syscall(number, *arguments) < 0:
        raise OSError(ctypes.get_errno(), "")
"""
ATTACKS = {
    "fork bomb": "held(lambda: [os.fork() for _ in range(1000)])",
    "another program": "import subprocess\nheld(lambda: subprocess.run([os.sys.executable, '-V']))",
    "vfork": "held(lambda: call(58))",
    "a process by clone3": "held(lambda: call(435, 0, 0))",
    "read /etc/passwd": "held(lambda: open('/etc/passwd').read())",
    "read the home of root": "held(lambda: os.listdir('/root/.ssh'))",
    "read a file of the machine": "held(lambda: open(SECRET).read())",
    "read it by a symbolic link": "os.symlink(SECRET, 'x')\nheld(lambda: open('x').read())",
    "climb out of the root": "held(lambda: open('../' * 20 + SECRET).read())",
    "link to the old root": "held(lambda: os.listdir('/old'))",
    "chroot": "held(lambda: os.chroot('/work'))",
    "read the memory of others": "held(lambda: open('/proc/1/mem', 'rb'))",
    "list processes": "held(lambda: os.listdir('/proc'))",
    "mount": "held(lambda: call(165, b'proc', b'/work', b'proc', 0, 0))",
    "trace init": "held(lambda: call(101, 16, 1, 0, 0))",
    "write into init": "held(lambda: call(311, 1, 0, 0, 0, 0, 0))",
    "a new user namespace": "held(lambda: call(272, 0x10000000))",
    "enter a namespace": "held(lambda: call(308, 0, 0))",
    "become root": "held(lambda: os.setuid(0))",
    "a device": "held(lambda: os.mknod('d', 0o60666, os.makedev(8, 0)))",
    "the network": "import socket\nheld(lambda: socket.create_connection(('127.0.0.1', PORT)))",
    "a unix socket": "import socket\nheld(lambda: socket.socket(socket.AF_UNIX))",
    "write to /": "held(lambda: open('/x', 'w'))",
    "write to the library": "held(lambda: open(os.__file__, 'a'))",
    "write to /dev": "held(lambda: open('/dev/x', 'w'))",
    "write to shared memory": "held(lambda: open('/dev/shm/x', 'w'))",
    "run what it wrote": (
        "open('x', 'w').write('#!/bin/sh')\nos.chmod('x', 0o755)\n"
        "held(lambda: os.execv('x', ['x']))"
    ),
    "memory that is a file": "held(lambda: os.memfd_create('x'))",
    "memory of System V": "held(lambda: call(29, 0, 1 << 30, 0o1600))",
    "memory": "held(lambda: len(bytearray(1 << 30)), MemoryError)",
    "fill the disk": (
        "def fill():\n    with open('x', 'wb', 0) as f:\n"
        "        while f.write(b'x' * 65536): pass\n"
        "held(fill)"
    ),
    "a file with holes": "held(lambda: os.truncate(os.open('x', os.O_CREAT | os.O_RDWR), 1 << 40))",
    "very many files": "held(lambda: [open(f'f{i}', 'w').close() for i in range(10**5)])",
    "very many open files": "held(lambda: [open('/dev/null') for _ in range(1000)])",
    "very many threads": (
        "import threading, time\n"
        "def t(): threading.Thread(target=time.sleep, args=(9,), daemon=True).start()\n"
        "held(lambda: [t() for _ in range(100)], RuntimeError)\nos.sys.stdout.flush()\nos._exit(0)"
    ),
    "raise its limits": (
        "import resource as r\nheld(lambda: r.setrlimit(r.RLIMIT_AS, (-1, -1)), ValueError)"
    ),
    "what is left open": (
        "def is_open(fd):\n    try: os.fstat(fd)\n    except OSError: return False\n"
        "    return True\n"
        "print('ESCAPED' if any(map(is_open, range(3, 64))) else 'HELD')"
    ),
    "secrets of the environment": "held(lambda: os.environ['SECRET'], KeyError)",
    "kernel keys": "held(lambda: call(250, 0, -3, 1))",
    "io_uring": "held(lambda: call(425, 8, 0))",
    "bpf": "held(lambda: call(321, 0, 0, 0))",
}  # fmt: skip
STUBBORN = {
    "sleeps": "import time\nprint('in', flush=True)\ntime.sleep(3600)",
    "ignores signals": (
        "import signal\nfor s in set(signal.Signals) - {9, 19}: signal.signal(s, signal.SIG_IGN)\n"
        "while True: pass"
    ),
    "closes its output": "import os, time\nos.close(1); os.close(2)\ntime.sleep(3600)",
    "stops itself": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
}


def processes_of(user_floor=0x60000000):
    """Return the processes that still run as a user of a sandbox."""
    result = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(FileNotFoundError):  # it has just ended
            if path.stat().st_uid >= user_floor:
                result.append(path.name)
    return result


def wait_for_end(processes):
    """Wait until these processes are gone; sandboxes of tests in other workers may still run."""
    until(lambda: not set(processes) & set(processes_of()), 30)


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_is_held(attack, tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", "much")
    secret = tmp_path / "secret"
    secret.write_text("much")
    secret.chmod(0o666)
    tmp_path.chmod(0o777)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        given = f"SECRET, PORT = {str(secret)!r}, {server.getsockname()[1]}\n"
        outcome = Sandbox(seconds=30).run(PRELUDE + given + ATTACKS[attack])
        with pytest.raises(BlockingIOError):
            server.accept()
    assert outcome.stdout.startswith("HELD"), outcome
    assert "ESCAPED" not in outcome.stdout
    assert (outcome.ended, outcome.code) == ("exit", 0), outcome
    assert secret.read_text() == "much"


@pytest.mark.parametrize("program", STUBBORN)
def test_a_program_that_does_not_end_is_ended_and_leaves_nothing(program):
    outcome = Sandbox(seconds=0.5).run(STUBBORN[program])
    assert outcome.ended == "timeout"
    assert outcome.stdout == ("in\n" if program == "sleeps" else "")
    assert outcome.seconds >= 0.5, "its own time, without its start"
    wait_for_end(processes_of())


def test_endless_output_is_cut_at_its_limit():
    program = "while True: print('x' * 1000)"
    outcome = Sandbox(seconds=30, output_kib=64).run(program)
    assert outcome.ended == "output"
    assert len(outcome.stdout) == 64 * 1024


@pytest.mark.parametrize("target", ["os.getppid()", "1", "-1", "0"])
def test_signals_reach_nobody_else(target):
    outcome = Sandbox(seconds=30).run(f"import os\nos.kill({target}, 9)\nprint('on')")
    assert (outcome.ended, outcome.code) in {("exit", 0), ("exit", 1), ("signal", 9)}
    assert Sandbox(seconds=30).run("print('alive')").stdout == "alive\n"


@pytest.mark.parametrize("number", [1, 2, 10, 13, 14, 15, 17, 25, 34, 64])
def test_init_outlives_every_signal_of_the_program(number):
    outcome = Sandbox(seconds=30).run(f"import os\nos.kill(1, {number})\nprint('on')")
    assert (outcome.ended, outcome.code, outcome.stdout) == ("exit", 0, "on\n")


@pytest.mark.parametrize(
    ("step", "killed"),
    [
        ("        code = linux.wait_as_init(child)", "        os.wait()\n        os._exit(7)"),
        ("        build_root(config)", "        os._exit(7)"),
        ("        linux.unshare()", "        os.kill(os.getpid(), 9)"),
    ],
    ids=["init", "init, before the program", "launcher"],
)
def test_a_sandbox_that_is_killed_from_outside_is_no_outcome_of_the_program(
    change_launcher, step, killed
):
    change_launcher(step, killed)
    with pytest.raises(ServiceAway, match="the sandbox was killed from outside"):
        Sandbox(seconds=30).run("print(1)")


def test_a_program_sees_the_standard_library_and_nothing_else():
    program = (
        "import os\n"
        "for path, folders, files in os.walk('/'):\n"
        "    if path == os.path.dirname(os.__file__):\n"
        "        folders[:] = []\n"
        "    for file in files: print(os.path.join(path, file))\n"
    )
    outcome = Sandbox(seconds=30).run(program)
    library = os.path.dirname(os.__file__)
    elsewhere = [path for path in outcome.stdout.split() if not path.startswith(library)]
    known = re.compile(
        r"/dev/(null|zero|full|urandom)|/work/program\.py|.*/python3\.\d+|.*/lib[^/]*\.so[\d.]*"
        r"|/lib64/ld-linux-x86-64\.so\.2"
    )
    assert outcome.code == 0, outcome.stderr
    assert not [path for path in elsewhere if not known.fullmatch(path)]
    assert Sandbox(seconds=30).run("import pip").code == 1


def test_it_imports_from_a_folder_that_a_recipe_names_and_cannot_change_it(tmp_path):
    (tmp_path / "named.py").write_text("answer = 7\n")
    (tmp_path / "named.py").chmod(0o666)
    tmp_path.chmod(0o755)
    program = f"import named\nprint(named.answer)\nopen({str(tmp_path / 'named.py')!r}, 'a')"
    outcome = Sandbox(seconds=30, folders=(str(tmp_path),)).run(program)
    assert outcome.stdout == "7\n"
    assert "Read-only file system" in outcome.stderr
    assert Sandbox(seconds=30).run(program).stdout == ""


@pytest.mark.parametrize("how", ["flock(f, fcntl.LOCK_EX)", "lockf(f, fcntl.LOCK_SH)",
                                 "fcntl(f, 1024, 1)"])  # fmt: skip
def test_it_locks_nothing_outside(how):
    outcome = Sandbox(seconds=30).run(f"import fcntl, os\nf = open(os.__file__)\nfcntl.{how}")
    assert "PermissionError" in outcome.stderr


def test_system_calls_of_another_architecture_end_the_program():
    program = (
        "import ctypes, mmap\n"
        "code = mmap.mmap(-1, 4096, prot=7)\n"
        "code.write(bytes.fromhex('b814000000cd80c3'))\n"  # getpid by int 0x80
        "address = ctypes.addressof(ctypes.c_char.from_buffer(code))\n"
        "print('ESCAPED', ctypes.CFUNCTYPE(ctypes.c_int)(address)())\n"
    )
    outcome = Sandbox(seconds=30).run(program)
    assert (outcome.ended, outcome.code, outcome.stdout) == ("signal", signal.SIGSYS, "")


def test_a_program_reads_its_input_and_how_it_ended_is_told():
    double = Sandbox(seconds=30).run("print(int(input()) * 2)", "21\n")
    assert (double.ended, double.code, double.stdout, double.stderr) == ("exit", 0, "42\n", "")
    failed = Sandbox(seconds=30).run("raise SystemExit(3)")
    assert (failed.ended, failed.code) == ("exit", 3)
    crashed = Sandbox(seconds=30).run("import ctypes\nctypes.string_at(0)")
    assert (crashed.ended, crashed.code) == ("signal", signal.SIGSEGV)
    wrong = Sandbox(seconds=30).run("print(1")
    assert wrong.code == 1
    assert "SyntaxError" in wrong.stderr


def test_large_inputs_and_programs_that_do_not_read_them_are_no_deadlock():
    count = Sandbox(seconds=30).run("import sys\nprint(len(sys.stdin.read()))", "x" * 3_000_000)
    assert count.stdout == "3000000\n"
    assert Sandbox(seconds=30).run("print(1)", "x" * 3_000_000).stdout == "1\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's sandboxes run as other users")
def test_a_sandbox_ends_with_whoever_started_it():
    starter = (
        "from actors.sandbox.sandbox import Sandbox\n"
        "print('go', flush=True)\n"
        "Sandbox(seconds=600).run('import time\\ntime.sleep(600)')\n"
    )
    with subprocess.Popen([sys.executable, "-c", starter], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"go\n"
        started, inside = psutil.Process(process.pid), set[str]()

        def runs():
            below = {str(child.pid) for child in started.children(recursive=True)}
            inside.update(below & set(processes_of()))
            return inside

        try:
            until(runs, 30)
        finally:
            process.kill()
    wait_for_end(inside)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody else")
def test_it_holds_without_root_where_user_namespaces_may_be_made(tmp_path):
    python = shutil.which("python3", path="/usr/bin")
    if python is None:
        pytest.skip("no interpreter that everybody may run")
    for name in ("launcher.py", "linux.py", "system_calls.py"):
        shutil.copy(module.LAUNCHER.with_name(name), tmp_path)
    driver = (
        "import json, os, subprocess, sys\n"
        f"config = json.load(open({str(tmp_path / 'config')!r}))\n"
        "config['parent'] = os.getpid()\n"
        "read, write = os.pipe()\n"
        "inside, fill = os.pipe()\n"
        "os.write(fill, json.dumps(config).encode()); os.close(fill)\n"
        f"subprocess.run([sys.executable, '-I', '-S', {str(tmp_path / 'launcher.py')!r}, "
        "str(inside), str(write)], pass_fds=(inside, write))\n"
        "os.close(write); print(os.read(read, 9999).decode())\n"
    )
    config = Sandbox().launcher_config(module.PROBE)
    config["paths"] = ["/usr/bin", "/usr/lib", "/lib", "/lib64"]
    config["packages"] = []
    config["command"] = [os.path.realpath(python), "-I", "-B", "/work/program.py"]
    (tmp_path / "config").write_text(json.dumps(config))
    for path in (tmp_path, *tmp_path.parents[:3]):
        path.chmod(0o755)
    done = subprocess.run(
        [python, "-c", driver], user=65534, group=65534, extra_groups=[], cwd="/",
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    printed, *status = done.stdout.splitlines()
    assert printed == "walls stand", done
    started, ended = [json.loads(line) for line in status if line]
    assert (started["started"], ended["exit"]) == (True, 0)
    assert started["at"] < ended["at"]


@pytest.mark.parametrize(
    ("step", "slow"),
    [
        (
            "        linux.unshare()",
            "        time.sleep(3)\n        linux.unshare()",
        ),
        ("        os.waitpid(child, 0)", "        os.waitpid(child, 0)\n        time.sleep(3)"),
    ],
    ids=["start", "end"],
)
def test_a_slow_sandbox_takes_no_time_of_the_program(change_launcher, step, slow):
    change_launcher(step, slow)
    outcome = Sandbox(seconds=2).run("print('done')")
    assert (outcome.ended, outcome.code, outcome.stdout) == ("exit", 0, "done\n")
    assert outcome.seconds < 2


def test_a_program_that_was_not_started_in_time_is_an_error_and_not_a_timeout(change_launcher):
    change_launcher("        linux.unshare()", "        time.sleep(600)")
    with pytest.raises(ServiceAway, match=r"did not start a program within 0\.5 s"):
        Sandbox(seconds=600, start_seconds=0.5).run("print('done')")


@pytest.mark.parametrize("end", ["the program's time", "too much output", "its caller is killed"])
def test_it_leaves_no_zombie_of_init_to_process_1(end):
    program = "while True: print('x' * 10_000)" if end == "too much output" else "while True: pass"
    seconds = 600 if end == "its caller is killed" else 1
    starter = (
        "from actors.sandbox.sandbox import Sandbox\n"
        f"Sandbox(seconds={seconds}, output_kib=1).run({program!r})\n"
    )
    adopter = (
        "import ctypes, os, subprocess, sys, time, psutil\n"
        "ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)\n"  # orphans become children of this process
        f"caller = subprocess.Popen([sys.executable, '-c', {starter!r}])\n"
        f"if {end == 'its caller is killed'}:\n"
        "    while len(psutil.Process(caller.pid).children(recursive=True)) < 3:\n"
        "        assert caller.poll() is None\n"
        "        time.sleep(0.01)\n"
        "    caller.kill()\n"
        "caller.wait()\n"
        "adopted = psutil.Process().children()\n"
        "psutil.wait_procs(adopted, timeout=30)\n"
        "left = psutil.Process().children()\n"
        "print(len(adopted), [child.name() for child in left])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", adopter], capture_output=True, text=True, timeout=120, check=False
    )
    # psutil reaps children of its process: what is adopted must be the launcher at most.
    assert done.stdout in ("0 []\n", "1 []\n"), done
    if end != "its caller is killed":
        assert done.stdout == "0 []\n"
