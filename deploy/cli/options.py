"""Arguments that several commands share, with their help."""

from pathlib import Path
from typing import Annotated

import typer

Recipe = Annotated[str, typer.Argument(help="A TOML file, or the name of a shipped recipe.")]
Overrides = Annotated[
    list[str], typer.Option("--set", metavar="KEY=VALUE", help="Change one key; may be repeated.")
]
Replace = Annotated[bool, typer.Option(help="Delete what has the same name first.")]
RunName = Annotated[str, typer.Argument(help="A run's folder, or its name in --runs-dir.")]
RunsDir = Annotated[Path, typer.Option(help="Folder of run folders.")]
