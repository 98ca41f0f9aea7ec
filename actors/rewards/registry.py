"""Finds reward functions by name; `actors.registry.REWARDS` lists them."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from actors.errors import InputError
from actors.registry import REWARDS
from actors.user_code.dotted_path import check_arguments

RewardFunction = Callable[..., Any]
"""score(prompt, completion, answer, metadata, *, options) -> float | dict[str, float], or a
coroutine of it.

`metadata` is the prompt's, with `finish_reason` added: "stop" where the policy ended the completion
itself, "length" where it was cut off.
"""


def find_reward(name: str, options: Mapping[str, Any]) -> RewardFunction:
    """Return the function behind a name, bound to its options.

    Raises:
        InputError: No such reward, or one with other arguments.
    """
    function = REWARDS.load(name)
    if not callable(function):
        raise InputError(f"actors.reward = {name!r} is a {type(function).__name__}, not a function")
    check_options(name, function, options)
    bound = partial(function, **options) if options else function
    setting = f"actors.reward = {name!r}"
    check_arguments(bound, "prompt", "completion", "answer", "metadata", setting=setting)
    return bound


def check_options(name: str, function: RewardFunction, options: Mapping[str, Any]) -> None:
    """Compare the options of a reward with its keyword-only arguments.

    Raises:
        InputError: An option that it does not have, or a required one that is missing.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (ValueError, TypeError):  # a builtin without a signature
        return
    known = {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY}
    accepts_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    unknown = [] if accepts_any else sorted(options.keys() - known.keys())
    missing = sorted(
        p.name for p in known.values() if p.default is p.empty and p.name not in options
    )
    if unknown or missing:
        raise InputError(
            f"actors.reward_options: the reward {name!r} "
            + (f"has no option {', '.join(unknown)}" if unknown else f"needs {', '.join(missing)}")
            + f"; its options: {', '.join(known) or 'none'}"
        )
