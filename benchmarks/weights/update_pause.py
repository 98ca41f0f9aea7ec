"""Measures how long a weight update stops generation.

In one run, with requests running throughout:

1. vLLM's own pause and resume with nothing in between,
2. the bare load of the same weights by vLLM's calls, inside a pause that is not counted,
3. the whole in-flight swap through publisher, broadcaster and receiver.

    headway bench update-pause

The figure of merit is (3) / ((1) + 2 × (2)), which must not exceed 1. Medians; raw numbers are
stored under benchmarks/results/. Leaves out transfer between nodes.
"""

import argparse
import asyncio
import itertools
import os
import statistics
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from actors.engines.protocol import SamplingParameters
from actors.engines.vllm import VllmEngine
from actors.engines.vllm_settings import VllmSettings
from benchmarks.harness.options import cores_option
from benchmarks.harness.provenance import RESULTS, environment, reserve, store
from benchmarks.harness.synthetic_load import SIZES, Size, build
from weight_sync.announcements import WeightUpdateReport
from weight_sync.broadcaster import Broadcaster
from weight_sync.manifest import Manifest
from weight_sync.publish.staged_publisher import StagedPublisher
from weight_sync.receive.receiver import Receiver
from weight_sync.receive.staging import StagedWeights, stage
from weight_sync.transports.shared_memory import SharedMemoryTransport

VOCABULARY = 1024
MAX_MODEL_LEN = 512


def build_model(
    folder: Path, *, hidden: int, layers: int, size: Size | None = None, dtype: str = "float32"
) -> int:
    """Writes a Qwen3 with random weights that never ends a sequence; its parameter count.

    With a `size` it is that of a learner's benchmark, whatever `hidden` and `layers` say.
    """
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    model = build(size) if size else _qwen3(hidden, layers)
    eos = model.config.vocab_size  # outside of what the model samples
    words = {str(token): token for token in range(eos)} | {"<eos>": eos}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="0")), eos_token="<eos>"
    ).save_pretrained(folder)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def _qwen3(hidden: int, layers: int) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=hidden,
            intermediate_size=3 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=hidden // 4,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            eos_token_id=None,
            bos_token_id=None,
        )
    )


class Load:
    """Keeps a number of requests running and counts what they sampled."""

    def __init__(self, engine: VllmEngine, requests: int, tokens: int = 400) -> None:
        self._engine = engine
        self._each = tokens
        self.tokens = 0
        self.crossed = 0
        self._tasks = [asyncio.create_task(self._repeat(slot)) for slot in range(requests)]

    async def _repeat(self, slot: int) -> None:
        sampling = SamplingParameters(temperature=1.0, max_new_tokens=self._each)
        for count in itertools.count():
            done = await self._engine.generate(
                f"{slot}-{count}", [3, 13, slot], sampling, cache_salt=str(count)
            )
            self.tokens += len(done.token_ids)
            self.crossed += len(set(done.versions)) > 1

    async def stop(self) -> None:
        """Cancels every request."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class Updates:
    """Publisher, broadcaster and receiver of one engine, in this process."""

    def __init__(self, engine: VllmEngine, weights: dict[str, torch.Tensor]) -> None:
        self.transport = SharedMemoryTransport()
        self.broadcaster = Broadcaster(0.25, 1)
        loop = asyncio.get_running_loop()

        def announce(manifest: Manifest) -> None:
            asyncio.run_coroutine_threadsafe(self.broadcaster.announce(manifest), loop).result(60)

        self._weights = weights
        self._publisher = StagedPublisher(self.transport, announce)
        self._stop = asyncio.Event()
        receiver = Receiver("engine-0", engine, self.broadcaster, self.transport)
        self._receiving = asyncio.create_task(receiver.run(self._stop))
        self._reports = 0

    async def update(self, version: int) -> tuple[WeightUpdateReport, float]:
        """Publishes slightly different weights and waits until the engine serves them."""
        tensors = [(n, w + 1e-4 * torch.randn_like(w)) for n, w in self._weights.items()]
        begin = time.perf_counter()
        await asyncio.to_thread(self._publisher.publish, version, tensors)
        publish_seconds = time.perf_counter() - begin
        while len(await self.broadcaster.reports(self._reports)) == 0:
            if self._receiving.done():
                self._receiving.result()
            await asyncio.sleep(0.01)
        (report,) = await self.broadcaster.reports(self._reports)
        self._reports += 1
        if report.error:
            raise SystemExit(f"the update failed: {report.error}")
        return report, publish_seconds

    async def staged(self) -> StagedWeights:
        """The newest version once more, to be loaded by hand."""
        manifest = await self.broadcaster.newest(-1, 1.0)
        return stage(manifest, self.transport)

    async def stop(self) -> None:
        """Ends receiver and publisher."""
        self._stop.set()
        await self._receiving
        self._publisher.close()


async def empty_pause(engine: VllmEngine) -> float:
    begin = time.perf_counter()
    await engine.pause()
    await engine.resume()
    return time.perf_counter() - begin


async def bare_load(engine: VllmEngine, updates: Updates, version: int) -> float:
    """Seconds of vLLM's start, update and finish of weights that the engine has already."""
    staged = await updates.staged()
    await engine.pause()
    begin = time.perf_counter()
    await engine.load(staged, version)
    seconds = time.perf_counter() - begin
    await engine.resume()
    staged.close()
    return seconds


