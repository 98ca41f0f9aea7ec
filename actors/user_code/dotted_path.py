"""Imports of the "module:attribute" paths of a recipe, and checks of what they stand for."""

import difflib
import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from actors.errors import InputError


def load_dotted(path: str, *, setting: str) -> Any:
    """Import the attribute of a module that is on the path of this process.

    `setting` is the key of the recipe, for the message.

    Raises:
        InputError: No such module or attribute, or the module fails to import.
    """
    module_name, _, attribute = path.partition(":")
    try:
        module = import_module(module_name)
    except (Exception, SystemExit) as error:
        raise InputError(f"{setting} = {path!r}: cannot import {module_name}: {error!r}") from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        public = [name for name in vars(module) if not name.startswith("_")]
        close = difflib.get_close_matches(attribute, public, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise InputError(
            f"{setting} = {path!r}: {module_name} has no {attribute!r}, only "
            f"{', '.join(public) or 'nothing'}{hint}"
        ) from None


def check_arguments(
    function: Callable[..., Any],
    *names: str,
    setting: str,
    options: Mapping[str, Any] | None = None,
) -> None:
    """Check that user code can be called with some arguments.

    It is called with the positional arguments `names` and the keywords of `options`; `setting` is
    the key and value of the recipe, for the message.

    Raises:
        InputError: Its signature does not allow them.
    """
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # a builtin without a signature
        return
    try:
        signature.bind(*names, **(options or {}))
    except TypeError as error:
        called = ", ".join([*names, *(options or {})])
        raise InputError(
            f"{setting} takes {signature}, but is called with ({called}): {error}"
        ) from None
