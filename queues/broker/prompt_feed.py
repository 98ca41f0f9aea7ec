"""The feeder's end of the broker: prompts and evaluations come in, outcomes go out."""

import logging
from collections.abc import Sequence
from functools import partial

from queues.broker.commit_pipeline import Commits
from queues.errors import InputError, ProtocolError, QueueClosed
from queues.records import Evaluation, Prompt
from queues.state.broker_state import BrokerState
from queues.state.evaluations import EvaluationRun
from queues.storage.ledger import Ledger, dump_prompt

log = logging.getLogger(__name__)


class Feed:
    """What `queues.protocols.PromptFeed` asks for.

    Args:
        book: Decides.
        ledger: Records.
        commits: Makes it durable.
    """

    def __init__(self, book: BrokerState, ledger: Ledger, commits: Commits) -> None:
        self._book = book
        self._ledger = ledger
        self._commits = commits

    async def prompts_wanted(self, timeout: float) -> int:
        """How many train prompts to issue now; long-polls, 0 at the timeout.

        Enough to keep the line filled, and never more groups than the remaining steps can train.

        Raises:
            QueueClosed: None will be wanted any more.
        """
        return await self._commits.line.until(self._book.wanted, timeout) or 0

    async def issue(self, prompts: Sequence[Prompt], *, cursor: str, last: bool = False) -> None:
        """Queue prompts for training, in one transaction with the source's cursor.

        Args:
            prompts: A group is made of each, less those that are retired or set aside. Once a whole
                epoch is, the source counts as ended.
            cursor: Where the source goes on after them.
            last: The source has ended; only then may the last batch be short. If that ends training
                before its last step, evaluations of versions that were not reached end without a
                score, all their prompts failed.

        Raises:
            InputError: Metadata that is not JSON, or with a pass-rate cap an id without an epoch.
        """
        self._commits.check_open()
        book = self._book
        if book.ended:
            raise ProtocolError("issue: the last prompts were issued before")
        kept, exhausted = book.retirement.select(prompts)
        texts = [dump_prompt(prompt) for prompt in kept]
        last = last or exhausted
        book.cursor, book.ended = cursor, last
        if exhausted:
            log.warning("all prompts of an epoch are set aside: the source counts as ended")
        if prompts and not kept and not last:
            return  # a cursor that a crash forgets only brings the same retired prompts again
        groups = book.issue(kept)
        await self._commits.durable(
            partial(self._ledger.issue, groups, texts, cursor, last=last),
            self._commits.work, *((self._commits.progress, self._commits.line) if last else ()),
        )  # fmt: skip

    async def cursor(self) -> str | None:
        """The cursor of the last `issue`; None before the first."""
        return self._book.cursor

    async def evaluate(
        self, name: str, prompts: Sequence[Prompt], *, temperature: float, min_version: int
    ) -> None:
        """Queue an evaluation; a name that is known already is left as it is.

        Every prompt is sampled once, or as often as it is given, ahead of training, by engines at
        `min_version` or later.
        Queue the evaluation of the last version before the last `ack`: after it, without an
        evaluation to generate, the run is over and the workers leave.

        Raises:
            QueueClosed: The run is over.
        """
        self._commits.check_open()
        if not prompts:
            raise InputError(f"evaluate: {name!r} has no prompts, must have at least 1")
        if min_version > (steps := self._book.bounds.steps):
            raise InputError(
                f"evaluate: {name!r} wants min_version = {min_version}, but the last is {steps}"
            )
        if name in self._book.evaluations:
            return
        if self._book.over:
            raise QueueClosed(f"evaluate: {name!r} comes after the end of the run")
        texts = [dump_prompt(prompt) for prompt in prompts]
        run = EvaluationRun(
            name=name, count=len(prompts), temperature=temperature, min_version=min_version
        )
        groups = self._book.evaluate(run, prompts)
        await self._commits.durable(
            partial(self._ledger.evaluate, run, groups, texts), self._commits.work
        )

    async def evaluation(self, name: str, timeout: float) -> Evaluation | None:
        """The outcome of an evaluation; long-polls, None if unfinished at the timeout."""
        run = self._book.evaluations.get(name)
        if run is None:
            raise ProtocolError(
                f"evaluation: {name!r} was not queued; known are {[*self._book.evaluations]}"
            )
        return await self._commits.progress.until(
            lambda: run.outcome() if run.finished else None, timeout
        )
