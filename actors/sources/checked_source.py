"""Checks that a prompt source, perhaps user code, keeps its contract in the middle of a run."""

import json
from collections.abc import Sequence
from typing import Any

from actors.errors import ActorsError, SourceFailed
from actors.sources.protocol import PromptSource
from queues.records import Prompt


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
