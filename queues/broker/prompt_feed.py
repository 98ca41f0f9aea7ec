"""The broker's side of `PromptFeed`: prompts and evaluations come in, outcomes go out."""

import logging
from collections.abc import Sequence
from functools import partial

from headway.errors import InputError
from queues.broker.commit_pipeline import CommitPipeline
from queues.errors import ProtocolError, QueueClosed
from queues.protocols import PromptFeed
from queues.records import Evaluation, Prompt, Purpose
from queues.state.groups import EvaluationRun
from queues.storage.ledger import dump_prompt
from queues.storage.ledger_schema import ISSUE_TOKEN

log = logging.getLogger(__name__)
_OUTCOME = f"""
WITH prompts AS (
    SELECT count(*) AS samples, sum(state = 'failed') AS failures, count(reward) AS scored,
        sum(reward) AS total, max(reward) AS largest, min(oldest_version) AS oldest,
        max(newest_version) AS newest
    FROM groups LEFT JOIN results USING (group_id)
    WHERE purpose = '{Purpose.EVALUATE}' AND evaluation = ? GROUP BY prompt_id
)
SELECT sum(samples) AS count, sum(failures) AS failed, sum(total) / sum(scored) AS score,
    avg(iif(failures, NULL, largest)) AS best, sum(failures > 0) AS incomplete,
    min(oldest) AS lowest_version, max(newest) AS highest_version
FROM prompts
"""
"""Query of the columns of an `Evaluation`, from the rows of its samples."""


class BrokerPromptFeed(PromptFeed):
    """Issues prompts and evaluations; each call returns once it is durable."""

    def __init__(self, commits: CommitPipeline) -> None:
        self.commits = commits

    async def prompts_wanted(self, timeout: float) -> int:
        return await self.commits.prompt_polls.until(self.commits.state.wanted, timeout) or 0

    async def issue(
        self, prompts: Sequence[Prompt], *, cursor: str, last: bool = False, token: str = ""
    ) -> None:
        commits, state = self.commits, self.commits.state
        commits.check_open()
        if token and token in state.issue_tokens:
            await commits.submit(lambda: None)
            return
        if state.ended:
            raise ProtocolError("issue: the last prompts were issued before")
        kept, exhausted = state.retirement.select(prompts)
        if state.curriculum is not None:
            kept = state.curriculum.select(kept)
        texts = [dump_prompt(prompt) for prompt in kept]
        last = last or exhausted
        state.cursor, state.ended = cursor, last
        state.issue_tokens.append(token)
        if exhausted:
            log.warning("a whole epoch of prompts is retired or failed: the source counts as ended")
        if prompts and not kept and not last and state.curriculum is None:
            return  # a cursor that a crash forgets only brings the same skipped prompts again
        groups = state.issue(kept)

        def record() -> None:
            commits.ledger.issue(groups, texts, cursor, last=last)
            commits.ledger.note(ISSUE_TOKEN, token)

        await commits.durable(record, *(commits.all_polls if last else [commits.lease_polls]))

    async def cursor(self) -> str | None:
        return self.commits.state.cursor

    async def evaluate(
        self, name: str, prompts: Sequence[Prompt], *, temperature: float, min_version: int
    ) -> None:
        commits, state = self.commits, self.commits.state
        commits.check_open()
        if not prompts:
            raise InputError(f"evaluate: {name!r} has no prompts, must have at least 1")
        if min_version > (steps := state.bounds.steps):
            raise InputError(
                f"evaluate: {name!r} wants min_version = {min_version}, but the last is {steps}"
            )
        if name in state.evaluations:
            await commits.submit(lambda: None)
            return
        if state.over:
            raise QueueClosed(f"evaluate: {name!r} comes after the end of the run")
        texts = [dump_prompt(prompt) for prompt in prompts]
        run = EvaluationRun(
            name=name, count=len(prompts), temperature=temperature, min_version=min_version
        )
        groups = state.issue(prompts, run)
        record = partial(commits.ledger.evaluate, run, groups, texts)
        await commits.durable(record, commits.lease_polls)

    async def evaluation(self, name: str, timeout: float) -> Evaluation | None:
        commits, known = self.commits, self.commits.state.evaluations
        if (run := known.get(name)) is None:
            raise ProtocolError(f"evaluation: {name!r} was not queued; known are {[*known]}")
        if await commits.progress_polls.until(lambda: run.finished or None, timeout) is None:
            return None

        def read() -> Evaluation:
            cursor = commits.ledger.database.execute(_OUTCOME, (name,))
            columns = [column for column, *_ in cursor.description]
            return Evaluation(**dict(zip(columns, cursor.fetchone(), strict=True)))

        return await commits.submit(read)
