"""Speed of an engine inside the loop, beside the same vLLM alone with the same requests.

    headway bench generate [--size 60m --groups 32]

In each round `offline` is `LLM.generate` with all requests at once, and `loop` a rollout actor that
leases groups, decodes and rewards their texts, and puts them, without training. The figure of merit
is the median of loop / offline, at least 0.95. Takes about four minutes.
"""

import asyncio
import os
import random
import tempfile
import time
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness.study import Options, Record, Study, number, option
from deploy.errors import RunFailed
from queues.records import Prompt

AIM = 0.95
GROUP_SIZE = 8
AT_ONCE = 128
"""Requests that an engine runs."""
CORE = "0"
"""Of the engines."""
START_SECONDS, ROUND_SECONDS, REST_SECONDS = 180.0, 300.0, 0.3
CHARACTERS = "0123456789+-=,abcdefghijklmnopqr"


def prompts_of(version: int, groups: int) -> list[Prompt]:
    """Return sums that no other round has."""
    draw = random.Random(version)
    prompts = []
    for index in range(groups):
        first, second = draw.randrange(10, 100), draw.randrange(10, 100)
        text = f"{version}+{index}+{first}+{second}="
        answer = str(version + index + first + second)
        prompts.append(Prompt(prompt_id=f"bench/{version}/{index}", text=text, answer=answer))
    return prompts


@dataclass(frozen=True, slots=True)
class Sampled:
    """One variant's figures of a round."""

    seconds: float
    tokens: int
    cpu_seconds: float
    """Of the process that holds the engine, and of its children."""


def check_equal(index: int, measured: Mapping[str, Sampled]) -> None:
    """Check that the variants of a round sampled the same number of tokens.

    Raises:
        RunFailed: They did not; names the round and the numbers.
    """
    tokens = {name: sampled.tokens for name, sampled in measured.items()}
    if len(set(tokens.values())) != 1:
        counts = ", ".join(f"{name} {count}" for name, count in tokens.items())
        raise RunFailed(
            f"the variants of round {index} cannot be compared, since they sampled different "
            f"numbers of tokens: {counts}"
        )


def figures_of(rounds: Sequence[Mapping[str, Sampled]]) -> Record:
    """Return medians over rounds, and of the ratios inside each.

    `of_offline_cpu` is the ratio of tokens per CPU second, which other work on the machine disturbs
    less, and which leaves out waiting.
    """

    def ratio(part: str) -> float:
        return median(getattr(one["offline"], part) / getattr(one["loop"], part) for one in rounds)

    return {
        "tokens_per_second": {
            name: median(one[name].tokens / one[name].seconds for one in rounds)
            for name in ("offline", "loop")
        },
        "of_offline": {"loop": ratio("seconds")},
        "of_offline_cpu": {"loop": ratio("cpu_seconds")},
        "raw": [{name: asdict(sampled) for name, sampled in one.items()} for one in rounds],
    }


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process and its children so far."""
    import psutil

    process = psutil.Process(pid)
    family = [process, *process.children(recursive=True)]
    return float(sum(sum(member.cpu_times()[:2]) for member in family))


async def timed(pid: int, work: Awaitable[tuple[float, int]]) -> Sampled:
    """Await a variant's seconds and tokens, and add the CPU seconds of its process."""
    before = cpu_seconds(pid)
    seconds, tokens = await work
    return Sampled(seconds, tokens, cpu_seconds(pid) - before)


class Loop:
    """Broker, broadcaster and one actor that has its weights."""

    def __init__(self, folder: Path, model_path: str, options: Options) -> None:
        import ray
        from safetensors.torch import load_file

        from actors.ray_actor import MAX_CONCURRENCY, ActorSpec
        from benchmarks.rollouts.generate_engines import SEED, MeasuredActor
        from queues.config import QueuesConfig, RunSpec
        from queues.ray_broker import create_broker
        from weight_sync.config import WeightSyncConfig
        from weight_sync.publish.staged_publisher import StagedPublisher
        from weight_sync.ray_broadcaster import create_broadcaster
        from weight_sync.transports.shared_memory import SharedMemoryTransport

        steps = options.rounds + 2
        self.broker = create_broker(
            folder,
            config=QueuesConfig(max_staleness=steps, window=2 * options.groups, patience_seconds=0),
            spec=RunSpec(groups_per_batch=options.groups, group_size=GROUP_SIZE, steps=steps),
        )
        broadcaster = create_broadcaster(0.25, 1)
        self.actor = (
            ray.remote(MeasuredActor)
            .options(num_cpus=0, max_concurrency=MAX_CONCURRENCY)
            .remote(
                ActorSpec(
                    index=0,
                    config=actors_config(),
                    weight_sync=WeightSyncConfig(),
                    model_path=model_path,
                    seed=SEED,
                    group_size=GROUP_SIZE,
                    heartbeat_seconds=5.0,
                    broker=self.broker,
                    broadcaster=broadcaster,
                )
            )
        )
        ray.get(self.actor.start.remote(), timeout=START_SECONDS)
        self._publisher = StagedPublisher(SharedMemoryTransport(), broadcaster.announce)
        self._publisher.publish(0, load_file(Path(model_path) / "model.safetensors").items())
        self._running = self.actor.run.remote()
        self._version = 0

    async def batch(self, prompts: Sequence[Prompt]) -> tuple[float, int]:
        """Generate a batch; return the seconds until its last group is accepted, and its tokens."""
        from queues.schema import summarize

        begin = time.perf_counter()
        await self.broker.issue(prompts, cursor=str(self._version), last=False)
        batch = await self.broker.take(self._version, ROUND_SECONDS)
        seconds = time.perf_counter() - begin
        if batch is None:
            raise RunFailed(f"no batch came within {ROUND_SECONDS:g} s")
        await self.broker.ack(self._version, {})
        self._version += 1
        return seconds, sum(summarize(payload).tokens for payload in batch.payloads)

    async def close(self) -> None:
        """End the actor, and its engine with it."""
        await self.actor.stop.remote()
        await self._running
        await self.broker.close()
        self._publisher.close()


