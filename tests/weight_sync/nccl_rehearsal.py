"""vLLM's own nccl engines without a GPU: gloo carries what NCCL would, and streams do nothing.

`serve` is a worker process of vLLM: the methods of its `Worker`, its `NCCLWeightTransferEngine` and
layerwise reloading, with a small model. Only the communicator and CUDA's streams are replaced.
"""

import contextlib
from datetime import timedelta
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import torch

SHAPES = {
    "first.weight": (8, 4),
    "first.bias": (8,),
    "second.weight": (4, 8),
    "third.weight": (8, 4),
    "head.weight": (4, 8),
}
BUFFER_BYTES = 130
"""A buffer holds one or two tensors, so that a version needs three broadcasts."""


class GlooCommunicator:
    """The calls of `PyNcclCommunicator` that the transfer engines make."""

    def __init__(self, group: Any) -> None:
        from torch.distributed import PrefixStore, ProcessGroupGloo

        store = PrefixStore("gloo", group.store)
        self.rank = group.rank
        self._group: Any = ProcessGroupGloo(
            store, group.rank, group.world_size, timedelta(seconds=60)
        )

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank = src
        self._group.broadcast([tensor], options).wait()

    def destroy(self) -> None:
        self._group = None


def replace_cuda(setattr_: Any, communicator: type[GlooCommunicator] = GlooCommunicator) -> None:
    """Replace the communicator and the streams, by `setattr` or a monkeypatch."""
    from vllm.distributed.utils import StatelessProcessGroup
    from vllm.distributed.weight_transfer import nccl_common, packed_tensor

    def join(address: str, port: int, rank: int, world_size: int, device: Any) -> Any:
        return communicator(
            StatelessProcessGroup.create(host=address, port=port, rank=rank, world_size=world_size)
        )

    stream = SimpleNamespace(synchronize=lambda: None)
    setattr_(nccl_common, "stateless_init_process_group", join)
    setattr_(packed_tensor, "_get_streams", lambda device, count: (stream,) * count)
    setattr_(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    setattr_(torch.accelerator, "current_device_index", lambda: 0)
    setattr_(torch.accelerator, "synchronize", lambda: None)


class Model(torch.nn.Module):
    """A model with vLLM's way of loading."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 8)
        self.second = torch.nn.Linear(8, 4, bias=False)
        self.third = torch.nn.Linear(4, 8, bias=False)
        self.head = torch.nn.Linear(8, 4, bias=False)

    def load_weights(self, weights: Any) -> None:
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader

        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            parameter = parameters[name]
            getattr(parameter, "weight_loader", default_weight_loader)(parameter, tensor)


def make_worker() -> Any:
    """Build vLLM's `Worker` without its model runner and its device."""
    from vllm.config import VllmConfig
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
    from vllm.v1.worker.gpu_worker import Worker

    model = Model()
    record_metadata_for_reloading(model)
    worker: Any = Worker.__new__(Worker)
    worker.vllm_config, worker.rank = VllmConfig(), 0
    worker.model_runner = SimpleNamespace(reset_lora_state=lambda: None)
    worker._weight_update_active = worker._weight_update_is_draft = False
    worker.weight_transfer_engine = WeightTransferEngineFactory.create_engine(
        WeightTransferConfig(backend="nccl"), worker.vllm_config, torch.device("cpu"), model
    )
    worker.model = model
    return worker


def serve(connection: Connection) -> None:
    """Answer calls of a worker's methods, and of `weights`, until the connection ends."""
    replace_cuda(setattr)
    worker = make_worker()
    with contextlib.suppress(EOFError):
        while True:
            method, arguments = connection.recv()
            try:
                if method == "weights":
                    answer = {
                        name: (parameter.data_ptr(), parameter.detach().clone().numpy())
                        for name, parameter in worker.model.named_parameters()
                    }
                else:
                    answer = getattr(worker, method)(**arguments)
            except Exception as error:  # noqa: BLE001  (sent back)
                answer = RuntimeError(f"{type(error).__name__}: {error}")
            connection.send(answer)
