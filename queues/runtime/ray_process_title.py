"""Shows what a Ray actor does at this moment by the title of its process.

Ray asks an actor for its `__repr__` once, when it is made: its dashboard shows there which role and
which number it has, and nothing that changes. Titles it reads every few seconds, and shows them on
the page of the cluster, in the unfolded row of an actor, and as every `ps` does.
"""

import asyncio
from collections.abc import Callable
from typing import NoReturn

import ray

RENEWED_SECONDS = 0.5
"""Ray sets its own title after every call of the actor."""


async def keep_title(name: str, state: Callable[[], str]) -> NoReturn:
    """Keeps the title up to date until it is cancelled.

    Args:
        name: The actor's class, with which Ray begins its own title.
        state: Who it is and what it does, in a few words.
    """
    while True:
        ray._raylet.setproctitle(f"ray::{name} {state()}")
        await asyncio.sleep(RENEWED_SECONDS)
