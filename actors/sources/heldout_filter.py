"""Keeps the prompts of an evaluation out of training, whichever source they come from."""

import json
from collections.abc import Sequence
from typing import Any

from actors.errors import ActorsError, InputError, SourceFailed
from actors.sources.protocol import PromptSource
from queues.records import Prompt

PATIENCE = 10_000
"""Held-out prompts in a row after which the source counts as exhausted."""


class WithoutHeldout:
    """A source less the prompts with some texts (a `PromptSource`).

    Args:
        source: Where prompts come from.
        texts: What no prompt may say.
    """

    def __init__(self, source: PromptSource, texts: frozenset[str]) -> None:
        self._source = source
        self._texts = texts

    def next(self, count: int) -> list[Prompt]:
        """See `PromptSource.next`.

        Raises:
            InputError: Next to every prompt of the source is held out.
            SourceFailed: The source raised, or gave something else than prompts.
        """
        kept: list[Prompt] = []
        in_a_row = 0
        while len(kept) < count:
            for prompt in self._draw(count - len(kept)):
                if prompt.text not in self._texts:
                    kept.append(prompt)
                    in_a_row = 0
                    continue
                in_a_row += 1
                if in_a_row == PATIENCE:
                    raise InputError(
                        f"{PATIENCE} prompts in a row were held out, the last of them "
                        f"{prompt.prompt_id!r}; hold out fewer, or give a larger prompts.source"
                    )
        return kept

    def cursor(self) -> str:
        """See `PromptSource.cursor`.

        Raises:
            SourceFailed: The source raised, or answered something else than text.
        """
        try:
            found = self._source.cursor()
        except Exception as error:
            raise SourceFailed(f"prompts.source: cursor() raised {error!r}") from error
        if not isinstance(found, str):
            raise SourceFailed(f"prompts.source: cursor() gave {found!r}, must be text, as JSON")
        return found

    def _draw(self, count: int) -> Sequence[Prompt]:
        """From one to `count` sound prompts."""
        try:
            drawn = self._source.next(count)
        except ActorsError:
            raise
        except Exception as error:
            raise SourceFailed(f"prompts.source: next({count}) raised {error!r}") from error
        if not isinstance(drawn, Sequence) or not drawn:
            raise SourceFailed(
                f"prompts.source: next({count}) gave {drawn!r}, which holds no prompt; a "
                "source must be endless"
            )
        for prompt in drawn:
            _check(prompt)
        return drawn

    def restore(self, cursor: str) -> None:
        """See `PromptSource.restore`.

        Raises:
            SourceFailed: The source cannot go on there.
        """
        try:
            self._source.restore(cursor)
        except Exception as error:
            raise SourceFailed(f"prompts.source: restore({cursor!r}) raised {error!r}") from error


def _check(prompt: Any) -> None:
    """Refuses what the broker could not store or an engine could not read."""
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
