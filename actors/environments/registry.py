"""Loads environments by name."""

from collections.abc import Callable
from functools import partial
from typing import Any

from actors.config import ENVIRONMENTS
from actors.environments.protocol import Environment
from actors.errors import InputError
from actors.user_code.dotted_path import check_arguments, load_dotted


def load_environment(
    name: str, options: dict[str, Any] | None = None, *, code_execution: str = "off"
) -> Callable[[], Environment]:
    """What makes a conversation of an environment.

    Args:
        name: `single_turn`, `tools`, `verifiers:ID`, or "module:Class".
        options: Its keywords.
        code_execution: Whether tools may run what the policy writes.

    Raises:
        InputError: No such environment, or options that it does not have.
    """
    options = options or {}
    if name == "single_turn":
        from actors.environments.single_turn import SingleTurn

        check_arguments(SingleTurn, setting=_with(name, options), options=options)
        return SingleTurn
    if name == "tools":
        from actors.environments.tools import ToolBox, Tools

        return partial(Tools, ToolBox(options, code_execution))
    if name.startswith("verifiers:"):
        from actors.environments.verifiers_environment import Conversation, load_verifiers

        played = load_verifiers(name, options, setting="actors.environment")
        return partial(Conversation, played)
    found = load_dotted(name, setting="actors.environment", known=ENVIRONMENTS)
    missing = [method for method in ("reset", "step") if not hasattr(found, method)]
    if not callable(found) or missing:
        raise InputError(
            f"actors.environment = {name!r} must be a class with the methods reset and step; "
            f"missing: {', '.join(missing) or 'a constructor'}"
        )
    check_arguments(found, setting=_with(name, options), options=options)
    return partial(found, **options)


def _with(name: str, options: dict[str, Any]) -> str:
    said = f" with actors.environment_options = {options}" if options else ""
    return f"actors.environment = {name!r}{said}"
