"""Finds what a user names as "module:attribute" in a recipe."""

import difflib
import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from actors.errors import InputError


def load_dotted(path: str, *, setting: str, known: tuple[str, ...]) -> Any:
    """The attribute of a module that can be imported from where the command runs.

    Args:
        path: "module:attribute".
        setting: Key of the recipe, for the message.
        known: Names that would not have needed a dotted path, for the message.

    Raises:
        InputError: No such module or attribute, or the module fails to import.
    """
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise InputError(
            f"{setting} = {path!r} is not one of {', '.join(known)}, nor a dotted path "
            '"module:attribute"'
        )
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
    """Compares how user code is called with what it takes.

    Args:
        function: A function or a class.
        names: Positional arguments that it is called with.
        setting: Key and value of the recipe, for the message.
        options: Keyword arguments that it is called with.

    Raises:
        InputError: It takes other arguments.
    """
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # code in C does not say
        return
    try:
        signature.bind(*names, **(options or {}))
    except TypeError as error:
        called = ", ".join([*names, *(options or {})])
        raise InputError(
            f"{setting} takes {signature}, but is called with ({called}): {error}"
        ) from None
