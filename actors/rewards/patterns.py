"""Rewards for the shape of a completion: a regular expression, tags in order, a JSON schema."""

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NoReturn

from actors.errors import RewardFailed
from actors.rewards.answers import last_match, required_answer
from actors.rewards.fenced_blocks import read_block
from actors.rewards.find_reward import Metadata, Verifier


def regex(prompt: str, answer: str | None, metadata: Metadata, *, pattern: str) -> Verifier:
    r"""1 where a regular expression is found in the completion; else 0.

    Of several matches of `pattern`, in Python's syntax, the last counts; "." matches new lines too.
    If it has a group named `answer`, that must equal the answer, apart from white space; the prompt
    then needs one (ValueError).
    """
    compiled = re.compile(pattern, re.DOTALL)
    compares = "answer" in compiled.groupindex
    gold = required_answer(answer).strip() if compares else ""

    def verify(completion: str) -> float:
        last = last_match(compiled, completion)
        return float(last is not None and (not compares or (last["answer"] or "").strip() == gold))

    return verify


async def tags(
    prompt: str,
    completion: str,
    answer: str | None,
    metadata: Metadata,
    *,
    names: Sequence[str] = ("think", "answer"),
) -> float:
    """1 where the completion is `<think>…</think><answer>…</answer>` and nothing else; else 0.

    Each tag occurs once; between and around the pairs of tags there may be white space.
    """
    rest = completion
    for name in names:
        opening, closing = f"<{name}>", f"</{name}>"
        if completion.count(opening) != 1 or completion.count(closing) != 1:
            return 0.0
        before, _, rest = rest.partition(opening)
        _, closed, rest = rest.partition(closing)
        if before.strip() or not closed:
            return 0.0
    return float(not rest.strip())


def json_schema(
    prompt: str,
    answer: str | None,
    metadata: Metadata,
    *,
    schema: Mapping[str, Any] | bool | None = None,
) -> Verifier:
    """1 where the completion, or its fenced block if it has any, is JSON and valid; else 0.

    Of several blocks `read_block` finds the one that counts. The schema is the option, or else that
    of the metadata: draft 2020-12 unless `$schema` names another, without references to other
    documents (RewardFailed, by the verifier). NaN and infinities are not JSON. Raises ValueError
    without a valid schema.
    """
    from referencing.exceptions import Unresolvable

    wanted = metadata.get("schema") if schema is None else schema
    if wanted is None:
        raise ValueError("json_schema needs the option schema, or metadata with a schema")
    validator = _validator(json.dumps(wanted))

    def verify(completion: str) -> float:
        try:
            block = read_block(completion, "json", "jsonc")
            value = json.loads(block, parse_constant=_refuse)
            return float(validator.is_valid(value))
        except Unresolvable as error:  # the schema's fault
            raise RewardFailed(f"cannot be used: {error}") from None
        except (ValueError, ArithmeticError, RecursionError):
            return 0.0

    return verify


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
