"""Programs in the sandbox: what they cannot do, what they can, and what is left of them."""

import asyncio
import json
import os
import queue
import shutil
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from sandboxes import needs_sandbox

from actors.errors import EnvironmentFailed
from actors.programs import launcher, program
from actors.programs.agent import AgentGone, AgentResult
from actors.programs.program import ProgramAgent, ProgramOptions, load_program
from actors.programs.visible_paths import folder_of, runs_in, visible_paths
from actors.sandbox import sandbox
from headway.errors import InputError
from tests.actors.programs.test_program import agent, play, task
from tests.waiting import reached

pytestmark = needs_sandbox
HERE = Path(__file__).parent
ATTACKS = {
    "read the folder of another rollout": "read(OTHER)",
    "see the folder of another rollout": "os.stat(KEPT + '/other')",
    "read the home": "read(HOME_FILE)",
    "read a run beside its script": "read(RUN)",
    "read a file of the machine": "read(SECRET)",
    "read it by a link": "[os.symlink(SECRET, 'x'), read('x')]",
    "climb out of the root": "read('../' * 20 + SECRET)",
    "read /etc/shadow": "read('/etc/shadow')",
    "read the environment of init": "read('/proc/1/environ')",
    "see the files of init": "os.listdir('/proc/1/root')",
    "see another process of the machine": "os.stat(f'/proc/{ACTOR}/status')",
    "kill its actor": "os.kill(ACTOR, 9)",
    "kill whatever there is": "kill_all()",
    "another port of the machine": "socket.create_connection(('127.0.0.1', PORT), 5)",
    "an address outside": "socket.create_connection(('192.0.2.1', 80), 5)",
    "a name outside": "socket.create_connection(('example.org', 80), 5)",
    "a socket of the machine": "unix(UNIX)",
    "a socket without a file": "unix('\\0' + ABSTRACT)",
    "a raw socket": "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
    "a packet socket": "socket.socket(17, socket.SOCK_RAW)",
    "a netlink socket": "socket.socket(16, socket.SOCK_RAW)",
    "a socket to the host": "socket.socket(40, socket.SOCK_STREAM)",
    "another protocol": "socket.socket(socket.AF_INET, socket.SOCK_STREAM, 132)",
    "write to its script": "write(__file__)",
    "write to its interpreter": "write(os.__file__)",
    "write to /": "write('/x')",
    "write to /etc": "write('/etc/hosts')",
    "write to /usr": "write('/usr/x')",
    "write to the folder of folders": "write(KEPT + '/x')",
    "write a setting of the kernel": "write('/proc/sys/kernel/core_pattern')",
    "write where it cannot see": "write(HOME_FILE)",
    "a device": "os.mknod('d', 0o60666, os.makedev(8, 0))",
    "become root": "os.setuid(0)",
    "mount": "call(165, b'none', b'/tmp', b'tmpfs', 0, 0)",
    "unmount": "call(166, b'/proc', 2)",
    "a new root": "os.chroot('/tmp')",
    "namespaces of its own": "call(272, 0x10000000)",
    "a process in namespaces": "call(56, 0x10000000 | 17, 0, 0, 0, 0)",
    "a process by clone3": "call(435, 0, 0)",
    "enter a namespace": "call(308, 0, 0)",
    "trace init": "call(101, 16, 1, 0, 0)",
    "read the memory of init": "call(310, 1, 0, 0, 0, 0, 0)",
    "bpf": "call(321, 0, 0, 0)",
    "kernel keys": "call(250, 0, -3, 1)",
    "performance counters": "call(298, 0, 0, -1, -1, 0)",
    "io_uring": "call(425, 8, 0)",
    "a module": "call(175, 0, 0, b'')",
    "memory that is a file": "os.memfd_create('x')",
    "memory of System V": "call(29, 0, 1 << 20, 0o1600)",
}  # fmt: skip


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Play all attacks at once; return what each wrote, and check that nothing has changed."""
    base = tmp_path_factory.mktemp("world")
    code, kept, home = base / "code", base / "code" / "kept", base / "home"
    secrets = {
        "OTHER": kept / "other" / "task", "HOME_FILE": home / "notes", "SECRET": base / "secret",
        "RUN": code / "runs" / "first" / "config",
    }  # fmt: skip
    for path in (base, *secrets.values()):
        path.parent.mkdir(parents=True, exist_ok=True)
    for path in secrets.values():
        path.write_text("much")
    (code / "runs" / "first" / "ledger.sqlite").write_text("")
    shutil.copy(HERE / "hostile.py", code)
    for path in (base, *base.rglob("*")):
        path.chmod(0o777)
    abstract = f"headway-{os.getpid()}"
    with (
        pytest.MonkeyPatch.context() as changes,
        socket.create_server(("127.0.0.1", 0)) as other,
        socket.create_server(("127.0.0.1", 0)) as gateway,
        socket.socket(socket.AF_UNIX) as named,
        socket.socket(socket.AF_UNIX) as unnamed,
    ):
        changes.setenv("HOME", str(home))
        named.bind(str(base / "socket"))
        (base / "socket").chmod(0o777)
        unnamed.bind(f"\0{abstract}")
        servers = other, gateway, named, unnamed
        for server in servers:
            server.listen()
            server.settimeout(0)
        world = {
            **{name: str(path) for name, path in secrets.items()},
            "KEPT": str(kept), "ACTOR": os.getpid(), "PORT": other.getsockname()[1],
            "UNIX": str(base / "socket"), "ABSTRACT": abstract,
        }  # fmt: skip
        url = f"http://127.0.0.1:{gateway.getsockname()[1]}/v1"
        words = ["python", str(code / "hostile.py")]
        options = ProgramOptions(sandbox=True, keep_folder=str(kept))

        async def all_attacks():
            played = ProgramAgent("program:x", words, options)
            tasks = [task(metadata={**world, "ATTACK": a}, base_url=url) for a in ATTACKS.values()]
            try:
                results = await asyncio.gather(*map(played.play, tasks))
            finally:
                await played.close()
            return [result.completion for result in results]

        results = asyncio.run(all_attacks())
        for server in servers:
            with pytest.raises(BlockingIOError):
                server.accept()
    assert [path.read_text() for path in secrets.values()] == ["much"] * len(secrets)
    assert not (kept / "x").exists()
    return dict(zip(ATTACKS, results, strict=True))


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_is_held(outcomes, attack):
    assert outcomes[attack].startswith("HELD"), outcomes[attack]


@contextmanager
def serving(answer):
    """Answer each connection to a port of this machine; yield the address of the API there."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                threading.Thread(target=answer, args=(connection,), daemon=True).start()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}/v1"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def play_code(folder, code, url="http://127.0.0.1:9/v1", **options):
    """Return the result of a script in the sandbox."""
    (folder / "agent.py").write_text(code)
    folder.chmod(0o755)

    async def run():
        words, chosen = ["python", str(folder / "agent.py")], {"sandbox": True, **options}
        played = ProgramAgent("program:x", words, ProgramOptions(**chosen))
        try:
            return await played.play(task(base_url=url))
        finally:
            await played.close()

    return asyncio.run(run())


