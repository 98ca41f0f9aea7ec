"""The command `headway`. Each command checks its recipe before it loads anything heavy.

Modules of the user's are found in the folder that the command runs in, after everything installed.

Exit codes: 0 done, 1 failed at run time, 2 bad input, 130 interrupted after a checkpoint.
"""

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from deploy.shadowing import check_not_shadowed

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


Recipe = Annotated[str, typer.Argument(help="A TOML file, or the name of a shipped recipe.")]
Overrides = Annotated[
    list[str], typer.Option("--set", metavar="KEY=VALUE", help="Change one key; may be repeated.")
]
Replace = Annotated[bool, typer.Option(help="Delete what has the same name first.")]
RunName = Annotated[str, typer.Argument(help="A run's folder, or its name in --runs-dir.")]
RunsDir = Annotated[Path, typer.Option(help="Folder of run folders.")]


@app.command()
def run(recipe: Recipe, overrides: Overrides = [], *, replace: Replace = False) -> None:  # noqa: B006
    """Train a recipe to its end."""
    from deploy.config import load_recipe

    config = load_recipe(recipe, overrides)
    from deploy.inputs import load_inputs
    from deploy.outcome import show
    from deploy.progress import Screen
    from deploy.run import run as train
    from deploy.run_directory import RunDirectory

    screen = Screen()
    inputs = load_inputs(config)
    directory = RunDirectory.create(config, replace=replace)
    show(train(config, inputs, directory, screen), directory, screen.console)


@app.command()
def sft(recipe: Recipe, overrides: Overrides = [], *, replace: Replace = False) -> None:  # noqa: B006
    """Make the warm start of a recipe: supervised learning on its demonstrations."""
    from deploy.config import load_recipe

    config = load_recipe(recipe, overrides)
    from deploy.progress import Screen
    from deploy.warm_start import warm_start

    screen = Screen()
    folder = warm_start(config, screen, replace=replace)
    screen.say(f"warm start in {folder}")


@app.command()
def validate(recipe: Recipe, overrides: Overrides = []) -> None:  # noqa: B006
    """Check a recipe and print it with every default filled in."""
    from deploy.config import load_recipe

    config = load_recipe(recipe, overrides)
    typer.echo(config.model_dump_json(indent=2))


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
    """Show the accounts of a run, alive or dead, or export its rollouts."""
    from deploy.outcome import show_accounting
    from deploy.run_directory import RunDirectory
    from queues.accounts import export_parquet, read_accounting

    directory = RunDirectory.open(run, runs_dir)
    if parquet is not None:
        typer.echo(f"{export_parquet(directory.path, parquet)} rollouts in {parquet}")
        return
    accounting = read_accounting(directory.path)
    if as_json:
        typer.echo(json.dumps(accounting.to_dict()))
    else:
        show_accounting(accounting, Console())


@app.command()
def export(
    run: RunName,
    to: Annotated[Path, typer.Option(help="Folder to write; must not exist.")],
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Copy the newest checkpoint's model and tokenizer into a folder for transformers."""
    from deploy.export import export_model
    from deploy.run_directory import RunDirectory

    version = export_model(RunDirectory.open(run, runs_dir), to)
    typer.echo(f"version {version} in {to}")


def main() -> Any:
    """Runs the command line; errors of ours become one message and their exit code."""
    try:
        check_not_shadowed()
        sys.path.append(os.getcwd())
        return app(standalone_mode=True)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        code = getattr(error, "exit_code", None)
        if code is None:
            raise
        Console(stderr=True, highlight=False).print(
            f"headway: {error}", markup=False, soft_wrap=True
        )
        sys.exit(code)
