"""Imports, checks and calls functions and classes that users name in a recipe."""

import asyncio
import importlib
import inspect
import traceback
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from actors.foreign_text import cut, shown
from headway.daemon_thread import run_in_daemon_thread
from headway.errors import InputError
from headway.nearest_name import nearest

_ROOT = Path(__file__).parents[1]
CALLERS = (
    *(f"{_ROOT / package}/" for package in ("actors", "headway", "queues")),
    importlib.__file__,
    "<frozen importlib",
)
"""Beginnings of the file names of the code that calls user code."""


def where_raised(error: BaseException) -> str:
    """Return the traceback of an error from the first line of user code on, on lines of its own.

    It is empty where no such code is in it, as for an error of a module that cannot be read.
    """
    frames = traceback.extract_tb(error.__traceback__)
    while frames and frames[0].filename.startswith(CALLERS):
        frames.pop(0)
    if not frames and error.__cause__ is not None:
        return where_raised(error.__cause__)
    return "\n" + cut("".join(traceback.format_list(frames)).rstrip()) if frames else ""


def load_dotted(path: str, *, setting: str, kinds: Iterable[str] = ()) -> Any:
    """Import an attribute "module:name"; raise InputError, which names `setting`, if that fails.

    The error names the one of `kinds`, shipped names that are followed by a colon, which is most
    like a module that does not exist.
    """
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        problem = f"{shown(error)}{where_raised(error)}"
        if isinstance(error, ModuleNotFoundError) and error.name == module_name.partition(".")[0]:
            problem = f"there is none in {Path.cwd()}, nor is one installed"
            problem += nearest(module_name, kinds)
        raise InputError(f"{setting} = {path!r}: cannot import {module_name}: {problem}") from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        public = [name for name in vars(module) if not name.startswith("_")]
        raise InputError(
            f"{setting} = {path!r}: {module_name} has no {attribute!r}, only "
            f"{', '.join(public) or 'nothing'}{nearest(attribute, public)}"
        ) from None


def check_arguments(
    function: Callable[..., Any], *names: str, setting: str, options: Mapping[str, Any]
) -> None:
    """Raise InputError if user code cannot be called with some arguments.

    It is called with the positional arguments `names` and the keywords of `options`; `setting` is
    the key and value of the recipe, for the message.
    """
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # a builtin without a signature
        return
    subject = f"{setting} with options {dict(options)}" if options else setting
    parameters = signature.parameters
    try:
        given = signature.bind_partial(*names).arguments
        known = [name for name in parameters if name not in given]
        unknown = sorted(options.keys() - set(known))
        if unknown and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            raise InputError(
                f"{subject} has no option {', '.join(unknown)}; known: {', '.join(known) or 'none'}"
                f"{nearest(unknown[0], known)}"
            )
        signature.bind(*names, **options)
    except TypeError as error:
        raise InputError(
            f"{subject} takes ({', '.join(parameters)}), but is called with "
            f"({', '.join([*names, *options])}): {error}"
        ) from None


def is_coroutine(function: Callable[..., Any]) -> bool:
    """Return True for a coroutine function, an object with such a `__call__`, or their partial."""
    function = function.func if isinstance(function, partial) else function
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004  (an object with an async __call__)
    )


async def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a coroutine function, or of a plain one that runs in a daemon thread.

    If this call is cancelled, the thread goes on and its result is dropped. An exception that would
    end the event loop or the caller's task, such as SystemExit, is raised in a RuntimeError.
    """
    try:
        if is_coroutine(function):
            return await function(*arguments)
        result = await run_in_daemon_thread(partial(function, *arguments), name="user-code")
        return await result if inspect.isawaitable(result) else result
    except Exception:
        raise
    except BaseException as error:
        if _is_cancelled():
            raise
        raise RuntimeError(f"ended by {error!r}") from error


def _is_cancelled() -> bool:
    """Return True if the running task is being cancelled, or its event loop has ended."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return True
    return task is None or task.cancelling() > 0
