"""Agents that are programs: a process for each rollout, started by `launcher`."""

import asyncio
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

from pydantic import Field

from actors.errors import EnvironmentFailed
from actors.programs.agent import AgentGone, AgentResult, AgentTask, failure, read_result
from actors.programs.launcher import LONGEST_RESULT
from actors.programs.visible_paths import runs_in, visible_paths
from actors.rewards.find_reward import NoNumber
from actors.rewards.process import FROM_OUTSIDE, scrubbed
from actors.sandbox.sandbox import START_SECONDS, check_sandbox, unavailable
from headway.clean_text import register
from headway.errors import InputError
from headway.options import parse_options
from headway.recipe_section import Section
from headway.user_code import CODE_DIR, PARAGRAPH, beside_recipe, cut

LAUNCHER = Path(__file__).with_name("launcher.py")
LONGEST_LINE = 16 * LONGEST_RESULT
"""Bytes of a guard's answer, whose result is written as JSON."""
IMPORT_SECONDS = 300.0
END_SECONDS = 5.0
"""Time in which a guard ends its program, after which the rollout goes on without waiting."""
INTERPRETER = "import json, sys; print(json.dumps([sys.executable, sys.prefix, sys.base_prefix]))"
READ = "import sys; [open(name).close() for name in sys.argv[1:]]"
READ_BY_SHELL = 'for name; do : < "$name" || exit; done'
SANDBOXED = {"HOME": "/tmp", "TMPDIR": "/tmp"}
"""Variables of a program in the sandbox."""
HIDDEN = {"XDG_CACHE_HOME", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE"}
"""Variables that name what is not in the sandbox."""


class ProgramOptions(Section):
    """`actors.environment_options` of an agent that is a program."""

    python: str | None = None
    """Interpreter in place of the word `python` that COMMAND begins with, such as
    ".venv-agent/bin/python", whose libraries need not be those of Headway; None: Headway's own."""
    preload: tuple[str, ...] = ()
    """Modules that are loaded once for all rollouts, where COMMAND is `python SCRIPT …`: each
    begins as a fork. They must start no threads."""
    variables: tuple[str, ...] = ()
    """Names of environment variables that it gets besides those that are no secrets."""
    memory_gib: float = Field(default=4.0, gt=0)
    """Memory of all processes of one rollout together."""
    processes: int = Field(default=256, ge=1)
    """Most processes of one rollout."""
    output_mib: float = Field(default=64.0, gt=0)
    """Most that one rollout may print; only the end of it is kept, for errors."""
    keep_folder: str | None = None
    """Folder in which the folders of all rollouts are kept, with tasks and results; None deletes
    them."""
    sandbox: bool = False
    """Let each rollout see no files but those of the system, the interpreter and COMMAND's folders,
    write only to its own folder and /tmp, and reach nothing but the policy."""
    sandbox_folders: tuple[str, ...] = ()
    """Further folders and files that it may read in the sandbox."""


class ProgramAgent:
    """A command that plays a task in a process of its own (an `Agent`).

    Raises InputError for a command that is not found, or modules that cannot be loaded.
    """

    def __init__(self, name: str, command: list[str], options: ProgramOptions) -> None:
        self._name, self._options = name, options
        setting = f"actors.environment = {name!r}"
        if not command:
            raise InputError(f"{setting} has no command; give one, as program:python agent.py")
        self._python = program_path(
            options.python or sys.executable, "actors.environment_options.python"
        )
        is_python = command[0] == "python"
        program = self._python if is_python else program_path(command[0], setting)
        files = [beside_recipe(word) for word in command[1:]]
        named = [str(file.absolute()) if file.is_file() else None for file in files]
        words = zip(named, command[1:], strict=True)
        self._command = [program, *(file or word for file, word in words)]
        self._forks = bool(options.preload)
        if self._forks and not (is_python and any(named[:1])):
            raise InputError(
                f"actors.environment_options.preload: {setting} is not of the form "
                "program:python SCRIPT …, with a file as SCRIPT"
            )
        if options.python is not None and not is_python:
            raise InputError(
                f"actors.environment_options.python has no effect: {setting} does not begin with "
                "the word python"
            )
        if options.sandbox_folders and not options.sandbox:
            raise InputError(
                "actors.environment_options.sandbox_folders has no effect without sandbox = true"
            )
        register(options.variables)
        self._environment = {CODE_DIR: os.getcwd(), **scrubbed(os.environ, options.variables)}
        self._check_modules()
        self._folder: TemporaryDirectory[str] | None = None
        self._launcher: subprocess.Popen[bytes] | None = None
        self._visible: list[str] = []
        """Paths that are read in the sandbox, if it is asked for."""
        if options.sandbox:
            self._check_sandbox([file for file in named if file], is_python=is_python)

    def _check_modules(self) -> None:
        """Load the modules to be preloaded once, in a process that ends."""
        if self._forks:
            words = ["-c", f"import {', '.join(self._options.preload)}"]
            failing = f"actors.environment_options.preload: {self._python} cannot load them"
            printed_by(self._python, words, self._environment, IMPORT_SECONDS, failing=failing)

    def _check_sandbox(self, files: list[str], *, is_python: bool) -> None:
        """Find what the program may read; raise InputError unless all of it is in the sandbox."""
        check_sandbox()
        setting = "actors.environment_options.sandbox"
        further = [str(beside_recipe(path).absolute()) for path in self._options.sandbox_folders]
        for path in further:
            if not os.path.exists(path):
                raise InputError(f"{setting}_folders: there is neither a folder nor a file {path}")
        if is_python:
            failing = f"{setting}: {self._python} does not run"
            words, seconds = ["-c", INTERPRETER], IMPORT_SECONDS
            printed = printed_by(self._python, words, self._environment, seconds, failing=failing)
            self._command[0], *prefixes = json.loads(printed.splitlines()[-1])
            reading = [self._command[0], "-c", READ]
            self._visible = visible_paths(files, [self._command[0], *prefixes, *further])
        else:
            files, reading = [self._command[0], *files], ["/bin/sh", "-c", READ_BY_SHELL, "sh"]
            self._visible = visible_paths(files, further)
        if (keep := self._keep()) and os.path.realpath(keep) in self._visible:
            raise InputError(
                f"actors.environment_options.keep_folder: the program reads {keep} in the sandbox; "
                "give another folder, such as one in it"
            )
        answer = self._run_now([*reading, *files])
        problem = answer["stderr"].strip().rpartition("\n")[2]
        if answer["code"] == -signal.SIGKILL:
            raise InputError(unavailable(problem))
        if answer["code"]:
            raise InputError(f"{setting}: {self._command[0]} cannot run in it: {cut(problem)}")

    def _run_now(self, command: list[str]) -> dict[str, Any]:
        """Run a command in the sandbox; return the answer of its guard."""
        task = AgentTask(
            prompt_id="sandbox", prompt="", messages=(), answer=None, metadata={},
            base_url="http://127.0.0.1:9/v1", api_key="",
        )  # fmt: skip
        request = {**self._request(task), "command": command, "forks": False, "keep": None}
        try:
            with socket.socket(socket.AF_UNIX) as asking:
                asking.settimeout(START_SECONDS)
                asking.connect(self._address(()))
                asking.sendall(json.dumps(request).encode() + b"\n")
                answer: dict[str, Any] = json.loads(asking.makefile("rb").readline())
        except (OSError, ValueError) as error:
            raise InputError(unavailable(f"no answer of its guard: {error}")) from None
        finally:
            self._close()
        return answer

    async def play(self, task: AgentTask) -> AgentResult:
        """See `Agent`."""
        request = await asyncio.to_thread(self._request, task)  # it looks for runs on the disk
        answer = await self._ask(request, task)
        code, stopped = answer["code"], answer["stopped"]
        if stopped is None and code == 0:
            try:
                text = answer["result"]
                return AgentResult() if text is None else read_result(text, LONGEST_RESULT)
            except NoNumber as error:
                raise EnvironmentFailed(failure(self._name, task, str(error))) from None
        how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        problem = f"reached {stopped}" if stopped else f"ended by {how}"
        if printed := answer["stderr"].strip():
            problem += f"; the end of its standard error:\n{cut(printed)}\n"
        lost = code in FROM_OUTSIDE and stopped is None
        raise (AgentGone if lost else EnvironmentFailed)(failure(self._name, task, problem))

    async def close(self) -> None:
        """End the launcher, and so every program."""
        self._close()

    def _close(self) -> None:
        self._end()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _end(self) -> None:
        if self._launcher is not None:
            self._launcher.kill()
            self._launcher.communicate()
            self._launcher = None

    def _keep(self) -> str | None:
        """Return the folder of the folders that are kept, which is made if need be."""
        if (keep := self._options.keep_folder) is None:
            return None
        path = Path(keep).expanduser().absolute()
        path.mkdir(parents=True, exist_ok=True)
        return str(path)

    def _request(self, task: AgentTask) -> dict[str, Any]:
        """Return what the guard needs to know, the task and the variables included."""
        options, environment, sandbox = self._options, self._environment, None
        if options.sandbox:
            url = urlsplit(task.base_url)
            environment = {**environment, **SANDBOXED}
            for name in HIDDEN.intersection(environment):
                del environment[name]
            sandbox = {
                "paths": self._visible,
                "covers": runs_in(self._visible),
                "gateway": [url.hostname, url.port],
            }
        return {
            "command": self._command,
            "forks": self._forks,
            "keep": self._keep(),
            "sandbox": sandbox,
            "memory_bytes": int(options.memory_gib * 2**30),
            "processes": options.processes,
            "output_bytes": int(options.output_mib * 2**20),
            "name": re.sub(r"[^\w.-]+", "-", f"headway-{task.prompt_id[:100]}-", flags=re.A),
            "task": task.described(),
            "environment": {
                **environment,
                "OPENAI_BASE_URL": task.base_url,
                "OPENAI_API_KEY": task.api_key,
                "ANTHROPIC_BASE_URL": task.base_url.removesuffix("/v1"),
                "ANTHROPIC_API_KEY": task.api_key,
                "HEADWAY_MODEL": task.model,
            },
        }

    def _address(self, modules: Sequence[str]) -> str:
        """Return the address of the launcher, which is started with modules if it does not run."""
        if self._folder is None:
            self._folder = TemporaryDirectory(prefix="headway-launcher-")
        address = f"{self._folder.name}/socket"
        if self._launcher is None or self._launcher.poll() is not None:
            self._end()
            with suppress(FileNotFoundError):
                os.unlink(address)
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(address)
                server.listen(1024)
                number = server.fileno()
                python = self._python if modules else sys.executable
                with open(f"{self._folder.name}/errors", "wb") as errors:
                    self._launcher = subprocess.Popen(
                        [python, str(LAUNCHER), str(number), *modules],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.DEVNULL,
                        stderr=errors,
                        env=self._environment,
                        pass_fds=[number],
                        start_new_session=True,
                    )
        return address

    async def _ask(self, request: dict[str, Any], task: AgentTask) -> dict[str, Any]:
        """Have a program run; return the answer of its guard, or end it when cancelled."""
        try:
            address = self._address(self._options.preload)
            reader, writer = await asyncio.open_unix_connection(address, limit=LONGEST_LINE)
        except OSError as error:
            raise AgentGone(failure(self._name, task, f"was not started: {error}")) from error
        try:
            writer.write(json.dumps(request).encode() + b"\n")
            line = await reader.readline()
        except OSError:
            line = b""
        except asyncio.CancelledError:
            writer.write_eof()
            with suppress(OSError, TimeoutError):
                await asyncio.wait_for(reader.read(), END_SECONDS)
            raise
        finally:
            writer.close()
        if not line.endswith(b"\n"):
            errors = Path(address).with_name("errors").read_text(errors="replace")
            printed = cut(errors[-PARAGRAPH:].strip())
            raise AgentGone(failure(self._name, task, f"lost its launcher; {printed}"))
        answer: dict[str, Any] = json.loads(line)
        return answer


def printed_by(
    python: str, words: list[str], environment: Mapping[str, str], seconds: float, *, failing: str
) -> str:
    """Return what an interpreter prints; raise InputError, which begins so, if it fails."""
    try:
        done = subprocess.run(
            [python, *words],
            capture_output=True, text=True, check=False, env=environment, timeout=seconds,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise InputError(f"{failing}: it took longer than {seconds:g} s") from None
    if done.returncode:
        problem = cut(done.stderr.strip().rpartition("\n")[2], PARAGRAPH)
        raise InputError(f"{failing}: {problem}")
    return done.stdout


def program_path(program: str, setting: str) -> str:
    """Return the path of a program; raise InputError if there is none."""
    path = beside_recipe(program)
    is_file = os.sep in program and path.is_file()
    named = str(path.absolute()) if is_file else shutil.which(program)
    if named is None or not os.access(named, os.X_OK):
        raise InputError(
            f"{setting}: there is no program {program!r}, neither on PATH nor in {Path.cwd()}"
        )
    return named


def load_program(name: str, options: dict[str, Any]) -> ProgramAgent:
    """Return the agent of `program:COMMAND`; raise InputError for what is missing or wrong."""
    chosen = parse_options(ProgramOptions, "actors.environment_options", options)
    try:
        command = shlex.split(name.partition(":")[2])
    except ValueError as error:
        raise InputError(f"actors.environment = {name!r}: {error}") from None
    return ProgramAgent(name, command, chosen)
