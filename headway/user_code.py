"""Functions and classes that users name in a recipe: imported, checked, called, their errors shown.

Nothing that comes from user code is trusted: its values may have a repr that fails, and its errors
may be of any type and length.
"""

import asyncio
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from headway.clean_text import without_secrets
from headway.daemon_thread import run_in_daemon_thread
from headway.errors import InputError
from headway.nearest_name import nearest

CODE_DIR = "HEADWAY_CODE_DIR"
"""Variable with the folder of a recipe, in all processes: its modules and files are found there."""
LONGEST = 4000
"""Most characters of an error of user code, and of its traceback."""
PARAGRAPH = 1000
"""Most characters of the same in a message that ends a command; libraries make it a page long."""
_ROOT = Path(__file__).parents[1]
CALLERS = (
    *(f"{_ROOT / package}/" for package in ("actors", "deploy", "headway", "learner", "queues")),
    importlib.__file__,
    "<frozen importlib",
)
"""Beginnings of the file names of the code that calls user code."""


def shown(value: Any, longest: int = LONGEST) -> str:
    """Return the repr of a value of user code, which may fail or be long, cut off at `longest`.

    An error of pydantic is described by its messages, without the values that it found.
    """
    try:
        text = repr(value)
        if isinstance(value, BaseException) and callable(errors := getattr(value, "errors", None)):
            parts = [f"{'.'.join(map(str, part['loc']))}: {part['msg']}" for part in errors()]
            text = f"{type(value).__name__}({'; '.join(parts)})" if parts else text
    except BaseException:  # noqa: BLE001  (it is user code, and may raise anything)
        text = f"<{type(value).__name__} whose repr fails>"
    return cut(text, longest)


def cut(text: str, longest: int = LONGEST) -> str:
    """Hide the secrets in a text, and cut it off at `longest` characters, saying so."""
    text = without_secrets(text)
    return text if len(text) <= longest else f"{text[:longest]}… ({len(text)} characters)"


def describe_error(error: BaseException) -> str:
    """Describe an error of user code: "raised …"."""
    return f"raised {shown(error)}"


def where_raised(error: BaseException) -> str:
    """Return the traceback of an error from the first line of user code on; "" without any."""
    frames = traceback.extract_tb(error.__traceback__)
    while frames and frames[0].filename.startswith(CALLERS):
        frames.pop(0)
    if not frames:
        return where_raised(error.__cause__) if error.__cause__ is not None else ""
    return "\n" + cut("".join(traceback.format_list(frames)).rstrip())


def look_in(folder: Path | None) -> None:
    """Find modules and relative files in a folder too, after all others; None forgets the last."""
    os.environ.pop(CODE_DIR, None)
    if folder is not None:
        os.environ[CODE_DIR] = str(folder.absolute())


def beside_recipe(path: str) -> Path:
    """Return a file of a recipe: in the working directory, or else where the recipe is."""
    here = Path(path).expanduser()
    there = Path(os.environ.get(CODE_DIR, ""), here)
    return there if there.exists() and not here.exists() else here


def load_dotted(path: str, *, subject: str, kinds: Iterable[str] = ()) -> Any:
    """Import the attribute at a path "module:attribute".

    `kinds` are names that are followed by a colon too: one like a missing module is suggested.

    Raises:
        InputError: The module cannot be imported, or has no such attribute; `subject`, such as the
            key and value of a recipe, begins the message.
    """
    module_name, _, attribute = path.partition(":")
    folder = os.environ.get(CODE_DIR, "")
    if folder and folder not in sys.path:
        sys.path.append(folder)
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        problem = f"{shown(error)}{where_raised(error)}"
        if isinstance(error, ModuleNotFoundError) and error.name == module_name.partition(".")[0]:
            folders = " or ".join([str(Path.cwd()), *filter(None, [folder])])
            problem = f"there is none in {folders}, nor is one installed"
            problem += nearest(module_name, kinds)
        raise InputError(f"{subject}: cannot import {module_name}: {problem}") from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        public = [name for name in vars(module) if not name.startswith("_")]
        raise InputError(
            f"{subject}: {module_name} has no {attribute!r}, only "
            f"{', '.join(public) or 'nothing'}{nearest(attribute, public)}"
        ) from None


def options_of(function: Callable[..., Any], *inputs: str) -> dict[str, inspect.Parameter]:
    """Return the named parameters of a function besides its positional `inputs`.

    Raises:
        TypeError: The function does not take as many positional arguments.
    """
    signature = inspect.signature(function)
    bound = signature.bind_partial(*inputs).arguments
    return {
        name: parameter
        for name, parameter in signature.parameters.items()
        if name not in bound
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    }


def refuse_unknown_options(subject: str, options: Iterable[str], known: Iterable[str]) -> None:
    """Raise InputError if an option is not among those known; `subject` begins the message."""
    names = sorted(known)
    unknown = sorted({*options} - {*names})
    if unknown:
        raise InputError(
            f"{subject} has no option {', '.join(unknown)}; its options: "
            f"{', '.join(names) or 'none'}{nearest(unknown[0], names)}"
        )


def check_call(
    function: Callable[..., Any], *inputs: str, subject: str, options: Mapping[str, Any]
) -> None:
    """Check that a function can be called with positional inputs, and with options as keywords.

    A function without a signature, as builtins may be, passes.

    Raises:
        InputError: An option is unknown or missing, or the function takes other inputs; `subject`
            begins the message, which has the names of the `inputs`.
    """
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):
        return
    parameters = signature.parameters
    try:
        known = options_of(function, *inputs)
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            refuse_unknown_options(subject, options, known)
        for name, parameter in known.items():
            required = parameter.kind is parameter.KEYWORD_ONLY and (
                parameter.default is parameter.empty
            )
            if required and name not in options:
                raise InputError(f"{subject} requires the option {name}")
        signature.bind(*inputs, **options)
    except TypeError as error:
        raise InputError(
            f"{subject} takes ({', '.join(parameters)}), but is called with "
            f"({', '.join([*inputs, *options])}): {error}"
        ) from None


def is_coroutine(function: Callable[..., Any]) -> bool:
    """Return True for a coroutine function, an object with such a `__call__`, or their partial."""
    function = function.func if isinstance(function, partial) else function
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004  (an object with an async __call__)
    )


async def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a coroutine function, or of a plain one that runs in a daemon thread.

    An exception that would end the event loop or the caller's task is raised in a RuntimeError.
    """
    try:
        if is_coroutine(function):
            return await function(*arguments)
        result = await run_in_daemon_thread(partial(function, *arguments), name=call_name())
        return await result if inspect.isawaitable(result) else result
    except Exception:
        raise
    except BaseException as error:
        if _is_cancelled():
            raise
        raise RuntimeError(f"ended by {error!r}") from error


def call_name() -> str:
    """Return the name of the threads in which the running task calls user code."""
    task = asyncio.current_task()
    return f"user-code of {task.get_name()}" if task else "user-code"


def _is_cancelled() -> bool:
    """Return True if the running task is being cancelled, or its event loop has ended."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return True
    return task is None or task.cancelling() > 0
