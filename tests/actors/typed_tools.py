"""Tools with parameters of every kind; each answers with the repr of what it was given."""

import dataclasses
import enum
import typing
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, Optional, Union

import typing_extensions
from pydantic import BaseModel, Field


class Unit(enum.Enum):
    METRE = "m"
    FOOT = "ft"


@dataclasses.dataclass
class Point:
    x: int
    unit: Unit = Unit.METRE


@dataclasses.dataclass
class Tree:
    leaves: "list[Tree]"


class Row(typing_extensions.TypedDict):
    key: str
    value: typing_extensions.NotRequired[float]


class OldRow(typing.TypedDict):
    key: str


class Pair(NamedTuple):
    first: int
    second: str = "b"


class Model(BaseModel):
    size: int


class Unknown:
    """No type that JSON or pydantic knows."""


def taking(annotation, *default):
    """Return a tool of one parameter, x."""

    def tool(x):
        return repr(x)

    tool.__annotations__["x"] = annotation
    tool.__defaults__ = default
    return tool


listed, typing_listed, lists = taking(list), taking(typing.List), taking(list[list[int]])  # noqa: UP006
mapped, typing_mapped = taking(dict[str, int]), taking(typing.Dict)  # noqa: UP006
chosen, enumerated = taking(Literal["c", 1], "c"), taking(Unit)
described = taking(Annotated[int, Field(description="how many", ge=1)])
pair, many, unique = taking(tuple[int, str]), taking(tuple[int, ...]), taking(set[int])
point, points, row, named = taking(Point), taking(list[Point]), taking(Row), taking(Pair)
optional, either, model = taking(Optional[int], None), taking(Union[int, str]), taking(Model)  # noqa: UP007, UP045
tree, forward, old_row = taking(Tree), taking("list[Point]"), taking(OldRow)
inner_forward = taking(list["Unit"])
unknown, function, untyped = taking(Unknown), taking(typing.Callable), taking(Any)


def positional(x: int, y: str = "b", /, z: float = 0.5):
    return repr((x, y, z))


def keyword(*, x: int):
    return repr(x)


def counted(**counts: int):
    return repr(counts)


def wrapped(*args, **kwargs):
    return repr((args, kwargs))


fixed = partial(wrapped, limit=1)
first = partial(positional, 1)


class Shelf:
    """A shelf of books."""

    def find(self, x: int):
        """Find a book."""
        return repr(x)

    async def __call__(self, x: int):
        return repr(x)


shelf = Shelf()
find = shelf.find
find_later = partial(shelf)
