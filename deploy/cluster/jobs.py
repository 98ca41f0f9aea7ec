"""`headway submit`, `attach` and `cancel`: a run as a job of a Ray cluster.

    recipe, the user's own modules ─▶ working folder of the job ─▶ `headway run` on the head node

Headway itself is installed on the nodes; versions are compared before anything starts
(`deploy.cluster.versions`), and so is what the nodes have (`deploy.cluster.placement`). The job
goes on when the terminal that submitted it is closed. Leaves out data and models: their paths are
the cluster's.
"""

import asyncio
import os
import re
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from deploy.cluster.versions import VARIABLE, of_submitter
from deploy.config.run_config import RunConfig
from deploy.errors import InputError, RunFailed

RECIPE = "recipe.toml"
DOTTED = re.compile(r"([A-Za-z_]\w*(?:\.\w+)*):[A-Za-z_]\w*")
"""A name of the user's own, "module:attribute"."""
SAYS_WHICH = ("name", "deploy.runs_dir")
"""Settings by which a run is found that was submitted before."""
STOPPED = 130
"""Exit code of a job that was cancelled, as of a run that was interrupted."""
GRACE_SECONDS = 15
"""Over deploy.checkpoint_seconds, until Ray kills a cancelled job."""
ENDED = ("SUCCEEDED", "FAILED", "STOPPED")
PAUSES_SECONDS = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0)
"""Before another try, by the number of tries that brought nothing; so many are made."""
IGNORED = ("__pycache__", ".git", ".venv", "runs")


class Jobs:
    """The jobs of one cluster.

    Args:
        address: Of its dashboard, as in "http://HEAD:8265".

    Raises:
        InputError: No cluster answers there, or it refuses the token.
    """

    def __init__(self, address: str) -> None:
        _use_token()
        from ray.job_submission import JobSubmissionClient

        self._address = address
        try:
            self._client = JobSubmissionClient(address)
        except Exception as error:  # noqa: BLE001  (Ray raises what it likes)
            raise InputError(
                f"--address {address}: no cluster takes jobs there: {_first(error)}"
            ) from None

    def submit(
        self,
        config: RunConfig,
        command: str,
        files: Sequence[Path],
        recipe: Path | None,
    ) -> str:
        """Starts a run on the cluster.

        Args:
            config: Its recipe.
            command: As on the head node, where `files` lie in the working folder.
            files: Modules that are sent along.
            recipe: Its file, unless it is a shipped one.

        Returns:
            The id of the job.
        """
        from ray import __version__

        with TemporaryDirectory(prefix="headway-submit-") as folder:
            pack(files, recipe, Path(folder))
            environment = {
                "working_dir": folder,
                "env_vars": {
                    VARIABLE: of_submitter(),
                    "RAY_JOB_STOP_WAIT_TIME_S": str(
                        int(config.deploy.checkpoint_seconds) + GRACE_SECONDS
                    ),
                },
            }
            try:
                job: str = self._client.submit_job(
                    entrypoint=command,
                    submission_id=f"{config.name}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}",
                    runtime_env=environment,
                    metadata={
                        "run": config.name,
                        "steps": str(config.steps),
                        "submitted with ray": __version__,
                    },
                )
            except RuntimeError as error:
                raise InputError(
                    f"the cluster at {self._address} refuses the job: {_first(error)}"
                ) from None
        return job

    def follow(self, job: str, echo: Callable[[str], Any]) -> int:
        """Passes on the log of a job until it ends, and returns its exit code.

        Raises:
            InputError: There is no such job.
            RunFailed: The connection breaks again and again.
        """
        self._status(job)
        written = failures = 0
        while failures < len(PAUSES_SECONDS):
            seen, before, broken = 0, written, "it ended early"
            try:
                for text in _lines(self._client, job):
                    seen += len(text)
                    if seen > written:
                        echo(text[len(text) - (seen - written) :])
                        written = seen
            except _LogBrokeError as error:
                broken = str(error)
            if self._status(job) in ENDED:
                return self._exit_code(job)
            time.sleep(PAUSES_SECONDS[failures])
            failures = 0 if written > before else failures + 1
        raise RunFailed(
            f"the log of job {job} broke off {failures} times ({broken}); {self._going_on(job)}"
        )

    def cancel(self, job: str) -> str:
        """Stops a job as Ctrl-C stops a run: it saves a checkpoint first. Returns its last status.

        Raises:
            InputError: There is no such job.
        """
        status = self._status(job)
        if status not in ENDED:
            self._ask(job, lambda: self._client.stop_job(job))
        deadline = time.monotonic() + 600.0
        while (status := self._status(job)) not in ENDED:
            if time.monotonic() > deadline:
                raise RunFailed(f"job {job} is still {status} 10 minutes after it was stopped")
            time.sleep(0.5)
        return status

    def _status(self, job: str) -> str:
        try:
            return str(self._ask(job, lambda: self._client.get_job_status(job)).value)
        except RuntimeError as error:
            found = ", ".join(str(each.submission_id) for each in self._client.list_jobs())
            raise InputError(
                f"no job {job!r} on the cluster at {self._address} ({_first(error)}); there are "
                f"{found or 'none'}"
            ) from None

    def _exit_code(self, job: str) -> int:
        info = self._ask(job, lambda: self._client.get_job_info(job))
        if info.status.value == "STOPPED":
            return STOPPED
        if info.driver_exit_code is not None:
            return int(info.driver_exit_code)
        if info.status.value == "SUCCEEDED":
            return 0
        raise RunFailed(f"job {job} failed before it began: {info.message}")

    def _ask(self, job: str, question: Callable[[], Any]) -> Any:
        """An answer of the cluster about a job; a connection that breaks is tried again."""
        for pause in PAUSES_SECONDS:
            try:
                return question()
            except OSError as error:
                broken = _first(error)
            time.sleep(pause)
        raise RunFailed(
            f"the cluster at {self._address} does not answer ({broken}); {self._going_on(job)}"
        )

    def _going_on(self, job: str) -> str:
        return f"the job may go on: headway attach {job} --address {self._address}"


