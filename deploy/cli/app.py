"""The command `headway`. Each command checks its recipe before it loads anything heavy.

Modules of the user's are found in the folder that the command runs in, after everything installed.

Exit codes: 0 done, 1 failed at run time, 2 bad input, 130 interrupted after a checkpoint.
"""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from deploy.cli.bench import BENCHMARKS, start
from deploy.cli.jobs import attach, cancel, submit
from deploy.cli.options import Overrides, Recipe, Replace, RunName, RunsDir
from deploy.cli.plan import plan
from deploy.cli.shadowing import check_not_shadowed
from deploy.runtime.signals import deferred, raise_interrupts

if TYPE_CHECKING:
    from deploy.config.run_config import RunConfig
    from deploy.preflight.inputs import Inputs
    from deploy.runtime.console import Terminal
    from deploy.storage.run_directory import RunDirectory

BAD_INPUT = 2
INTERRUPTED = 130
"""Exit code of a command that the user stopped; typer makes it of a KeyboardInterrupt."""

app = typer.Typer(
    help="Asynchronous reinforcement learning of language models, with bounded staleness.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


@app.callback(invoke_without_command=True)
def version(
    show: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True)
    ] = False,
) -> None:
    """Asynchronous reinforcement learning of language models, with bounded staleness."""
    if show:
        from importlib.metadata import version as installed

        typer.echo(installed("headway-rl"))
        raise typer.Exit


@app.command()
def run(recipe: Recipe, overrides: Overrides = [], *, replace: Replace = False) -> None:  # noqa: B006
    """Train a recipe to its end."""
    from deploy.config.loader import load_recipe

    config = load_recipe(recipe, overrides)
    from deploy.runtime.console import Terminal

    screen = Terminal()
    screen.say(f"{config.name}: checking the recipe, the model and the prompts")
    with deferred():
        from deploy.preflight.inputs import load_inputs
        from deploy.storage.run_directory import RunDirectory
    inputs = load_inputs(config)
    directory = RunDirectory.of(config)
    try:
        with deferred():
            directory.create(config, replace=replace)
    except KeyboardInterrupt:
        directory.discard()
        raise
    try:
        _train(config, inputs, directory, screen)
    except BaseException as error:
        if getattr(error, "exit_code", None) == BAD_INPUT and directory.trained_nothing():
            directory.discard()
        raise
    finally:
        directory.settle()


@app.command()
def resume(run: RunName, runs_dir: RunsDir = Path("runs")) -> None:
    """Go on with a run that was interrupted, failed or was killed, to its end."""
    from deploy.runtime.console import Terminal
    from deploy.storage.run_directory import RunDirectory

    screen = Terminal()
    directory = RunDirectory.open(run, runs_dir)
    config = directory.config()
    directory.check_at_rest()
    if directory.status() == "done":
        screen.say(f"{config.name} is done: {config.steps} of {config.steps} steps are trained")
        return
    screen.say(f"{config.name}: checking the recipe, the model and the prompts")
    with deferred():
        from deploy.preflight.inputs import load_inputs
    inputs = load_inputs(config, resumed=directory.checkpoints)
    _train(config, inputs, directory, screen)


def _train(
    config: "RunConfig", inputs: "Inputs", directory: "RunDirectory", screen: "Terminal"
) -> None:
    """Runs to the end, or to one message."""
    with deferred():
        from deploy.config.weight_transport_rules import claim_folder
        from deploy.errors import RunFailed
        from deploy.report.tables import show
        from deploy.session import run
        from queues.runtime.disk_space import is_full
    try:
        with directory.held():
            claim_folder(config.weight_sync, directory.path)
            summary = run(config, inputs, directory, screen)
    except Exception as error:
        if is_full(error, directory.path):
            raise RunFailed(f"no space is left on the disk of {directory.path}") from error
        raise
    show(summary, directory, screen.console)


for command in (submit, attach, cancel):
    app.command()(command)


@app.command()
def sft(recipe: Recipe, overrides: Overrides = [], *, replace: Replace = False) -> None:  # noqa: B006
    """Make the warm start of a recipe: supervised learning on its demonstrations."""
    from deploy.config.loader import load_recipe

    config = load_recipe(recipe, overrides)
    from deploy.offline.sft import warm_start
    from deploy.runtime.console import Terminal

    screen = Terminal()
    folder = warm_start(config, screen, replace=replace)
    screen.say(f"warm start in {folder}")


@app.command()
def reward_model(
    recipe: Recipe,
    overrides: Overrides = [],  # noqa: B006
    *,
    replace: Replace = False,
) -> None:
    """Train the reward models of a recipe on its preference pairs."""
    from deploy.config.loader import load_recipe

    config = load_recipe(recipe, overrides)
    from deploy.offline.reward_model import train_reward_models
    from deploy.runtime.console import Terminal

    screen = Terminal()
    folder = train_reward_models(config, screen, replace=replace)
    screen.say(f"reward models in {folder}")


@app.command()
def validate(recipe: Recipe, overrides: Overrides = []) -> None:  # noqa: B006
    """Check a recipe and print it with every default filled in."""
    from deploy.config.loader import load_recipe

    config = load_recipe(recipe, overrides)
    typer.echo(config.model_dump_json(indent=2))


app.command()(plan)


