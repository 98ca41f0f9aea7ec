"""Options that a recipe gives to one function or plug-in, checked before it is called."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

from headway.errors import InputError
from headway.recipe_section import Section
from headway.user_code import PARAGRAPH, check_call, options_of, refuse_unknown_options, shown

AnySection = TypeVar("AnySection", bound=Section)


def parse_options(kind: type[AnySection], subject: str, options: Mapping[str, Any]) -> AnySection:
    """Check the options of a plug-in against its model; `subject` begins the messages.

    Raises:
        InputError: An option is unknown, missing or wrong.
    """
    try:
        return kind(**options)
    except ValidationError as error:
        wrong = min(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
        name = ".".join(str(part) for part in wrong["loc"])
        if wrong["type"] == "extra_forbidden":  # first, since a misspelt option is also missing
            refuse_unknown_options(subject, [name], kind.model_fields)
        if wrong["type"] == "missing":
            problem = f"requires the option {name}; its options: {', '.join(kind.model_fields)}"
            raise InputError(f"{subject} {problem}") from None
        value = f"{name} = {shown(wrong['input'], PARAGRAPH)}: " if name else ""
        raise InputError(f"{subject}: {value}{wrong['msg']}") from None


def check_options(
    function: Callable[..., Any], *inputs: str, setting: str, name: str, options: object
) -> None:
    """Check a recipe's table of options, of key `setting`, against the parameters of a function.

    `name` is the function's in the recipe. A parameter without a type accepts any value.

    Raises:
        InputError: It is no table, or an option is unknown, missing, or has another type.
    """
    if not isinstance(options, Mapping):
        raise InputError(f"{setting} = {options!r} must be a table of options of {name!r}")
    check_call(function, *inputs, subject=f"{setting}: {name!r}", options=options)
    for key in options_of(function, *inputs).keys() & options.keys():
        try:
            _adapter(function, key).validate_python(options[key], strict=True)
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise InputError(f"{setting}.{key} = {options[key]!r} of {name!r}: {reason}") from None


@functools.cache  # losses are checked with every microbatch
def _adapter(function: Callable[..., Any], parameter: str) -> TypeAdapter[Any]:
    return TypeAdapter(get_type_hints(function, include_extras=True).get(parameter, Any))
