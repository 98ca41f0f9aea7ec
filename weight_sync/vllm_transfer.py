"""The endpoint of vLLM's own transfer engines in an inference engine. Written against vLLM 0.32."""

from typing import Any

METHODS = (
    "init_weight_transfer_engine",
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
)


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
    match method:
        case "init_weight_transfer_engine":
            await engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info=given))
        case "start_weight_update":
            await engine.start_weight_update()
        case "update_weights":
            await engine.update_weights(WeightTransferUpdateRequest(**given))
        case "finish_weight_update":
            await engine.finish_weight_update()
        case _:
            raise ValueError(f"method is {method!r}; expected one of {', '.join(METHODS)}")
