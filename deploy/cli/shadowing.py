"""Detection of a user's folder or module that shadows one of the five packages."""

import importlib.util
from pathlib import Path

from deploy.errors import InputError

PACKAGES = ("actors", "learner", "queues", "weight_sync")


def check_not_shadowed() -> None:
    """Check that each package is imported from the folder that contains this one.

    Ray puts the folder that a command runs in first on the path of its workers, so a package there
    is refused even if this process still imports the right one.

    Raises:
        InputError: Another folder would be imported in place of a package of Headway.
    """
    ours = Path(__file__).resolve().parents[2]
    for name in PACKAGES:
        local = [path for path in (Path.cwd() / name, Path.cwd() / f"{name}.py") if path.exists()]
        if local and Path.cwd().resolve() != ours:
            raise InputError(
                f"{local[0]} hides Headway's package {name!r} from the processes of a run; rename "
                "it, or run headway from another folder"
            )
        spec = importlib.util.find_spec(name)
        origin = None if spec is None or spec.origin is None else Path(spec.origin).resolve()
        if origin is None or origin.parent.parent != ours:
            folders = getattr(spec, "submodule_search_locations", None)
            imported = origin or list(folders or ["nothing"])
            raise InputError(
                f"`import {name}` finds {imported} instead of Headway's package in {ours / name}; "
                f"rename your own {name!r}, or run headway from another folder"
            )
