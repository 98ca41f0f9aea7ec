"""Sources that check another source and leave out held-out problems or long prompts of it."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from actors.environments.protocol import Message
from actors.environments.single_turn import opening
from actors.errors import PromptRefused, SourceFailed
from actors.foreign_text import not_json, surrogate
from actors.rollout.chat_rendering import Renderer
from actors.sources.fingerprints import watched
from actors.sources.protocol import PromptSource, RestartableSource
from headway.errors import HeadwayError, InputError
from headway.user_code import describe_error, shown, where_raised
from queues.records import Prompt

LOG = logging.getLogger("headway.sources")
PATIENCE = 10_000
"""Prompts in a row that may be left out before the source counts as exhausted."""


@dataclass(frozen=True, slots=True)
class FilteredSource:
    """A source less some of its prompts, its contract checked (a `RestartableSource`).

    Every method raises `SourceFailed` where the source raises or breaks its contract.
    """

    source: RestartableSource
    keeps: Callable[[Prompt], bool]
    """Returns True for the prompts to keep."""
    exhausted: str
    """Message for `PATIENCE` skipped prompts in a row; {} is the id of the last."""

    def next(self, count: int) -> list[Prompt]:
        """See `PromptSource.next`; raise InputError where `PATIENCE` prompts were left out."""
        kept: list[Prompt] = []
        in_a_row = 0
        while len(kept) < count:
            for prompt in self._draw(count - len(kept)):
                in_a_row = 0 if self.keeps(prompt) else in_a_row + 1
                if not in_a_row:
                    kept.append(prompt)
                elif in_a_row == PATIENCE:
                    reason = self.exhausted.format(repr(prompt.prompt_id))
                    raise InputError(f"{PATIENCE} prompts in a row were {reason}")
        return kept

    def cursor(self) -> str:
        cursor = _call(self.source.cursor)
        if not isinstance(cursor, str) or surrogate(cursor):
            raise SourceFailed(
                f"prompts.source: cursor() gave {shown(cursor)}, must be text, as JSON"
            )
        return cursor

    def restore(self, cursor: str) -> None:
        _call(self.source.restore, cursor)

    def restart(self, cursor: str) -> None:
        _call(self.source.restart, cursor)

    def _draw(self, count: int) -> Sequence[Prompt]:
        """Return from one to `count` valid prompts."""
        prompts = _call(self.source.next, count)
        if not isinstance(prompts, Sequence) or not prompts:
            raise SourceFailed(
                f"prompts.source: next({count}) gave {shown(prompts)}, which holds no prompt; a "
                "source must be endless"
            )
        for prompt in prompts:
            _check(prompt)
        return prompts


def _call(method: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return method(*arguments)
    except HeadwayError:
        raise
    except Exception as error:
        called = f"{method.__name__}({', '.join(map(repr, arguments))})"
        raise SourceFailed(
            f"prompts.source: {called} {describe_error(error)}{where_raised(error)}"
        ) from error


def _check(prompt: Any) -> None:
    """Refuse a prompt that the broker could not store or an engine could not read."""
    if not isinstance(prompt, Prompt):
        raise SourceFailed(
            f"prompts.source gave {shown(prompt)}, a {type(prompt).__name__}; a source must give "
            "queues.records.Prompt"
        )
    texts = {"prompt_id": prompt.prompt_id, "text": prompt.text, "answer": prompt.answer or ""}
    for name, value in texts.items():
        if not isinstance(value, str):
            raise SourceFailed(
                f"prompts.source gave a Prompt whose {name} is {shown(value)}, a "
                f"{type(value).__name__}, must be text"
            )
    if problem := surrogate(prompt.prompt_id):  # no ledger can hold it; other texts can be stored
        raise SourceFailed(f"prompts.source gave the prompt_id {prompt.prompt_id!a}: {problem}")
    mapping = isinstance(prompt.metadata, Mapping)
    if problem := not_json(dict(prompt.metadata)) if mapping else "it is no mapping":
        raise SourceFailed(
            f"prompts.source: the metadata of prompt {prompt.prompt_id!r} is not JSON: {problem}"
        )


def without_heldout(source: PromptSource, texts: frozenset[str]) -> FilteredSource:
    """Return a source less the prompts with some texts."""
    return FilteredSource(
        watched(source),
        lambda prompt: prompt.text not in texts,
        "held out, the last of them {}; hold out fewer, or give a larger prompts.source",
    )


def within_tokens(source: PromptSource, fits: Callable[[Prompt], bool]) -> FilteredSource:
    """Return a source less the prompts for which `fits` is false, which are too long."""

    def keeps(prompt: Prompt) -> bool:
        if fits(prompt):
            return True
        LOG.info("prompt %s is longer than prompts.max_tokens: left out", prompt.prompt_id)
        return False

    exhausted = "longer than prompts.max_tokens, the last of them {}; raise it"
    return FilteredSource(watched(source), keeps, exhausted)


def shorter(
    renderer: Renderer,
    max_tokens: int,
    begin: Callable[[Prompt], Sequence[Message]] = opening,
) -> Callable[[Prompt], bool]:
    """Return a predicate: the messages that begin with a prompt have at most `max_tokens` tokens.

    `begin` returns them. One that cannot be rendered counts as short; `prompt_checks` reports it.
    """

    def fits(prompt: Prompt) -> bool:
        try:
            return len(renderer.prompt(begin(prompt))) <= max_tokens
        except PromptRefused:
            return True

    return fits
