"""The gateway on a real vLLM engine, with unmodified clients: tokens, versions, logprobs."""

import asyncio

import openai
import pytest
import torch

from actors.engines.vllm import VllmEngine
from queues.records import FinishReason
from tests.actors.fakes import engine_spec
from tests.actors.gateway.agent_model import LENGTH, agent_model
from tests.actors.gateway.agents import AGENTS, chat, openai_client
from tests.actors.gateway.gateway_bench import GatewayBench, check_exact
from tests.weight_sync.weight_families import staged

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

CALL = (
    r'<tool_call>\n\{"name": "add", "arguments": \{"a": [1-9]{1,2}, "b":  ?[1-9]\}\}\n</tool_call>'
)
TOLERANCE = 1e-4


class Real(GatewayBench):
    """A gateway on an engine whose weights change, and the model to compare with."""

    def __init__(self, folder) -> None:
        self.model = agent_model(folder)
        settings = {"kv_cache_gib": 1, "cores": ("0",), "max_concurrent_rollouts": 16}
        spec = engine_spec(folder, version=0, dtype="float32", **settings)
        engine = VllmEngine(spec, LENGTH)
        self.version = 0
        super().__init__(engine, spec.config)

    async def update(self, begun) -> None:
        """Replace the weights by others while a request that has begun is paused."""
        await begun.wait()
        torch.manual_seed(self.version)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(0.01 * torch.randn_like(parameter))
        weights = {name: p.detach() for name, p in self.model.named_parameters()}
        with staged(self.version + 1, weights) as held:
            await self.engine.prepare(held)
            await self.engine.pause()
            await self.engine.load(held, self.version + 1)
            await self.engine.resume()
        self.version += 1


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        real = Real(tmp_path_factory.mktemp("model"))
        yield real
        real.close()


def check_logprobs(bench, session) -> None:
    """Compare the log-probabilities of all sampled tokens with a forward pass of the model."""
    result = session.tokens()
    ids = torch.tensor(result.token_ids)
    with torch.no_grad():
        logits = bench.model(ids[None]).logits[0].float()
    expected = logits.log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
    sampled = torch.tensor(result.loss_mask)[1:]
    given = torch.tensor(result.behavior_logprobs)[1:]
    torch.testing.assert_close(given[sampled], expected[sampled], atol=TOLERANCE, rtol=0)
    assert set(torch.tensor(result.versions)[1:][sampled].tolist()) == {bench.version}


async def talk(opened, *, stream, turns=4, tokens=40):
    """Chat about nothing, without tools."""
    history = [{"role": "user", "content": "add name"}]
    async with openai_client(opened) as client:
        for _ in range(turns):
            asked = {"model": "m", "messages": history, "max_tokens": tokens}
            if stream:
                parts = await client.chat.completions.create(**asked, stream=True)
                text = "".join([p.choices[0].delta.content or "" async for p in parts])
            else:
                answer = await client.chat.completions.create(**asked)
                text = answer.choices[0].message.content
            history += [
                {"role": "assistant", "content": text},
                {"role": "user", "content": "12 more"},
            ]


@pytest.mark.parametrize("stream", [False, True])
def test_conversations_extend_what_was_sampled_with_the_logprobs_of_the_model(bench, stream):
    opened = [bench.open() for _ in range(8)]

    async def crowd():
        await asyncio.gather(*(talk(one, stream=stream) for one in opened))

    bench.run(crowd())
    for one in opened:
        assert one.session.turns == 4
        check_exact(one.session)
        check_logprobs(bench, one.session)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("agent", AGENTS)
def test_tools_that_a_real_engine_calls_are_continued_exactly(bench, monkeypatch, agent, stream):
    from vllm.sampling_params import StructuredOutputsParams

    made = bench.engine.parameters

    def forced(sampling, **others):
        return made(sampling, structured_outputs=StructuredOutputsParams(regex=CALL), **others)

    monkeypatch.setattr(bench.engine, "parameters", forced)  # a random model calls no tool
    opened = bench.open()
    got = bench.run(AGENTS[agent](opened, "add name", stream=stream, turns=3))
    assert [calls for _, calls in got] == [["add"]] * 3
    check_exact(opened.session)


def test_an_update_in_the_middle_of_an_answer_stamps_both_versions(bench):
    opened, begun = bench.open(), asyncio.Event()
    before = bench.version

    async def asking():
        async with openai_client(opened) as client:
            asked = [{"role": "user", "content": "add name"}]
            body = {"model": "m", "messages": asked, "max_tokens": 700}
            async for _ in await client.chat.completions.create(**body, stream=True):
                begun.set()

    async def crossing():
        await asyncio.gather(asking(), bench.update(begun))

    # The random model ends an answer once in a hundred tokens.
    while not (bench.saved and len(set(bench.saved[-1].versions)) == 2):
        begun.clear()
        bench.run(crossing())
        before = bench.version - 1
    assert set(bench.saved[-1].versions) == {before, before + 1}
    check_logprobs_of_new_session(bench)


def check_logprobs_of_new_session(bench):
    opened = bench.open()
    bench.run(talk(opened, stream=True, turns=2))
    assert opened.session.cache_salt == f"{bench.version}"
    check_logprobs(bench, opened.session)


def test_requests_that_a_pause_holds_are_sampled_by_the_version_that_resumes(bench):
    opened = [bench.open() for _ in range(4)]

    async def play():
        await bench.engine.pause()
        asking = asyncio.gather(*(talk(one, stream=False, turns=1) for one in opened))
        done, _ = await asyncio.wait({asking}, timeout=0.3)
        assert not done
        paused = asyncio.Event()
        paused.set()
        await bench.update(paused)
        await asking

    bench.run(play())
    for one in opened:
        assert set(one.session.tokens().versions) == {-1, bench.version}


def test_an_interruption_ends_every_request_of_every_session(bench):
    opened = [bench.open() for _ in range(8)]

    async def play():
        asking = [asyncio.create_task(talk(one, stream=False, tokens=700)) for one in opened]
        await talk(bench.open(), stream=True, turns=1, tokens=8)
        await bench.engine.interrupt()
        return await asyncio.gather(*asking, return_exceptions=True)

    ended = bench.run(play())
    stopped = [one for one, error in zip(opened, ended, strict=True) if error is not None]
    assert stopped
    for one in stopped:
        assert one.interrupted
        assert set(one.session.tokens().left_out) == {"interrupted"}
    with pytest.raises(openai.APIStatusError) as caught:
        bench.run(chat(bench.open(), "late"))
    assert caught.value.status_code == 503
    assert all(turn.finish_reason is not FinishReason.ABORTED for turn in bench.saved)
