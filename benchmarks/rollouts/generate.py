"""What the loop leaves of an engine's speed: inside it, and alone with the same requests.

    headway bench generate [--size demo] [--rounds 5] [--groups 96]

Arms take turns in one run: `offline` is `LLM.generate` of vLLM, which is given all requests at once
and returns token ids and log-probabilities; `loop` is a rollout actor as runs have it, which leases
groups from the broker, decodes and rewards their texts, and puts them, while nobody trains;
`contended` is the same while a learner trains on another core, a model of the same size; it is
left out where there is no such core. The model is untrained, of the demo's size, where what the
actor does for a token weighs as much as the model itself, or of about 50 million parameters with
`--size 60m --groups 32`. All requests have fixed, lognormal lengths, and
prompts differ from round to round. The figure of merit is the median of loop / offline over rounds,
at least 0.95. Takes about four minutes. Raw numbers are stored under benchmarks/results/.
"""

import argparse
import asyncio
import contextlib
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.options import cores_option
from benchmarks.harness.provenance import RESULTS, environment, reserve, store
from benchmarks.training.train import FIRST_BATCH
from deploy.cli.bench import ROOT
from queues.records import Prompt
from queues.runtime.cpu_affinity import parse_cores

ARMS = ("offline", "loop", "contended")
AIM = 0.95
GROUP_SIZE = 8
START_SECONDS, ROUND_SECONDS = 180.0, 300.0
CHARACTERS = "0123456789+-=,abcdefghijklmnopqr"


def prompts_of(version: int, groups: int) -> list[Prompt]:
    """Sums that no other round has."""
    draw = random.Random(version)
    made = []
    for number in range(groups):
        first, second = draw.randrange(10, 100), draw.randrange(10, 100)
        text = f"{version}+{number}+{first}+{second}="
        answer = str(version + number + first + second)
        made.append(Prompt(prompt_id=f"bench/{version}/{number}", text=text, answer=answer))
    return made


@dataclass(frozen=True, slots=True)
class Sampled:
    """What an arm made of a round's requests."""

    seconds: float
    tokens: int
    cpu_seconds: float
    """Of the process that holds the engine, and of its children."""


def check_equal(number: int, found: Mapping[str, Sampled]) -> None:
    """Compares what the arms of a round had to do.

    Raises:
        SystemExit: They sampled different numbers of tokens; names the round and the numbers.
    """
    tokens = {arm: sampled.tokens for arm, sampled in found.items()}
    if len(set(tokens.values())) != 1:
        told = ", ".join(f"{arm} {count}" for arm, count in tokens.items())
        raise SystemExit(
            f"the arms of round {number} cannot be compared, since they sampled different numbers "
            f"of tokens: {told}"
        )


def figures_of(rounds: Sequence[dict[str, Sampled]]) -> dict[str, Any]:
    """Medians over rounds, and of the ratios inside each.

    `of_offline_cpu` is the ratio of tokens a CPU second, which others on the machine disturb less,
    and which says nothing of waiting.
    """
    others = [arm for arm in rounds[0] if arm != "offline"]

    def ratios(part: str) -> dict[str, float]:
        return {
            arm: statistics.median(
                [getattr(e["offline"], part) / getattr(e[arm], part) for e in rounds]
            )
            for arm in others
        }

    return {
        "tokens_per_second": {
            arm: statistics.median([e[arm].tokens / e[arm].seconds for e in rounds])
            for arm in rounds[0]
        },
        "of_offline": ratios("seconds"),
        "of_offline_cpu": ratios("cpu_seconds"),
        "raw": [{arm: asdict(found) for arm, found in each.items()} for each in rounds],
    }


def cpu_seconds(pid: int) -> float:
    """That a process and its children have used."""
    import psutil

    process = psutil.Process(pid)
    everyone = [process, *process.children(recursive=True)]
    return float(sum(sum(each.cpu_times()[:2]) for each in everyone))


async def timed(pid: int, work: Awaitable[tuple[float, int]]) -> Sampled:
    """What an arm says it took, and the CPU seconds of its process meanwhile."""
    before = cpu_seconds(pid)
    seconds, tokens = await work
    return Sampled(seconds, tokens, cpu_seconds(pid) - before)


