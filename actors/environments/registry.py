"""Loads environments by name; `actors.registry.ENVIRONMENTS` lists them."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from actors.environments.protocol import Environment
from actors.errors import InputError
from actors.registry import ENVIRONMENTS
from actors.user_code.dotted_path import check_arguments


def load_environment(
    name: str, options: Mapping[str, Any] | None = None, *, code_execution: str = "off"
) -> Callable[[], Environment]:
    """Return a function that makes a new conversation of an environment.

    Raises:
        InputError: No such environment, or options that it does not have.
    """
    options = dict(options or {})
    loaded = ENVIRONMENTS.load(name)
    if ENVIRONMENTS.find(name) is not None and inspect.isfunction(loaded):
        make: Callable[[], Environment] = loaded(name, options, code_execution)
        return make
    missing = [method for method in ("reset", "step") if not hasattr(loaded, method)]
    if not callable(loaded) or missing:
        raise InputError(
            f"actors.environment = {name!r} must be a class with the methods reset and step; "
            f"missing: {', '.join(missing) or 'a constructor'}"
        )
    with_options = f" with actors.environment_options = {options}" if options else ""
    check_arguments(loaded, setting=f"actors.environment = {name!r}{with_options}", options=options)
    return partial(loaded, **options)