def command_of(
    recipe: str, overrides: Sequence[str], *, replace: bool, before: Sequence[str] = ()
) -> str:
    """What a job of a new run does; a recipe that is a file lies in its working folder.

    Args:
        recipe: As the user named it.
        overrides: Settings.
        replace: Whether what has the same name is deleted first.
        before: Commands that make what the run begins with, "sft" and "reward-model".

    Returns:
        Commands for a shell, each if the one before it has ended well.
    """
    name = RECIPE if Path(recipe).exists() else recipe
    settings = [part for override in overrides for part in ("--set", override)]
    more = ["--set", "deploy.ray_address=auto", *(["--replace"] if replace else [])]
    commands = [["headway", each, name, *settings, *more] for each in (*before, "run")]
    return " && ".join(shlex.join(command) for command in commands)


def resumption(
    config: RunConfig, overrides: Sequence[str], *, replace: bool, before: Sequence[str] = ()
) -> str:
    """What a job does that goes on with a run which was submitted before.

    Raises:
        InputError: It was asked for what a resumed run does not do: its recipe is in its folder.
    """
    for option in (*(["replace"] if replace else []), *before):
        raise InputError(f"--resume goes on with a run, and --{option} begins anew; choose one")
    for override in overrides:
        if override.partition("=")[0].strip() not in SAYS_WHICH:
            raise InputError(
                f"--resume goes on with the recipe in the run's folder, so --set {override} would "
                f"change nothing; allowed are {' and '.join(SAYS_WHICH)}, which say what run it is"
            )
    runs_dir = str(config.deploy.runs_dir)
    return shlex.join(["headway", "resume", config.name, "--runs-dir", runs_dir])


def files_of(config: RunConfig, modules: Sequence[str], folder: Path) -> list[Path]:
    """The user's own modules: those that the recipe names and `folder` has, and further ones.

    Raises:
        InputError: A further one is not in the folder.
    """
    named = {match[1] for text in _texts(config.model_dump()) if (match := DOTTED.fullmatch(text))}
    found = [path for name in sorted(named) if (path := _module(name, folder)) is not None]
    for name in modules:
        path = _module(name, folder)
        if path is None:
            raise InputError(f"--module {name}: neither {name}.py nor a folder {name} in {folder}")
        found.append(path)
    return list(dict.fromkeys(found))


def pack(files: Sequence[Path], recipe: Path | None, folder: Path) -> None:
    """Copies modules and the recipe, which is RECIPE there whatever its name was, into a folder."""
    for path in files:
        if path.is_dir():
            shutil.copytree(path, folder / path.name, ignore=shutil.ignore_patterns(*IGNORED))
        else:
            shutil.copy(path, folder)
    if recipe is not None:
        shutil.copy(recipe, folder / RECIPE)


def check(document: Mapping[str, Any]) -> None:
    """Refuses what would be lost with the job.

    Args:
        document: The tables of a valid recipe, as they are written.

    Raises:
        InputError: The run's folder would be in the job's working folder, or nobody knows where.
    """
    runs_dir = document.get("deploy", {}).get("runs_dir", "runs")
    if runs_dir.startswith("~"):
        raise InputError(
            f'deploy.runs_dir = "{runs_dir}" is in the home of whoever runs the job; name a folder '
            'of the head node from its root, as in --set deploy.runs_dir="/data/runs"'
        )
    if not Path(runs_dir).is_absolute():
        raise InputError(
            f'deploy.runs_dir = "{runs_dir}" is relative, and the working folder of a job is '
            'deleted; name a folder of the head node, as in --set deploy.runs_dir="/data/runs"'
        )


def _use_token() -> None:
    """Has Ray's client send the user's token where there is one, as `ray.init` does by itself."""
    named = os.environ.get("RAY_AUTH_TOKEN_PATH", Path.home() / ".ray" / "auth_token")
    if "RAY_AUTH_TOKEN" in os.environ or Path(named).exists():
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def _module(name: str, folder: Path) -> Path | None:
    """What has to be sent of a folder for a module, "package.part", to be imported from it."""
    top, *parts = name.split(".")
    package, file = folder / top, folder / f"{top}.py"
    inner = package.joinpath(*parts)
    nested = bool(parts) and (inner.with_suffix(".py").is_file() or any(inner.glob("*.py")))
    if any(package.glob("*.py")) or nested:
        return package
    return file if file.is_file() else None


def _texts(value: Any) -> Iterator[str]:
    """Every text in nested tables and lists."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _texts(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _texts(each)


class _LogBrokeError(Exception):
    """The connection, or Ray, broke a log off; says why."""


def _lines(client: Any, job: str) -> Iterator[str]:
    """The log of a job from its beginning, as it comes.

    Raises:
        _LogBrokeError: Instead of whatever Ray's client passes on from below.
    """
    loop = asyncio.new_event_loop()
    log = client.tail_job_logs(job)
    try:
        while True:
            try:
                text = loop.run_until_complete(anext(log))
            except StopAsyncIteration:
                return
            except Exception as error:  # noqa: BLE001
                raise _LogBrokeError(_first(error)) from None
            yield text
    finally:
        loop.run_until_complete(_close(log))
        loop.close()


async def _close(log: Any) -> None:
    """Closes a log; the wait for its next text, which an interrupt leaves behind, ends first."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    await asyncio.gather(log.aclose(), return_exceptions=True)


def _first(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
