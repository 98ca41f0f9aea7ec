"""Tasks of a run with names: an error says which part of the run it came from."""

import asyncio
from collections.abc import Awaitable, Iterable
from typing import Any

from ray.exceptions import RayActorError, RayTaskError

from deploy.errors import Interrupted, RunFailed
from headway.errors import HeadwayError, first_line
from headway.user_code import PARAGRAPH, shown


def named(name: str, work: Awaitable[Any]) -> "asyncio.Task[Any]":
    """Create a task whose error begins with the task's name.

    Headway's own errors keep their exit code, whichever process raised them.
    """

    async def explained() -> Any:
        try:
            return await work
        except (RunFailed, Interrupted):
            raise
        except RayActorError as error:
            raise RunFailed(f"the process of {name} died: {first_line(error)}") from error
        except Exception as error:
            cause = (error.cause or error) if isinstance(error, RayTaskError) else error
            if isinstance(cause, HeadwayError):
                raise RunFailed(f"{name}: {cause}", exit_code=cause.exit_code) from error
            is_of_file = isinstance(cause, OSError) and cause.filename
            text = str(cause) if is_of_file else shown(cause, PARAGRAPH)
            raise RunFailed(f"{name}: {text}") from error

    return asyncio.create_task(explained(), name=name)


async def all_or_first_error(
    tasks: Iterable["asyncio.Task[Any]"], *, meanwhile: Iterable["asyncio.Task[Any]"] = ()
) -> None:
    """Wait for all tasks; at the first error, cancel the others and raise it.

    Those of `meanwhile`, whose errors count too, are cancelled when all of `tasks` have ended.
    """
    needed, extra = set(tasks), set(meanwhile)
    pending = needed | extra
    try:
        while needed & pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*needed, *extra, return_exceptions=True)
