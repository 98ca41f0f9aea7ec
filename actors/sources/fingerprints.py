"""Fingerprints of what prompts come from, in every cursor: no change between sessions is missed.

    source          what its cursor knows again
    rows            every row of its tables: files, data sets, environments of verifiers
    procedural      the held-out problems, and the first ones to train
    mixture         each of its parts
    the user's      what its `fingerprint()` returns, or the files that its options name; and the
                    prompts that were drawn last, which are drawn again

A source that has changed is refused by `restore`; `restart` goes on with what there is now.
"""

import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

import xxhash

from actors.errors import SourceChanged
from actors.foreign_text import surrogate
from actors.sources.protocol import PromptSource, RestartableSource
from headway.errors import InputError
from headway.folder_checksums import checksum_of
from headway.user_code import beside_recipe
from queues.records import Prompt

LOG = logging.getLogger("headway.sources")
Fingerprints = Mapping[str, str]
"""By the name of a table, file or task."""


def of_prompts(prompts: Sequence[Prompt]) -> str:
    """Return the fingerprint of prompts in their order: ids, texts, answers and metadata."""
    digest = xxhash.xxh3_64()
    for prompt in prompts:
        fields = [prompt.prompt_id, prompt.text, prompt.answer, dict(prompt.metadata)]
        digest.update(json.dumps(fields, default=repr).encode())
    return f"{len(prompts)} prompts, {digest.hexdigest()}"


def of_files(options: Any) -> dict[str, str]:
    """Return size and checksum of every file that options name, by its path."""
    checksums = {text: checksum_of(beside_recipe(text)) for text in sorted({*_files(options)})}
    return {text: checksum.replace("-", " bytes, ", 1) for text, checksum in checksums.items()}


def _files(options: Any) -> Iterator[str]:
    if isinstance(options, str):
        try:
            path = beside_recipe(options)
            is_file = bool(options) and path.is_file() and os.access(path, os.R_OK)
        except (OSError, ValueError, RuntimeError):  # too long, a NUL, or "~" without a home
            is_file = False
        if is_file:
            yield options
    elif isinstance(options, Mapping):
        for value in options.values():
            yield from _files(value)
    elif isinstance(options, Iterable):
        for value in options:
            yield from _files(value)


def check(recorded: Fingerprints, present: Fingerprints) -> None:
    """Raise SourceChanged where fingerprints differ; names each."""
    changed = [
        f"{name}: {recorded.get(name, 'not there')} before, {present.get(name, 'not there')} now"
        for name in sorted(recorded.keys() | present.keys())
        if recorded.get(name) != present.get(name)
    ]
    if changed:
        raise SourceChanged("; ".join(changed))


class UserSource:
    """A source of the user with fingerprints in its cursor (a `RestartableSource`)."""

    def __init__(self, source: PromptSource, options: Any) -> None:
        self._source, self._options = source, options
        self._last: tuple[str, int, Sequence[Prompt]] | None = None
        """The cursor before the last call of `next`, its count, and its prompts."""

    def next(self, count: int) -> list[Prompt]:
        before = self._source.cursor()
        prompts = self._source.next(count)
        self._last = (before, count, prompts)
        return prompts

    def cursor(self) -> str:
        """See `PromptSource.cursor`; what is no cursor is returned as it is."""
        cursor = self._source.cursor()
        if not isinstance(cursor, str) or surrogate(cursor):
            return cursor
        state: dict[str, Any] = {"cursor": cursor, "made_from": self._made_from}
        if self._last is not None:
            before, count, prompts = self._last
            state["last"] = [before, count, of_prompts(prompts)]
        return json.dumps(state)

    def restore(self, cursor: str) -> None:
        """See `PromptSource.restore`; raise SourceChanged for a source that gives others now."""
        state = json.loads(cursor)
        check(state["made_from"], self._made_from)
        if "last" in state:
            before, count, drawn = state["last"]
            self._source.restore(before)
            again = of_prompts(self._source.next(count))
            check({"its last prompts": drawn}, {"its last prompts": again})
        self._source.restore(state["cursor"])

    def restart(self, cursor: str) -> None:
        self._source.restore(json.loads(cursor)["cursor"])

    @cached_property
    def _made_from(self) -> Fingerprints:
        """The fingerprints when the source was opened, since it may have read its files then."""
        own: Callable[[], str] | None = getattr(self._source, "fingerprint", None)
        return of_files(self._options) if own is None else {"its fingerprint()": own()}


def watched(source: PromptSource, options: Any = None) -> RestartableSource:
    """Return a source whose cursor has fingerprints; `options` are those of a source without."""
    return source if isinstance(source, RestartableSource) else UserSource(source, options)


def go_on(
    source: RestartableSource, cursor: str, *, on_change: Literal["refuse", "new_epoch"]
) -> None:
    """Restore a source, or restart a changed one; raise InputError if `on_change` forbids it."""
    try:
        source.restore(cursor)
    except SourceChanged as change:
        if on_change == "refuse":
            raise InputError(
                f"the prompts are not those of the run's last session ({change}): going on would "
                "repeat some and leave out others. Put them back, or begin a new epoch of the "
                'present ones: --set prompts.on_change="new_epoch"'
            ) from None
        LOG.warning("the prompts changed, and a new epoch of them begins: %s", change)
        source.restart(cursor)
