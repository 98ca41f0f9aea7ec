"""Plays two commands on one run: one stops before one of its file operations, the other runs whole.

Each command is a process with the command line of Headway. Ray, torch, models and plots are
replaced: a session trains with a real broker in its process, a model is two files of one stamp.
"""

import asyncio
import multiprocessing
import os
import shutil
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

from deploy.cli import main
from deploy.errors import RunFailed
from deploy.report.report import report
from deploy.report.summary import summarise
from deploy.runtime import session_process
from deploy.runtime.machine import environment
from deploy.storage.jsonl import append_rows
from deploy.storage.run_record import restore
from deploy.storage.sessions import begin_session
from headway import clock
from learner.engine.checkpoint import checkpoint_path
from queues.readers.accounting import read_batches
from queues.readers.checkpoints import newest_checkpoint
from tests.deploy.report.test_report import batch
from tests.deploy.trained import save
from tests.queues.conftest import answer, make_broker, make_prompts

RECIPE = Path(__file__).parents[1] / "deploy" / "recipe.toml"
OPERATIONS = frozenset((
    "open", "os.mkdir", "os.rename", "os.rmdir", "os.remove", "os.link", "os.listdir",
    "os.scandir", "fcntl.flock", "sqlite3.connect", "shutil.rmtree", "shutil.copytree",
))  # fmt: skip
"""Audit events before which a command is stopped, if they are about the folder of runs."""
PARTS = ("model.safetensors", "tokenizer.json")
SECONDS = 120.0
"""Deadline of a command."""
STEPS = 2
MACHINE = environment()


stopped = SimpleNamespace(began=False, batches=STEPS)
"""What this process, as a command, has done, and the batch after which its session ends."""


class Ended(NamedTuple):
    """The end of a command."""

    code: int
    output: str
    operations: int
    """File operations before which it could have been stopped."""
    began: bool
    """It began to train."""


# --- what is replaced


def stamp_of(model: Path) -> str:
    """Return the stamp of a model; both of its files have the same."""
    first, second = ((model / part).read_text() for part in PARTS)
    if first != second:
        raise AssertionError(f"half of model {first} and half of model {second}")
    return first


def write_model(folder: Path, stamp: str) -> None:
    for part in PARTS:
        (folder / part).write_text(stamp)


def load_inputs(config, **_):
    return SimpleNamespace(stamp=stamp_of(config.warm_start))


def run_session(config, inputs, directory, terminal, process):
    """Train the recipe to its end, one group a batch, with a checkpoint after each."""
    stopped.began = True

    async def train(version, session=None):
        broker = make_broker(directory.path, session=session, steps=STEPS, groups_per_batch=1)
        recorded = len(await asyncio.to_thread(read_batches, directory.path))
        await broker.serving("a", version)
        if recorded == version:
            await broker.issue(make_prompts(1, version), cursor=str(version + 1))
            [lease] = await broker.lease("a", 2, 5.0)
            await broker.put("a", answer(lease))
        await broker.take(version, 5.0)
        row = batch(version).to_dict()
        await broker.ack(version, row)
        append_rows(directory.path / "metrics.jsonl", [row])
        stamp = f"{config.name} {version + 1}"
        folder = save(directory.checkpoints, version + 1, "", parts=PARTS, text=stamp)
        await broker.commit_checkpoint(version + 1, f"checkpoints/{folder.name}")
        older = checkpoint_path(directory.checkpoints, version)
        if older.exists():
            older.rename(older.with_name(".old"))
            shutil.rmtree(older.with_name(".old"))
        await broker.close()

    saved = newest_checkpoint(directory.path) if directory.ledger.exists() else None
    first = saved[0] if saved else 0
    if stamp_of(config.warm_start) != inputs.stamp:
        raise RunFailed("the engines have another model than the learner")
    session = begin_session(directory, config, MACHINE, version=first)
    for version in range(first, min(config.steps, stopped.batches)):
        asyncio.run(train(version, session if version == first else None))
    record = restore(config, directory, now=clock.now(), say=terminal.say)
    status = "done" if record.version == config.steps else "interrupted"
    summary = summarise(record, status=status, now=clock.now())
    directory.write_summary(summary)
    with suppress(BlockingIOError):  # as `deploy.session`: a run does not fail for its page
        if record.batches:
            report(directory)
    return summary


