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

from weight_sync.direct.engines import Transfer, Weights
from weight_sync.errors import NotNow
from weight_sync.vllm.transfer import FINISH, INIT, START, UPDATE


class VllmSender:
    """A connection to one engine (a `direct.Sender`).

    Args:
        backend: vLLM's name of the transport: "nccl" or "ipc".
        workers: Processes of the engine; its endpoint must have been made for the same backend.
        weights: Names, dtypes and shapes of every later `send`.
        transfer: How the endpoint is reached to connect.
        address: Of this node, as the engine's node sees it.
        device: Where tensors must be to be sent; each is copied there in its turn.
    """

    def __init__(
        self,
        backend: str,
        workers: int,
        weights: Weights,
        transfer: Transfer,
        address: str,
        device: str,
    ) -> None:
        self._source, self._client = _Source(weights, device), _Client(transfer)
        info: TrainerInitInfo = IPCTrainerInitInfo(rank=0, packed=True)
        if backend == "nccl":
            info = NCCLTrainerInitInfo(
                rank=0,
                master_address=address,
                master_port=_free_port(),
                world_size=1 + workers,
            )
        self._engine = WeightTransferTrainerFactory.trainer_init(
            info, client=self._client, source=self._source
        )

    def send(self, weights: Weights, transfer: Transfer) -> None:
        """See `direct.Sender.send`."""
        self._source.weights, self._client.transfer = weights, transfer
        try:
            self._engine.send_weights()
        finally:
            self._source.weights = []

    def close(self) -> None:
        """See `direct.Sender.close`; the next tensor is not sent any more."""
        self._source.closed = True
        self._engine.shutdown()


class _Source(WeightSource):
    """The tensors of the version that is being sent."""

    def __init__(self, weights: Weights, device: str) -> None:
        self.weights, self._device = weights, device
        self.closed = False

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.weights]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.weights:
            if self.closed:
                raise NotNow("the connection was given up")
            yield name, tensor.detach().to(self._device)


class _Client:
    """What vLLM's trainer engines ask of an inference engine (a `VLLMWeightSyncClient`)."""

    def __init__(self, transfer: Transfer) -> None:
        self.transfer = transfer

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.transfer(INIT, init_info)

    def start_weight_update(self) -> None:
        self.transfer(START, None)

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        self.transfer(UPDATE, {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        del weight_version  # the engine is told by `resume`, which can still be refused
        self.transfer(FINISH, None)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
    return port
