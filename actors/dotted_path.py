"""Finds what a user names as "module:attribute" in a recipe."""

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
    except Exception as error:
        raise InputError(f"{setting} = {path!r}: cannot import {module_name}: {error!r}") from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        public = ", ".join(name for name in vars(module) if not name.startswith("_"))
        raise InputError(
            f"{setting} = {path!r}: {module_name} has no {attribute!r}, only {public or 'nothing'}"
        ) from None
