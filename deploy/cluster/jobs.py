"""`headway submit`, `attach` and `cancel`: a run as a job of a Ray cluster.

recipe, the user's own modules ─▶ working folder of the job ─▶ `headway run` on the head node
"""

import asyncio
import logging
import os
import re
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from deploy.cluster.versions import VARIABLE, of_submitter
from deploy.config.run_config import RunConfig
from deploy.errors import Interrupted, RunFailed
from headway.daemon_thread import run_in_daemon_thread
from headway.errors import InputError, first_line

log = logging.getLogger(__name__)
RECIPE = "recipe.toml"
DOTTED = re.compile(r'"([A-Za-z_]\w*(?:\.\w+)*):[A-Za-z_]\w*"')
"""A name in the user's own code, "module:attribute", as JSON has it."""
GRACE_SECONDS = 300
"""Time beyond deploy.checkpoint_seconds after which Ray kills a cancelled job, if it has not ended:
a run allows twice the time of its last checkpoint, which is not known here."""
ENDED = ("SUCCEEDED", "FAILED", "STOPPED")
PAUSES_SECONDS = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0)
"""Waits between attempts that brought nothing; the number of waits limits the attempts."""
ANSWER_SECONDS = 60.0
"""Deadline of one answer of the cluster, to which Ray's client sets none."""
PASSING_STATUS = (408, 425, 429, 500, 502, 503, 504)
"""HTTP answers of a server, or of a proxy before it, that is starting, busy or being replaced."""
HTTP_STATUS = re.compile(r"status code (\d{3})")
IGNORED = ("__pycache__", ".git", ".venv", "runs")


