"""Prompts from several sources, mixed by weights that may move as the run goes on.

    [prompts]
    source = "mixture"
    [[prompts.source_options.parts]]
    source = "reasoning_gym:chain_sum"
    options = { min_terms = 2, max_terms = 2 }
    weight = [[0, 1.0], [1000, 0.0]]
    [[prompts.source_options.parts]]
    source = "reasoning_gym:chain_sum"
    options = { min_terms = 4, max_terms = 4 }
    weight = [[0, 0.0], [1000, 1.0]]

A schedule of difficulty is such a mix: parts of growing difficulty with weights that cross. Which
part a prompt comes from depends on the seed and its place alone.
"""

import json
import random
from collections.abc import Iterator
from itertools import accumulate, chain, pairwise, zip_longest
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from actors.errors import InputError
from actors.sources.heldout_filter import WithoutHeldout
from actors.sources.protocol import PromptSource, Split
from actors.sources.registry import load_source
from queues.records import Prompt

Points = tuple[tuple[int, float], ...]


class Part(BaseModel):
    """One source of a mix."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )

    source: str
    """As prompts.source."""
    options: dict[str, Any] = {}
    """As prompts.source_options."""
    weight: float | Points = Field(default=1.0)
    """Share against the other parts: a number, or [prompt, weight] points with straight lines
    between them. Before the first point and after the last one the weight stays."""
    name: str | None = None
    """What its prompts are told apart by; None takes its number from 0."""

    @field_validator("weight")
    @classmethod
    def _points_rise(cls, value: float | Points) -> float | Points:
        points = value if isinstance(value, tuple) else ((0, value),)
        places = [place for place, _ in points]
        rising = all(one < other for one, other in pairwise(places))
        if not points or not rising or any(weight < 0 for _, weight in points):
            raise ValueError("must be 0 or more, or [prompt, weight] points, the prompts rising")
        return value


class Mixture:
    """Several sources as one (a `PromptSource`).

    Args:
        options: `parts`, each as `Part`.
        seed: Of every part, and of which part comes when.
        split: The held-out problems are shared out evenly among the parts.
        heldout_size: Of all parts together.

    Raises:
        InputError: A part that cannot be used, or weights that are all 0 at some time.
    """

    def __init__(
        self,
        *,
        options: dict[str, Any],
        seed: int,
        split: Split = "train",
        heldout_size: int = 0,
    ) -> None:
        parts = _parts(options)
        share, more = divmod(heldout_size, len(parts))
        sizes = [share + (place < more) for place in range(len(parts))]
        of_parts = [
            [self._named(part, place, p) for p in _load(part, seed, "heldout", size).next(size)]
            for place, (part, size) in enumerate(zip(parts, sizes, strict=True))
            if size
        ]
        in_turn = chain.from_iterable(zip_longest(*of_parts))  # a smaller evaluation has all parts
        self._held_out = [prompt for prompt in in_turn if prompt is not None]
        self._train = split == "train"
        if not self._train and not self._held_out:
            raise InputError("source 'mixture': the held-out split needs a size above 0")
        texts = frozenset(prompt.text for prompt in self._held_out)
        self._parts = parts
        self._own = [
            _load(part, seed, "train", size)
            for part, size in zip(parts, sizes, strict=True)
            if self._train
        ]
        self._sources = [WithoutHeldout(source, texts) for source in self._own]
        self._seed = seed
        self._place = 0

    def next(self, count: int) -> list[Prompt]:
        """See `PromptSource.next`; the held-out split starts over when it is used up."""
        start, self._place = self._place, self._place + count
        places = range(start, start + count)
        if not self._train:
            return [self._held_out[place % len(self._held_out)] for place in places]
        return [self._draw(place) for place in places]

    def one_of_each(self) -> list[Prompt]:
        """The next training prompt of every part, however late its turn; no source moves on."""
        found = []
        for number, (part, source) in enumerate(zip(self._parts, self._sources, strict=True)):
            cursor = source.cursor()
            found.append(self._named(part, number, source.next(1)[0]))
            source.restore(cursor)
        return found

    def cursor(self) -> str:
        """See `PromptSource.cursor`."""
        return json.dumps(
            {"place": self._place, "parts": [source.cursor() for source in self._sources]}
        )

    def restore(self, cursor: str) -> None:
        """See `PromptSource.restore`."""
        found = json.loads(cursor)
        self._place = found["place"]
        for source, of_part in zip(self._sources, found["parts"], strict=True):
            source.restore(of_part)

    def demonstrations(self, **options: Any) -> Iterator[tuple[str, str]]:
        """Demonstrations of all parts, mixed by the weights that they begin with.

        Raises:
            InputError: A part has none.
        """
        drawn = []
        for part, source in zip(self._parts, self._own, strict=True):
            method = getattr(source, "demonstrations", None)
            if method is None:
                raise InputError(f"source 'mixture': {part.source!r} has no demonstrations")
            drawn.append(method(**options))
        place = -1
        while True:
            yield next(drawn[self._choose(place)])
            place -= 1

    def _choose(self, place: int) -> int:
        """The number of the part that is drawn from at a place; before 0 the first weights hold."""
        sums = list(accumulate(weight_at(part.weight, place) for part in self._parts))
        lot = random.Random(f"{self._seed}/{place}").random() * sums[-1]
        return next(number for number, upper in enumerate(sums) if lot < upper)

    def _draw(self, place: int) -> Prompt:
        chosen = self._choose(place)
        return self._named(self._parts[chosen], chosen, self._sources[chosen].next(1)[0])

    @staticmethod
    def _named(part: Part, place: int, prompt: Prompt) -> Prompt:
        name = str(place) if part.name is None else part.name
        return Prompt(
            prompt_id=f"{name}:{prompt.prompt_id}",
            text=prompt.text,
            answer=prompt.answer,
            metadata={**prompt.metadata, "part": name},
        )


def weight_at(weight: float | Points, place: int) -> float:
    """The weight of a part when the prompt at a place is drawn.

    Example:
        >>> [weight_at(((10, 1.0), (20, 0.0)), place) for place in (0, 10, 15, 20, 99)]
        [1.0, 1.0, 0.5, 0.0, 0.0]
    """
    if not isinstance(weight, tuple):
        return weight
    if place <= weight[0][0]:
        return weight[0][1]
    for (start, low), (end, high) in pairwise(weight):
        if place <= end:
            return low + (high - low) * (place - start) / (end - start)
    return weight[-1][1]


def _parts(options: dict[str, Any]) -> list[Part]:
    found = options.get("parts")
    if options.keys() != {"parts"} or not isinstance(found, list) or not found:
        raise InputError(
            f"source 'mixture' with options {options}: give parts, a list with a source each"
        )
    parts = []
    for place, part in enumerate(found):
        try:
            parts.append(Part(**part))
        except (ValidationError, TypeError) as error:
            raise InputError(f"source 'mixture': parts[{place}]: {error}") from None
    names = [str(place) if part.name is None else part.name for place, part in enumerate(parts)]
    if len(set(names)) < len(names) or any("/" in name for name in names):
        raise InputError(f"source 'mixture': names {names} must differ, and have no '/'")
    corners = {0}
    for part in parts:
        if isinstance(part.weight, tuple):
            corners |= {place for place, _ in part.weight}
    for corner in sorted(corners):  # between corners a sum of straight lines stays above 0
        if not any(weight_at(part.weight, corner) for part in parts):
            raise InputError(f"source 'mixture': all weights are 0 at prompt {corner}")
    return parts


def _load(part: Part, seed: int, split: Split, size: int) -> PromptSource:
    return load_source(part.source, options=part.options, seed=seed, split=split, heldout_size=size)
