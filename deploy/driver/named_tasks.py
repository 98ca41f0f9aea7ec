"""Tasks of a run with names: an error says which part of the run it came from."""

import asyncio
from collections.abc import Awaitable, Iterable
from typing import Any

from ray.exceptions import RayActorError, RayTaskError

from deploy.errors import DeployError, RunFailed, exit_code_of, first_line


def named(name: str, work: Awaitable[Any]) -> "asyncio.Task[Any]":
    """Create a task whose error begins with the task's name.

    Headway's own errors keep their exit code, whichever process raised them.
    """
    return asyncio.create_task(_explained(name, work), name=name)


async def _explained(name: str, work: Awaitable[Any]) -> Any:
    try:
        return await work
    except DeployError:
        raise
    except RayActorError as error:
        raise RunFailed(f"the process of {name} died: {first_line(error)}") from error
    except Exception as error:
        cause = (error.cause or error) if isinstance(error, RayTaskError) else error
        code = exit_code_of(cause)
        failure = RunFailed(f"{name}: {cause!r}" if code is None else f"{name}: {cause}")
        failure.exit_code = code or 1  # type: ignore[misc]
        raise failure from error


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
        await asyncio.gather(*pending, return_exceptions=True)
