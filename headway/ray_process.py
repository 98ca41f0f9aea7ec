"""The current activity of a Ray actor in the title of its process, as `ps` and Ray's pages show it.

Ray calls an actor's `__repr__` only when the actor is made, so it shows nothing that changes.
"""

import asyncio
from collections.abc import Callable
from typing import NoReturn

import ray

RENEWED_SECONDS = 0.5
"""Interval of renewal: Ray overwrites the title after every call of the actor."""


async def keep_title(name: str, state: Callable[[], str]) -> NoReturn:
    """Keep the title of this process up to date until cancelled.

    `name` is the actor's class; `state` returns in a few words who the actor is and what it does.
    """
    while True:
        ray._raylet.setproctitle(f"ray::{name} {state()}")
        await asyncio.sleep(RENEWED_SECONDS)