def replace_what_is_slow() -> None:
    """Replace sessions, inputs and training by those of this module."""
    session = ModuleType("deploy.session")
    session.run = run_session
    inputs = ModuleType("deploy.preflight.inputs")
    inputs.load_inputs = load_inputs
    sys.modules |= {session.__name__: session, inputs.__name__: inputs}
    from deploy.report import report, tables

    tables.show = lambda *_: None
    report.page = lambda title, *_: f"<html>{title}</html>\n"
    sft = ModuleType("deploy.offline.warm_start")

    def warm_start(config, terminal, *, replace):
        from deploy.storage.atomic_folder import atomic_folder, check_absent

        check_absent(config.warm_start, replace=replace)
        with atomic_folder(config.warm_start, replace=replace) as partial:
            write_model(partial, str(os.getpid()))
            (partial / "origin.json").write_text("{}")
        return config.warm_start

    sft.warm_start = warm_start
    sys.modules[sft.__name__] = sft
    session_process.begin_session = lambda _: None  # in this process


# --- a race


def play(arguments, folder, stop, batches, pipe) -> None:
    """Be a command, which waits for `pipe` before the file operation numbered `stop`."""
    os.chdir(folder)
    output = Path(folder) / f"{os.getpid()}.txt"
    sys.stdout = sys.stderr = output.open("w")
    stopped.batches = batches
    replace_what_is_slow()
    count, quiet = 0, False

    def audit(event, values):
        nonlocal count, quiet
        if quiet or event not in OPERATIONS:
            return
        subject = str(values[0])
        if event != "fcntl.flock" and not (folder in subject or subject.startswith("runs")):
            return
        count += 1
        if count == stop:
            quiet = True
            pipe.send("stopped")
            pipe.recv()
            quiet = False

    sys.addaudithook(audit)
    sys.argv = ["headway", *arguments]
    code = 0
    try:
        main()
    except SystemExit as ended:
        code = ended.code or 0
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
        code = 70
    quiet = True
    sys.stdout.flush()
    pipe.send(Ended(code, output.read_text(), count, stopped.began))
    output.unlink()
    os._exit(0)


class Player:
    """A command in a process of its own, which may be stopped before one of its operations."""

    def __init__(self, arguments, folder, *, stop=None, batches=STEPS) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._pipe, theirs = context.Pipe()
        given = (list(map(str, arguments)), str(folder), stop, batches, theirs)
        self._process = context.Process(target=play, args=given, daemon=True)
        self._process.start()
        theirs.close()
        self._ended = None

    def wait(self) -> bool:
        """Wait until the command stops, or has ended; return whether it has ended."""
        if not self._pipe.poll(SECONDS):
            self._process.kill()
            raise AssertionError("the command neither stopped nor ended")
        received = self._pipe.recv()
        self._ended = received if received != "stopped" else None
        return self._ended is not None

    def end(self) -> Ended:
        """Let it go on if it is stopped, and return its end."""
        if self._ended is None:
            self._pipe.send("go")
            assert self.wait()
        self._process.join(SECONDS)
        return self._ended


def call(arguments, folder, *, batches=STEPS) -> Ended:
    """Run a command whole."""
    player = Player(arguments, folder, batches=batches)
    assert player.wait()
    return player.end()


def race(first, second, folder, stop) -> tuple[Ended, Ended]:
    """Stop the first command before its operation `stop`, run the second, and end the first."""
    player = Player(first, folder, stop=stop)
    player.wait()
    other = call(second, folder)
    return player.end(), other


def prepare(folder: Path) -> None:
    """Make a folder with a warm start and a run of which one batch of two is trained."""
    model = folder / "runs" / "small-sft" / "model"
    model.mkdir(parents=True)
    write_model(model, "0")
    (model / "origin.json").write_text("{}")
    ended = call(COMMANDS["run"], folder, batches=1)
    assert ended.code == 0, ended.output


SETTINGS = ("--set", f"steps={STEPS}", "--set", "name=mine")
COMMANDS = {
    "run": ("run", RECIPE, *SETTINGS, "--replace"),
    "resume": ("resume", "mine"),
    "sft": ("sft", RECIPE, *SETTINGS, "--replace"),
    "report": ("report", "mine"),
    "export": ("export", "mine", "--to", "runs-exported"),
    "inspect": ("inspect", "mine", "--parquet", "runs.parquet"),
    "requeue": ("requeue", "mine"),
    "salvage": ("salvage", "mine"),
}
FRESH = COMMANDS["run"][:-1]
"""A run of a name that nobody has."""
