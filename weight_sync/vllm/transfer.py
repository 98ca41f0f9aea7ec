"""What vLLM calls things: its transfer backends, and the endpoint of an inference engine for them.

Written against vLLM 0.32; imports nothing of it before it is called.
"""

from typing import Any

from weight_sync.errors import LoadFailed

BACKEND = "headway"
"""Loads staged weights (`vllm_plugin`); "nccl" and "ipc" are vLLM's own."""

INIT = "init_weight_transfer_engine"
START = "start_weight_update"
UPDATE = "update_weights"
FINISH = "finish_weight_update"

METHODS = (INIT, START, UPDATE, FINISH)


def announced(payload: dict[str, Any] | None) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors in a call of UPDATE, as vLLM's trainer engines say them.

    Raises:
        LoadFailed: It does not say.
    """
    try:
        info = (payload or {})["update_info"]
        shapes = [tuple(shape) for shape in info["shapes"]]
        return dict(zip(info["names"], shapes, strict=True))
    except (KeyError, TypeError, ValueError) as error:
        raise LoadFailed(f"{UPDATE} does not name its tensors: {error!r}") from error


async def transfer(engine: Any, method: str, payload: dict[str, Any] | None) -> None:
    """Calls a method of the endpoint.

    Args:
        engine: An AsyncLLM whose `weight_transfer_config` names the learner's backend.
        method: One of `METHODS`.
        payload: What vLLM's trainer engine sends along.

    Raises:
        ValueError: A method that it does not have.
        Exception: Whatever vLLM raises.
    """
    from vllm.distributed.weight_transfer.base import (
        WeightTransferInitRequest,
        WeightTransferUpdateRequest,
    )

    given = payload or {}
    if method == INIT:
        await engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info=given))
    elif method == START:
        await engine.start_weight_update()
    elif method == UPDATE:
        await engine.update_weights(WeightTransferUpdateRequest(**given))
    elif method == FINISH:
        await engine.finish_weight_update()
    else:
        raise ValueError(f"method is {method!r}; expected one of {', '.join(METHODS)}")
