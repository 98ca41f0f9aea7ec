"""The model APIs of the gateway with unmodified clients, on a stand-in for vLLM's engine."""

import asyncio
import re
from contextvars import ContextVar

import httpx
import openai
import pytest

from actors.errors import EngineDied, RolloutFailed
from tests.actors.gateway.agents import AGENTS, CALL, chat, openai_client
from tests.actors.gateway.gateway_bench import check_exact
from tests.actors.gateway.stand_in import spelled
from tests.waiting import reached

pytestmark = pytest.mark.vllm


def calls_twice(prompt):
    """Call the tool in two turns, the second time after some words, then end."""
    turn = prompt.count("<|im_start|>tool")
    return [CALL, f"once more {CALL}", "12 name add"][turn]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("agent", AGENTS)
def test_a_conversation_with_tools_goes_on_from_the_very_tokens(bench, agent, stream):
    bench.client.says = calls_twice
    opened = bench.open()
    got = bench.run(AGENTS[agent](opened, "add name", stream=stream))
    assert [calls for _, calls in got] == [["add"], ["add"], []]
    assert [text.strip() for text, _ in got] == ["", "once more", "12 name add"]
    check_exact(opened.session)
    tokenizer = bench.client.renderer.tokenizer
    for prompt, turn in zip(bench.client.prompts, bench.saved, strict=True):
        said = tokenizer.convert_ids_to_tokens(turn.token_ids)
        assert said == [*spelled(calls_twice(tokenizer.decode(prompt))), "<|im_end|>"]
    rendered = tokenizer(tokenizer.decode(bench.client.prompts[2]))["input_ids"]
    assert rendered != bench.client.prompts[2]  # which texts alone would have given
    assert opened.session.reply == "12 name add"
    assert bench.client.salts == ["0", "0", "0"]


def test_texts_of_completions_are_continued_too(bench):
    opened = bench.open()

    async def play():
        async with openai_client(opened) as client:
            prompt = "add name"
            for stream in (False, True):
                asked = {"model": "m", "prompt": prompt, "max_tokens": 5}
                answer = await client.completions.create(**asked, stream=stream)
                if stream:
                    prompt += "".join([part.choices[0].text async for part in answer])
                else:
                    prompt += answer.choices[0].text
            return prompt

    assert bench.run(play()) == "add namehellohello"
    check_exact(opened.session)


def test_the_recipe_samples_and_a_client_chooses_only_length_and_stops(bench):
    opened = bench.open(tokens=150, temperature=0.5)
    wish = {"temperature": 0.1, "top_p": 0.2, "seed": 3, "max_tokens": 9, "stop": ["x"]}
    bench.run(chat(opened, "name", extra_body={"top_k": 2}, logprobs=True, top_logprobs=2, **wish))
    [asked] = bench.client.parameters
    assert (asked.temperature, asked.top_p, asked.top_k, asked.seed) == (0.5, 1.0, -1, None)
    assert (asked.max_tokens, asked.stop, asked.logprobs) == (9, ["x"], 2)
    bench.run(chat(opened, "name"))
    assert bench.client.parameters[-1].max_tokens == 150 - 6
    assert bench.client.parameters[-1].logprobs == 0


def test_a_turn_is_saved_before_its_answer_ends(bench):
    saved, order = asyncio.Event(), []

    async def slow(turn):
        await saved.wait()
        order.append("saved")

    opened = bench.open(on_turn=slow)

    async def play():
        async with openai_client(opened) as client:
            asked = [{"role": "user", "content": "name"}]
            parts = await client.chat.completions.create(model="m", messages=asked, stream=True)
            async for part in parts:
                if not order:
                    saved.set()
                order.append(part.choices[0].finish_reason)
        return order

    whole = bench.run(play())
    assert whole.index("saved") < whole.index("stop")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("agent", AGENTS)
def test_recorded_answers_are_given_without_the_engine(bench, agent, stream):
    bench.client.says = calls_twice
    first = bench.open()
    got = bench.run(AGENTS[agent](first, "add name", stream=stream))
    recorded = [*bench.saved]
    bench.client.says = lambda prompt: "another answer"
    bench.client.prompts.clear()
    again = bench.open(recorded=recorded[:2])
    repeated = bench.run(AGENTS[agent](again, "add name", stream=not stream))
    assert repeated[:2] == got[:2]
    assert len(bench.client.prompts) == 1
    assert bench.saved[3:5] == recorded[:2]
    check_exact(again.session)


