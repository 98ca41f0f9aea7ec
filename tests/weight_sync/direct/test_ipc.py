"""What `ipc` sends crosses the message encoder of AsyncLLM and fits into vLLM's buffer."""

import os
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.vllm

TENSORS = [("a", torch.ones(3)), ("b", torch.zeros(2, 2))]
HANDLE = (
    torch.Tensor, torch.Size([8]), (1,), 0, torch.UntypedStorage, torch.uint8, 0,
    b"handle" * 10, 8, 0, b"counter", 0, b"event", True,
)  # fmt: skip
"""Arguments of `rebuild_cuda_tensor`, as `reduce_tensor` returns them for a CUDA tensor."""


@pytest.fixture
def cuda(monkeypatch) -> None:
    """Stand in for the device: it has no memory, and exports every buffer under one handle."""
    from types import SimpleNamespace

    from vllm.distributed.weight_transfer import packed_tensor

    empty = torch.empty
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="gpu")
    )
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None)
    )
    monkeypatch.setattr(
        torch, "empty", lambda *shape, device, **o: empty(*shape, device="meta", **o)
    )
    monkeypatch.setattr(packed_tensor, "reduce_tensor", lambda buffer: (None, HANDLE))


def sent(tensors: list[tuple[str, torch.Tensor]]) -> list[tuple[str, Any]]:
    """Return all calls that one version makes of an engine's endpoint."""
    from weight_sync.direct.vllm_sender import VllmSender

    calls: list[tuple[str, Any]] = []

    def transfer(method: str, payloads: list[Any]) -> None:
        calls.extend((method, payload) for payload in payloads)

    sender = VllmSender("ipc", [1], tensors, transfer, "127.0.0.1", "meta")
    sender.send(tensors, transfer)
    return calls


def test_handles_cross_the_message_encoder_of_async_llm(cuda, monkeypatch) -> None:
    """The call of `collective_rpc` is encoded as AsyncLLM does, then read as the worker does."""
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferUpdateInfo
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    monkeypatch.delenv("VLLM_ALLOW_INSECURE_SERIALIZATION", raising=False)
    (_, payload) = next(call for call in sent(TENSORS) if call[0] == "update_weights")
    message = (0, 1, "collective_rpc", ("update_weights", None, (), payload))
    decoded = MsgpackDecoder().decode(MsgpackEncoder().encode(message))
    update = decoded[3][3]["update_info"]
    with pytest.raises(ValueError, match="VLLM_ALLOW_INSECURE_SERIALIZATION"):
        IPCWeightTransferUpdateInfo(**update)
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # as `engine_arguments` does
    info = IPCWeightTransferUpdateInfo(**update)
    assert info.ipc_handles == {"gpu": HANDLE}
    assert (info.names, info.shapes, info.tensor_sizes) == (["a", "b"], [[3], [2, 2]], [12, 16])


def test_only_the_process_of_an_ipc_engine_may_read_pickled_handles(tmp_path, monkeypatch) -> None:
    from actors.config import ActorsConfig
    from actors.engines import vllm_arguments
    from actors.engines.protocol import EngineSpec
    from weight_sync.config import WeightSyncConfig

    monkeypatch.setattr(vllm_arguments, "check_sampling", lambda path: None)
    monkeypatch.setattr(vllm_arguments, "plain_arguments", lambda spec, length: {})
    for transport, allowed in (("nccl", None), ("ipc", "1")):
        monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "0")
        monkeypatch.delenv("VLLM_ALLOW_INSECURE_SERIALIZATION")
        spec = EngineSpec(
            index=0,
            config=ActorsConfig(kv_cache_gib=1),
            weight_sync=WeightSyncConfig(transport=transport),
            model_path=str(tmp_path),
            seed=0,
        )
        arguments = vllm_arguments.engine_arguments(spec, 128)
        assert arguments["weight_transfer_config"].backend == transport
        assert os.environ.get("VLLM_ALLOW_INSECURE_SERIALIZATION") == allowed


@pytest.mark.parametrize(
    ("mebibytes", "chunks"),
    [
        (1, [["a", "b", "large", "last"]]),
        (255, [["a", "b", "large"], ["last"]]),
        (300, [["a", "b"], ["large"], ["last"]]),
        (2048, [["a", "b"], ["large"], ["last"]]),
    ],
)
def test_tensors_of_any_size_are_sent_through_a_buffer_of_the_largest_and_256_mib_at_least(
    cuda, mebibytes, chunks
) -> None:
    """The plan is vLLM's own; its default buffer of 1 GiB refuses the last one."""
    large = torch.zeros(mebibytes * 2**18, device="meta")
    last = torch.zeros(2**18, device="meta")
    updates = [
        payload["update_info"]
        for method, payload in sent([*TENSORS, ("large", large), ("last", last)])
        if method == "update_weights"
    ]
    assert [update["names"] for update in updates] == chunks
    for update in updates:
        assert sum(update["tensor_sizes"]) <= max(256, mebibytes) * 2**20
