"""The contract of rollout engines, run against each implementation."""

import asyncio
import multiprocessing
import os
import signal

import pytest
import torch
from engine_bench import FAMILY, LONG_PROMPT, Bench
from fakes import engine_spec

from actors.engines.model_folder import load_tokenizer
from actors.engines.scripted import ScriptedEngine
from actors.errors import EngineDied
from actors.rollout.chat_rendering import Renderer
from actors.rollout.stops import load_stops
from queues.records import FinishReason
from tests.weight_sync.weight_families import VOCABULARY, build, expected_logprobs, staged
from weight_sync.errors import LoadFailed

SLOTS = 4
"""Requests that vLLM runs at once; what is more waits in its queue."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("model")
    return folder, build(FAMILY, folder)


def scripted(torch_model) -> ScriptedEngine:
    shapes = {name: tuple(p.shape) for name, p in torch_model.named_parameters()}
    return ScriptedEngine(
        shapes, vocabulary=VOCABULARY, median_length=10_000, tokens_per_second=1000
    )


@pytest.fixture(scope="module", params=["scripted", pytest.param("vllm", marks=pytest.mark.vllm)])
def bench(request, model):
    folder, torch_model = model
    if request.param == "scripted":
        engine = scripted(torch_model)
    else:
        os.environ["HF_HUB_OFFLINE"] = "1"
        from actors.engines.vllm import VllmEngine

        engine = VllmEngine(
            engine_spec(
                folder, dtype="float32", max_concurrent_rollouts=SLOTS, kv_cache_gib=1, cores=("0",)
            ),
            max_model_len=512,
        )
    made = Bench(engine, torch_model, real=request.param == "vllm")
    yield made
    made.runner.run(engine.close())
    made.runner.close()
    assert not multiprocessing.active_children()


def test_every_sampled_token_has_a_logprob_and_a_version(bench: Bench) -> None:
    done = bench.run(bench.generate(tokens=32))
    assert len(done.token_ids) == len(done.logprobs) == len(done.versions) == 32
    assert set(done.versions) == {bench.version}
    assert all(type(token) is int and 0 <= token < VOCABULARY for token in done.token_ids)
    assert all(type(value) is float and value <= 0 for value in done.logprobs)
    assert done.finish_reason is FinishReason.LENGTH


def test_a_seed_repeats_the_tokens_and_another_seed_does_not(bench: Bench) -> None:
    async def three():
        return await asyncio.gather(
            bench.generate("a", seed=7), bench.generate("b", seed=7), bench.generate("c", seed=8)
        )

    one, same, other = bench.run(three())
    assert one.token_ids == same.token_ids != other.token_ids


@pytest.mark.parametrize("by", ["text", "id"])
def test_an_engine_stops_at_a_stop_or_later_and_never_before_it(bench: Bench, by, model) -> None:
    renderer = Renderer(load_tokenizer(str(model[0])))
    whole = bench.run(bench.generate("whole", seed=7))
    stop = whole.token_ids[9] if by == "id" else renderer.text(whole.token_ids[8:10])
    stops = load_stops(renderer, [stop])
    asked = {"stop": stops.strings, "stop_ids": stops.ids}
    done = bench.run(bench.generate("stopped", seed=7, **asked))
    length = stops.find(whole.token_ids)
    assert length is not None
    assert done.token_ids == whole.token_ids[: len(done.token_ids)]
    assert length <= len(done.token_ids) == len(done.logprobs) == len(done.versions)
    if bench.real:
        assert len(done.token_ids) == length < len(whole.token_ids)
        assert done.finish_reason is FinishReason.STOP


def test_tokens_after_an_update_carry_its_version_and_come_from_its_weights(bench: Bench) -> None:
    bench.perturb()
    version = bench.run(bench.update())
    done = bench.run(bench.generate(tokens=64))
    assert set(done.versions) == {version}
    bench.check_logprobs(done)


@pytest.mark.vllm
def test_a_cpu_keeps_the_history_of_short_turns(model) -> None:
    from actors.engines.vllm_arguments import engine_arguments

    assert engine_arguments(engine_spec(model[0]), 512)["block_size"] == 32


def test_what_is_prepared_is_served_when_it_is_loaded_and_not_before(bench: Bench) -> None:
    """Prepared once, overtaken by the next, which is then loaded."""
    old = {name: weight.clone() for name, weight in bench.weights().items()}
    before = bench.version

    async def overtaken():
        bench.perturb()
        with staged(before + 1, bench.weights()) as held:
            await bench.engine.prepare(held)
            between = await bench.generate("between", tokens=64)
        bench.perturb()
        await bench.update()
        return between, await bench.generate("after", tokens=64)

    between, after = bench.run(overtaken())
    assert set(between.versions) == {before}
    assert set(after.versions) == {before + 1}
    bench.check_logprobs(after, atol=1e-4)
    new = {name: weight.clone() for name, weight in bench.weights().items()}
    bench.model.load_state_dict(old, strict=False)
    bench.check_logprobs(between, atol=1e-4)
    bench.model.load_state_dict(new, strict=False)


def test_an_update_in_the_middle_of_a_request_leaves_tokens_of_both_versions(bench: Bench) -> None:
    async def crossing():
        request = asyncio.create_task(bench.generate(tokens=400))
        for _ in range(2):
            await bench.advance()
            await bench.update()
        return await request

    before = bench.version
    done = bench.run(crossing())
    assert len(done.versions) == 400
    assert done.versions == sorted(done.versions)
    assert set(done.versions) == {before, before + 1, before + 2}


def test_no_token_is_sampled_while_paused(bench: Bench) -> None:
    async def frozen():
        request = asyncio.create_task(bench.generate(tokens=200))
        await bench.advance()
        await bench.engine.pause()
        await bench.engine.pause()
        late = asyncio.create_task(bench.generate("late", tokens=4))
        finished, _ = await asyncio.wait([request, late], timeout=0.7)
        await bench.engine.resume()
        return finished, await request, await late

    finished, one, two = bench.run(frozen())
    assert not finished
    assert (len(one.token_ids), len(two.token_ids)) == (200, 4)


def test_a_request_begun_during_a_pause_is_sampled_wholly_by_the_new_version(bench: Bench) -> None:
    async def begin_paused():
        version = bench.version + 1
        with staged(version, bench.weights()) as held:
            await bench.engine.pause()
            first = asyncio.create_task(bench.generate("first", tokens=40))
            later = asyncio.create_task(bench.generate("later", tokens=40, salt="a turn before"))
            await asyncio.sleep(0.05)
            await bench.engine.load(held, version)
            await asyncio.sleep(0.05)
            await bench.engine.resume()
        bench.version = version
        return await first, await later

    first, later = bench.run(begin_paused())
    assert set(first.versions) == set(later.versions) == {bench.version}
    assert (first.cache_salt, later.cache_salt) == (str(bench.version), "a turn before")


def test_the_salt_of_a_request_names_the_version_that_prefilled_it(bench: Bench) -> None:
    """Twice as many requests as run at once: those in vLLM's queue begin after the update."""

    async def crossing():
        await bench.generate("cached", tokens=1, prompt=LONG_PROMPT)
        short = asyncio.create_task(bench.generate("short", tokens=4, prompt=LONG_PROMPT))
        requests = [
            asyncio.create_task(bench.generate(f"r{i}", tokens=150, prompt=LONG_PROMPT))
            for i in range(2 * SLOTS)
        ]
        await short  # beside it the first ones have begun
        bench.perturb()
        await bench.update()
        return await asyncio.gather(*requests)

    before = bench.version
    done = bench.run(crossing())
    assert all(request.cache_salt == str(request.versions[0]) for request in done)
    assert all(len(request.token_ids) == 150 for request in done)
    assert done[0].versions[0] == before
    if bench.real:
        queued = [request for request in done if request.versions[0] > before]
        assert len(queued) >= SLOTS
        for request in queued:
            bench.check_logprobs(request, LONG_PROMPT)


