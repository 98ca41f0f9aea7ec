"""The commands that train, among them `pipeline`, and `pairs`, which makes what some learn from.

Each checks its recipe and prints its first line before it imports anything heavy.
"""

import os
import shlex
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deploy.cli.arguments import Overrides, Recipe, Replace, RunName, RunsDir, load, next_command
from deploy.errors import RunFailed
from deploy.runtime.session_process import PIPELINE, Session
from deploy.runtime.signals import deferred
from headway.errors import InputError

if TYPE_CHECKING:
    from deploy.config.run_config import RunConfig
    from deploy.preflight.inputs import Inputs
    from deploy.runtime.console import Terminal
    from deploy.storage.run_directory import RunDirectory

CHECKING = "checking the recipe, the model and the prompts"
LOCATING_KEYS = ("name", "deploy.runs_dir")
"""Keys that say which run is meant; they are not passed on to `resume`."""


def run(
    context: typer.Context,
    recipe: Recipe,
    overrides: Overrides = [],  # noqa: B006
    *,
    replace: Replace = False,
    resume_if_begun: Annotated[
        bool,
        typer.Option("--resume", help="Resume it if it has begun, if need be from its backup."),
    ] = False,
) -> None:
    """Train a recipe to its end.

    With --resume, the same command begins a run and goes on with it, wherever it is called.
    """
    config = load(recipe, overrides)
    if resume_if_begun:
        from deploy.storage.repair.backups import find_begun_run

        if replace:
            raise InputError("--resume goes on with a run, and --replace begins anew; choose one")
        if (folder := find_begun_run(config)) is not None:
            changed = [x for x in overrides if x.partition("=")[0].strip() not in LOCATING_KEYS]
            resume(context, str(folder), changed, config.deploy.runs_dir)
            return
    process: Session | None = context.obj
    if process is not None:
        process.allow(config.deploy.max_restarts)
    from deploy.runtime.console import Terminal

    terminal = Terminal()
    terminal.say(f"{config.name}: {CHECKING}")
    with deferred():
        from deploy import session  # noqa: F401  (here, so that the folder is held once it is made)
        from deploy.preflight.inputs import load_inputs
        from deploy.storage.atomic_folder import in_use
        from deploy.storage.run_directory import RunDirectory
    directory = RunDirectory.of(config)
    with in_use((config.warm_start, config.preferred, config.reward_models)):
        inputs = load_inputs(config)
        with directory.created(config, replace=replace):
            _train(config, inputs, directory, terminal, process)