async def measure(arguments: argparse.Namespace, folder: Path) -> dict:
    engine = VllmEngine(
        VllmSettings(
            str(folder),
            dtype=arguments.dtype,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=max(64, arguments.requests),
            cores=arguments.cores,
            kv_cache_gib=1,
        )
    )
    await engine.start()
    raw: dict[str, list[float]] = {
        key: []
        for key in (
            "empty_pause",
            "bare_load",
            "swap",
            "swap_pause",
            "swap_load",
            "swap_resume",
            "publish_call",
            "staging",
            "publish_to_serving",
        )
    }
    try:
        updates = Updates(engine, load_file(folder / "model.safetensors"))
        await updates.update(0)
        load = Load(engine, arguments.requests)
        await asyncio.sleep(arguments.warm_up)
        for round_ in range(arguments.rounds + 1):
            report, publish_seconds = await updates.update(round_ + 1)
            pause = await empty_pause(engine)
            bare = await bare_load(engine, updates, round_ + 1)
            await asyncio.sleep(0.3)
            if round_ == 0:  # the first of each kind touches fresh memory
                continue
            raw["empty_pause"].append(pause)
            raw["bare_load"].append(bare)
            raw["swap"].append(report.stalled_seconds)
            raw["swap_pause"].append(report.pause_seconds)
            raw["swap_load"].append(report.load_seconds)
            raw["swap_resume"].append(report.resume_seconds)
            raw["publish_call"].append(publish_seconds)
            raw["staging"].append(report.staged_at - report.published_at)
            raw["publish_to_serving"].append(report.swap_finished_at - report.published_at)
        await load.stop()
        await updates.stop()
        return {"raw_seconds": raw, "bytes": report.bytes, "requests_that_crossed": load.crossed}
    finally:
        await engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=64, help="requests that run throughout")
    parser.add_argument("--rounds", type=int, default=9, help="repetitions, at least 7")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument(
        "--size", choices=[name for name, size in SIZES.items() if size.longest >= MAX_MODEL_LEN],
        help="a model of `headway bench train` instead of --hidden and --layers",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="float32", help="of weights and engine"
    )
    parser.add_argument("--cores", type=cores_option, help="CPU cores of vLLM, as 0 or 0-3")
    parser.add_argument("--warm-up", type=float, default=3.0, help="seconds before measuring")
    parser.add_argument("--output", type=Path, help="of the figures, else under results/")
    arguments = parser.parse_args()
    if arguments.rounds < 7:
        parser.error(f"--rounds is {arguments.rounds}; medians need at least 7")
    file = arguments.output or RESULTS / f"update_pause_{datetime.now(UTC):%Y%m%dT%H%M%SZ}.json"
    reserve(file)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with tempfile.TemporaryDirectory() as folder:
        parameters = build_model(
            Path(folder), hidden=arguments.hidden, layers=arguments.layers,
            size=SIZES.get(arguments.size), dtype=arguments.dtype,
        )  # fmt: skip
        measured = asyncio.run(measure(arguments, Path(folder)))
    medians = {key: statistics.median(values) for key, values in measured["raw_seconds"].items()}
    ratio = medians["swap"] / (medians["empty_pause"] + 2 * medians["bare_load"])
    print(f"{parameters:,} parameters, {measured['bytes']:,} bytes, {arguments.requests} requests")
    for key, seconds in medians.items():
        values = measured["raw_seconds"][key]
        print(
            f"{key:20s} median {1e3 * seconds:8.1f} ms   "
            f"{1e3 * min(values):8.1f} … {1e3 * max(values):.1f}"
        )
    print(f"swap / (empty_pause + 2 × bare_load) = {ratio:.2f}   (must be ≤ 1)")
    record = environment() | {"parameters": parameters, "medians": medians, "ratio": ratio}
    options = {name: value for name, value in vars(arguments).items() if name != "output"}
    store(record | measured | {"arguments": options}, file)
    sys.exit(ratio > 1)


if __name__ == "__main__":
    main()
