"""An engine under test that serves a tiny model, and plain forward passes to compare with."""

import asyncio

import pytest
import torch

from actors.engines.protocol import SamplingParameters
from actors.errors import EngineStale
from queues.records import FinishReason
from tests.weight_sync.weight_families import VOCABULARY, expected_logprobs, staged

PROMPT = [3, 13, 4, 17]
FAMILY = "qwen3, norms of queries and keys, tied"
LONG_PROMPT = [(7 * i + i // 5) % VOCABULARY for i in range(300)]
"""Long enough for vLLM to keep its first blocks in the prefix cache."""


class Bench:
    """One started engine, the weights it takes, and a loop that outlives the single test."""

    def __init__(self, engine, model, *, real: bool) -> None:
        self.engine = engine
        self.model = model
        self.real = real
        self.version = -1
        self.runner = asyncio.Runner()
        self.runner.run(engine.start())
        with pytest.raises(EngineStale, match="no policy version"):
            self.run(self.generate())
        self.run(self.update())

    def run(self, coroutine):
        return self.runner.run(asyncio.wait_for(coroutine, 120))

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: p.detach() for name, p in self.model.named_parameters()}

    def perturb(self) -> None:
        """Another policy, clearly different, in the model that is compared with."""
        torch.manual_seed(self.version)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))

    async def update(self, weights: dict[str, torch.Tensor] | None = None) -> int:
        with staged(self.version + 1, weights or self.weights()) as held:
            await self.engine.prepare(held)
            await self.engine.pause()
            await self.engine.load(held, self.version + 1)
            await self.engine.resume()
        self.version += 1
        return self.version

    async def generate(
        self, request: str = "r", tokens: int = 32, *, prompt=PROMPT, salt=None, **sampling
    ):
        return await self.engine.generate(
            request,
            prompt,
            SamplingParameters(**{"temperature": 1.0, "max_new_tokens": tokens, **sampling}),
            cache_salt=salt,
        )

    def check_logprobs(self, done, prompt=PROMPT, *, atol=1e-3) -> None:
        """Compare the log-probabilities of a real engine with those of the present weights."""
        if self.real:
            expected = expected_logprobs(self.model, prompt, done.token_ids)
            torch.testing.assert_close(torch.tensor(done.logprobs), expected, atol=atol, rtol=0)

    async def advance(self) -> None:
        """Return when every request that had a free slot has sampled some tokens."""
        await self.generate("beside", tokens=8)

    def check_interruption(self, count: int) -> None:
        """Interrupt `count` requests: they end as they are, and nothing begins any more."""

        async def interrupted():
            first = asyncio.create_task(self.generate("first", tokens=16))
            requests = [
                asyncio.create_task(self.generate(f"r{index}", tokens=400))
                for index in range(count)
            ]
            await first  # beside it others have begun
            await self.engine.interrupt()
            return await asyncio.gather(*requests), await self.generate("late")

        done, late = self.run(interrupted())
        assert {request.finish_reason for request in (*done, late)} == {FinishReason.ABORTED}
        assert late.token_ids == late.logprobs == late.versions == []
        for request in done:
            assert len(request.token_ids) == len(request.logprobs) == len(request.versions) < 400
        assert {version for request in done for version in request.versions} == {self.version}
