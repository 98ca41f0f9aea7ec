"""A receiver in a process of its own that writes down what its engine serves, for tests that kill.

    python tests/weight_sync/serving.py FOLDER STATE [slow-open | slow-load]

Follows the newest manifest of FOLDER, loads it into an engine that is a file, STATE: one line for
each thing that happens. `slow-open` and `slow-load` hang there, so that a kill meets that moment.
"""

import asyncio
import sys
import time
from pathlib import Path

from weight_sync.announcements import WeightUpdateReport
from weight_sync.checksum import checksum
from weight_sync.manifest import Manifest
from weight_sync.receive.receiver import Receiver
from weight_sync.receive.staging import StagedWeights
from weight_sync.transports.filesystem import FilesystemTransport, newest

HANG_SECONDS = 600


class FileEngine:
    """Writes down what is done to it."""

    def __init__(self, state: Path, slow: bool) -> None:
        self._state, self._slow = state, slow

    def say(self, line: str) -> None:
        with self._state.open("a") as file:
            print(line, file=file, flush=True)

    async def prepare(self, weights: StagedWeights) -> None:
        pass

    async def pause(self) -> None:
        self.say("pause")

    async def load(self, weights: StagedWeights, version: int) -> None:
        self.say(f"loading {version}")
        if self._slow:
            await asyncio.sleep(HANG_SECONDS)
        self.say(f"loaded {version} {checksum(weights.tensors())}")

    async def resume(self) -> None:
        self.say("resume")


class FolderAnnouncements:
    """What a folder says (`Announcements`)."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def newest(self, after: int, timeout: float) -> Manifest | None:
        deadline = time.monotonic() + timeout
        while True:
            found = newest(self._folder)
            if found is not None and found.version > after:
                return found
            if time.monotonic() > deadline:
                return None
            await asyncio.sleep(0.01)

    async def acquire_swap(self, engine_id: str, timeout: float) -> bool:
        return True

    async def report(self, report: WeightUpdateReport) -> None:
        pass


class SlowTransport(FilesystemTransport):
    """Hangs in the second bucket."""

    opened = 0
    state: Path

    def open(self, bucket):
        self.opened += 1
        if self.opened == 2:
            with self.state.open("a") as file:
                print("staging", file=file, flush=True)
            time.sleep(HANG_SECONDS)
        return super().open(bucket)


def main(folder: Path, state: Path, fault: str = "") -> None:
    transport = (SlowTransport if fault == "slow-open" else FilesystemTransport)(folder)
    transport.state = state
    engine = FileEngine(state, slow=fault == "slow-load")
    receiver = Receiver("e0", engine, FolderAnnouncements(folder), transport)
    asyncio.run(receiver.run(asyncio.Event()))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
