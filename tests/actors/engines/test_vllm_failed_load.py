"""A load that failed on a worker of vLLM does not keep the next one from beginning."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import engine_spec

from actors.engines.vllm import VllmEngine
from weight_sync.errors import LoadFailed

pytestmark = pytest.mark.vllm


class Workers:
    """The endpoint of an engine of two workers, each vLLM's own with a transfer that may fail."""

    errored = False

    def __init__(self) -> None:
        from vllm.config import VllmConfig
        from vllm.v1.worker.gpu_worker import Worker

        from weight_sync.vllm.plugin import PreparesWeights

        # As vLLM adds the methods of a worker extension.
        kind = type("ExtendedWorker", (Worker, PreparesWeights), {})
        self.workers: list[Any] = [kind.__new__(kind) for _ in range(2)]
        self.fails: dict[str, bool] = {}
        for number, worker in enumerate(self.workers):
            worker.vllm_config = VllmConfig()
            worker.model_runner = SimpleNamespace(reset_lora_state=lambda: None)
            worker._weight_update_active = worker._weight_update_is_draft = False
            worker.weight_transfer_engine = SimpleNamespace(
                start_weight_update=lambda: None,
                update_weights=lambda info, number=number: self.fail("update", number),
                finish_weight_update=lambda number=number: self.fail("finish", number),
                reset_weight_update_target=lambda: None,
            )

    def fail(self, method: str, number: int) -> None:
        if self.fails.get(method) and number == 0:
            raise ValueError(f"{method} failed")

    async def collective_rpc(self, method: str, args: tuple = (), **kwargs: Any) -> list[Any]:
        answers, error = [], None
        for worker in self.workers:
            try:
                answers.append(getattr(worker, method)(*args, **kwargs))
            except ValueError as raised:
                error = raised
        if error is not None:
            raise error
        return answers

    async def start_weight_update(self) -> None:
        await self.collective_rpc("start_weight_update")

    async def update_weights(self, request: Any) -> None:
        await self.collective_rpc("update_weights", update_info=request.update_info)

    async def finish_weight_update(self) -> None:
        await self.collective_rpc("finish_weight_update")

    async def update_weight_version(self, version: str) -> None:
        self.version = version


@pytest.mark.parametrize("method", ["update", "finish"])
def test_a_load_follows_one_that_failed_on_one_of_two_workers(method: str) -> None:
    staged: Any = SimpleNamespace(manifest=SimpleNamespace(to_json=lambda: "{}", version=1))

    async def run() -> None:
        engine = VllmEngine(engine_spec(""), max_model_len=64)
        engine._engine = workers = Workers()
        workers.fails[method] = True
        for _ in range(2):
            with pytest.raises(LoadFailed, match=f"{method} failed"):
                await engine.load(staged, 1)
        workers.fails.clear()
        await engine.load(staged, 2)
        assert workers.version == "2"

    asyncio.run(run())
