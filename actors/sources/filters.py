"""Sources around a source: its contract checked, held-out problems or long prompts left out."""

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from actors.environments.single_turn import opening
from actors.errors import ActorsError, InputError, PromptRefused, SourceFailed
from actors.rollout.chat_rendering import Renderer
from actors.sources.protocol import PromptSource
from queues.records import Prompt

LOG = logging.getLogger("headway.sources")
PATIENCE = 10_000
"""Prompts in a row that may be left out before the source counts as exhausted."""


class CheckedSource:
    """A source whose prompts and cursors are checked (a `PromptSource`).

    Every method raises `SourceFailed` where the source raises or breaks its contract.
    """

    def __init__(self, source: PromptSource) -> None:
        self._source = source

    def next(self, count: int) -> list[Prompt]:
        """Return from one to `count` valid prompts."""
        try:
            prompts = self._source.next(count)
        except ActorsError:
            raise
        except Exception as error:
            raise SourceFailed(f"prompts.source: next({count}) raised {error!r}") from error
        if not isinstance(prompts, Sequence) or not prompts:
            raise SourceFailed(
                f"prompts.source: next({count}) gave {prompts!r}, which holds no prompt; a "
                "source must be endless"
            )
        for prompt in prompts:
            _check(prompt)
        return list(prompts)

    def cursor(self) -> str:
        """See `PromptSource.cursor`."""
        try:
            cursor = self._source.cursor()
        except Exception as error:
            raise SourceFailed(f"prompts.source: cursor() raised {error!r}") from error
        if not isinstance(cursor, str):
            raise SourceFailed(f"prompts.source: cursor() gave {cursor!r}, must be text, as JSON")
        return cursor

    def restore(self, cursor: str) -> None:
        """See `PromptSource.restore`."""
        try:
            self._source.restore(cursor)
        except Exception as error:
            raise SourceFailed(f"prompts.source: restore({cursor!r}) raised {error!r}") from error


def _check(prompt: Any) -> None:
    """Refuse a prompt that the broker could not store or an engine could not read."""
    if not isinstance(prompt, Prompt):
        raise SourceFailed(
            f"prompts.source gave {prompt!r}, a {type(prompt).__name__}; a source must give "
            "queues.records.Prompt"
        )
    texts = {"prompt_id": prompt.prompt_id, "text": prompt.text, "answer": prompt.answer or ""}
    for name, value in texts.items():
        if not isinstance(value, str):
            raise SourceFailed(
                f"prompts.source gave a Prompt whose {name} is {value!r}, a "
                f"{type(value).__name__}, must be text"
            )
    try:
        json.dumps(dict(prompt.metadata))
    except (TypeError, ValueError) as error:
        raise SourceFailed(
            f"prompts.source: the metadata of prompt {prompt.prompt_id!r} is not JSON: {error}"
        ) from None


@dataclass(frozen=True, slots=True)
class FilteredSource:
    """A source less some of its prompts (a `PromptSource`)."""

    source: PromptSource
    keeps: Callable[[Prompt], bool]
    """Returns True for the prompts to keep."""
    exhausted: Callable[[Prompt], str]
    """Describes, given the last prompt, what `patience` prompts in a row were."""
    patience: int = PATIENCE
    """Prompts in a row that may be left out."""

    def next(self, count: int) -> list[Prompt]:
        """See `PromptSource.next`.

        Raises:
            InputError: `patience` prompts in a row were left out.
        """
        kept: list[Prompt] = []
        in_a_row = 0
        while len(kept) < count:
            for prompt in self.source.next(count - len(kept)):
                if self.keeps(prompt):
                    kept.append(prompt)
                    in_a_row = 0
                    continue
                in_a_row += 1
                if in_a_row == self.patience:
                    reason = self.exhausted(prompt)
                    raise InputError(f"{self.patience} prompts in a row were {reason}")
        return kept

    def cursor(self) -> str:
        """See `PromptSource.cursor`."""
        return self.source.cursor()

    def restore(self, cursor: str) -> None:
        """See `PromptSource.restore`."""
        self.source.restore(cursor)


def without_heldout(source: PromptSource, texts: frozenset[str]) -> FilteredSource:
    """Return a source, its contract checked, less the prompts with some texts."""
    return FilteredSource(
        CheckedSource(source),
        lambda prompt: prompt.text not in texts,
        lambda prompt: (
            f"held out, the last of them {prompt.prompt_id!r}; hold out fewer, or give a larger "
            "prompts.source"
        ),
    )


def within_tokens(
    source: PromptSource, fits: Callable[[Prompt], bool], *, patience: int = PATIENCE
) -> FilteredSource:
    """Return a source less the prompts for which `fits` is false, which are too long."""

    def keeps(prompt: Prompt) -> bool:
        if fits(prompt):
            return True
        LOG.info("prompt %s is longer than prompts.max_tokens: left out", prompt.prompt_id)
        return False

    return FilteredSource(
        source,
        keeps,
        lambda prompt: (
            f"longer than prompts.max_tokens, the last of them {prompt.prompt_id!r}; raise it"
        ),
        patience=patience,
    )


def shorter(tokenizer: Any, chat_template: Any, max_tokens: int) -> Callable[[Prompt], bool]:
    """Return a predicate: the messages of a prompt, rendered, have at most `max_tokens` tokens.

    A prompt that cannot be rendered counts as short: `prompt_checks` reports what is wrong with it.
    """
    renderer = Renderer(tokenizer, chat_template)

    def fits(prompt: Prompt) -> bool:
        try:
            return len(renderer.prompt(opening(prompt))) <= max_tokens
        except PromptRefused:
            return True

    return fits
