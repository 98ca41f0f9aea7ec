"""Copies committed checkpoints to `deploy.checkpoint_address`, beside training.

The newest is copied first; one that the run has deleted meanwhile is left out. What fails is said,
and tried again with the next look; training does not wait for it.
"""

import asyncio
import json
import threading

import xxhash

from deploy.driver.run_context import RunContext
from deploy.errors import RunFailed
from deploy.storage.remote_folder import RemoteFolder, UploadFailed
from deploy.storage.sessions import read_sessions
from headway.daemon_thread import run_in_daemon_thread
from queues.readers.checkpoints import committed_checkpoints

LOOK_SECONDS = 5.0


class Uploads:
    """The copies of a run's checkpoints at an address; nothing is done without one."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._address = context.config.deploy.checkpoint_address or ""
        self._lock = threading.Lock()
        """Held by the thread that copies, which goes on if the task that waits for it is ended."""
        self._copied: int | None = None
        """The newest version that is at the address."""

    async def follow(self) -> None:
        """Copy each new checkpoint, until cancelled."""
        while self._address:
            try:
                await run_in_daemon_thread(self._copy_newest, name="upload")
            except UploadFailed as error:
                self._context.console.say(f"{error}; it is tried again")
            await asyncio.sleep(LOOK_SECONDS)

    async def finish(self) -> None:
        """Copy the last checkpoint; raise RunFailed if that fails."""
        if self._address:
            try:
                await run_in_daemon_thread(self._copy_newest, name="upload")
            except UploadFailed as error:
                raise RunFailed(
                    f"all batches are trained, but the last checkpoint is only here: {error}"
                ) from error

    def _copy_newest(self) -> None:
        context = self._context
        with self._lock:
            saved = committed_checkpoints(context.directory.path, verify=False)
            version = max(saved, default=None)
            if version is None or version == self._copied:
                return
            remote = RemoteFolder(f"{self._address.rstrip('/')}/{self._name()}")
            try:
                copied = remote.upload(saved[version], saved[version].name)
            except FileNotFoundError:
                return  # the run has deleted it, and has a newer one
            remote.keep_only({folder.name for folder in saved.values()})
            self._copied = version
        if copied:
            context.console.say(f"checkpoint {version} is in {remote.address}")

    def _name(self) -> str:
        """Return the name of the run, and what no other run of that name has: its first session."""
        first = json.dumps(read_sessions(self._context.directory)[:1], sort_keys=True)
        return f"{self._context.record.name}-{xxhash.xxh3_64_hexdigest(first.encode())[:8]}"
