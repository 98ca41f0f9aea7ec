"""The interface of a prompt source: endless, seeded and resumable."""

from typing import Literal, Protocol, runtime_checkable

from queues.records import Prompt

Split = Literal["train", "heldout"]


class PromptSource(Protocol):
    """Prompts in an order that depends only on the arguments; none to train is ever held out.

    A class in user code is built with the keywords `options`, `seed`, `split` and `heldout_size`.
    It may have a method `fingerprint() -> str`, which differs whenever its prompts do.
    """

    def next(self, count: int) -> list[Prompt]:
        """Return the next `count` prompts; there are always more."""

    def cursor(self) -> str:
        """Return the position of the source, as JSON."""

    def restore(self, cursor: str) -> None:
        """Go to a position that a source with the same arguments returned from `cursor`."""


@runtime_checkable
class TableSource(PromptSource, Protocol):
    """A source that draws from rows, which are all known."""

    def table(self) -> list[Prompt]:
        """Return the prompts of all rows that may be drawn, their ids as "table:row"."""


@runtime_checkable
class RestartableSource(PromptSource, Protocol):
    """A source with fingerprints in its cursor; `restore` raises SourceChanged by them."""

    def restart(self, cursor: str) -> None:
        """Go on from a cursor though prompts changed, with a new epoch; may be called again."""
