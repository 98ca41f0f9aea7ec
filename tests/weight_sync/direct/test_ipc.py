"""What `ipc` sends crosses the message encoder of AsyncLLM and fits into vLLM's buffer."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.actors.fakes import engine_spec
from weight_sync.config import WeightSyncConfig
from weight_sync.errors import UpdateRefused
from weight_sync.vllm.transfer import tensor_shapes

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


class Calls(list[tuple[str, Any]]):
    """All calls that one version makes of an engine's endpoint, given up at the first update."""

    def __init__(self, tensors: list[tuple[str, torch.Tensor]], *, given_up: bool = False) -> None:
        from weight_sync.direct.vllm_sender import VllmSender

        self._given_up = given_up
        self._sender: VllmSender | None = None
        self._sender = VllmSender("ipc", [1], tensors, self.transfer, "127.0.0.1", "meta")
        try:
            self._sender.send(tensors, self.transfer)
        except UpdateRefused as error:
            self.append((str(error), None))

    def transfer(self, method: str, payloads: list[Any]) -> None:
        self.extend((method, payload) for payload in payloads)
        if self._given_up and method == "update_weights":
            self._sender.close()


def test_handles_cross_the_message_encoder_of_async_llm(cuda, monkeypatch) -> None:
    """The call of `collective_rpc` is encoded as AsyncLLM does, then read as the worker does."""
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferUpdateInfo
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    monkeypatch.delenv("VLLM_ALLOW_INSECURE_SERIALIZATION", raising=False)
    payload = dict(Calls(TENSORS))["update_weights"]
    message = (0, 1, "collective_rpc", ("update_weights", None, (), payload))
    decoded = MsgpackDecoder().decode(MsgpackEncoder().encode(message))
    update = decoded[3][3]["update_info"]
    with pytest.raises(ValueError, match="VLLM_ALLOW_INSECURE_SERIALIZATION"):
        IPCWeightTransferUpdateInfo(**update)
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # as an engine's process
    info = IPCWeightTransferUpdateInfo(**update)
    assert info.ipc_handles == {"gpu": HANDLE}
    assert (info.names, info.shapes, info.tensor_sizes) == (["a", "b"], [[3], [2, 2]], [12, 16])


def test_only_the_process_of_an_ipc_engine_may_read_pickled_handles(tmp_path, monkeypatch) -> None:
    from actors.engines import vllm_arguments

    monkeypatch.setattr(vllm_arguments, "check_sampling", lambda path: None)
    monkeypatch.setattr(vllm_arguments, "plain_arguments", lambda spec, length: {})
    for transport, allowed in (("nccl", None), ("ipc", "1")):
        weight_sync = WeightSyncConfig(transport=transport)
        spec = engine_spec(tmp_path, kv_cache_gib=1, weight_sync=weight_sync)
        arguments = vllm_arguments.engine_arguments(spec, 128)
        assert arguments["weight_transfer_config"].backend == transport
        variables = vllm_arguments.process_variables(spec)
        assert variables.get("VLLM_ALLOW_INSECURE_SERIALIZATION") == allowed


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
    tensors = [*TENSORS, ("large", large), ("last", last)]
    first, start, *updates, finish = Calls(tensors)
    assert first == ("init_weight_transfer_engine", {"packed": True})
    assert [start[0], finish[0]] == ["start_weight_update", "finish_weight_update"]
    sent = [tensor_shapes(payload) for method, payload in updates if method == "update_weights"]
    assert [[*shapes] for shapes in sent] == chunks
    shapes = {name: shape for part in sent for name, shape in part.items()}
    assert shapes == {name: tuple(tensor.shape) for name, tensor in tensors}
    for _, payload in updates:
        assert sum(payload["update_info"]["tensor_sizes"]) <= max(256, mebibytes) * 2**20


def test_a_sender_that_is_closed_stops_between_two_chunks(cuda) -> None:
    large = [(name, torch.zeros(200 * 2**18, device="meta")) for name in "abc"]
    assert [method for method, _ in Calls(large, given_up=True)] == [
        *("init_weight_transfer_engine", "start_weight_update", "update_weights"),
        "the connection was given up",
    ]


@pytest.mark.parametrize("tensor", [torch.ones(2, 2), torch.nn.Parameter(torch.ones(3))])
def test_a_tensor_on_its_way_to_the_device_is_not_waited_for(monkeypatch, tensor) -> None:
    """The next ones are copied while the device sends those before."""
    from weight_sync.direct.vllm_sender import VersionSource

    calls, to = [], torch.Tensor.to
    monkeypatch.setattr(
        torch.Tensor, "to", lambda self, *a, **k: calls.append((a, k)) or to(self, *a, **k)
    )
    ((name, sent),) = VersionSource([("a", tensor)], "cpu")
    assert (name, calls) == ("a", [(("cpu",), {"non_blocking": True})])
    assert torch.equal(sent, tensor)
    assert not sent.requires_grad
