"""Where staged weights lie, and their way there through two chunks.

On a GPU of the engine's own with room, else in memory of the host.
"""

from contextlib import nullcontext

import pytest
import torch
from fake_device import FakeDeviceMemory

from weight_sync.publish.snapshot import Gpu
from weight_sync.vllm import device_memory
from weight_sync.vllm.device_memory import SPARE_BYTES, DeviceMemory


@pytest.mark.parametrize(
    ("free", "shared", "device"),
    [
        (SPARE_BYTES + 1000, False, "meta"),
        (SPARE_BYTES + 999, False, "cpu"),
        (80 * 2**30, True, "cpu"),
    ],
)
def test_staged_weights_take_no_memory_of_a_gpu_that_others_use(free, shared, device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 80 * 2**30))
    monkeypatch.setattr(Gpu, "register", lambda gpu, memory: None)
    block = DeviceMemory(torch.device("meta"), shared=shared).allocate(1000)
    assert (block.device.type, block.nbytes) == (device, 1000)


LIKE = {
    "matrix": torch.empty(31, 7),
    "half": torch.empty(31, 7, dtype=torch.bfloat16),
    "row beyond a chunk": torch.empty(3, 90),
    "vector": torch.empty(129),
    "0-dim": torch.empty(()),
    "three dimensions": torch.empty(2, 5, 40),
    "empty": torch.empty(0, 4),
}


def test_copies_into_slots_go_through_two_chunks_and_have_their_values_in_every_layout(
    monkeypatch,
) -> None:
    """Whole tensors and columns of them, turned, broadcast and cast, version after version."""
    monkeypatch.setattr(device_memory, "CHUNK_BYTES", 256)
    memory = FakeDeviceMemory()
    for version in range(3):
        torch.manual_seed(version)
        slots = dict(zip(LIKE, memory.slots(list(LIKE.values())), strict=True))
        values = {name: torch.randn(slot.shape) for name, slot in slots.items()}
        values["matrix"] = torch.randn(7, 31).T
        expected = {name: value.to(LIKE[name].dtype) for name, value in values.items()}
        expected["half"] = expected["half"].clone()
        expected["half"][:, 2:5] = 1.5
        with memory.filling():
            for name, slot in slots.items():
                assert slot.data.copy_(values[name]) is not None
            slots["half"].narrow(1, 2, 3).copy_(torch.full((31, 3), 1.5, dtype=torch.float64))
            slots["vector"].copy_(torch.tensor(2.0))
            torch.empty(3).copy_(torch.ones(3))  # not into a slot
        expected["vector"] = torch.full((129,), 2.0)
        for name, slot in slots.items():
            assert torch.equal(slot, expected[name]), name
        sent = sum(slot.nbytes for slot in slots.values())
        assert memory.filled[-1] == sent + 31 * 3 * 2 + 129 * 4
    assert len(memory.blocks) == 1
    assert memory.chunks == 2


def test_a_chunk_is_written_again_only_once_the_device_has_read_it(monkeypatch) -> None:
    """The device copies when an event is waited for, or at the end."""
    monkeypatch.setattr(device_memory, "CHUNK_BYTES", 64)
    order: list[str] = []

    class Event:
        def __init__(self, name: str) -> None:
            self.name = name

        def record(self) -> None:
            order.append(f"sent from {self.name}")

        def synchronize(self) -> None:
            order.append(f"waited for {self.name}")

    class Timed(FakeDeviceMemory):
        def chunk(self):
            memory, _ = super().chunk()
            return memory, Event("ab"[self.chunks - 1])

    memory = Timed()
    [slot] = memory.slots([torch.empty(48)])
    with memory.filling():
        slot.copy_(torch.ones(48))
    steps = [f"{step} {chunk}" for chunk in "aba" for step in ("waited for", "sent from")]
    assert order == steps
