"""Rounds of generation by the actor of a run and by `LLM.generate`, with equal lengths."""

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import ray

from actors import ray_actor
from actors.assembly import build_engine
from actors.config import ActorsConfig
from actors.engines.model_folder import context_length, load_tokenizer
from actors.engines.protocol import EngineSpec, Generation, SamplingParameters
from actors.engines.vllm_arguments import engine_arguments
from actors.environments.single_turn import opening
from actors.rollout.chat_rendering import Renderer
from benchmarks.harness.actor_fleet import start_fleet
from benchmarks.harness.synthetic_load import SIGMA, SIZES
from deploy.config.loader import load_recipe
from deploy.errors import RunFailed
from learner.model.policy import build_tiny
from queues.config import QueuesConfig
from queues.ray_broker import BrokerClient
from queues.records import Prompt
from queues.schema import summarize
from weight_sync.config import WeightSyncConfig

START_SECONDS, ROUND_SECONDS, REST_SECONDS = 180.0, 300.0, 0.3
MEDIAN_TOKENS = 48
TINY = {
    "hidden_size": "hidden", "intermediate_size": "intermediate", "layers": "layers",
    "heads": "heads", "kv_heads": "kv_heads", "head_dim": "head_size",
}  # fmt: skip
"""Fields of a `Size` by key of [model.tiny]."""


def length_of(prompt_ids: Sequence[int], sample_index: int, longest: int) -> int:
    """Return the lognormal number of tokens of a sample, a function of its prompt and index."""
    draw = random.Random(f"{list(prompt_ids)}/{sample_index}")
    return min(longest, max(1, round(MEDIAN_TOKENS * draw.lognormvariate(0, SIGMA))))


class MeasuredActor(ray_actor.RolloutActor):
    """A rollout actor that samples the numbers of tokens that `length_of` gives."""

    def _build(self) -> Any:
        import vllm

        vllm.SamplingParams = partial(vllm.SamplingParams, ignore_eos=True)
        vars(ray_actor)["build_engine"] = lambda *given: fix_lengths(build_engine(*given))
        return super()._build()


def fix_lengths(engine: Any) -> Any:
    """Return the engine, whose every request is as long as `length_of` gives."""
    generate = engine.generate

    async def fixed(
        request_id: str, prompt_ids: Sequence[int], sampling: SamplingParameters, **options: Any
    ) -> Generation:
        index = int(request_id.split("/")[-2])
        tokens = length_of(prompt_ids, index, sampling.max_new_tokens)
        sampling = replace(sampling, max_new_tokens=tokens)
        done: Generation = await generate(request_id, prompt_ids, sampling, **options)
        return done

    engine.generate = fixed
    return engine


@dataclass(frozen=True, slots=True)
class Sampled:
    """One variant's figures of a round."""

    seconds: float
    tokens: int


class Offline:
    """An `LLM` of vLLM: a list of requests in, all their tokens out."""

    def start(self, model_path: str, config: ActorsConfig, max_model_len: int) -> None:
        """Load the model with the arguments of the actor's engine; others are vLLM's defaults."""
        from vllm import LLM

        spec = EngineSpec(
            index=0, config=config, weight_sync=WeightSyncConfig(), model_path=model_path, seed=0
        )
        self._llm = LLM(**engine_arguments(spec, max_model_len))

    def generate(self, requests: Sequence[tuple[list[int], int]]) -> Sampled:
        """Sample token ids and log-probabilities, as many as asked."""
        from vllm import SamplingParams
        from vllm.inputs import tokens_input

        prompts = [tokens_input(ids) for ids, _ in requests]
        settings = {"temperature": 1.0, "ignore_eos": True, "detokenize": False}
        settings |= {"logprobs": 0, "flat_logprobs": True}
        sampling = [SamplingParams(max_tokens=tokens, **settings) for _, tokens in requests]
        begin = time.perf_counter()
        outputs = self._llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - begin
        return Sampled(seconds, sum(len(output.outputs[0].token_ids) for output in outputs))