def resume(
    context: typer.Context,
    run: RunName,
    overrides: Overrides = [],  # noqa: B006
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Resume a run that was interrupted, failed or was killed, and train it to its end.

    Given the folder of its backup (deploy.backup_dir), it is made anew in the folder of runs first.
    A run that is done goes on with more steps, as by --set steps=200. Its recipe.toml keeps what is
    set; what can change in a run is in deploy/docs/keys.md.
    """
    from deploy.cluster.cleanup import end_leftovers
    from deploy.runtime.console import Terminal
    from deploy.storage.repair.backups import from_backup, named_backup
    from deploy.storage.run_directory import RunDirectory
    from deploy.storage.sessions import resumed_recipe
    from headway.full_disk import wait_for_space
    from queues.storage.backup import CURRENT

    terminal, process = Terminal(), context.obj
    is_again = process is not None and process.is_again
    if (Path(run) / CURRENT).exists():
        directory = from_backup(Path(run), runs_dir, terminal.say)
        if process is not None:
            process.goes_on(directory.path)
    else:
        directory = RunDirectory.open(run, runs_dir)
    with directory.held(end_leftovers, is_again=is_again), named_backup(directory):
        for folder in (directory.path, directory.backup) if is_again else ():
            wait_for_space(folder, terminal.say)
        config, changes = resumed_recipe(directory, overrides)
        if process is not None:
            process.allow(config.deploy.max_restarts)
        trained: int | None = None
        with suppress(InputError):  # a damaged summary is made again
            if directory.status() == "done":
                trained = int(directory.summary("version")["version"])
        if trained is not None and not any(change.name == "steps" for change in changes):
            terminal.say(
                f"{config.name} is done: {trained} of {config.steps} steps are trained; to train "
                f"more: headway resume {directory.path} --set steps=…"
            )
            return
        if changes:
            lines = "\n  ".join(map(str, changes))
            terminal.say(f"{config.name} goes on with other settings than before:\n  {lines}")
        terminal.say(f"{config.name}: {CHECKING}")
        with deferred():
            from deploy.preflight.inputs import load_inputs
            from deploy.storage.atomic_folder import in_use
        with in_use((config.warm_start, config.preferred, config.reward_models)):
            inputs = load_inputs(config, resumed=directory, needs_space=not is_again)
            if overrides:
                directory.store_recipe(config)
            _train(config, inputs, directory, terminal, process)


def _train(
    config: "RunConfig",
    inputs: "Inputs",
    directory: "RunDirectory",
    terminal: "Terminal",
    process: Session | None,
) -> None:
    with deferred():
        from deploy import session
        from deploy.report.tables import show
        from deploy.runtime.console import log_to
        from headway.full_disk import is_full
        from weight_sync.transports.filesystem import claim
    if process is not None:
        process.goes_on(directory.path)
    directory.logs.mkdir(exist_ok=True)
    try:
        with log_to(directory.logs / "driver.log"):
            shared = config.weight_sync.folder
            if config.weight_sync.transport == "filesystem" and shared is not None:
                claim(Path(shared), str(directory.path))
            summary = session.run(config, inputs, directory, terminal, process)
    except Exception as error:
        if is_full(error, directory.path):
            raise RunFailed(f"no space is left on the disk of {directory.path}") from error
        raise
    show(summary, directory, terminal.console)


def _say_next(terminal: "Terminal", command: str, recipe: str, overrides: list[str]) -> None:
    if PIPELINE not in os.environ:  # which goes on by itself
        terminal.say(next_command(command, recipe, overrides))


def sft(recipe: Recipe, overrides: Overrides = [], *, replace: Replace = False) -> None:  # noqa: B006
    """Make the warm start of a recipe: supervised learning on its demonstrations."""
    config = load(recipe, overrides)
    from deploy.offline.warm_start import warm_start
    from deploy.runtime.console import Terminal

    terminal = Terminal()
    terminal.say(f"warm start in {warm_start(config, terminal, replace=replace)}")
    _say_next(terminal, "prefer" if config.prefer else "run", recipe, overrides)


def prefer(recipe: Recipe, overrides: Overrides = [], *, replace: Replace = False) -> None:  # noqa: B006
    """Train the model of a recipe on its preferences: DPO, IPO, KTO, ORPO or SimPO."""
    config = load(recipe, overrides)
    from deploy.offline.preferences import prefer_model
    from deploy.runtime.console import Terminal

    terminal = Terminal()
    terminal.say(f"preferred model in {prefer_model(config, terminal, replace=replace)}")
    _say_next(terminal, "run", recipe, overrides)


def pairs(
    recipe: Recipe,
    overrides: Overrides = [],  # noqa: B006
    *,
    policy: Annotated[
        str | None,
        typer.Option(help="Model, run or RUN@VERSION that answers; the recipe's by default."),
    ] = None,
    replace: Replace = False,
) -> None:
    """Make preference pairs: answers of a policy, compared by a judge or by rewards.

    Interrupted, the same command goes on after the prompts that are compared.
    """
    config = load(recipe, overrides)
    with deferred():
        from deploy.offline.preference_pairs import make_pairs
        from deploy.runtime.console import Terminal
    terminal = Terminal()
    terminal.say(f"pairs in {make_pairs(config, policy, terminal, replace=replace)}")


def reward_model(
    recipe: Recipe,
    overrides: Overrides = [],  # noqa: B006
    *,
    replace: Replace = False,
) -> None:
    """Train the reward models of a recipe on its preference pairs."""
    config = load(recipe, overrides)
    from deploy.offline.reward_models import train_reward_models
    from deploy.runtime.console import Terminal

    terminal = Terminal()
    terminal.say(f"reward models in {train_reward_models(config, terminal, replace=replace)}")
    _say_next(terminal, "run", recipe, overrides)


def pipeline(
    file: Annotated[str, typer.Argument(help="A TOML file of stages, or `demo`.")],
    *,
    redo: Annotated[
        list[str],
        typer.Option(metavar="STAGE", help="Do this stage anew, and what is made of it."),
    ] = [],  # noqa: B006
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Do the stages of a file: warm start, preferences, reward models, runs, each scored.

    The same command goes on with what was interrupted, and leaves out what is done.
    """
    from deploy.config.pipeline import load_pipeline

    stages = load_pipeline(file, runs_dir)
    from deploy.offline.pipeline import PipelineRun
    from deploy.report.pipeline_report import pipeline_report, show_pipeline
    from deploy.runtime.console import Terminal

    terminal = Terminal()
    place = [] if runs_dir == Path("runs") else ["--runs-dir", str(runs_dir)]
    again = shlex.join(["headway", "pipeline", file, *place])
    done = PipelineRun(stages, again, terminal.say).run(redo)
    show_pipeline(stages.folder.name, done, terminal.console)
    terminal.say(f"report: {pipeline_report(stages, done)}")
