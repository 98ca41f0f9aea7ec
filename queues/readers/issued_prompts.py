"""The position of the prompt source, and the held-out problems, that a run's ledger has."""

from pathlib import Path

from queues.readers.open_run import open_ledger
from queues.records import Prompt, Purpose
from queues.storage.ledger import load_prompt


def stored_cursor(run_directory: Path) -> str | None:
    """Return the cursor of the source after the prompts that were issued last; None before them."""
    with open_ledger(run_directory) as database:
        row = database.execute("SELECT value FROM meta WHERE key = 'cursor'").fetchone()
    return None if row is None else str(row[0])


def heldout_problems(run_directory: Path) -> list[Prompt]:
    """Return the different problems of all evaluations, in the order of the largest one."""
    with open_ledger(run_directory) as database:
        rows = database.execute(
            "SELECT prompt FROM groups WHERE purpose = ? GROUP BY prompt_id ORDER BY min(number)",
            (Purpose.EVALUATE,),
        ).fetchall()
    return [load_prompt(text) for (text,) in rows]
