"""Sends weights by vLLM's own trainer engines: `nccl` between GPUs, `ipc` on the same GPU.

With `nccl` all engines of a connection form one process group: rank 0 is the learner, the workers
of the engines follow in their order, and each tensor is broadcast once. Written against vLLM 0.32.
"""

import base64
import pickle
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from torch import Tensor
from vllm.distributed.weight_transfer.base import ParamMeta, TrainerInitInfo, WeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
from vllm.utils.network_utils import get_open_port

from weight_sync.direct.attempt import Transfer, Weights
from weight_sync.errors import UpdateRefused
from weight_sync.vllm.transfer import FINISH, INIT, START, UPDATE

BUFFER_BYTES = 256 * 2**20
"""Size of vLLM's buffers on the GPU; a larger tensor makes a buffer of its own size."""


class VllmSender:
    """A connection to some engines (a `Sender`).

    Args:
        backend: "nccl", or "ipc" for one engine; that of their endpoints.
        workers: Processes of each engine.
        weights: Names, dtypes and shapes of every later `send`.
        transfer: Calls the endpoints while connecting.
        address: Address of this node, as seen from the engines' nodes.
        device: Device that each tensor is copied to before it is sent.
    """

    def __init__(
        self,
        backend: str,
        workers: Sequence[int],
        weights: Weights,
        transfer: Transfer,
        address: str,
        device: str,
    ) -> None:
        self._source, self._client = VersionSource(weights, device), _Client(transfer, workers)
        info: TrainerInitInfo
        if backend == "nccl":
            info = NCCLTrainerInitInfo(
                rank=0, master_address=address, master_port=get_open_port(),
                world_size=1 + sum(workers), packed_buffer_size_bytes=BUFFER_BYTES,
            )  # fmt: skip
        else:
            largest = max(tensor.nbytes for _, tensor in weights)
            info = IPCTrainerInitInfo(
                rank=0, packed=True, packed_buffer_size_bytes=max(BUFFER_BYTES, largest)
            )
        self._engine = WeightTransferTrainerFactory.trainer_init(
            info, client=self._client, source=self._source
        )

    def send(self, weights: Weights, transfer: Transfer) -> None:
        """Replace every weight of the engines; return once they are in place."""
        self._source.weights, self._client.transfer = weights, transfer
        try:
            self._engine.send_weights()
        finally:
            self._source.weights = []

    def close(self) -> None:
        """Close the connection; the next tensor is not sent, and a broadcast is aborted."""
        self._source.closed = True
        self._engine.shutdown()


class VersionSource(WeightSource):
    """The tensors of the version being sent."""

    def __init__(self, weights: Weights, device: str) -> None:
        self.weights, self._device = weights, device
        self.closed = False

    def metadata(self) -> list[ParamMeta]:
        """Return name, dtype and shape of every tensor."""
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.weights]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.weights:
            if self.closed:
                raise UpdateRefused("the connection was given up")
            yield name, tensor.detach().to(self._device, non_blocking=True)


class _Client:
    """The calls of vLLM's trainer engines to inference engines (a `VLLMWeightSyncClient`)."""

    def __init__(self, transfer: Transfer, workers: Sequence[int]) -> None:
        self.transfer, self._workers = transfer, workers

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        payloads = [init_info] * len(self._workers)
        if "rank_offset" in init_info:  # vLLM's own is the first engine's
            offsets = accumulate(self._workers[:-1], initial=init_info["rank_offset"])
            payloads = [init_info | {"rank_offset": offset} for offset in offsets]
        self.transfer(INIT, payloads)

    def start_weight_update(self) -> None:
        self._transfer_to_all(START, None)

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        if isinstance(update_info, dict) and "ipc_handles" in update_info:
            # AsyncLLM's message encoder refuses handles, as JSON does.
            handles = pickle.dumps(update_info["ipc_handles"])
            update_info = update_info | {"ipc_handles_pickled": base64.b64encode(handles).decode()}
            del update_info["ipc_handles"]
        self._transfer_to_all(UPDATE, {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        del weight_version  # set by `resume`, which can still be refused
        self._transfer_to_all(FINISH, None)

    def _transfer_to_all(self, method: str, payload: dict[str, Any] | None) -> None:
        self.transfer(method, [payload] * len(self._workers))