def test_an_answer_that_is_dropped_is_aborted_and_left_out(bench):
    bench.client.goes_on.clear()
    opened = bench.open()

    async def play():
        body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
        headers = {"Authorization": f"Bearer {opened.key}"}
        async with (
            httpx.AsyncClient(headers=headers) as client,
            client.stream("POST", f"{opened.base_url}/chat/completions", json=body) as answer,
        ):
            async for _ in answer.aiter_lines():
                break
        while opened.running:
            await asyncio.wait({*opened.running})

    bench.run(play())
    assert len(bench.client.aborted) == 1
    assert opened.session.tokens().left_out == {"undelivered": 1}
    assert opened.session.turns == 0
    assert (opened.failure, opened.interrupted) == (None, False)


PATHS = {
    "chat/completions": {"messages": [{"role": "user", "content": "add name"}]},
    "completions": {"prompt": "add name"},
    "responses": {"input": "add name"},
    "messages": {"messages": [{"role": "user", "content": "add name"}], "max_tokens": 9},
}


async def dropped(client, reached, path, **body):
    """Ask, and leave as soon as an event happens."""
    asking = asyncio.create_task(client.post(path, json=body))
    await reached.wait()
    asking.cancel()
    await asyncio.wait({asking})


def text_of(answer):
    assert answer.status_code == 200, answer.text
    return "".join(re.findall(r'"(?:content|text|delta)": *"([^"]*)"', answer.text))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_a_saved_answer_that_was_not_delivered_is_given_to_the_next_identical_request(
    bench, path, stream
):
    texts, begun, durable = iter(["one", "two"]), asyncio.Event(), asyncio.Event()
    bench.client.says = lambda _: next(texts)
    body = {"model": "m", **PATHS[path], "stream": stream}

    async def slow(turn):
        bench.saved.append(turn)
        begun.set()
        await durable.wait()

    opened = bench.open(on_turn=slow, turns=2, tokens=9)

    async def play():
        headers = {"Authorization": f"Bearer {opened.key}"}
        async with httpx.AsyncClient(base_url=opened.base_url, headers=headers) as client:
            await dropped(client, begun, path, **body)
            await reached(lambda: not opened.running)
            again = asyncio.create_task(client.post(path, json=body))
            await reached(lambda: opened.running)
            durable.set()
            return text_of(await again), text_of(await client.post(path, json=body))

    again, new = bench.run(play())
    assert "one" in again
    assert "two" in new  # the first was delivered by then
    assert (len(bench.client.prompts), opened.session.turns) == (2, 2)
    assert {turn.number for turn in bench.saved} == {0, 1}
    tokens = opened.session.tokens()
    assert (sum(tokens.loss_mask), tokens.left_out) == (8, {})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_a_request_whose_client_leaves_while_it_is_sampled_is_sampled_anew(bench, path, stream):
    bench.client.goes_on.clear()
    opened = bench.open()
    body = {"model": "m", **PATHS[path], "stream": stream}

    async def play():
        headers = {"Authorization": f"Bearer {opened.key}"}
        async with httpx.AsyncClient(base_url=opened.base_url, headers=headers) as client:
            await dropped(client, bench.client.began, path, **body)
            again = asyncio.create_task(client.post(path, json=body))
            await reached(lambda: bench.client.aborted)
            bench.client.goes_on.set()
            return text_of(await again)

    assert "hello" in bench.run(play())
    assert (len(bench.client.prompts), opened.session.turns) == (2, 1)
    assert opened.session.tokens().left_out == {"undelivered": 1}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("agent", AGENTS)
def test_an_engine_that_dies_ends_the_session(bench, caplog, agent, stream):
    bench.client.error = EngineDied("the engine is gone")
    opened = bench.open()
    with pytest.raises(Exception, match=r"stopped; the cause is in the log|503") as caught:
        bench.run(AGENTS[agent](opened, "name", stream=stream))
    assert "gone" not in str(caught.value)
    assert "the engine is gone" in caplog.text
    assert isinstance(opened.failure, EngineDied)
    assert opened.stopped.is_set()
    with pytest.raises(openai.APIStatusError) as caught:
        bench.run(chat(opened, "name"))
    assert caught.value.status_code == 503


def test_an_answer_that_the_engine_fails_fails_its_rollout_alone(bench, monkeypatch):
    output = bench.client._output

    def failed(request_id, prompt_ids, ids, finish, spans):
        return output(request_id, prompt_ids, ids, finish and "error", spans)

    monkeypatch.setattr(bench.client, "_output", failed)
    opened = bench.open()
    with pytest.raises(openai.APIStatusError) as caught:
        bench.run(chat(opened, "name"))
    assert caught.value.status_code == 503
    assert isinstance(opened.failure, RolloutFailed)
    assert (opened.session.turns, bench.saved) == (0, [])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("agent", AGENTS)
