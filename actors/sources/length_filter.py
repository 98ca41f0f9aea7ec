"""Leaves out prompts that are too long in tokens, whichever source they come from."""

import logging
from collections.abc import Callable
from typing import Any

from actors.environments.single_turn import opening
from actors.errors import InputError, PromptRefused
from actors.rollout.chat_rendering import Renderer
from actors.sources.protocol import PromptSource
from queues.records import Prompt

LOG = logging.getLogger("headway.sources")
PATIENCE = 10_000
"""Prompts in a row that are too long, after which the source counts as exhausted."""


class WithinTokens:
    """A source less its long prompts (a `PromptSource`).

    Args:
        source: Where prompts come from.
        fits: Whether one is short enough.
    """

    def __init__(self, source: PromptSource, fits: Callable[[Prompt], bool]) -> None:
        self._source, self._fits = source, fits

    def next(self, count: int) -> list[Prompt]:
        """See `PromptSource.next`.

        Raises:
            InputError: Next to every prompt of the source is too long.
        """
        kept: list[Prompt] = []
        in_a_row = 0
        while len(kept) < count:
            for prompt in self._source.next(count - len(kept)):
                if self._fits(prompt):
                    kept.append(prompt)
                    in_a_row = 0
                    continue
                in_a_row += 1
                LOG.info("prompt %s is longer than prompts.max_tokens: left out", prompt.prompt_id)
                if in_a_row == PATIENCE:
                    raise InputError(
                        f"{PATIENCE} prompts in a row were longer than prompts.max_tokens, the "
                        f"last of them {prompt.prompt_id!r}; raise it"
                    )
        return kept

    def cursor(self) -> str:
        """See `PromptSource.cursor`."""
        return self._source.cursor()

    def restore(self, cursor: str) -> None:
        """See `PromptSource.restore`."""
        self._source.restore(cursor)


def shorter(tokenizer: Any, chat_template: Any, max_tokens: int) -> Callable[[Prompt], bool]:
    """Whether the messages of a prompt, as a chat template writes them, have at most some tokens.

    A prompt that cannot be written counts as short: what is wrong with it is said elsewhere.
    """
    renderer = Renderer(tokenizer, chat_template)

    def fits(prompt: Prompt) -> bool:
        try:
            return len(renderer.prompt(opening(prompt))) <= max_tokens
        except PromptRefused:
            return True

    return fits