@contextlib.contextmanager
def learner_beside(
    cores: str | None, size: str, seconds: float = START_SECONDS
) -> Iterator[subprocess.Popen[bytes] | None]:
    """A learner that has trained a batch on cores of its own, halted until it is told to go on.

    Args:
        cores: As `parse_cores` reads them; None: there is no such learner.
        size: Of its model, one of `training_load.SIZES`.
        seconds: That it gets until its first batch is trained.

    Raises:
        SystemExit: It ends, or trains no batch in time; with the end of what it said.
    """
    if cores is None:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder, open(Path(folder) / "log", "wb") as log:
        command = [
            sys.executable, "-m", "benchmarks.training.train", "--sizes", size, "--endless",
            "--threads", "1",
        ]  # fmt: skip
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=log, stderr=log,
            preexec_fn=lambda: os.sched_setaffinity(0, parse_cores(cores)),
        )  # fmt: skip
        try:
            _await_first_batch(process, Path(log.name), seconds)
            process.send_signal(signal.SIGSTOP)
            yield process
        finally:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait(30)


def _await_first_batch(process: subprocess.Popen[bytes], log: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while FIRST_BATCH not in (said := log.read_text(errors="replace")):
        ended = process.poll() is not None
        if ended or time.monotonic() > deadline:
            why = "has ended" if ended else f"trained no batch within {seconds:g} s"
            raise SystemExit(f"the learner beside {why}; it said: … {said[-2000:].strip()}")
        time.sleep(0.1)


class Loop:
    """Broker, broadcaster and one actor that has its weights; nobody trains."""

    def __init__(self, folder: Path, model_path: str, options: argparse.Namespace) -> None:
        import ray
        from safetensors.torch import load_file

        from actors.ray_actor import MAX_CONCURRENCY
        from benchmarks.rollouts.generate_arms import SEED, MeasuredActor
        from queues.config import QueuesConfig, RunSpec
        from queues.ray_broker import create_broker
        from weight_sync.config import WeightSyncConfig
        from weight_sync.publish.staged_publisher import StagedPublisher
        from weight_sync.ray_broadcaster import create_broadcaster
        from weight_sync.transports.shared_memory import SharedMemoryTransport

        steps = len(ARMS) * (options.rounds + 1) + 1
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
                0,
                config=actors_config(options),
                weight_sync=WeightSyncConfig(),
                model_path=model_path,
                seed=SEED,
                group_size=GROUP_SIZE,
                heartbeat_seconds=5.0,
                broker=self.broker,
                broadcaster=broadcaster,
            )
        )
        ray.get(self.actor.start.remote(), timeout=START_SECONDS)
        self._publisher = StagedPublisher(SharedMemoryTransport(), broadcaster.announce)
        self._publisher.publish(0, load_file(Path(model_path) / "model.safetensors").items())
        self.running = self.actor.run.remote()
        self.version = 0

    async def batch(self, prompts: Sequence[Prompt]) -> tuple[float, int]:
        """Has a batch generated; seconds until the last group is accepted, and tokens."""
        from queues.schema import summarize

        begin = time.perf_counter()
        await self.broker.issue(prompts, cursor=str(self.version), last=False)
        found = await self.broker.take(self.version, ROUND_SECONDS)
        seconds = time.perf_counter() - begin
        if found is None:
            raise SystemExit(f"no batch came within {ROUND_SECONDS:g} s")
        await self.broker.ack(self.version, {})
        self.version += 1
        return seconds, sum(summarize(payload).tokens for payload in found.payloads)

    async def close(self) -> None:
        """Ends the actor; its engine with it."""
        await self.actor.stop.remote()
        await self.running
        await self.broker.close()
        self._publisher.close()


def model_of(size: str) -> Any:
    """A model with the demo's characters and the dimensions of one of `training_load.SIZES`."""
    from benchmarks.harness.synthetic_load import SIZES
    from learner.config.learner import TinyModelConfig

    found = SIZES[size]
    return TinyModelConfig(
        characters=CHARACTERS,
        context=256,
        hidden_size=found.hidden,
        layers=found.layers,
        intermediate_size=found.intermediate,
        heads=found.heads,
        kv_heads=found.kv_heads,
        head_dim=found.head_size,
    )