CONNECT = """
import os, socket
from urllib.parse import urlsplit
url = urlsplit(os.environ["OPENAI_BASE_URL"])
def connect():
    return socket.create_connection((url.hostname, url.port), 20)
def finish(text):
    with open(os.environ["HEADWAY_RESULT"], "w") as file:
        file.write(str(text))
"""


def test_bytes_pass_both_ways_and_each_direction_ends_by_itself(tmp_path):
    def answer(connection):
        with connection:
            count = 0
            while block := connection.recv(65536):
                count += len(block)
            connection.sendall(b"x" * count + b"end")

    code = CONNECT + (
        "def ask(size):\n"
        "    with connect() as policy:\n"
        "        policy.sendall(b'x' * size)\n"
        "        policy.shutdown(socket.SHUT_WR)\n"
        "        return len(b''.join(iter(lambda: policy.recv(65536), b'')))\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "finish(list(ThreadPoolExecutor(20).map(ask, [5_000_000, *range(300)])))\n"
    )
    with serving(answer) as url:
        result = play_code(tmp_path, code, url)
    assert json.loads(result.completion) == [5_000_003, *range(3, 303)]


def test_each_side_sees_that_the_other_dropped_its_connection(tmp_path):
    seen = queue.Queue()

    def answer(connection):
        with connection:
            first = connection.recv(1)
            if first == b"a":  # answers until the client is gone
                try:
                    while True:
                        connection.sendall(b"x" * 65536)
                except OSError:
                    seen.put("the client")

    code = CONNECT + (
        "with connect() as policy:\n"
        "    policy.sendall(b'a')\n"
        "    policy.recv(10)\n"
        "policy = connect()\n"
        "policy.sendall(b'b')\n"
        "finish(policy.recv(10))\n"
    )
    with serving(answer) as url:
        assert play_code(tmp_path, code, url).completion == "b''"
        assert seen.get(timeout=20) == "the client"


