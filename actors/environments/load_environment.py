"""Loads environments by name; `actors.shipped.ENVIRONMENTS` lists them."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from actors.config import ActorsConfig
from actors.environments.protocol import Environment, Message
from actors.environments.single_turn import opening
from actors.shipped import ENVIRONMENTS
from headway.errors import InputError
from headway.user_code import check_call
from queues.records import Prompt


def load_environment(
    name: str, options: Mapping[str, Any] | None = None, *, code_execution: str = "off"
) -> Callable[[], Environment]:
    """Return a function that makes a conversation; raise InputError for a wrong name or option."""
    options = dict(options or {})
    loaded = ENVIRONMENTS.load(name, setting="actors.environment").function
    if ENVIRONMENTS.get(name) is not None and inspect.isfunction(loaded):
        make: Callable[[], Environment] = loaded(name, options, code_execution)
        return make
    setting = f"actors.environment = {name!r}"
    missing = [method for method in ("reset", "step") if not hasattr(loaded, method)]
    if missing:
        raise InputError(
            f"{setting} must be a class with the methods reset and step; missing: "
            f"{', '.join(missing)}"
        )
    check_call(loaded, subject=setting, options=options)
    return partial(loaded, **options)


def shipped_opening(config: ActorsConfig) -> Callable[[Prompt], list[Message]] | None:
    """Return what makes a prompt's first messages; None where `reset` may answer anything."""
    if config.environment == "tools":
        from actors.environments.tools import Tools

        return Tools(config.environment_options, config.code_execution).opening
    return opening if config.environment == "single_turn" else None
