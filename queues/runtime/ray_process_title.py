"""The current activity of a Ray actor, shown in the title of its process.

Ray calls an actor's `__repr__` only when the actor is made, so its dashboard shows role and number
there, and nothing that changes. It reads process titles every few seconds and shows them on the
cluster page, in the unfolded row of an actor; `ps` shows them too.
"""

import asyncio
from collections.abc import Callable
from typing import NoReturn

import ray

RENEWED_SECONDS = 0.5
"""Interval of renewal: Ray overwrites the title after every call of the actor."""


async def keep_title(name: str, state: Callable[[], str]) -> NoReturn:
    """Keep the title of this process up to date until cancelled.

    Args:
        name: The actor's class, with which Ray begins its own title.
        state: Returns who the actor is and what it does, in a few words.
    """
    while True:
        ray._raylet.setproctitle(f"ray::{name} {state()}")
        await asyncio.sleep(RENEWED_SECONDS)