@app.command(name="try")
def try_recipe(
    recipe: Recipe,
    overrides: Overrides = [],  # noqa: B006
    *,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts to try, once each.")] = 3,
) -> None:
    """Play a few episodes with the model of a recipe and print all of them; trains nothing."""
    from deploy.config.loader import load_recipe

    config = load_recipe(recipe, overrides)
    with deferred():
        from deploy.offline.try_recipe import try_recipe
        from deploy.preflight.inputs import load_inputs
    try_recipe(config, load_inputs(config), prompts, typer.echo)


@app.command()
def presets(
    name: Annotated[str | None, typer.Argument(help="One of them, in full.")] = None,
) -> None:
    """List the algorithms that a recipe can name as its preset, or show one."""
    from deploy.config.presets import preset_names, preset_text, title

    if name is not None:
        typer.echo(preset_text(name))
        return
    for each in preset_names():
        typer.echo(f"{each:14} {title(each)}")


@app.command()
def inspect(
    run: RunName,
    runs_dir: RunsDir = Path("runs"),
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print the accounts as JSON.")] = False,
    parquet: Annotated[
        Path | None, typer.Option(help="Write every journaled rollout to this file.")
    ] = None,
) -> None:
    """Show the accounts of a run, alive or dead, and its failed prompts, or export its rollouts."""
    from deploy.report.tables import show_accounting, show_bias, show_failed
    from deploy.storage.run_directory import RunDirectory
    from queues.readers.accounting import (
        account,
        export_parquet,
        failed_prompts,
        open_ledger,
        removed_groups,
    )
    from queues.readers.selection_bias import report_bias
    from queues.storage.state_counts import count_rows

    directory = RunDirectory.open(run, runs_dir)
    if parquet is not None:
        typer.echo(f"{export_parquet(directory.path, parquet)} rollouts in {parquet}")
        if gone := removed_groups(directory.path):
            typer.echo(f"those of {gone} groups are gone, since queues.keep_rollouts = 'needed'")
        return
    with open_ledger(directory.path) as database:
        accounting = account(count_rows(database))
        failed, bias = failed_prompts(database), report_bias(database)
    if as_json:
        more = {"failed_prompts": [asdict(each) for each in failed], "bias": bias.to_dict()}
        typer.echo(json.dumps({**accounting.to_dict(), **more}))
    else:
        show_accounting(accounting, Console())
        show_failed(failed, Console())
        show_bias(bias, Console())


@app.command()
def export(
    run: RunName,
    to: Annotated[Path, typer.Option(help="Folder to write; must not exist.")],
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Copy the newest checkpoint's model and tokenizer into a folder for transformers."""
    from deploy.offline.export import export_model
    from deploy.storage.run_directory import RunDirectory

    version = export_model(RunDirectory.open(run, runs_dir), to)
    typer.echo(f"version {version} in {to}")


@app.command()
def report(
    run: RunName,
    runs_dir: RunsDir = Path("runs"),
    *,
    compare: Annotated[
        list[str], typer.Option(metavar="RUN", help="Another run beside it; may be repeated.")
    ] = [],  # noqa: B006
) -> None:
    """Draw report.html of a run anew, alive or dead, and print its path."""
    from deploy.report.report import report as draw
    from deploy.storage.run_directory import RunDirectory

    others = [RunDirectory.open(other, runs_dir) for other in compare]
    typer.echo(draw(RunDirectory.open(run, runs_dir), others))


@app.command()
def top(
    run: Annotated[
        str, typer.Argument(help="A run's folder, its name in --runs-dir, or its metrics' address.")
    ],
    runs_dir: RunsDir = Path("runs"),
    *,
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option(help="Print one frame and end.")] = False,
) -> None:
    """Watch a run that is going on, here or on another machine."""
    from deploy.observability.run_client import show

    show(run, runs_dir, interval=interval, once=once, console=Console(highlight=False))


@app.command()
def replay(
    run: RunName,
    steps: Annotated[str, typer.Option(metavar="A:B", help="Batches A to B−1.")],
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Train recorded batches of a run again, and compare the weights; 1 where they differ."""
    from deploy.offline.replay import parse_steps
    from deploy.offline.replay import replay as again
    from deploy.storage.run_directory import RunDirectory

    wanted = parse_steps(steps)
    directory = RunDirectory.open(run, runs_dir)
    from deploy.runtime.console import Terminal

    screen = Terminal()
    if not again(directory, wanted, screen, screen.console):
        raise typer.Exit(1)


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def bench(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(sorted(BENCHMARKS))}.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Its own; `--help` lists them.")
    ] = None,
) -> None:
    """Run one of a checkout's benchmarks; `headway bench NAME --help` says what it takes."""
    start(name, arguments or [])


def main() -> Any:
    """Runs the command line; errors of ours become one message and their exit code."""
    try:
        raise_interrupts()
        check_not_shadowed()
        sys.path.append(os.getcwd())
        return app(standalone_mode=True)
    except (KeyboardInterrupt, SystemExit) as leaving:
        if isinstance(leaving, KeyboardInterrupt) or leaving.code == INTERRUPTED:
            _tell("stopped by the user")
            sys.exit(INTERRUPTED)
        raise
    except Exception as error:
        code = getattr(error, "exit_code", 1 if isinstance(error, OSError) else None)
        if code is None:
            raise
        _tell(str(error))
        sys.exit(code)


def _tell(message: str) -> None:
    console = Console(stderr=True, highlight=False)
    console.print(f"headway: {message}", markup=False, soft_wrap=True)
