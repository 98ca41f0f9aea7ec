"""The reward `json_schema`: a completion is JSON that a schema allows."""

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NoReturn

FENCED = re.compile(r"```(?:json)?[ \t]*\n(.*?)```", re.DOTALL)


def json_schema(
    prompt: str,
    completion: str,
    answer: str | None,
    metadata: Mapping[str, Any],
    *,
    schema: Mapping[str, Any] | bool | None = None,
) -> float:
    """1 where the completion is JSON and valid; else 0.

    The last fenced block of the completion counts, or without one the whole of it.

    The schema is the option, or else that of the metadata: draft 2020-12 unless `$schema` names
    another, without references to other documents. NaN and infinities are not JSON.

    Raises:
        ValueError: There is no schema, or it is not valid.
    """
    wanted = metadata.get("schema") if schema is None else schema
    if wanted is None:
        raise ValueError("json_schema needs the option schema, or metadata with a schema")
    validator = _validator(json.dumps(wanted))
    blocks = FENCED.findall(completion)
    try:
        value = json.loads(blocks[-1] if blocks else completion, parse_constant=_refuse)
        return float(validator.is_valid(value))
    except (ValueError, ArithmeticError, RecursionError):
        return 0.0


@lru_cache(maxsize=256)
def _validator(schema: str) -> Any:
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import Draft202012Validator, validator_for
    from referencing import Registry

    parsed = json.loads(schema)
    kind = validator_for(parsed, default=Draft202012Validator)
    try:
        kind.check_schema(parsed)
    except SchemaError as error:
        raise ValueError(f"not a JSON Schema: {error.message}") from None
    return kind(parsed, registry=Registry())  # an empty one: references are not fetched


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
