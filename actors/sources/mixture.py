"""Prompts from several sources, mixed by weights that may move, as in a curriculum.

The part that a prompt comes from depends on the seed and its position alone.
"""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, chain, count, pairwise, zip_longest
from typing import Any

from pydantic import Field, field_validator

from actors.errors import SourceChanged
from actors.sources.filters import without_heldout
from actors.sources.fingerprints import watched
from actors.sources.load_source import load_source
from actors.sources.protocol import PromptSource, RestartableSource, Split, TableSource
from headway.errors import InputError
from headway.options import parse_options
from headway.recipe_section import Section
from queues.records import Prompt

Points = tuple[tuple[int, float], ...]


class Part(Section):
    """One source of a mix."""

    source: str
    """As prompts.source."""
    options: dict[str, Any] = Field(default={})
    """As prompts.source_options."""
    weight: float | Points = Field(default=1.0)
    """Share against the other parts: a number, or [prompt, weight] points with straight lines
    between them. Before the first point and after the last one the weight stays."""
    name: str | None = None
    """Prefix of its prompt ids; None takes its number, from 0."""

    @field_validator("weight")
    @classmethod
    def _points_rise(cls, value: float | Points) -> float | Points:
        points = value if isinstance(value, tuple) else ((0, value),)
        rising = all(start < end for (start, _), (end, _) in pairwise(points))
        if not points or not rising or any(weight < 0 for _, weight in points):
            raise ValueError("must be 0 or more, or [prompt, weight] points, the prompts rising")
        return value


class MixtureOptions(Section):
    """Options of `mixture`."""

    parts: tuple[Part, ...] = Field(min_length=1)
    """The sources, which share the held-out problems evenly."""

    @field_validator("parts")
    @classmethod
    def _parts_can_be_drawn(cls, parts: tuple[Part, ...]) -> tuple[Part, ...]:
        names = [_name(part, number) for number, part in enumerate(parts)]
        if len(set(names)) < len(names) or any("/" in name for name in names):
            raise ValueError(f"names {names} must differ, and have no '/'")
        corners = {0}
        for part in parts:
            if isinstance(part.weight, tuple):
                corners |= {position for position, _ in part.weight}
        for corner in sorted(corners):  # between corners a sum of straight lines stays above 0
            if not any(weight_at(part.weight, corner) for part in parts):
                raise ValueError(f"all weights are 0 at prompt {corner}")
        return parts


