"""Restarts of one process that dies: how many in a row, how long apart, said and written down.

Leaves out what a death is and how the process is made again, which its supervisor knows.
"""

import asyncio
import time

from rich.markup import escape

from deploy.config.run_config import DeployConfig
from deploy.errors import RunFailed
from deploy.runtime.console import Screen
from deploy.runtime.daemon_thread import run_in_daemon_thread
from deploy.storage.jsonl import JsonlWriter
from deploy.storage.run_record import Record

FIRST_WAIT_SECONDS = 1.0
"""Before the first restart in a row; doubled for each further one."""
LONGEST_WAIT_SECONDS = 30.0
SETTLED_SECONDS = 600.0
"""A process that worked for so long has not died in a row with the time before."""


class Restarts:
    """Counts the deaths of a process, and allows its restarts.

    Args:
        name: Of the process.
        config: Section `[deploy]`: max_restarts.
        record: Counts the restarts.
        rows: Gets one of `restarts.jsonl` for each.
        screen: Says them.
    """

    def __init__(
        self,
        name: str,
        *,
        config: DeployConfig,
        record: Record,
        rows: JsonlWriter,
        screen: Screen,
    ) -> None:
        self._name, self._most = name, config.max_restarts
        self._record, self._rows, self._screen = record, rows, screen
        self._in_a_row = 0

    async def allow(self, reason: str, *, worked: float) -> None:
        """Returns when the process may be made again.

        Args:
            reason: Why it died.
            worked: Seconds that it had worked until then.

        Raises:
            RunFailed: It died more often in a row than deploy.max_restarts.
        """
        if worked >= SETTLED_SECONDS:
            self._in_a_row = 0
        if self._in_a_row >= self._most:
            raise RunFailed(
                f"{self._name} died {self._in_a_row + 1} times in a row, more than "
                f"deploy.max_restarts = {self._most} makes up for; the last error: {reason}"
            )
        wait = min(FIRST_WAIT_SECONDS * 2**self._in_a_row, LONGEST_WAIT_SECONDS)
        self._in_a_row += 1
        await self._note(reason)
        await asyncio.sleep(wait)

    async def _note(self, reason: str) -> None:
        self._record.restarts[self._name] += 1
        self._screen.say(
            f"{self._name} is made again ({self._in_a_row} of {self._most} in a row): "
            f"{escape(reason)}"
        )
        row = {
            "actor": self._name,
            "at": time.time(),
            "in_a_row": self._in_a_row,
            "reason": reason,
        }
        await run_in_daemon_thread(lambda: self._rows.write("restarts.jsonl", [row]))