def test_a_cached_prompt_is_prefilled_anew_after_other_weights_of_the_same_version(
    bench: Bench,
) -> None:
    async def again():
        old = await bench.generate("old", tokens=32, prompt=LONG_PROMPT)
        bench.perturb()
        bench.version -= 1
        await bench.update()
        return old, await bench.generate("new", tokens=32, prompt=LONG_PROMPT)

    old, new = bench.run(again())
    assert set(old.versions) == set(new.versions)
    if bench.real:
        assert old.cache_salt != new.cache_salt
    bench.check_logprobs(new, LONG_PROMPT)


def test_a_cached_prompt_is_prefilled_anew_after_an_update(bench: Bench) -> None:
    """The state that the old salt still finds shows that there was something to keep apart."""

    async def again():
        old = await bench.generate("old", tokens=32, prompt=LONG_PROMPT)
        bench.perturb()
        await bench.update()
        new = await bench.generate("new", tokens=32, prompt=LONG_PROMPT)
        stale = await bench.generate("stale", tokens=32, prompt=LONG_PROMPT, salt=old.cache_salt)
        return new, stale

    new, stale = bench.run(again())
    assert set(new.versions) == set(stale.versions) == {bench.version}
    before, after = (int(done.cache_salt.partition("+")[0]) for done in (stale, new))
    assert after == before + 1 == bench.version
    bench.check_logprobs(new, LONG_PROMPT)
    if bench.real:
        apart = expected_logprobs(bench.model, LONG_PROMPT, stale.token_ids)
        assert (torch.tensor(stale.logprobs) - apart).abs().max() > 0.05