class Jobs:
    """The jobs of one cluster, by the address of its dashboard, as in "http://HEAD:8265".

    Errors that may pass (`is_passing`) are tried again for PAUSES_SECONDS, others are final. Raises
    InputError if no cluster answers there, or it refuses the token.
    """

    def __init__(
        self,
        address: str,
        sleep: Callable[[float], None] = time.sleep,
        *,
        answer_seconds: float = ANSWER_SECONDS,
    ) -> None:
        _use_token()
        from ray.job_submission import JobSubmissionClient

        self._address, self._sleep, self._answer_seconds = address, sleep, answer_seconds
        try:
            self._client = self._attempts(lambda: JobSubmissionClient(address))
        except Exception as error:  # noqa: BLE001  (of any type)
            raise InputError(
                f"--address {address}: no cluster takes jobs there: {_reason(error)}"
            ) from None

    def submit(
        self, config: RunConfig, command: str, files: Sequence[Path], recipe: Path | None
    ) -> str:
        """Start a run by a shell command on the head node, and return the id of its job.

        The working folder of the job gets `files`, and `recipe` unless it is a shipped one.
        """
        from ray import __version__

        with TemporaryDirectory(prefix="headway-submit-") as folder:
            pack(files, recipe, Path(folder))
            grace = str(int(config.deploy.checkpoint_seconds) + GRACE_SECONDS)
            variables = {VARIABLE: of_submitter(), "RAY_JOB_STOP_WAIT_TIME_S": grace}
            submission: dict[str, Any] = {
                "entrypoint": command,
                "submission_id": f"{config.name}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}",
                "runtime_env": {"working_dir": folder, "env_vars": variables},
                "metadata": {
                    "run": config.name,
                    "folder": str(config.deploy.runs_dir / config.name),
                    "steps": str(config.steps),
                    "submitted with ray": __version__,
                },
            }
            send = partial(self._send, submission, count())
            try:
                return str(self._ask(submission["submission_id"], send))
            except RuntimeError as error:
                raise InputError(
                    f"the cluster at {self._address} refuses the job: {_reason(error)}"
                ) from None

    def _send(self, submission: Mapping[str, Any], attempts: Iterator[int]) -> str:
        """Submit a job and return its id, also if an attempt whose answer was lost did so."""
        is_first = next(attempts) == 0
        try:
            return str(self._client.submit_job(**submission))
        except RuntimeError as error:
            if is_first or "already exists" not in str(error):
                raise
            job: str = submission["submission_id"]
            if self._client.get_job_info(job).entrypoint != submission["entrypoint"]:
                raise
            return job

    def live_job(self, config: RunConfig) -> str | None:
        """Return the job of a recipe's run that has not ended; None if there is none."""
        folder = str(config.deploy.runs_dir / config.name)
        for job in self._ask(None, lambda: self._client.list_jobs()):
            if (job.metadata or {}).get("folder") == folder and job.status.value not in ENDED:
                return str(job.submission_id)
        return None

    def follow(self, job: str, echo: Callable[[str], Any]) -> int:
        """Pass on the log of a job until it ends, and return its exit code.

        Raises InputError without such a job, and RunFailed if the connection broke too often.
        """
        self._status(job)
        before = failures = 0
        while failures < len(PAUSES_SECONDS):
            written, broken = asyncio.run(self._echo_log(job, echo, before))
            if self._status(job) in ENDED:
                return self._exit_code(job)
            self._sleep(PAUSES_SECONDS[failures])
            failures = 0 if written > before else failures + 1
            before = written
        raise RunFailed(
            f"the log of job {job} broke off {failures} times ({broken}); {self._hint(job)}"
        )

    async def _echo_log(
        self, job: str, echo: Callable[[str], Any], written: int
    ) -> tuple[int, str]:
        """Pass on a log from a character on, as it grows; return where, and why, it ended."""
        seen, log = 0, self._client.tail_job_logs(job)
        while True:
            try:
                text = await anext(log)
            except StopAsyncIteration:
                return written, "it ended early"
            except Exception as error:  # noqa: BLE001  (of any type)
                return written, first_line(error)
            seen += len(text)
            if seen > written:
                echo(text[len(text) - (seen - written) :])
                written = seen

    def cancel(self, job: str) -> str:
        """Stop a job as Ctrl-C stops a run, after a checkpoint, and return its last status.

        Raises InputError without such a job.
        """
        if self._status(job) not in ENDED:
            self._ask(job, lambda: self._client.stop_job(job))
        deadline = time.monotonic() + 600.0
        while (status := self._status(job)) not in ENDED:
            if time.monotonic() > deadline:
                raise RunFailed(f"job {job} is still {status} 10 minutes after it was stopped")
            self._sleep(0.5)
        return status

    def _status(self, job: str) -> str:
        try:
            return str(self._ask(job, lambda: self._client.get_job_status(job)).value)
        except RuntimeError as error:
            jobs = self._ask(job, lambda: self._client.list_jobs())
            known = ", ".join(str(other.submission_id) for other in jobs)
            raise InputError(
                f"no job {job!r} on the cluster at {self._address} ({_reason(error)}); there "
                f"are {known or 'none'}"
            ) from None

    def _exit_code(self, job: str) -> int:
        info = self._ask(job, lambda: self._client.get_job_info(job))
        if info.status.value == "STOPPED":
            return Interrupted.exit_code
        if info.driver_exit_code is not None:
            return int(info.driver_exit_code)
        if info.status.value == "SUCCEEDED":
            return 0
        raise RunFailed(f"job {job} failed before it began: {info.message}")

    def _ask(self, job: str | None, question: Callable[[], Any]) -> Any:
        """Return the cluster's answer about a job; RunFailed if none comes."""
        try:
            return self._attempts(question)
        except Exception as error:
            if not is_passing(error):
                raise
            hint = f"; {self._hint(job)}" if job else ""
            raise RunFailed(
                f"the cluster at {self._address} does not answer ({_reason(error)}){hint}"
            ) from None

    def _attempts(self, question: Callable[[], Any]) -> Any:
        """Return the cluster's answer, trying again after passing errors, or raise the last."""
        seconds = self._answer_seconds

        async def answer() -> Any:
            try:
                return await asyncio.wait_for(run_in_daemon_thread(question), seconds)
            except TimeoutError as error:
                raise TimeoutError(str(error) or f"no answer in {seconds:g} s") from None

        for pause in PAUSES_SECONDS:
            try:
                return asyncio.run(answer())
            except Exception as error:
                if not is_passing(error):
                    raise
                log.warning("%s: %s; trying again", self._address, _reason(error))
            self._sleep(pause)
        return asyncio.run(answer())

    def _hint(self, job: str) -> str:
        return f"the job may go on: headway attach {job} --address {self._address}"