def prompts_of(version: int, groups: int) -> list[Prompt]:
    """Return sums that no other round has."""
    return [
        Prompt(prompt_id=f"bench/{version}/{n}", text=f"{version}+{n}=", answer=str(version + n))
        for n in range(groups)
    ]


def check_equal(index: int, measured: Mapping[str, Sampled]) -> None:
    """Raise `RunFailed` unless the variants of a round sampled the same number of tokens."""
    tokens = {name: sampled.tokens for name, sampled in measured.items()}
    if len(set(tokens.values())) != 1:
        counts = ", ".join(f"{name} {count}" for name, count in tokens.items())
        raise RunFailed(
            f"the variants of round {index} cannot be compared, since they sampled different "
            f"numbers of tokens: {counts}"
        )


async def batch(broker: BrokerClient, version: int, prompts: Sequence[Prompt]) -> Sampled:
    """Generate a batch; its seconds end when its last group is accepted."""
    begin = time.perf_counter()
    await broker.issue(prompts, cursor=str(version), last=False)
    taken = await broker.take(version, ROUND_SECONDS)
    seconds = time.perf_counter() - begin
    if taken is None:
        raise RunFailed(f"no batch came within {ROUND_SECONDS:g} s")
    await broker.ack(version, {})
    return Sampled(seconds, sum(summarize(payload).tokens for payload in taken.payloads))


async def measure_rounds(
    count: int, groups: int, size: str, folder: Path
) -> list[Mapping[str, Sampled]]:
    """Return the figures of `count` rounds of both engines, after one that compiles.

    Both have the demo's recipe, with batches of so many groups and one of `synthetic_load.SIZES`.
    """
    sizes = SIZES[size]
    settings = ['actors.reward=["exact_match"]', f"prompts.groups_per_batch={groups}"]
    settings += [f"model.tiny.{key}={getattr(sizes, name)}" for key, name in TINY.items()]
    config, model = load_recipe("demo", settings), folder / "model"
    assert config.model.tiny is not None
    build_tiny(config.model.tiny, model, seed=0)
    offline = ray.remote(Offline).options(num_cpus=0).remote()
    start = offline.start.remote(str(model), config.actors, context_length(str(model)))
    ray.get(start, timeout=START_SECONDS)
    steps = count + 2
    queues = QueuesConfig(max_staleness=steps, window=2 * groups, patience_seconds=0)
    create = partial(ray_actor.create_actor, actor=MeasuredActor, num_cpus=0)
    fleet = await start_fleet(config, str(model), folder / "run", queues, steps, create=create)
    await fleet.publish(0, model)
    renderer, longest = Renderer(load_tokenizer(str(model))), config.actors.max_new_tokens
    rounds: list[Mapping[str, Sampled]] = []

    async def measure_each() -> None:
        for index in range(count + 1):
            prompts = prompts_of(index, groups)
            rendered = [renderer.prompt(opening(prompt)) for prompt in prompts]
            requests = [
                (ids, length_of(ids, sample, longest))
                for ids in rendered
                for sample in range(config.prompts.group_size)
            ]
            measured: dict[str, Sampled] = {}
            for name in ("offline", "loop") if index % 2 else ("loop", "offline"):
                await asyncio.sleep(REST_SECONDS)
                if name == "offline":
                    measured[name] = await offline.generate.remote(requests)
                else:
                    measured[name] = await batch(fleet.broker, index, prompts)
            check_equal(index, measured)
            if index:  # the first compiles
                rounds.append(measured)
                speeds = (f"{name} {s.tokens / s.seconds:,.0f}" for name, s in measured.items())
                print(f"round {index}: {', '.join(speeds)} tokens/s", flush=True)

    await fleet.serve(rounds=measure_each())
    return rounds
