"""An engine serves the learner's model after each of several updates, for every model family.

Its log-probabilities are compared with a plain forward pass of transformers, after an exchange of
prepared weights and after vLLM's own reload of weights that were not prepared.
"""

import asyncio
import itertools
import os
from dataclasses import replace
from multiprocessing import forkserver
from unittest import mock

import pytest
import torch
from weight_families import (
    FAMILIES,
    VOCABULARY,
    build,
    expected_logprobs,
    named_as_in_the_folder,
    staged,
)

from actors.engines.protocol import SamplingParameters
from tests.actors.fakes import engine_spec
from weight_sync.adapter import AdapterForm

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

UPDATES = 4
PROMPT = [3, 13, 4, 17, 8]
SERVED = pytest.mark.parametrize(
    ("family", "workers"), [*((family, 1) for family in FAMILIES), ("qwen2, biases and tied", 2)]
)


@pytest.fixture(autouse=True)
def engines_of_their_own():
    """Leave no variables and no fork server to the next engine: an actor has one engine."""
    with mock.patch.dict(os.environ):
        yield
    forkserver._forkserver._stop()


def perturb(model, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.03 * torch.randn(parameter.shape, generator=generator))


def serve_updates(family: str, model, folder, staged_version, workers: int = 1) -> None:
    """Serve several versions; compare each with a forward pass of `model`.

    `staged_version` changes the model and returns a context in which its version is staged.
    """
    from actors.engines.vllm import VllmEngine

    spec = engine_spec(folder, dtype="float32", kv_cache_gib=1, tensor_parallel_size=workers)
    cores = "0" if workers == 1 else "0-1"
    config = spec.config.model_copy(update={"cores": (cores,)})
    engine = VllmEngine(replace(spec, config=config), max_model_len=128)
    prepared = "moe" not in family

    async def update(version: int, *, prepare: bool) -> None:
        with staged_version(version) as held:
            if prepare:
                await engine.prepare(held)
                assert (engine.prepared is not None) == prepared
            await engine.pause()
            await engine.load(held, version)
            await engine.resume()

    async def serve() -> None:
        await engine.start()
        try:
            for version, prepare in zip(
                range(UPDATES), itertools.cycle([True, True, False]), strict=False
            ):
                await update(version, prepare=prepare)
                sampling = SamplingParameters(temperature=1.0, max_new_tokens=24)
                done = await engine.generate(f"r{version}", PROMPT, sampling)
                assert set(done.versions) == {version}
                assert max(done.token_ids) < VOCABULARY
                expected = expected_logprobs(model, PROMPT, done.token_ids)
                torch.testing.assert_close(torch.tensor(done.logprobs), expected, atol=1e-4, rtol=0)
        finally:
            await engine.close()

    asyncio.run(asyncio.wait_for(serve(), 240))


@SERVED
def test_the_engine_serves_exactly_what_was_published_last(
    family: str, workers: int, tmp_path, monkeypatch
) -> None:
    """With one worker, and with two that hold half of every projection."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model = build(family, tmp_path)

    def staged_version(version: int):
        perturb(model, version)
        return staged(version, named_as_in_the_folder(model))

    serve_updates(family, model, tmp_path, staged_version, workers)


@SERVED
def test_the_engine_merges_the_adapter_that_was_published_last_into_its_folder(
    family: str, workers: int, tmp_path, monkeypatch
) -> None:
    """Beside generation, or, for experts and what was not prepared, in the pause."""
    from learner.config.lora import LoraConfig
    from learner.model.lora import add_adapter, factors

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model = build(family, tmp_path)
    config = LoraConfig(rank=4, alpha=8.0)
    add_adapter(model, config, seed=0)

    def staged_version(version: int):
        adapter = {factor.name: factor.value() for factor in factors(model)}
        generator = torch.Generator().manual_seed(version)
        for tensor in adapter.values():
            tensor.add_(0.05 * torch.randn(tensor.shape, generator=generator))
        return staged(version, adapter, AdapterForm(scale=config.scale))

    serve_updates(family, model, tmp_path, staged_version, workers)
