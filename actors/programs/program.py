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
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pydantic import Field, field_validator

from actors.errors import EnvironmentFailed
from actors.programs.agent import AgentGone, AgentResult, AgentTask, failure, read_result
from actors.programs.launcher import LONGEST_RESULT
from actors.rewards.find_reward import NoNumber
from actors.rewards.process import FROM_OUTSIDE, scrubbed
from headway.clean_text import register
from headway.errors import InputError
from headway.options import parse_options
from headway.recipe_section import Section
from headway.user_code import PARAGRAPH, beside_recipe, cut

LAUNCHER = Path(__file__).with_name("launcher.py")
LONGEST_LINE = 16 * LONGEST_RESULT
"""Bytes of a guard's answer, whose result is written as JSON."""
IMPORT_SECONDS = 300.0
END_SECONDS = 5.0
"""Time in which a guard ends its program, after which the rollout goes on without waiting."""


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

    @field_validator("sandbox")
    @classmethod
    def _has_no_sandbox(cls, value: bool) -> bool:
        if value:
            raise ValueError(
                "the sandbox of programs that models write has no network, not even sockets of "
                "this machine, so that an agent in it could not reach the policy; let COMMAND "
                "start a container that shares the network of this machine instead"
            )
        return value


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
        register(options.variables)
        self._environment = scrubbed(os.environ, options.variables)
        self._check_modules()
        self._folder: TemporaryDirectory[str] | None = None
        self._launcher: subprocess.Popen[bytes] | None = None

    def _check_modules(self) -> None:
        """Load the modules to be preloaded once, in a process that ends."""
        if self._forks:
            words = ["-c", f"import {', '.join(self._options.preload)}"]
            failing = f"actors.environment_options.preload: {self._python} cannot load them"
            printed_by(self._python, words, self._environment, IMPORT_SECONDS, failing=failing)

    async def play(self, task: AgentTask) -> AgentResult:
        """See `Agent`."""
        answer = await self._ask(self._request(task), task)
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
        self._end()
        if self._folder is not None:
            self._folder.cleanup()

    def _end(self) -> None:
        if self._launcher is not None:
            self._launcher.kill()
            self._launcher.communicate()

    def _request(self, task: AgentTask) -> dict[str, Any]:
        """Return what the guard needs to know, the task and the variables included."""
        options = self._options
        keep = options.keep_folder and str(Path(options.keep_folder).expanduser().absolute())
        if keep:
            os.makedirs(keep, exist_ok=True)
        return {
            "command": self._command,
            "forks": self._forks,
            "keep": keep,
            "memory_bytes": int(options.memory_gib * 2**30),
            "processes": options.processes,
            "output_bytes": int(options.output_mib * 2**20),
            "name": re.sub(r"[^\w.-]+", "-", f"headway-{task.prompt_id[:100]}-", flags=re.A),
            "task": task.described(),
            "environment": {
                **self._environment,
                "OPENAI_BASE_URL": task.base_url,
                "OPENAI_API_KEY": task.api_key,
                "ANTHROPIC_BASE_URL": task.base_url.removesuffix("/v1"),
                "ANTHROPIC_API_KEY": task.api_key,
                "HEADWAY_MODEL": task.model,
            },
        }

    def _address(self) -> str:
        """Return the address of the launcher, which is started if it does not run."""
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
                python = self._python if self._forks else sys.executable
                with open(f"{self._folder.name}/errors", "wb") as errors:
                    self._launcher = subprocess.Popen(
                        [python, str(LAUNCHER), str(number), *self._options.preload],
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
            address = self._address()
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