@pytest.mark.parametrize("fault", ["foreign", "missing", "part", "shape"])
def test_a_failed_load_leaves_no_trace_once_a_full_load_succeeds(bench: Bench, fault: str) -> None:
    old = {name: weight.clone() for name, weight in bench.weights().items()}
    bad = {name: weight + 1 for name, weight in old.items()}
    last = next(reversed(bad))
    name = "model.layers.1.self_attn.q_norm.weight"
    if fault == "foreign":
        bad["model.layers.1.nobody.weight"] = torch.ones(3)
    elif fault == "missing":
        del bad[name if name in bad else last]
    elif fault == "part":
        del bad["model.layers.1.self_attn.v_proj.weight" if name in bad else last]
    else:
        bad["model.layers.1.self_attn.v_proj.weight"] = torch.ones(7, 5)

    async def fail_then_repair():
        request = asyncio.create_task(bench.generate(tokens=300))
        await bench.advance()
        with staged(bench.version + 1, bad) as held:
            await bench.engine.prepare(held)
            await bench.engine.pause()
            with pytest.raises(LoadFailed):
                await bench.engine.load(held, bench.version + 1)
        finished, _ = await asyncio.wait([request], timeout=0.3)
        assert not finished
        bench.version += 1
        await bench.update()
        await request
        return await bench.generate("after", tokens=48), await request

    before = bench.version
    after, through = bench.run(fail_then_repair())
    assert set(through.versions) == {before, before + 2}
    assert set(after.versions) == {before + 2}
    bench.check_logprobs(after)


def test_cancelling_a_call_ends_its_request_and_no_other(bench: Bench) -> None:
    async def cancel_one():
        doomed = asyncio.create_task(bench.generate("doomed", tokens=400))
        other = asyncio.create_task(bench.generate("other", tokens=40))
        await bench.advance()
        doomed.cancel()
        with pytest.raises(asyncio.CancelledError):
            await doomed
        return await other, await bench.generate("doomed", tokens=3)

    other, again = bench.run(cancel_one())
    assert (len(other.token_ids), len(again.token_ids)) == (40, 3)


def test_an_interrupted_engine_gives_what_it_has_and_begins_nothing(model) -> None:
    """An interruption is for good, so `test_vllm_modes` has the one of vLLM."""
    bench = Bench(scripted(model[1]), model[1], real=False)
    bench.check_interruption(SLOTS + 1)
    bench.runner.run(bench.engine.close())
    bench.runner.close()


def test_the_inventory_names_exactly_the_weights_that_are_published(bench: Bench) -> None:
    shapes = {name: shape for name, (_, shape) in bench.engine.inventory().items()}
    assert shapes == {name: tuple(weight.shape) for name, weight in bench.weights().items()}


def test_requests_of_an_engine_that_ends_fail_with_a_typed_error(bench: Bench) -> None:
    """Last in this file: nothing runs on the engine afterwards."""

    async def end():
        request = asyncio.create_task(bench.generate(tokens=400))
        await bench.advance()
        if bench.real:
            (core,) = multiprocessing.active_children()
            os.kill(core.pid, signal.SIGSTOP)
            pausing = asyncio.create_task(bench.engine.pause())
            await asyncio.sleep(0)  # the engine has the call, and never answers it
            os.kill(core.pid, signal.SIGKILL)
            async with asyncio.timeout(10):
                with pytest.raises(EngineDied):
                    await pausing
        else:
            await bench.engine.close()
        with pytest.raises(EngineDied):
            await request
        with pytest.raises(EngineDied):
            await bench.generate()
        with pytest.raises(EngineDied):
            await bench.update()

    bench.run(end())