class Mixture:
    """Several sources as one (a `RestartableSource`); options as `MixtureOptions`."""

    def __init__(
        self,
        *,
        options: dict[str, Any],
        seed: int,
        split: Split = "train",
        heldout_size: int = 0,
    ) -> None:
        self.position = 0
        parts = parse_options(MixtureOptions, "source 'mixture'", options).parts
        share, more = divmod(heldout_size, len(parts))
        sizes = [share + 1 if number < more else share for number in range(len(parts))]
        by_part = [
            [_named(part, number, p) for p in _load(part, seed, "heldout", size).next(size)]
            for number, (part, size) in enumerate(zip(parts, sizes, strict=True))
            if size
        ]
        in_turn = chain.from_iterable(zip_longest(*by_part))  # a smaller evaluation has all parts
        self._held_out = [prompt for prompt in in_turn if prompt is not None]
        self._train = split == "train"
        if not self._train and not self._held_out:
            raise InputError("source 'mixture': the held-out split needs a size above 0")
        texts = frozenset(prompt.text for prompt in self._held_out)
        self._parts = parts
        self._unfiltered = [
            _load(part, seed, "train", size)
            for part, size in zip(parts, sizes, strict=True)
            if self._train
        ]
        self._sources = [
            without_heldout(watched(source, part.options), texts)
            for part, source in zip(parts, self._unfiltered, strict=False)
        ]
        self._seed = seed

    def next(self, count: int) -> list[Prompt]:
        return [self._draw() for _ in range(count)]

    def _draw(self) -> Prompt:
        position, self.position = self.position, self.position + 1
        if not self._train:
            return self._held_out[position % len(self._held_out)]
        number = self._choose(position)
        return _named(self._parts[number], number, self._sources[number].next(1)[0])

    def one_of_each(self) -> list[Prompt]:
        """Return the next training prompt of every part, without moving any source."""
        prompts = []
        for number, (part, source) in enumerate(zip(self._parts, self._sources, strict=True)):
            cursor = source.cursor()
            prompts.append(_named(part, number, source.next(1)[0]))
            source.restore(cursor)
        return prompts

    def table(self) -> list[Prompt]:
        """Return the rows of those parts that draw from a table."""
        tables = (part.table() for part in self._unfiltered if isinstance(part, TableSource))
        return [*chain.from_iterable(tables)]

    def cursor(self) -> str:
        return json.dumps(
            {"position": self.position, "parts": [source.cursor() for source in self._sources]}
        )

    def restore(self, cursor: str) -> None:
        for source, part_cursor in self._at(cursor):
            source.restore(part_cursor)

    def restart(self, cursor: str) -> None:
        """See `RestartableSource.restart`; parts that did not change go on."""
        for source, part_cursor in self._at(cursor):
            try:
                source.restore(part_cursor)
            except SourceChanged:
                source.restart(part_cursor)

    def _at(self, cursor: str) -> Iterator[tuple[RestartableSource, str]]:
        """Go to a position, and yield the sources with their cursors there."""
        state = json.loads(cursor)
        self.position = state["position"]
        yield from zip(self._sources, state["parts"], strict=True)

    def demonstrations(self, **options: Any) -> Iterator[Any]:
        """Yield demonstrations of all parts, by first weights; raise InputError if one has none."""
        by_part = []
        for part, source in zip(self._parts, self._unfiltered, strict=True):
            method = getattr(source, "demonstrations", None)
            if method is None:
                raise InputError(f"source 'mixture': {part.source!r} has no demonstrations")
            by_part.append(method(**options))
        for position in count(-1, -1):  # before position 0 the first weights hold
            yield next(by_part[self._choose(position)])

    def _choose(self, position: int) -> int:
        """Return the number of the part that is drawn from at a position."""
        weights = [weight_at(part.weight, position) for part in self._parts]
        return chosen(weights, self._seed, position)


def chosen(weights: Sequence[float], seed: int, position: int) -> int:
    """Return the number of the part that is drawn from at a position, by the weights of all."""
    sums = list(accumulate(weights))
    threshold = random.Random(f"{seed}/{position}").random() * sums[-1]
    return next(number for number, upper in enumerate(sums) if threshold < upper)


def _name(part: Part, number: int) -> str:
    return str(number) if part.name is None else part.name


def _named(part: Part, number: int, prompt: Prompt) -> Prompt:
    name = _name(part, number)
    metadata = {"part": name, **prompt.metadata, "headway:part": name}
    return replace(prompt, prompt_id=f"{name}:{prompt.prompt_id}", metadata=metadata)


def weight_at(weight: float | Points, position: int) -> float:
    """Return the weight of a part when the prompt at a position is drawn.

    Example:
        >>> [weight_at(((10, 1.0), (20, 0.0)), position) for position in (0, 10, 15, 20, 99)]
        [1.0, 1.0, 0.5, 0.0, 0.0]
    """
    if not isinstance(weight, tuple):
        return weight
    if position <= weight[0][0]:
        return weight[0][1]
    for (start, low), (end, high) in pairwise(weight):
        if position <= end:
            return low + (high - low) * (position - start) / (end - start)
    return weight[-1][1]


def _load(part: Part, seed: int, split: Split, size: int) -> PromptSource:
    return load_source(
        part.source,
        options=part.options,
        seed=seed,
        split=split,
        heldout_size=size,
        setting="parts.source",
    )
