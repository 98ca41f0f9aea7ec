"""Requests to a live run for another number of actors: files in its folder, answered by rows.

headway scale ─▶ scale-ID.json ─▶ the driver ─▶ a row of scalings.jsonl ─▶ headway scale
"""

import json
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from deploy.storage.jsonl import DAMAGED, JsonlWriter
from deploy.storage.run_directory import RunDirectory
from headway import clock
from headway.atomic_file import atomic_file
from headway.errors import InputError

FILE = "scalings.jsonl"
"""Every change of the number of actors that was asked for, with the reason if it was refused."""
ANSWER_SECONDS = 60.0
"""Deadline of an answer; a driver looks every second, once its run has begun to train."""
POLL_SECONDS = 0.2


def ask(directory: RunDirectory, actors: int, seconds: float = ANSWER_SECONDS) -> dict[str, Any]:
    """Ask the driver of a run for a number of actors; return its answer, a row of FILE.

    Raises InputError if the run does not go on, or its driver refuses or does not answer in time.
    """
    name, number = directory.path.name, secrets.token_hex(8)
    if directory.lock.rests():
        raise InputError(
            f"no process works on {name}; go on with `headway resume {name} --set "
            f"actors.count={actors}`"
        )
    request = directory.path / f"scale-{number}.json"
    with atomic_file(request) as file:
        file.write(json.dumps({"actors": actors}).encode())
    deadline = time.monotonic() + seconds
    try:
        while time.monotonic() < deadline and not directory.lock.rests():
            answers: list[dict[str, Any]] = directory.rows(FILE)
            for row in (row for row in answers if row["id"] == number):
                if row["refused"]:
                    raise InputError(f"{name} keeps {row['before']} actor(s): {row['refused']}")
                return row
            time.sleep(POLL_SECONDS)
    finally:
        request.unlink(missing_ok=True)
    what = "has ended" if directory.lock.rests() else f"has not answered within {seconds:g} s"
    raise InputError(
        f"the driver of {name} {what}, and the request is withdrawn; `headway top {name}` shows "
        "whether it still starts"
    )


def requests(directory: RunDirectory) -> list[tuple[Path, int]]:
    """Return the requests that wait for an answer, with the numbers of actors, oldest first."""
    waiting = []
    for file in directory.path.glob("scale-*.json"):
        with suppress(OSError):  # it was withdrawn, or this process may not read it
            asked_at = file.stat().st_mtime
            try:
                actors = int(json.loads(file.read_bytes())["actors"])
            except DAMAGED:
                file.unlink()
                continue
            if time.time() - asked_at > ANSWER_SECONDS:
                file.unlink()  # the command was killed
            else:
                waiting.append((asked_at, file, actors))
    return [(file, actors) for _, file, actors in sorted(waiting)]


def answer(jsonl: JsonlWriter, request: Path, row: Mapping[str, Any]) -> None:
    """Answer a request by a row of FILE, which gets the time and the request's id."""
    jsonl.write(FILE, [{"at": clock.now(), "id": request.stem.removeprefix("scale-"), **row}])
    request.unlink(missing_ok=True)
