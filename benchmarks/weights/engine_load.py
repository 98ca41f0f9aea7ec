"""A vLLM engine under load, with a model of random weights."""

import asyncio
import itertools
import os
import time
from pathlib import Path

import torch

from actors.config import ActorsConfig
from actors.engines.protocol import EngineSpec, SamplingParameters
from actors.engines.vllm import VllmEngine
from benchmarks.harness.synthetic_load import MAX_MODEL_LEN, Size, build
from weight_sync.config import WeightSyncConfig
from weight_sync.manifest import Manifest
from weight_sync.receive.staging import stage
from weight_sync.transports.protocol import Transport


def build_model(folder: Path, size: Size, dtype: str) -> int:
    """Write a Qwen3 with random weights that never ends a sequence; return its parameters."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    model = build(size)
    eos = model.config.vocab_size  # outside of what the model samples
    words = {str(token): token for token in range(eos)} | {"<eos>": eos}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="0")), eos_token="<eos>"
    ).save_pretrained(folder)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


async def start_engine(folder: Path, dtype: str, rollouts: int) -> VllmEngine:
    """Start vLLM with a model folder as version 0, for so many rollouts at once."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    settings = {"dtype": dtype, "max_concurrent_rollouts": rollouts, "kv_cache_gib": 1}
    spec = EngineSpec(
        index=0,
        config=ActorsConfig.model_validate(settings),
        weight_sync=WeightSyncConfig(),
        model_path=str(folder),
        seed=0,
        initial_version=0,
    )
    engine = VllmEngine(spec, max_model_len=MAX_MODEL_LEN)
    await engine.start()
    return engine


class Load:
    """Keeps a number of requests running and counts the tokens that they sampled."""

    def __init__(self, engine: VllmEngine, requests: int, tokens: int) -> None:
        self._engine, self._length = engine, tokens
        self.tokens = 0
        self._tasks = [asyncio.create_task(self._repeat(slot)) for slot in range(requests)]

    async def _repeat(self, slot: int) -> None:
        sampling = SamplingParameters(temperature=1.0, max_new_tokens=self._length)
        for count in itertools.count():
            done = await self._engine.generate(
                f"{slot}-{count}", [3, 13, slot], sampling, cache_salt=str(count)
            )
            self.tokens += len(done.token_ids)

    async def rate(self, seconds: float) -> float:
        """Return the tokens a second that are sampled in the next seconds."""
        tokens, begin = self.tokens, time.perf_counter()
        await asyncio.sleep(seconds)
        return (self.tokens - tokens) / (time.perf_counter() - begin)

    async def stop(self) -> None:
        """Cancel every request."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def empty_pause(engine: VllmEngine) -> float:
    """Return the seconds of vLLM's pause and resume with nothing in between."""
    begin = time.perf_counter()
    await engine.pause()
    await engine.resume()
    return time.perf_counter() - begin


async def bare_load(engine: VllmEngine, manifest: Manifest, transport: Transport) -> float:
    """Return the seconds of vLLM's start, update and finish of a version that it has already."""
    staged = stage(manifest, transport)
    await engine.pause()
    begin = time.perf_counter()
    await engine.load(staged, manifest.version)
    seconds = time.perf_counter() - begin
    await engine.resume()
    staged.close()
    return seconds
