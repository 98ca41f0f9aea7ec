"""Keeps the prompts of an evaluation out of training, whichever source they come from."""

from actors.errors import InputError
from actors.sources.source import PromptSource
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
            InputError: Next to every prompt of the source is held out, or it gives no prompts.
        """
        kept: list[Prompt] = []
        in_a_row = 0
        while len(kept) < count:
            drawn = self._source.next(count - len(kept))
            if not drawn:
                raise InputError("prompts.source gave no prompt; a source must be endless")
            for prompt in drawn:
                if not isinstance(prompt, Prompt):
                    raise InputError(
                        f"prompts.source gave {prompt!r}, a {type(prompt).__name__}; a source "
                        "must give queues.records.Prompt"
                    )
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
        """See `PromptSource.cursor`."""
        return self._source.cursor()

    def restore(self, cursor: str) -> None:
        """See `PromptSource.restore`."""
        self._source.restore(cursor)