def test_what_a_gateway_says_arrives_as_it_is_said(tmp_path):
    def answer(connection):
        with connection:
            for _ in range(3):
                connection.sendall(b"data: 1\n\n")
                connection.recv(10)  # which the client sends when it has that

    code = CONNECT + (
        "got = []\n"
        "with connect() as policy:\n"
        "    while block := policy.recv(100):\n"
        "        got.append(len(block))\n"
        "        policy.sendall(b'on')\n"
        "finish(got)\n"
    )
    with serving(answer) as url:
        assert play_code(tmp_path, code, url).completion == "[9, 9, 9]"


def test_a_gateway_at_another_address_of_the_machine_is_reached_there(tmp_path, monkeypatch):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no address but loopback")
        own = asking.getsockname()[0]

    def answer(connection):
        with connection:
            connection.sendall(b"hello")

    code = CONNECT + "finish(connect().recv(10))\n"
    with socket.create_server((own, 0)) as server:
        threading.Thread(target=lambda: answer(server.accept()[0]), daemon=True).start()
        url = f"http://{own}:{server.getsockname()[1]}/v1"
        assert play_code(tmp_path, code, url).completion == "b'hello'"


def test_children_threads_and_temporary_files_are_as_elsewhere(tmp_path):
    code = CONNECT + (
        "import getpass, multiprocessing, sqlite3, subprocess, tempfile, pathlib\n"
        "def double(n): return 2 * n\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.Pool(2) as pool:\n"
        "        doubled = pool.map(double, [1, 2])\n"
        "    shell = subprocess.run(['sh', '-c', 'echo $((3 + 4)) | tee out; hostname'],\n"
        "                           capture_output=True, text=True, check=True).stdout.split()\n"
        "    sqlite3.connect('db').execute('create table t (a)').connection.commit()\n"
        "    script = pathlib.Path(tempfile.mkdtemp(), 'run')\n"
        "    script.write_text('#!/bin/sh\\necho ran')\n"
        "    script.chmod(0o755)\n"
        "    ran = subprocess.run([script], capture_output=True, text=True).stdout.strip()\n"
        "    local = socket.create_server(('localhost', 0)).getsockname()[0]\n"
        "    finish([doubled, shell, ran, local, getpass.getuser(), sorted(os.listdir('.')),\n"
        "            os.path.expanduser('~')])\n"
    )
    result = play_code(tmp_path, code).completion
    assert result.replace("'", '"') == json.dumps(
        [[2, 4], ["7", "sandbox"], "ran", "127.0.0.1", getpass_name(), ["db", "out"], "/tmp"]
    )


def getpass_name():
    return os.environ.get("LOGNAME") or os.environ.get("USER") or "agent"


@pytest.mark.parametrize(
    ("way", "options", "limit"),
    [
        ("prints", {"output_mib": 1}, "the limit of its output, 1048576 bytes"),
        ("takes_memory", {"memory_gib": 0.2}, "MemoryError"),
        ("takes_memory_slowly", {"memory_gib": 0.125}, "the limit of its memory, 0.125 GiB"),
        ("forks", {"processes": 8}, "the limit of 8 processes"),
        ("fails", {}, r"exit code 1; the end of its standard error:\nthe key is \[key\]"),
        ("crashes", {}, "ended by SIGSEGV"),
        ("writes_much", {}, "wrote a result of more than"),
    ],
)
def test_limits_and_ends_are_those_of_other_programs(way, options, limit):
    with pytest.raises(EnvironmentFailed, match=limit):
        play(way, sandbox=True, **options)


