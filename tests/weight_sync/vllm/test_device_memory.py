"""Where staged weights lie: on a GPU of the engine's own with room, else in memory of the host."""

from contextlib import nullcontext

import pytest
import torch

from weight_sync.publish.snapshot import Gpu
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