def is_passing(error: Exception) -> bool:
    """Return True if another attempt may succeed: no answer, a broken connection, a busy server."""
    from requests import exceptions as http

    if isinstance(error.__context__, http.SSLError):  # Ray's client names no cause
        return False
    if isinstance(error, http.HTTPError) and error.response is not None:
        return error.response.status_code in PASSING_STATUS
    if isinstance(error, RuntimeError):
        status = HTTP_STATUS.search(first_line(error))
        return status is not None and int(status[1]) in PASSING_STATUS
    broken = (ConnectionError, TimeoutError, http.ConnectionError, http.Timeout)
    more = (http.ChunkedEncodingError, http.ContentDecodingError)
    passes = isinstance(error, (*broken, *more))
    return passes and not isinstance(error, (http.SSLError, ValueError))


def _reason(error: Exception) -> str:
    """Return an error's first line; of a traceback that the cluster sent, its last line."""
    lines = str(error).strip().splitlines()
    return lines[-1] if lines and "Traceback (most recent" in lines[0] else first_line(error)


def command_of(
    recipe: str,
    overrides: Sequence[str],
    *,
    replace: bool = False,
    resume: bool = False,
    before: Sequence[str] = (),
) -> str:
    """Return the shell command of a job that trains a recipe, after the commands in `before`.

    A recipe that is a file is RECIPE in the job's working folder. Raises InputError for a command
    that would resume a run and begin it anew.
    """
    if resume and (anew := [*(["replace"] if replace else []), *before]):
        raise InputError(f"--resume goes on with a run, and --{anew[0]} begins anew; choose one")
    name = RECIPE if Path(recipe).exists() else recipe
    settings = [part for override in overrides for part in ("--set", override)]
    options = [*(["--replace"] if replace else []), *(["--resume"] if resume else [])]
    always = ["--set", "deploy.ray_address=auto", *options]
    commands = [["headway", verb, name, *settings, *always] for verb in (*before, "run")]
    return " && ".join(shlex.join(command) for command in commands)


def files_of(config: RunConfig, modules: Sequence[str], folder: Path) -> list[Path]:
    """Return the user's own modules: those that the recipe names and `folder` has, and `modules`.

    Raises InputError if one of `modules` is not in the folder.
    """
    named = set(DOTTED.findall(config.model_dump_json()))
    files = [path for name in sorted(named) if (path := _module(name, folder)) is not None]
    for name in modules:
        path = _module(name, folder)
        if path is None:
            raise InputError(f"--module {name}: neither {name}.py nor a folder {name} in {folder}")
        files.append(path)
    return list(dict.fromkeys(files))


def pack(files: Sequence[Path], recipe: Path | None, folder: Path) -> None:
    """Copy modules and the recipe, which is renamed to RECIPE, into a folder."""
    for path in files:
        if path.is_dir():
            shutil.copytree(path, folder / path.name, ignore=shutil.ignore_patterns(*IGNORED))
        else:
            shutil.copy(path, folder)
    if recipe is not None:
        shutil.copy(recipe, folder / RECIPE)


def check(document: Mapping[str, Any]) -> None:
    """Refuse a recipe, as it is written, whose run would be lost with the job.

    Raises InputError if deploy.runs_dir is relative, or in the home of an unknown user.
    """
    runs_dir = document.get("deploy", {}).get("runs_dir", "runs")
    if Path(runs_dir).is_absolute():
        return
    where = "relative, and the working folder of a job is deleted"
    if runs_dir.startswith("~"):
        where = "in the home of whoever runs the job"
    raise InputError(
        f'deploy.runs_dir = "{runs_dir}" is {where}; name a folder of the head node from its root, '
        'as in --set deploy.runs_dir="/data/runs"'
    )


def _use_token() -> None:
    """Make Ray's client send the user's token if there is one, as `ray.init` does by itself."""
    path = os.environ.get("RAY_AUTH_TOKEN_PATH", Path.home() / ".ray" / "auth_token")
    if "RAY_AUTH_TOKEN" in os.environ or Path(path).exists():
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def _module(name: str, folder: Path) -> Path | None:
    """Return the file or package of a folder that contains a module such as "package.part"."""
    top, *parts = name.split(".")
    package, file = folder / top, folder / f"{top}.py"
    inner = package.joinpath(*parts)
    nested = bool(parts) and (inner.with_suffix(".py").is_file() or any(inner.glob("*.py")))
    if any(package.glob("*.py")) or nested:
        return package
    return file if file.is_file() else None