def test_as_many_processes_are_allowed_as_without_a_sandbox(tmp_path):
    code = CONNECT + (
        "import subprocess, time\n"
        "children = [subprocess.Popen(['sleep', '600']) for _ in range(7)]\n"
        "time.sleep(2.5)\n"
        "finish(sum(child.poll() is None for child in children))\n"
    )
    assert play_code(tmp_path, code, processes=8).completion == "7"


@pytest.mark.parametrize("preload", [(), ("only_there",)])
def test_a_foreign_interpreter_brings_its_own_libraries(tmp_path, preload):
    python = shutil.which("python3", path="/usr/bin") or sys.executable
    subprocess.run([python, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    [library] = (tmp_path / "venv").glob("lib/python3*/site-packages")
    (library / "only_there.py").write_text("answer = 7\n")
    code = CONNECT + "import only_there, sys\nfinish([only_there.answer, sys.prefix])\n"
    (tmp_path / "code").mkdir()
    played = play_code(
        tmp_path / "code", code, python=str(tmp_path / "venv/bin/python"), preload=preload
    )
    assert played.completion == f"[7, '{tmp_path / 'venv'}']"


def test_a_fork_sees_its_modules_and_is_enclosed(tmp_path):
    code = CONNECT + (
        "import sys\n"
        "finish([os.path.exists('/etc/shadow'), 'colorsys' in sys.modules,\n"
        "        'linux' in sys.modules, os.readlink('/proc/self'),\n"
        "        sorted(os.listdir('/proc/self/fd'))])\n"
    )
    result = play_code(tmp_path, code, preload=("colorsys",)).completion
    assert result == "[False, True, False, '2', ['0', '1', '2', '3']]"


def test_a_command_that_is_no_python_sees_its_folder(tmp_path, monkeypatch):
    (tmp_path / "agent.sh").write_text('cat words > "$HEADWAY_RESULT"; cat ../no >> out; true\n')
    (tmp_path / "words").write_text("it is 7")
    tmp_path.chmod(0o755)
    (tmp_path / "start").write_text(f'#!/bin/sh\ncd {tmp_path}; . "$1"\n')
    (tmp_path / "start").chmod(0o755)
    monkeypatch.setenv("HEADWAY_CODE_DIR", str(tmp_path))
    played = load_program("program:./start agent.sh", {"sandbox": True})
    assert asyncio.run(played.play(task())) == AgentResult(completion="it is 7")
    asyncio.run(played.close())


def test_it_reads_the_folders_that_a_recipe_names(tmp_path):
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "text").write_text("7")
    (tmp_path / "code").mkdir()
    tmp_path.chmod(0o755)
    code = CONNECT + f"finish(open({str(tmp_path / 'more' / 'text')!r}).read())\n"
    with pytest.raises(EnvironmentFailed, match="FileNotFoundError"):
        play_code(tmp_path / "code", code)
    named = {"sandbox_folders": (str(tmp_path / "more"),)}
    assert play_code(tmp_path / "code", code, **named).completion == "7"


def test_a_folder_that_a_recipe_names_has_to_be_there_and_in_a_sandbox(tmp_path):
    missing = {"sandbox_folders": (str(tmp_path / "more"),)}
    with pytest.raises(InputError, match=f"sandbox_folders: there is neither .* {tmp_path}/more"):
        agent("writes", "7", sandbox=True, **missing)
    with pytest.raises(InputError, match="sandbox_folders has no effect without sandbox = true"):
        agent("writes", "7", **missing)


def test_a_link_as_a_result_is_none(tmp_path):
    code = CONNECT + "os.symlink('/etc/hostname', os.environ['HEADWAY_RESULT'])\n"
    assert play_code(tmp_path, code) == AgentResult()


@pytest.mark.parametrize("preload", [(), ("colorsys",)])
def test_a_cancelled_program_leaves_no_process_connection_or_folder(tmp_path, preload):
    connected, ended = threading.Event(), threading.Event()

    def answer(connection):
        with connection:
            connected.set()
            connection.recv(1)
            ended.set()

    code = CONNECT + (
        "import subprocess, time\n"
        "policy = connect()\n"
        "subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "time.sleep(600)\n"
    )
    kept = tmp_path / "kept"
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "agent.py").write_text(code)

    async def run(url):
        words = ["python", str(tmp_path / "code" / "agent.py")]
        options = ProgramOptions(sandbox=True, preload=preload, keep_folder=str(kept))
        played = ProgramAgent("program:x", words, options)
        playing = asyncio.create_task(played.play(task(base_url=url)))
        await reached(connected.is_set)
        started = psutil.Process(played._launcher.pid)
        inside = started.children(recursive=True)
        assert len(inside) == 5  # guard, keeper, init, program and its child
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        await reached(ended.is_set)
        assert psutil.wait_procs(inside, 20)[1] == []
        await played.close()

    mounts = Path("/proc/self/mountinfo").read_text()
    with serving(answer) as url:
        asyncio.run(run(url))
    assert Path("/proc/self/mountinfo").read_text() == mounts
    [folder] = kept.iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["folder", "task"]


