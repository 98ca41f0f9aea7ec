"""The two engines of `headway bench generate`: one inside the loop, one alone. Actors of Ray.

Both sample the same numbers of tokens for the same prompts: an end of a sequence is ignored, and
`length_of` gives the length of each.
"""

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from actors import ray_actor
from actors.assembly import build_engine
from actors.config import ActorsConfig
from actors.engines.protocol import EngineSpec, Generation, SamplingParameters
from actors.engines.vllm_arguments import engine_arguments
from benchmarks.harness.synthetic_load import SIGMA
from weight_sync.config import WeightSyncConfig

MEDIAN_TOKENS = 48
SEED = 0
"""Of both engines."""


def length_of(prompt_ids: Sequence[int], sample_index: int, longest: int) -> int:
    """Return the lognormal number of tokens of a sample, a function of its prompt and index."""
    draw = random.Random(f"{list(prompt_ids)}/{sample_index}")
    return min(longest, max(1, round(MEDIAN_TOKENS * draw.lognormvariate(0, SIGMA))))


class MeasuredActor(ray_actor.RolloutActor):
    """A rollout actor that samples given numbers of tokens."""

    def _build(self) -> Any:
        import vllm

        vllm.SamplingParams = partial(vllm.SamplingParams, ignore_eos=True)
        ray_actor.build_engine = lambda *arguments: fix_lengths(build_engine(*arguments))
        return super()._build()


def fix_lengths(engine: Any) -> Any:
    """Return the engine, whose every request is as long as `length_of` gives."""
    generate = engine.generate

    async def fixed(
        request_id: str,
        prompt_ids: Sequence[int],
        sampling: SamplingParameters,
        *,
        cache_salt: str | None = None,
    ) -> Generation:
        index = int(request_id.split("/")[-2])
        tokens = length_of(prompt_ids, index, sampling.max_new_tokens)
        sampling = replace(sampling, max_new_tokens=tokens)
        done: Generation = await generate(request_id, prompt_ids, sampling, cache_salt=cache_salt)
        return done

    engine.generate = fixed
    return engine


class Offline:
    """An `LLM` of vLLM: a list of requests in, all their tokens out."""

    def start(self, model_path: str, config: ActorsConfig, max_model_len: int) -> None:
        """Load the model with the arguments of the actor's engine; others are vLLM's defaults."""
        spec = EngineSpec(
            index=0,
            config=config,
            weight_sync=WeightSyncConfig(),
            model_path=model_path,
            seed=SEED,
        )
        from vllm import LLM

        self._llm = LLM(**engine_arguments(spec, max_model_len))

    def generate(self, requests: Sequence[tuple[list[int], int]]) -> tuple[float, int]:
        """Sample token ids and log-probabilities, as many as asked; return seconds and tokens."""
        from vllm import SamplingParams
        from vllm.inputs import tokens_input

        prompts = [tokens_input(ids) for ids, _ in requests]
        sampling = [
            SamplingParams(
                temperature=1.0,
                max_tokens=tokens,
                ignore_eos=True,
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
            )
            for _, tokens in requests
        ]
        begin = time.perf_counter()
        outputs = self._llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - begin
        return seconds, sum(len(output.outputs[0].token_ids) for output in outputs)
