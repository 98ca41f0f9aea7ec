"""Two engines through fifty updates with requests running: what begins after each is of it.

The learner trains all weights, or an adapter that the engines merge into their model folder.
"""

import asyncio
import contextlib
import itertools

import pytest
import torch
from weight_families import VOCABULARY, build, expected_logprobs

from actors.engines.protocol import SamplingParameters
from actors.engines.vllm import VllmEngine
from learner.config.lora import LoraConfig
from learner.model.lora import add_adapter, factors
from tests.actors.fakes import engine_spec
from tests.weight_sync.checksum import checksum
from weight_sync.adapter import AdapterForm
from weight_sync.broadcaster import Broadcaster
from weight_sync.publish.staged_publisher import StagedPublisher
from weight_sync.receive.receiver import Receiver
from weight_sync.transports.shared_memory import SharedMemoryTransport

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1500)]

UPDATES = 50
LORA = LoraConfig(rank=4, alpha=8.0)
ENGINES = 2
SHARED = [(7 * i + i // 5) % VOCABULARY for i in range(150)]
"""A prompt long enough for vLLM to keep its first blocks in the prefix cache."""


class CheckedEngine(VllmEngine):
    """Records the checksum of every version that it loads."""

    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, **options)
        self.loaded: dict[int, str] = {}

    async def load(self, weights, version: int) -> None:
        digest = checksum(weights.tensors())
        await super().load(weights, version)
        self.loaded[version] = digest


class Fleet:
    """A learner's model, its publisher, and engines that follow it."""

    def __init__(self, folder, *, adapted: bool) -> None:
        self.model = build("llama, untied", folder)
        self.adapter = AdapterForm(scale=LORA.scale) if adapted else None
        if adapted:
            add_adapter(self.model, LORA, seed=0)
        spec = engine_spec(folder, dtype="float32", kv_cache_gib=1, cores=("0",))
        self.engines = [CheckedEngine(spec, max_model_len=512) for _ in range(ENGINES)]
        self.version = -1
        self.runner = asyncio.Runner()
        self.runner.run(self._start())

    async def _start(self) -> None:
        loop, transport = asyncio.get_running_loop(), SharedMemoryTransport()
        self._stop = asyncio.Event()
        self.broadcaster = Broadcaster(0.25, ENGINES)
        for engine in self.engines:
            await engine.start()

        def announce(manifest) -> None:
            asyncio.run_coroutine_threadsafe(self.broadcaster.announce(manifest), loop).result(60)

        self.publisher = StagedPublisher(transport, announce, bucket_bytes=2**18)
        self.receivers = [
            Receiver(f"e{number}", engine, self.broadcaster, transport)
            for number, engine in enumerate(self.engines)
        ]
        self.following = [asyncio.create_task(r.run(self._stop)) for r in self.receivers]

    def weights(self):
        """Return the tensors that are published, which may be changed."""
        if self.adapter is not None:
            return [(factor.name, factor.value()) for factor in factors(self.model)]
        return [(name, parameter.detach()) for name, parameter in self.model.named_parameters()]

    async def publish(self) -> str:
        """Publish the next version, wait until all engines serve it and return its checksum."""
        self.version += 1
        digest = await asyncio.to_thread(
            self.publisher.publish, self.version, self.weights(), self.adapter
        )
        async with asyncio.timeout(60):
            while any(receiver.version != self.version for receiver in self.receivers):
                for task in self.following:
                    if task.done():
                        task.result()
                await asyncio.sleep(0.01)
        return digest.result(60)

    async def generate(self, engine, request: str, prompt, tokens: int):
        sampling = SamplingParameters(temperature=1.0, max_new_tokens=tokens)
        return await engine.generate(request, prompt, sampling)

    @contextlib.asynccontextmanager
    async def running(self, prompt):
        """Run long requests, one after the other, on every engine."""

        async def repeat(number, engine) -> None:
            for count in itertools.count():
                name = f"long-{self.version}-{number}-{count}"
                await self.generate(engine, name, prompt, 300)

        tasks = [asyncio.create_task(repeat(*item)) for item in enumerate(self.engines)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        self._stop.set()
        await asyncio.gather(*self.following)
        self.publisher.close()
        for engine in self.engines:
            await engine.close()


@pytest.fixture(scope="module", params=[False, True], ids=["weights", "adapter"])
def fleet(tmp_path_factory, request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        fleet = Fleet(tmp_path_factory.mktemp("model"), adapted=request.param)
        yield fleet
        fleet.runner.run(fleet.close())
        fleet.runner.close()


def test_requests_begun_after_each_update_have_the_learners_logprobs_on_every_engine(fleet) -> None:
    """They share a prompt, whose blocks of an older version would show."""

    async def updates() -> None:
        async with fleet.running([3, 13, 4]):
            for _ in range(UPDATES):
                torch.manual_seed(fleet.version)
                for _, tensor in fleet.weights():
                    tensor.add_(0.01 * torch.randn_like(tensor))
                published = await fleet.publish()
                assert published == checksum(fleet.weights())
                for engine in fleet.engines:
                    assert engine.loaded[fleet.version] == published
                    name = f"after-{fleet.version}"
                    done = await fleet.generate(engine, name, SHARED, 8)
                    assert set(done.versions) == {fleet.version}
                    expected = expected_logprobs(fleet.model, SHARED, done.token_ids)
                    torch.testing.assert_close(
                        torch.tensor(done.logprobs), expected, atol=1e-4, rtol=0
                    )

    fleet.runner.run(asyncio.wait_for(updates(), 600))
    reports = fleet.runner.run(fleet.broadcaster.reports(0))
    assert not [report.error for report in reports if report.error]
    assert len(reports) == ENGINES * UPDATES