@pytest.mark.parametrize("victim", [1, 2])
def test_a_sandbox_that_was_killed_from_outside_is_lost(tmp_path, victim):
    async def run():
        played = agent("sleeps", "pid", sandbox=True, keep_folder=str(tmp_path))
        playing = asyncio.create_task(played.play(task()))
        await reached(lambda: [*tmp_path.glob("*/result")])
        _, *inside = psutil.Process(played._launcher.pid).children(recursive=True)
        inside[victim - 1].kill()
        with pytest.raises(AgentGone, match="ended by SIGKILL"):
            await playing
        assert psutil.wait_procs(inside, 20)[1] == []
        await played.close()

    asyncio.run(run())


def test_a_sandbox_that_is_not_made_starts_no_program(monkeypatch, tmp_path):
    for folder in ("programs", "sandbox"):
        shutil.copytree(Path(launcher.__file__).parents[1] / folder, tmp_path / folder)
    walls = tmp_path / "sandbox" / "agent_walls.py"
    monkeypatch.setattr(program, "LAUNCHER", tmp_path / "programs" / "launcher.py")
    text = walls.read_text()
    for step in ("linux.unshare()", "linux.drop_rights(", "build_root(config, "):
        assert text.count(f"        {step}") == 1
        walls.write_text(text.replace(f"        {step}", f"        absent.{step}"))
        with pytest.raises(InputError, match=r"\(the sandbox was not made: .*no program is run"):
            agent("writes", "7", sandbox=True)


def test_a_machine_without_a_sandbox_is_refused_before_anything_starts(monkeypatch):
    def refuse():
        raise InputError(sandbox.unavailable("unshare: Operation not permitted"))

    monkeypatch.setattr(program, "check_sandbox", refuse)
    monkeypatch.setattr(ProgramAgent, "_address", None)
    with pytest.raises(InputError, match=r"Operation not permitted.*without it no program is run"):
        agent("writes", "7", sandbox=True)


def test_a_script_that_the_sandbox_cannot_read_is_refused(tmp_path):
    (tmp_path / "agent.py").write_text("")
    tmp_path.chmod(0o755)
    words, options = ["python", str(tmp_path / "agent.py")], ProgramOptions(sandbox=True)
    ProgramAgent("program:x", words, options)
    (tmp_path / "agent.py").chmod(0)
    with pytest.raises(
        InputError, match=r"options\.sandbox: .* cannot run in it: Permission.*agent"
    ):
        ProgramAgent("program:x", words, options)


def test_the_folder_of_kept_folders_is_none_that_the_program_reads(tmp_path):
    (tmp_path / "agent.py").write_text("")
    options = ProgramOptions(sandbox=True, keep_folder=str(tmp_path))
    with pytest.raises(InputError, match=f"keep_folder: the program reads {tmp_path} in the"):
        ProgramAgent("program:x", ["python", str(tmp_path / "agent.py")], options)


