"""Arguments that several commands share, and the recipe that they name."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from deploy.config.run_config import RunConfig

Recipe = Annotated[str, typer.Argument(help="A TOML file, or the name of a shipped recipe.")]
Overrides = Annotated[
    list[str], typer.Option("--set", metavar="KEY=VALUE", help="Change one key; may be repeated.")
]
Replace = Annotated[bool, typer.Option(help="Delete what has the same name first.")]
RunName = Annotated[str, typer.Argument(help="A run's folder, or its name in --runs-dir.")]
RunsDir = Annotated[Path, typer.Option(help="Folder of run folders.")]


def load(recipe: str, overrides: list[str]) -> "RunConfig":
    """Load a recipe, completed for this machine; imports late, so that `headway --help` is quick.

    Raises:
        InputError: The recipe cannot be read or is not valid.
    """
    from deploy.config.devices import visible_gpus, with_dtype, with_gpus
    from deploy.config.loader import load_recipe

    return with_dtype(with_gpus(load_recipe(recipe, overrides), visible_gpus()))
