"""A receiver in a process of its own whose engine logs every call, for tests that kill it.

    python -m tests.weight_sync.serving FOLDER LOG [slow-open | slow-load]

Follows the newest manifest of FOLDER and appends one line per event to LOG. `slow-open` and
`slow-load` hang at that step, so that the test can kill the process there.
"""

import asyncio
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tests.weight_sync.checksum import checksum
from weight_sync.announcements import WeightUpdateReport
from weight_sync.manifest import Manifest
from weight_sync.receive.receiver import Receiver
from weight_sync.receive.staging import StagedWeights
from weight_sync.transports.filesystem import MANIFEST, FilesystemTransport

HANG_SECONDS = 600


class FileEngine:
    """An engine that logs every call."""

    def __init__(self, log: Callable[[str], None], slow: bool) -> None:
        self._log, self._slow = log, slow

    async def prepare(self, weights: StagedWeights) -> None: ...

    async def pause(self) -> None:
        self._log("pause")

    async def load(self, weights: StagedWeights, version: int) -> None:
        self._log(f"loading {version}")
        if self._slow:
            await asyncio.sleep(HANG_SECONDS)
        self._log(f"loaded {version} {checksum(weights.tensors())}")

    async def resume(self) -> None:
        self._log("resume")


def newest_version(folder: Path) -> Manifest | None:
    """Return the complete version that was published last, as a reader of the folder finds it."""
    manifests = []
    for file in folder.glob(f"*/{MANIFEST}"):
        with suppress(FileNotFoundError):  # replaced by a newer version meanwhile
            manifests.append(Manifest.from_json(file.read_text()))
    return max(manifests, key=lambda manifest: manifest.created_at, default=None)


class FolderAnnouncements:
    """Announces the versions of a folder (`Announcements`)."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def newest(
        self, after: int, timeout: float, digest: str | None = None
    ) -> Manifest | None:
        deadline = time.monotonic() + timeout
        while True:
            manifest = newest_version(self._folder)
            if manifest is not None and manifest.version > after:
                return manifest
            if time.monotonic() > deadline:
                return None
            await asyncio.sleep(0.01)

    async def acquire_swap(self, engine_id: str, timeout: float) -> bool:
        return True

    async def report(self, report: WeightUpdateReport) -> None: ...


class SlowTransport(FilesystemTransport):
    """Hangs in the second bucket."""

    opened = 0

    def open(self, bucket):
        self.opened += 1
        if self.opened == 2:
            write("staging")
            time.sleep(HANG_SECONDS)
        return super().open(bucket)


def write(line: str) -> None:
    with LOG.open("a") as file:
        print(line, file=file, flush=True)


if __name__ == "__main__":
    folder, LOG, fault = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    transport = (SlowTransport if fault == ["slow-open"] else FilesystemTransport)(folder)
    engine = FileEngine(write, slow=fault == ["slow-load"])
    receiver = Receiver("e0", engine, FolderAnnouncements(folder), transport)
    asyncio.run(receiver.run(asyncio.Event()))
