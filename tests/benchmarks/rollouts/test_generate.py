"""`headway bench generate`: the same requests in every variant, ratios inside a round, a trial."""

import asyncio
import os
from unittest import mock

import pytest

from actors.assembly import build_engine
from actors.config import ActorsConfig
from actors.engines.protocol import EngineSpec
from benchmarks.rollouts.generate import figures_of
from benchmarks.rollouts.generation_rounds import (
    Offline,
    Sampled,
    check_equal,
    length_of,
    prompts_of,
)
from deploy.config.loader import load_recipe
from deploy.errors import RunFailed
from headway.errors import InputError
from weight_sync.config import WeightSyncConfig


def test_lengths_are_the_same_wherever_they_are_asked():
    asked = [length_of([3, 5, prompt], index, 160) for prompt in range(40) for index in range(8)]
    again = [length_of((3, 5, prompt), index, 160) for prompt in range(40) for index in range(8)]
    assert asked == again
    assert min(asked) >= 1
    assert max(asked) == 160
    assert len(set(asked)) > 50


def test_no_prompt_comes_twice_and_all_can_be_read():
    texts = [prompt.text for version in range(3) for prompt in prompts_of(version, 50)]
    assert len(set(texts)) == 150
    assert set("".join(texts)) <= set(load_recipe("demo").model.tiny.characters)


def test_ratios_are_medians_of_those_of_each_round():
    rounds = [
        {"offline": Sampled(1.0, 100), "loop": Sampled(2.0, 100)},
        {"offline": Sampled(4.0, 100), "loop": Sampled(4.0, 100)},
        {"offline": Sampled(2.0, 200), "loop": Sampled(2.5, 200)},
    ]
    figures = figures_of(rounds)
    assert figures["of_offline"] == {"loop": 0.8}
    assert figures["tokens_per_second"] == {"offline": 100.0, "loop": 50.0}


def test_variants_that_sampled_different_numbers_are_not_compared():
    check_equal(0, {"offline": Sampled(1.0, 100), "loop": Sampled(2.0, 100)})
    message = r"round 3 .* different numbers of tokens: offline 100, loop 101"
    with pytest.raises(RunFailed, match=message):
        check_equal(3, {"offline": Sampled(1.0, 100), "loop": Sampled(2.0, 101)})


@pytest.mark.vllm
def test_the_engine_alone_has_every_argument_of_the_actors(monkeypatch, tiny_model):
    from vllm import AsyncEngineArgs

    alone, inside = [], []

    def refuse(arguments, **_):
        inside.append(arguments)
        raise ValueError("enough is known")

    monkeypatch.setattr("vllm.LLM", lambda **arguments: alone.append(arguments))
    monkeypatch.setattr("vllm.v1.engine.async_llm.AsyncLLM.from_engine_args", refuse)
    here = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    config = ActorsConfig(
        reward=["exact_match"], dtype="float32", float32_head=True, cores=[here], kv_cache_gib=1
    )
    path = str(tiny_model)
    with mock.patch.dict(os.environ):
        Offline().start(path, config, 256)
        spec = EngineSpec(
            index=0, config=config, weight_sync=WeightSyncConfig(), model_path=path, seed=0
        )
        engine = build_engine(spec, None, 256)
        with pytest.raises(InputError, match="enough is known"):
            asyncio.run(engine.start())
    assert AsyncEngineArgs(**alone[0]) == inside[0]
    assert inside[0].block_size == 32


@pytest.mark.slow
@pytest.mark.vllm
def test_the_loop_is_measured_beside_the_engine_alone(measured):
    record = measured("generate", "--rounds", "1", "--groups", "4", timeout=400)
    assert record["of_offline"]["loop"] > 0
    (only,) = record["raw"]
    assert len({sampled["tokens"] for sampled in only.values()}) == 1
