"""Sends weights by vLLM's own trainer engines: `nccl` between GPUs, `ipc` on the same GPU.

Each engine has a process group of its own: rank 0 is the learner, the engine's workers are the
others. Written against vLLM 0.32.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from vllm.distributed.weight_transfer.base import ParamMeta, TrainerInitInfo, WeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
from vllm.utils.network_utils import get_open_port

from weight_sync.direct.publisher import Transfer, Weights
from weight_sync.errors import UpdateRefused
from weight_sync.vllm.transfer import FINISH, INIT, START, UPDATE


class VllmSender:
    """A connection to one engine (a `Sender`).

    Args:
        backend: "nccl" or "ipc"; the engine's endpoint must have been made for the same.
        workers: Processes of the engine.
        weights: Names, dtypes and shapes of every later `send`.
        transfer: Calls the endpoint while connecting.
        address: Address of this node, as seen from the engine's node.
        device: Device that each tensor is copied to before it is sent.
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
                rank=0, master_address=address, master_port=get_open_port(), world_size=1 + workers
            )
        self._engine = WeightTransferTrainerFactory.trainer_init(
            info, client=self._client, source=self._source
        )

    def send(self, weights: Weights, transfer: Transfer) -> None:
        """See `Sender.send`."""
        self._source.weights, self._client.transfer = weights, transfer
        try:
            self._engine.send_weights()
        finally:
            self._source.weights = []

    def close(self) -> None:
        """See `Sender.close`; the next tensor is not sent."""
        self._source.closed = True
        self._engine.shutdown()


class _Source(WeightSource):
    """The tensors of the version being sent."""

    def __init__(self, weights: Weights, device: str) -> None:
        self.weights, self._device = weights, device
        self.closed = False

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.weights]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.weights:
            if self.closed:
                raise UpdateRefused("the connection was given up")
            yield name, tensor.detach().to(self._device)


class _Client:
    """The calls of vLLM's trainer engines to an inference engine (a `VLLMWeightSyncClient`)."""

    def __init__(self, transfer: Transfer) -> None:
        self.transfer = transfer

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.transfer(INIT, init_info)

    def start_weight_update(self) -> None:
        self.transfer(START, None)

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        self.transfer(UPDATE, {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        del weight_version  # set by `resume`, which can still be refused
        self.transfer(FINISH, None)
