"""Running requests of vLLM when their weights change, mode by mode."""

import asyncio

import pytest
import torch
from engine_bench import FAMILY, PROMPT, Bench
from fakes import engine_spec

from actors.engines.protocol import SamplingParameters
from headway.errors import InputError
from tests.weight_sync.weight_families import build, expected_logprobs, staged
from weight_sync.config import WeightSyncConfig

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


ENGINES = {
    "cpu": {"kv_cache_gib": 1, "cores": ("0",)},
    "cuda": {"gpus": 1, "gpu_memory_utilization": 0.3},
}
ROUNDING = {"cpu": 1e-3, "cuda": 2e-2}
"""Triton multiplies float32 in TF32."""


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


@pytest.fixture
def start(tmp_path, monkeypatch, device):
    """Return a function that starts an engine, which is closed at the end of the test.

    On a GPU it has vLLM's V2 runner.
    """
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    if device == "cuda":
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    benches = []

    def begin(**options) -> Bench:
        from actors.engines.vllm import VllmEngine

        model = build(FAMILY, tmp_path)
        engine = VllmEngine(
            engine_spec(
                tmp_path, weight_sync=WeightSyncConfig(**options), dtype="float32",
                max_concurrent_rollouts=64, **ENGINES[device],
            ),
            max_model_len=512,
        )  # fmt: skip
        benches.append(Bench(engine, model, real=True))
        return benches[0]

    yield begin
    for bench in benches:
        bench.runner.run(bench.engine.close())
        bench.runner.close()


def test_a_cleared_cache_makes_every_token_exact_under_its_own_version(start, device) -> None:
    bench = start(clear_cache=True)
    served = []

    async def crossing():
        request = asyncio.create_task(bench.generate(tokens=500))  # which outlasts both updates
        for _ in range(2):
            await bench.advance()
            before = {name: weight.clone() for name, weight in bench.weights().items()}
            served.append((bench.version, before))
            bench.perturb()
            await bench.update()
        return await request

    done = bench.run(crossing())
    served.append((bench.version, {n: w.clone() for n, w in bench.weights().items()}))
    assert set(done.versions) == {version for version, _ in served}
    logprobs, versions = torch.tensor(done.logprobs), torch.tensor(done.versions)
    for version, weights in served:
        bench.model.load_state_dict(weights, strict=False)
        mine = versions == version
        expected = expected_logprobs(bench.model, PROMPT, done.token_ids)[mine]
        torch.testing.assert_close(logprobs[mine], expected, atol=ROUNDING[device], rtol=0)


def test_between_requests_running_ones_finish_first_and_new_ones_wait(start) -> None:
    bench = start(update_mode="between_requests")

    async def crossing():
        running = asyncio.create_task(bench.generate("running", tokens=300))
        await bench.advance()
        with staged(1, bench.weights()) as held:
            await bench.engine.prepare(held)
            pausing = asyncio.create_task(bench.engine.pause())
            await asyncio.sleep(0)  # it has begun
            late = asyncio.create_task(bench.generate("late", tokens=20))
            await pausing
            await bench.engine.load(held, 1)
            await bench.engine.resume()
        return await running, await late

    running, late = bench.run(crossing())
    assert running.versions == [0] * 300
    assert late.versions == [1] * 20


def test_a_prompt_that_does_not_fit_is_refused_and_the_engine_lives_until_its_end(start) -> None:
    bench = start()
    sampling = SamplingParameters(temperature=1.0, max_new_tokens=4)
    with pytest.raises(InputError, match="512"):
        bench.run(bench.engine.generate("long", PROMPT * 200, sampling, cache_salt=""))
    assert len(bench.run(bench.generate(tokens=4)).token_ids) == 4
    bench.check_interruption(65)
