"""The rewards by name: those that ship with Headway, and the user's by dotted path."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from actors.config import REWARDS
from actors.errors import InputError
from actors.user_code.dotted_path import check_arguments, load_dotted

if TYPE_CHECKING:
    from actors.rewards.llm_judge import LlmJudge

RewardFunction = Callable[..., Any]
"""score(prompt, completion, answer, metadata, *, options) -> float | dict[str, float], or a
coroutine of it.

`metadata` is the prompt's, with `finish_reason` added: "stop" where the policy ended the completion
itself, "length" where it was cut off.
"""


class Shipped(NamedTuple):
    """Where a reward that ships with Headway is, and what it needs."""

    module: str
    answer: bool = False
    """Compares with the prompt's answer."""
    inline: bool = False
    """Takes time in proportion to the text, and cannot hang: it needs no process of its own."""


SHIPPED = {
    "exact_match": Shipped("answers", answer=True, inline=True),
    "last_answer": Shipped("answers", answer=True, inline=True),
    "numeric_match": Shipped("answers", answer=True, inline=True),
    "tags": Shipped("patterns", inline=True),
    "regex": Shipped("patterns"),
    "json_schema": Shipped("json_schema"),
    "similarity": Shipped("similarity", answer=True),
    "math_verify": Shipped("math_verify", answer=True),
    "reasoning_gym": Shipped("reasoning_gym"),
    "code": Shipped("code"),
}
"""All but `reward_model` and `llm_judge`, which ask others."""


def find_reward(name: str, options: Mapping[str, Any]) -> RewardFunction:
    """The function behind a name, with its options.

    Args:
        name: A key of `SHIPPED`, or "module:function".
        options: Its keyword-only arguments.

    Raises:
        InputError: No such reward, or one with other arguments.
    """
    if name in SHIPPED:
        found = getattr(import_module(f"actors.rewards.{SHIPPED[name].module}"), name)
    else:
        found = load_dotted(name, setting="actors.reward", known=REWARDS)
    if not callable(found):
        raise InputError(f"actors.reward = {name!r} is a {type(found).__name__}, not a function")
    check_options(name, found, options)
    bound = partial(found, **options) if options else found
    setting = f"actors.reward = {name!r}"
    check_arguments(bound, "prompt", "completion", "answer", "metadata", setting=setting)
    return bound


def check_options(name: str, function: RewardFunction, options: Mapping[str, Any]) -> None:
    """Compares the options of a reward with its keyword-only arguments.

    Raises:
        InputError: An option that it does not have, or one that it needs and is not given.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (ValueError, TypeError):  # code in C does not say
        return
    known = {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY}
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters)
    unknown = [] if anything else sorted(options.keys() - known.keys())
    needed = sorted(
        p.name for p in known.values() if p.default is p.empty and p.name not in options
    )
    if unknown or needed:
        raise InputError(
            f"actors.reward_options: the reward {name!r} "
            + (f"has no option {', '.join(unknown)}" if unknown else f"needs {', '.join(needed)}")
            + f"; its options: {', '.join(known) or 'none'}"
        )


def load_llm_judge(options: Mapping[str, Any]) -> "LlmJudge":
    """The judge with these options.

    Raises:
        InputError: Options that it does not have, or that cannot be used.
    """
    from actors.rewards.llm_judge import LlmJudge

    check_options("llm_judge", LlmJudge, options)
    return LlmJudge(**options)


def is_coroutine(function: RewardFunction) -> bool:
    """Whether many calls of a function can wait at once in one process."""
    function = function.func if isinstance(function, partial) else function
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004  (an object with an async __call__)
    )