def tiny_model(size: str) -> Any:
    """Return a model with the demo's characters and the sizes of one of `synthetic_load.SIZES`."""
    from benchmarks.harness.synthetic_load import SIZES
    from learner.config.learner import TinyModelConfig

    sizes = SIZES[size]
    return TinyModelConfig(
        characters=CHARACTERS,
        context=256,
        hidden_size=sizes.hidden,
        layers=sizes.layers,
        intermediate_size=sizes.intermediate,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_size,
    )


def actors_config() -> Any:
    """Return the section [actors] of the demo."""
    from actors.config import ActorsConfig

    return ActorsConfig(
        reward=["exact_match"],
        max_new_tokens=160,
        max_concurrent_rollouts=AT_ONCE,
        dtype="float32",
        cores=[CORE],
        kv_cache_gib=1,
    )


async def measure_rounds(options: Options, folder: Path) -> Record:
    """Measure all rounds."""
    import ray

    from actors.engines.model_folder import context_length, load_tokenizer
    from benchmarks.rollouts.generate_engines import Offline, length_of
    from learner.model.policy import build_tiny

    model = str(folder / "model")
    build_tiny(tiny_model(options.size), Path(model), seed=0)
    tokenizer, config = load_tokenizer(model), actors_config()
    offline = ray.remote(Offline).options(num_cpus=0).remote()
    ray.get(offline.start.remote(model, config, context_length(model)), timeout=START_SECONDS)
    loop = Loop(folder / "run", model, options)
    offline_pid, loop_pid = ray.get(
        [actor.__ray_call__.remote(lambda _: os.getpid()) for actor in (offline, loop.actor)],
        timeout=START_SECONDS,
    )
    rounds = []
    for index in range(options.rounds + 1):
        prompts = prompts_of(index, options.groups)
        requests = []
        for prompt in prompts:
            ids = tokenizer.encode(prompt.text, add_special_tokens=False)
            lengths = (length_of(ids, i, config.max_new_tokens) for i in range(GROUP_SIZE))
            requests += [(ids, length) for length in lengths]
        measured = {}
        for name in ("offline", "loop") if index % 2 else ("loop", "offline"):
            await asyncio.sleep(REST_SECONDS)
            if name == "offline":
                measured[name] = await timed(offline_pid, offline.generate.remote(requests))
            else:
                measured[name] = await timed(loop_pid, loop.batch(prompts))
        check_equal(index, measured)
        if index:  # the first compiles
            rounds.append(measured)
            speeds = (f"{name} {s.tokens / s.seconds:,.0f}" for name, s in measured.items())
            print(f"round {index}: {', '.join(speeds)} tokens/s", flush=True)
    await loop.close()
    return figures_of(rounds)


def measure(options: Options) -> Iterator[Record]:
    import ray

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    try:
        with tempfile.TemporaryDirectory() as folder:
            yield asyncio.run(measure_rounds(options, Path(folder)))
    finally:
        ray.shutdown()


def table(record: Record) -> str:
    return (
        f"loop / offline = {record['of_offline']['loop']:.3f} (aim {AIM}); "
        f"of tokens a CPU second {record['of_offline_cpu']['loop']:.3f}"
    )


STUDY = Study(
    name="generate",
    about=__doc__,
    options=(
        option("--rounds", 5, "of both engines", type=number(int, 1)),
        option("--groups", 96, "of 8 rollouts, in a round of an engine", type=number(int, 1)),
        option("--size", "demo", "of the model", choices=("demo", "60m")),
    ),
    file="generate.json",
    measure=measure,
    table=table,
)
