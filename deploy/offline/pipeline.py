"""`headway pipeline`: does the stages of a file one after another, but for those that are done.

    stage ─▶ headway sft | prefer | reward-model | run ─▶ headway eval ─▶ record ─▶ page

A stage that was interrupted goes on as its command does. One that is done and has other settings
or data files now, or inputs that were made again, is refused until `--redo` names it.
"""

import json
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from deploy.config.changes import changes
from deploy.config.pipeline import Pipeline, Stage
from deploy.config.run_config import RunConfig
from deploy.errors import Interrupted, RunFailed
from deploy.preflight.models import files_read, settings_read
from deploy.runtime.session_process import LAUNCHER, PIPELINE
from deploy.runtime.signals import FORWARDED, deferred
from deploy.storage.stage_records import DoneStage, StageRecords
from headway import clock
from headway.atomic_file import atomic_file
from headway.errors import InputError
from headway.file_lock import locked
from headway.user_code import look_in


def todo(
    stages: Sequence[Stage], done: Mapping[str, DoneStage], redo: Collection[str]
) -> list[Stage]:
    """Return the stages to do, in order: those not done, and those of `redo` with what needs them.

    Raises:
        InputError: A stage is done with other settings, or its inputs are not what they were then;
            or `redo` names no stage.
    """
    names = [stage.name for stage in stages]
    if unknown := [name for name in redo if name not in names]:
        raise InputError(f"--redo {unknown[0]}: the stages are {', '.join(names)}")
    left, problems, anew = [], [], set(redo)
    for stage in stages:
        record = done.get(stage.name)
        if anew & {stage.name, *stage.needs}:
            anew.add(stage.name)
        if record is None or stage.name in anew:
            left.append(stage)
        elif difference := _difference(stage, record, done):
            problems.append(
                f"stage {stage.name!r} is done, but {difference}; --redo {stage.name} does it "
                "anew, with what is made of it"
            )
            anew.add(stage.name)
    if problems:
        raise InputError("\n".join(problems))
    return left


def _difference(stage: Stage, record: DoneStage, done: Mapping[str, DoneStage]) -> str | None:
    """Return what has changed since a stage was done."""
    if record.command != stage.command:
        return f"by headway {record.command}, not {stage.command}"
    then = settings_read(stage.command, record.settings)
    if changed := _changed(then, record.files, *_read(stage)):
        return changed
    for name in stage.needs:
        if name not in done or record.inputs.get(name) != done[name].done_at:
            return f"stage {name!r}, from which it took something, is not the same now"
    return None


def _changed(
    then: Any, files_then: Mapping[str, str], now: Any, files: Mapping[str, str]
) -> str | None:
    """Return the first setting or file that is another now; one that is gone does not count."""
    for change in changes(then, now):
        return f"with {change.name} = {change.before}, not {change.after}"
    for name, checksum in files.items():
        if (before := files_then.get(name, checksum)) != checksum:
            return f"with another {name} ({before} then, {checksum} now)"
    return None


def _read(stage: Stage) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the settings that the command of a stage reads, and fingerprints of the files."""
    return _read_by(stage.command, stage.config, stage.arguments[0])


def _read_by(command: str, config: RunConfig, recipe: str) -> tuple[dict[str, Any], dict[str, str]]:
    look_in(config.deploy.code_dir or Path(recipe).parent)  # as the command does
    try:
        return settings_read(command, config.settings()), files_read(command, config)
    finally:
        look_in(None)


class PipelineRun:
    """Carries out the stages of a pipeline.

    Args:
        pipeline: Its stages.
        again: The command that goes on with it, for messages.
        say: Prints a line.
    """

    def __init__(self, pipeline: Pipeline, again: str, say: Callable[[str], None]) -> None:
        self._pipeline, self._again, self._say = pipeline, again, say
        self._records = StageRecords(pipeline.folder)

    def run(self, redo: Collection[str] = ()) -> dict[str, DoneStage]:
        """Do what is left; return the records of all stages.

        Raises:
            InputError: The stages do not fit what is done, or another command works on them.
            RunFailed: A command failed, which has said why.
            Interrupted: The user stopped it.
        """
        stages = self._pipeline.stages
        try:
            with locked(self._pipeline.folder / ".pipeline.lock", passing=True):
                marked, done = self._records.marked(stages), self._records.done(stages)
                left = todo(stages, done, {*redo, *marked})
                self._records.mark(left, redo, lambda stage: json.dumps(_read(stage)))
                for number, stage in enumerate(stages, start=1):
                    what = f"headway {stage.command}" if stage in left else "is done"
                    self._say(f"stage {number} of {len(stages)}, {stage.name}: {what}")
                    if stage in left:
                        self._make(stage)
                    self._score(stage)
        except BlockingIOError:
            raise InputError(f"another command works on {self._pipeline.folder}") from None
        return self._records.done(stages)

    def _make(self, stage: Stage) -> None:
        """Make what a stage makes, and record what it was made with."""
        begin, (_, files) = time.monotonic(), _read(stage)
        flags = ["--resume"] if stage.command == "run" else []
        if anew := self._records.begins_anew(stage):
            flags = ["--replace"]
            if stage.command == "run":
                shutil.rmtree(stage.output, ignore_errors=True)
        if anew or not self._records.is_made(stage):
            self._command(stage, stage.command, *stage.arguments, *flags)
            if stage.command == "run":
                self._command(stage, "export", str(stage.run_folder), "--to", str(stage.output))
        done = self._records.done(self._pipeline.stages)
        self._records.write(
            stage,
            DoneStage(
                command=stage.command,
                settings=stage.config.settings(),
                inputs={name: done[name].done_at for name in stage.needs},
                done_at=clock.now(),
                seconds=time.monotonic() - begin,
                files=files,
            ),
        )

    def _score(self, stage: Stage) -> None:
        """Score the policy of a stage, unless it has been scored so."""
        record = self._records.done([stage])[stage.name]
        arguments, config = self._pipeline.scores, self._pipeline.suite
        if not stage.makes_policy or arguments is None or config is None:
            return
        settings, files = _read_by("eval", config, arguments[1])
        suite = {"samples": arguments[-1], **settings}
        if not _changed(record.suite, record.suite_files, suite, files):
            return
        scores = self._records.scores_file(stage)
        with atomic_file(scores) as file:
            self._command(stage, "eval", str(stage.output), *arguments, "--json", output=file)
        document = json.loads(scores.read_bytes())
        scored = replace(record, scores=document, suite=suite, suite_files=files)
        self._records.write(stage, scored)

    def _command(self, stage: Stage, *command: str, output: BinaryIO | None = None) -> None:
        """Run a command of Headway to its end; interrupts are passed on to it."""
        process: subprocess.Popen[bytes] | None = None
        line, environment = [*LAUNCHER, *command], {**os.environ, PIPELINE: self._again}
        interrupted = False
        while True:
            try:
                with deferred():
                    process = process or subprocess.Popen(line, stdout=output, env=environment)
                code = process.wait()
                break
            except KeyboardInterrupt:
                interrupted = True  # although the command may end as if it were not
                if process is not None:
                    process.send_signal(FORWARDED[signal.SIGTERM])
        if interrupted or code == Interrupted.exit_code:
            raise Interrupted(f"stopped by the user\ngo on with: {self._again}")
        if code:
            raise RunFailed(
                f"stage {stage.name!r}: {shlex.join(['headway', *command])} ended with exit code "
                f"{code}\nonce that is mended, go on with: {self._again}; or begin the stage anew, "
                f"with what is made of it: {self._again} --redo {stage.name}"
            )
