"""vLLM's names for weight transfer, and calls of an engine's transfer endpoint.

Written against vLLM 0.32; imports nothing of it before it is called.
"""

from typing import Any

from weight_sync.errors import LoadFailed

BACKEND = "headway"
"""The backend that loads staged weights (`vllm.plugin`); "nccl" and "ipc" are vLLM's own."""

INIT = "init_weight_transfer_engine"
START = "start_weight_update"
UPDATE = "update_weights"
FINISH = "finish_weight_update"

METHODS = (INIT, START, UPDATE, FINISH)


def tensor_shapes(payload: dict[str, Any] | None) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the tensors in a call of UPDATE; LoadFailed without them."""
    try:
        info = (payload or {})["update_info"]
        shapes = [tuple(shape) for shape in info["shapes"]]
        return dict(zip(info["names"], shapes, strict=True))
    except (KeyError, TypeError, ValueError) as error:
        raise LoadFailed(f"{UPDATE} does not name its tensors: {error!r}") from error


async def transfer(engine: Any, method: str, payload: dict[str, Any] | None) -> None:
    """Call one of `METHODS` of the weight-transfer endpoint of `engine`, an AsyncLLM."""
    from vllm.distributed.weight_transfer.base import (
        WeightTransferInitRequest,
        WeightTransferUpdateRequest,
    )

    arguments = payload or {}
    if method == INIT:
        await engine.shutdown_weight_transfer_engine()  # the connection before, which it would leak
        await engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info=arguments))
    elif method == UPDATE:
        await engine.update_weights(WeightTransferUpdateRequest(**arguments))
    elif method in (START, FINISH):
        await getattr(engine, method)()
    else:
        raise ValueError(f"method is {method!r}; expected one of {', '.join(METHODS)}")
