"""The learner's side of vLLM's own transfer engines: `nccl` between GPUs, `ipc` on the same one.

A `direct.Sender` around vLLM's trainer engine, with one process group for each engine: rank 0 is
the learner, the engine's workers are the others. Written against vLLM 0.32. Leaves out the engine's
side, which is vLLM's alone (`weight_transfer_config` with the same backend).
"""

import socket
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from vllm.distributed.weight_transfer.base import ParamMeta, TrainerInitInfo, WeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

from weight_sync.direct import EngineLink, Weights


class VllmSender:
    """A connection to one engine (a `direct.Sender`).

    Args:
        backend: vLLM's name of the transport: "nccl" or "ipc".
        link: The engine; its endpoint must have been made for the same backend.
        weights: Names, dtypes and shapes of every later `send`.
        address: Of this node, as the engine's node sees it.
        device: Where tensors must be to be sent; each is copied there in its turn.
    """

    def __init__(
        self, backend: str, link: EngineLink, weights: Weights, address: str, device: str
    ) -> None:
        self._source = _Source(weights, device)
        info: TrainerInitInfo = IPCTrainerInitInfo(rank=0, packed=True)
        if backend == "nccl":
            info = NCCLTrainerInitInfo(
                rank=0,
                master_address=address,
                master_port=_free_port(),
                world_size=1 + link.workers,
            )
        self._engine = WeightTransferTrainerFactory.trainer_init(
            info, client=_Client(link), source=self._source
        )

    def send(self, weights: Weights) -> None:
        """See `direct.Sender.send`."""
        self._source.weights = weights
        try:
            self._engine.send_weights()
        finally:
            self._source.weights = []

    def close(self) -> None:
        """See `direct.Sender.close`."""
        self._engine.shutdown()


class _Source(WeightSource):
    """The tensors of the version that is being sent."""

    def __init__(self, weights: Weights, device: str) -> None:
        self.weights, self._device = weights, device

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.weights]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, tensor.detach().to(self._device)) for name, tensor in self.weights)


class _Client:
    """What vLLM's trainer engines ask of an inference engine (a `VLLMWeightSyncClient`)."""

    def __init__(self, link: EngineLink) -> None:
        self._link = link

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._link.transfer("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        self._link.transfer("start_weight_update", None)

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        self._link.transfer("update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        del weight_version  # the engine is told by `resume`, which can still be refused
        self._link.transfer("finish_weight_update", None)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
    return port
