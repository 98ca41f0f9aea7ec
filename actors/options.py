"""The base of all settings of this package, and the check of those that a plug-in reads itself."""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from headway.errors import InputError
from headway.nearest_name import nearest
from headway.recipe_section import Section


class Options(Section):
    """Options that a plug-in reads from a table of a recipe."""


AnyOptions = TypeVar("AnyOptions", bound=Options)


def parse_options(kind: type[AnyOptions], setting: str, options: Mapping[str, Any]) -> AnyOptions:
    """Check options; raise InputError for one that is unknown, missing or wrong.

    `setting` names their owner in messages.
    """
    try:
        return kind(**options)
    except ValidationError as error:
        # First a name that is unknown: a misspelt one is also missing.
        wrong = min(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
        name = ".".join(str(part) for part in wrong["loc"])
        known = ", ".join(kind.model_fields)
        problem = {
            "extra_forbidden": f"unknown: {name}; known: {known}{nearest(name, kind.model_fields)}",
            "missing": f"give {name}; known: {known}",
        }.get(wrong["type"], f"{name} = {wrong['input']!r}: {wrong['msg']}")
        raise InputError(f"{setting}: {problem if name else wrong['msg']}") from None
