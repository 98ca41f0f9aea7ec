"""`headway init`: writes the files of a small task to start from."""

from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from headway.errors import InputError

NAMES = ("my_task.toml", "my_task.py")
NEXT_STEPS = """\
{files} written; go on with:
  cd {folder}
  headway validate my_task.toml --strict
  headway sft my_task.toml
  headway try my_task.toml
  headway run my_task.toml"""


def init(
    folder: Annotated[Path, typer.Argument(help="Folder to write, here by default.")] = Path(),
) -> None:
    """Write a recipe, a prompt source and a reward to start from; they train on a CPU."""
    targets = [folder / name for name in NAMES]
    if existing := [str(target) for target in targets if target.exists()]:
        raise InputError(f"{', '.join(existing)} exists; choose another folder, or delete it")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for target in targets:
            with target.open("x") as file:
                file.write((files("deploy") / "starter" / target.name).read_text())
    except OSError as error:
        raise InputError(f"{folder} cannot be written: {error}") from None
    typer.echo(NEXT_STEPS.format(files=" and ".join(map(str, targets)), folder=folder))