def actors_config(options: argparse.Namespace) -> Any:
    """Section `[actors]` of the demo."""
    from actors.config import ActorsConfig

    return ActorsConfig(
        reward=["exact_match"],
        max_new_tokens=160,
        max_concurrent_rollouts=options.at_once,
        dtype="float32",
        cores=[options.core],
        kv_cache_gib=1,
    )


async def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All rounds."""
    import ray

    from actors.engines.model_folder import context_length, load_tokenizer
    from benchmarks.rollouts.generate_arms import Offline, length_of, settled
    from learner.model.policy import build_tiny

    model = str(folder / "model")
    build_tiny(model_of(options.size), Path(model), seed=0)
    tokenizer, config = load_tokenizer(model), actors_config(options)
    offline = ray.remote(Offline).options(num_cpus=0).remote()
    ray.get(offline.start.remote(model, config, context_length(model)), timeout=START_SECONDS)
    loop = Loop(folder / "run", model, options)
    pids = ray.get(
        [each.__ray_call__.remote(lambda _: os.getpid()) for each in (offline, loop.actor)],
        timeout=START_SECONDS,
    )
    rounds = []
    with learner_beside(options.learner_core, options.size) as learner:
        for number in range(options.rounds + 1):
            prompts = prompts_of(number, options.groups)
            ids = [tokenizer.encode(prompt.text, add_special_tokens=False) for prompt in prompts]
            requests = [
                (each, length_of(each, index, config.max_new_tokens))
                for each in ids
                for index in range(GROUP_SIZE)
            ]
            found = {}
            for arm in ("offline", "loop") if number % 2 else ("loop", "offline"):
                await settled()
                alone = arm == "offline"
                work = offline.generate.remote(requests) if alone else loop.batch(prompts)
                found[arm] = await timed(pids[0 if alone else 1], work)
            if learner is not None:
                learner.send_signal(signal.SIGCONT)
                await settled()
                found["contended"] = await timed(pids[1], loop.batch(prompts))
                if learner.poll() is not None:
                    raise SystemExit("the learner beside has ended; `headway bench train` says why")
                learner.send_signal(signal.SIGSTOP)
            check_equal(number, found)
            if number:  # the first compiles
                rounds.append(found)
                print(
                    ", ".join(f"{a} {f.tokens / f.seconds:,.0f} tokens/s" for a, f in found.items())
                )
    await loop.close()
    return figures_of(rounds)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="headway bench generate", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="of all arms; 5 take about four minutes"
    )
    parser.add_argument(
        "--groups", type=int, default=96, help="of 8 rollouts, in a round of an arm"
    )
    parser.add_argument("--size", choices=("demo", "60m"), default="demo", help="of the model")
    parser.add_argument("--at-once", type=int, default=128, help="requests that an engine runs")
    parser.add_argument(
        "--core", type=cores_option, default="0", help="CPU cores of the engines, as 0 or 0-3"
    )
    parser.add_argument(
        "--learner-core", type=cores_option,
        help="of the learner beside; another one than --core, if any",
    )  # fmt: skip
    parser.add_argument(
        "--output", type=Path, default=RESULTS / "generate.json", help="of the figures"
    )
    options = parser.parse_args()
    for name, least in (("rounds", 1), ("groups", 1), ("at_once", GROUP_SIZE)):
        if getattr(options, name) < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}")
    engines = set(parse_cores(options.core))
    if options.learner_core is None:
        others = os.sched_getaffinity(0) - engines
        options.learner_core = str(max(others)) if others else None
    elif engines & set(parse_cores(options.learner_core)):
        parser.error(
            f"--learner-core {options.learner_core} must have none of the cores of "
            f"--core {options.core}: the learner trains beside the engines"
        )
    reserve(options.output)
    if options.learner_core is None:
        print(f"no core is left beside --core {options.core}: the arm `contended` is left out")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import ray

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    try:
        with tempfile.TemporaryDirectory() as folder:
            figures = asyncio.run(measure(options, Path(folder)))
    finally:
        ray.shutdown()
    for arm, ratio in figures["of_offline"].items():
        print(f"{arm} / offline = {ratio:.3f}" + (f"   (aim {AIM})" if arm == "loop" else ""))
        print(f"… of tokens a CPU second: {figures['of_offline_cpu'][arm]:.3f}")
    arguments = {name: str(value) for name, value in vars(options).items()}
    store(environment() | {"arguments": arguments} | figures, options.output)


if __name__ == "__main__":
    main()
