"""Detection of a user's folder or module that shadows one of the five packages."""

import importlib.util
import os
from collections.abc import Collection
from pathlib import Path

from headway.errors import InputError

INFORMING = ("--help", "--version", "--install-completion", "--show-completion")
COMPLETION = "_HEADWAY_COMPLETE"
"""Environment variable that a shell sets when it asks for completions."""
PACKAGES = ("actors", "headway", "learner", "queues", "weight_sync")


def only_informs(arguments: Collection[str]) -> bool:
    """Return True for a command line that prints help, the version, or completions."""
    return not arguments or COMPLETION in os.environ or any(a in arguments for a in INFORMING)


def check_not_shadowed() -> None:
    """Check that each package is imported from the folder that contains this one.

    Ray puts the folder that a command runs in first on the path of its workers, so a package there
    is refused, by an InputError, even if this process still imports the right one; so is a folder
    that has been removed.
    """
    ours = Path(__file__).resolve().parents[2]
    try:
        here = Path.cwd()
    except FileNotFoundError:
        raise InputError("this folder has been removed; change to one that exists") from None
    for name in PACKAGES:
        local = [path for path in (here / name, here / f"{name}.py") if path.exists()]
        if local and here.resolve() != ours:
            raise InputError(
                f"{local[0]} hides Headway's package {name!r} from the processes of a run; "
                f"{_advice(local[0])}"
            )
        spec = importlib.util.find_spec(name)
        origin = None if spec is None or spec.origin is None else Path(spec.origin).resolve()
        if origin is None or origin.parent.parent != ours:
            folders = getattr(spec, "submodule_search_locations", None)
            imported = next(iter(folders or [str(origin)]))
            raise InputError(
                f"`import {name}` finds {imported} instead of Headway's package in {ours / name}; "
                f"{_advice(Path(imported))}, without it in PYTHONPATH"
            )


def _advice(path: Path) -> str:
    return (
        f"rename it with the imports of it (mv {path} {path.with_name(f'my_{path.name}')}), or run "
        "headway in a folder that holds only your recipe and its modules"
    )
