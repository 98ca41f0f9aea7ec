"""Arguments that several commands share, and the recipe that they name."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from headway.user_code import look_in

if TYPE_CHECKING:
    from deploy.config.run_config import RunConfig


class WithoutFlagTypes:
    """Mixin of a command whose help shows no type beside flags, which take no value."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters of the command."""
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


class Command(WithoutFlagTypes, TyperCommand):
    """A command."""


def complete_recipes() -> list[str]:
    """Return the shipped recipes and presets; the shell adds files."""
    from deploy.config.loader import shipped_names

    return shipped_names()


def complete_runs() -> list[str]:
    """Return the names of the runs in `runs`."""
    from deploy.storage.run_directory import RunDirectory

    return sorted(run.path.name for run in RunDirectory.all(Path("runs")))


def complete_keys() -> list[str]:
    """Return the keys of a recipe."""
    from deploy.config.messages import key_paths
    from deploy.config.run_config import RunConfig

    return [*key_paths(RunConfig)]


Recipe = Annotated[
    str,
    typer.Argument(
        help="A TOML file, or the name of a shipped recipe.", autocompletion=complete_recipes
    ),
]
Overrides = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change one key; may be repeated.",
        autocompletion=complete_keys,
    ),
]
Replace = Annotated[bool, typer.Option(help="Delete what has the same name first.")]
RunName = Annotated[
    str,
    typer.Argument(help="A run's folder, or its name in --runs-dir.", autocompletion=complete_runs),
]
RunsDir = Annotated[Path, typer.Option(help="Folder of run folders.")]


def next_command(command: str, recipe: str, overrides: list[str]) -> str:
    """Return the line that names the command to go on with, with the recipe and its settings."""
    settings = [part for setting in overrides for part in ("--set", setting)]
    return f"go on with: {shlex.join(['headway', command, recipe, *settings])}"


def load(recipe: str, overrides: list[str]) -> "RunConfig":
    """Load a recipe, completed for this machine and with its folder, where its code is found."""
    from deploy.config.devices import for_this_machine
    from deploy.config.loader import load_recipe

    config = for_this_machine(load_recipe(recipe, overrides))
    folder = Path(recipe).absolute().parent
    if config.deploy.code_dir is None and Path(recipe).is_file() and folder != Path.cwd():
        config = config.updated(deploy={"code_dir": folder})
    look_in(config.deploy.code_dir)
    return config
