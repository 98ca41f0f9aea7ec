"""`headway pipeline`: does the stages of a file one after another, but for those that are done.

    stage ─▶ headway sft | prefer | reward-model | run ─▶ headway eval ─▶ record ─▶ page

A stage that was interrupted goes on as its command does. One that is done and has other settings
now, or inputs that were made again, is refused until `--redo` names it.
"""

import json
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import BinaryIO

from deploy.config.changes import changes
from deploy.config.pipeline import Pipeline, Stage
from deploy.errors import Interrupted, RunFailed
from deploy.runtime.session_process import LAUNCHER
from deploy.runtime.signals import FORWARDED
from deploy.storage.stage_records import DoneStage, StageRecords
from headway import clock
from headway.atomic_file import atomic_file
from headway.errors import InputError
from headway.file_lock import locked


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
    left, anew = [], set(redo)
    for stage in stages:
        record = done.get(stage.name)
        if anew & {stage.name, *stage.needs}:
            anew.add(stage.name)
        if record is None or stage.name in anew:
            left.append(stage)
        elif difference := _difference(stage, record, done):
            raise InputError(
                f"stage {stage.name!r} is done, but {difference}; --redo {stage.name} does it "
                "anew, with what is made of it"
            )
    return left


def _difference(stage: Stage, record: DoneStage, done: Mapping[str, DoneStage]) -> str | None:
    """Return what has changed since a stage was done."""
    settings = {"command": stage.command, **stage.config.settings()}
    if differ := changes({"command": record.command, **record.settings}, settings):
        return f"with {differ[0].name} = {differ[0].before}, not {differ[0].after}"
    for name in stage.needs:
        if name not in done or record.inputs.get(name) != done[name].done_at:
            return f"stage {name!r}, from which it took something, is not the same now"
    return None


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
                done = self._records.done(stages)
                left = todo(stages, done, redo)
                for stage in left:
                    if stage.name in {*done, *redo}:
                        self._records.forget(stage)
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
        """Make what a stage makes, and record the settings that it was made with."""
        begin = time.monotonic()
        flags = ["--resume"] if stage.command == "run" else []
        if anew := self._records.begins_anew(stage):
            flags = ["--replace"]
            if stage.command == "run":
                shutil.rmtree(stage.output, ignore_errors=True)
        if anew or not stage.output.exists():
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
            ),
        )

    def _score(self, stage: Stage) -> None:
        """Score the policy of a stage, unless it has been scored so."""
        record = self._records.done([stage])[stage.name]
        suite = self._pipeline.scores
        if not stage.makes_policy or suite is None or record.suite == [*suite]:
            return
        scores = self._records.scores_file(stage)
        with atomic_file(scores) as file:
            self._command(stage, "eval", str(stage.output), *suite, "--json", output=file)
        document = json.loads(scores.read_bytes())
        self._records.write(stage, replace(record, scores=document, suite=[*suite]))

    def _command(self, stage: Stage, *command: str, output: BinaryIO | None = None) -> None:
        """Run a command of Headway to its end; interrupts are passed on to it."""
        process, interrupted = subprocess.Popen([*LAUNCHER, *command], stdout=output), False
        while True:
            try:
                code = process.wait()
                break
            except KeyboardInterrupt:
                interrupted = True  # although the command may end as if it were not
                process.send_signal(FORWARDED[signal.SIGTERM])
        if interrupted or code == Interrupted.exit_code:
            raise Interrupted(f"stopped by the user\ngo on with: {self._again}")
        if code:
            raise RunFailed(
                f"stage {stage.name!r}: {shlex.join(['headway', *command])} ended with exit code "
                f"{code}\nonce that is mended, go on with: {self._again}"
            )