def test_an_error_inside_is_not_shown_to_the_agent(bench, caplog, agent, stream):
    bench.client.error = RuntimeError("list index 7 of worker /opt/x.py")
    opened = bench.open()
    with pytest.raises(Exception, match=r"cause is in the log|500|503") as caught:
        bench.run(AGENTS[agent](opened, "name", stream=stream))
    assert "index" not in str(caught.value)
    assert "list index 7 of worker /opt/x.py" in caplog.text


def test_an_agent_that_compresses_a_history_too_long_for_the_context_is_not_cut_off(bench):
    opened = bench.open()
    with pytest.raises(openai.BadRequestError, match="1024"):
        bench.run(chat(opened, "word " * 1000))
    assert "1024" in opened.limit
    assert bench.run(chat(opened, "name")) == [("hello", [])]
    assert opened.limit is None


def test_an_interruption_ends_requests_and_counts_their_tokens(bench):
    bench.client.goes_on.clear()
    opened = bench.open()

    async def play():
        asking = asyncio.create_task(chat(opened, "name"))
        await bench.client.began.wait()
        await bench.engine.interrupt()
        with pytest.raises(openai.APIStatusError) as caught:
            await asking
        return caught.value.status_code

    assert bench.run(play()) == 503
    assert (opened.interrupted, opened.failure) == (True, None)
    assert opened.session.tokens().left_out == {"interrupted": 1}


def test_a_turn_that_cannot_be_saved_is_not_answered(bench):
    async def broken(turn):
        raise RuntimeError("the ledger is gone")

    opened = bench.open(on_turn=broken)
    with pytest.raises(openai.APIStatusError) as caught:
        bench.run(chat(opened, "name"))
    assert caught.value.status_code == 503
    assert str(opened.failure) == "the ledger is gone"


def test_a_turn_that_is_being_saved_outlives_deadline_and_session(bench):
    saved, begun, durable = [], asyncio.Event(), asyncio.Event()
    deadline = ContextVar("deadline")

    async def slow(turn):
        begun.set()
        await durable.wait()
        saved.append((turn.number, deadline.get()))

    async def play():
        deadline.set("of the rollout")
        opened = bench.open(on_turn=slow, turns=2, seconds=0.3)
        first = asyncio.create_task(chat(opened, "name"))
        await begun.wait()
        begun.clear()
        second = asyncio.create_task(chat(opened, "name"))  # the last turn, the first counts once
        await begun.wait()
        await asyncio.wait({first}, timeout=0.4)
        assert opened.limit is None
        closing = asyncio.create_task(opened.close())
        done = await asyncio.gather(first, second, return_exceptions=True)
        assert [error.status_code for error in done] == [401, 401]
        assert not closing.done()
        durable.set()
        await closing

    bench.run(play())
    assert sorted(saved) == [(0, "of the rollout"), (1, "of the rollout")]


def test_nothing_begins_while_the_engine_is_paused(bench):
    opened = bench.open()

    async def play():
        await bench.engine.pause()
        asking = asyncio.create_task(chat(opened, "name"))
        done, _ = await asyncio.wait({asking}, timeout=0.2)
        assert not done
        assert bench.client.prompts == []
        await bench.engine.resume()
        await asking

    bench.run(play())
    assert len(bench.client.prompts) == 1


def test_only_one_of_several_calls_is_answered_where_a_client_wants_it_so(bench):
    bench.client.says = lambda prompt: "done" if "tool\n" in prompt else f"{CALL}\n{CALL}"
    opened = bench.open()
    got = bench.run(chat(opened, "name", parallel_tool_calls=False))
    assert [calls for _, calls in got] == [["add"], []]
    check_exact(opened.session)


def test_tokens_are_counted_without_a_turn(bench):
    opened = bench.open()
    asked = {"model": "m", "messages": [{"role": "user", "content": "add name"}]}
    headers = {"x-api-key": opened.key}
    answer = httpx.post
    counted = bench.run(
        asyncio.to_thread(
            answer, f"{opened.base_url}/messages/count_tokens", json=asked, headers=headers
        )
    )
    assert counted.json()["input_tokens"] == len(
        bench.template.prompt([*map(_message, asked["messages"])], None, {})
    )
    assert opened.session.turns == 0


def _message(fields):
    from actors.gateway.messages import read_message

    return read_message(fields)