def test_a_script_in_the_home_is_seen_alone(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home" / "me"))
    monkeypatch.setattr("tempfile.tempdir", "/scratch/tmp")
    alone = [f"{tmp_path}/home/me/a.py", f"{tmp_path}/home/a.py", "/a.py", "/scratch/tmp/a.py"]
    assert list(map(folder_of, alone)) == alone
    assert folder_of(f"{tmp_path}/home/me/code/a.py") == f"{tmp_path}/home/me/code"


def test_links_to_what_is_seen_are_seen(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a.py").write_text("")
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "b.py").symlink_to("link/a.py")
    paths = visible_paths([str(tmp_path / "b.py")], [])
    assert {f"{tmp_path}{name}" for name in ("", "/link", "/real")} <= {*paths}


def test_runs_are_found_below_what_is_seen(tmp_path):
    for run in ("one", "runs/two", "runs/.three.replaced", "runs/deep/four"):
        (tmp_path / run).mkdir(parents=True)
        (tmp_path / run / "ledger.sqlite").write_text("")
    runs = [f"{tmp_path}/{run}" for run in ("one", "runs/.three.replaced", "runs/two")]
    assert runs_in([str(tmp_path), "/usr"]) == runs


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody else")
def test_it_holds_without_root_where_user_namespaces_may_be_made(tmp_path):
    python = shutil.which("python3", path="/usr/bin")
    if python is None:
        pytest.skip("no interpreter that everybody may run")
    for folder in ("programs", "sandbox"):
        shutil.copytree(Path(launcher.__file__).parents[1] / folder, tmp_path / folder)
    shutil.copy(HERE / "hostile.py", tmp_path)
    for path in (tmp_path, *tmp_path.parents[:3], *tmp_path.rglob("*")):
        path.chmod(0o755)
    driver = (
        "import json, socket, subprocess, sys, tempfile\n"
        "address = tempfile.mkdtemp() + '/socket'\n"
        "server = socket.socket(socket.AF_UNIX); server.bind(address); server.listen()\n"
        f"program = {str(tmp_path / 'programs/launcher.py')!r}\n"
        "launcher = subprocess.Popen([sys.executable, program,\n"
        "    str(server.fileno())], stdin=subprocess.PIPE, pass_fds=[server.fileno()])\n"
        "client = socket.socket(socket.AF_UNIX); client.connect(address)\n"
        "client.sendall(sys.stdin.buffer.read())\n"
        "print(client.makefile().readline())\n"
    )
    attacks = [
        "os.setuid(0)", "call(272, 0x10000000)", "os.chroot('/tmp')", "write('/etc/hosts')",
        "os.kill(1, 9) or read('/etc/shadow')", f"write('{tmp_path}/x')",
    ]  # fmt: skip
    for attack in attacks:
        request = {
            "command": [python, str(tmp_path / "hostile.py")], "forks": False, "keep": None,
            "sandbox": {
                "paths": ["/bin", "/lib", "/lib64", "/usr", str(tmp_path)], "covers": [],
                "gateway": ["127.0.0.1", 9],
            },
            "memory_bytes": 1 << 30, "processes": 9, "output_bytes": 1 << 20, "name": "x",
            "task": {"metadata": {"ATTACK": attack}}, "environment": {},
        }  # fmt: skip
        done = subprocess.run(
            [python, "-c", driver], input=json.dumps(request) + "\n", user=65534, group=65534,
            extra_groups=[], cwd="/", capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        answer = json.loads(done.stdout)
        assert answer["code"] == 0, answer
        assert answer["result"].startswith("HELD"), (attack, answer)


def test_the_socket_of_the_policy_is_the_only_one(tmp_path):
    code = CONNECT + (
        "lines = open('/proc/net/tcp').read().splitlines()[1:]\n"
        "finish([int(line.split()[1].partition(':')[2], 16) for line in lines])\n"
    )
    assert play_code(tmp_path, code, "http://127.0.0.1:4711/v1").completion == "[4711]"
