"""Environments of the library verifiers, played token by token with the library's own code."""

import asyncio
import sys
import threading
import types

import pytest
from fakes import Recited, episodes, lease

from actors.engines.protocol import SamplingParameters
from actors.environments.load_environment import load_environment
from actors.environments.protocol import Message
from actors.environments.tool_calls import find_calls
from actors.environments.verifiers_environment import library_loop
from actors.errors import EnvironmentFailed
from actors.sources.load_source import load_source
from headway.errors import InputError
from tests.waiting import reached

pytestmark = pytest.mark.slow  # the library takes half a minute to import
vf = pytest.importorskip("verifiers", reason="verifiers is not installed beside the environment")

SUMS = [{"question": f"{n}+{n}=", "answer": str(2 * n)} for n in range(1, 7)]


COLUMNS = [
    {"question": f"{n}?", "answer": n, "shape": {"of": [n, 1.5]}, "info": {"n": n}} for n in (2, 3)
]


def rows(values=SUMS):
    from datasets import Dataset

    return Dataset.from_list(values)


async def right(completion, answer) -> float:
    return float(completion[-1].content == answer)


async def half_for_brevity(completion) -> float:
    return 0.5 * (len(completion[-1].content) < 3)


async def twice_a_number(completion, answer) -> float:
    return float(int(completion[-1].content) == 2 * answer)


def breaks(completion, **rest) -> float:
    raise ZeroDivisionError("by nothing")


def silent(completion) -> float:
    return None


ENDED = threading.Event()


def waits(completion) -> float:
    assert ENDED.wait(10)
    return 1.0


class Tidy(vf.Rubric):
    """Counts what it has cleaned up."""

    ended = 0

    @vf.cleanup
    async def count(self, state):
        Tidy.ended += 1


class Columns(vf.SingleTurnEnv):
    """Keeps the rows that it is given."""

    rows = ()

    async def setup_state(self, state):
        Columns.rows = (*Columns.rows, dict(state["input"]))


class Countdown(vf.MultiTurnEnv):
    """Says what is left of 3 until nothing is, and cleans up."""

    ended = 0

    async def setup_state(self, state):
        state["left"] = 3

    async def env_response(self, messages, state, **rest):
        state["left"] -= int(messages[-1].content)
        return [vf.UserMessage(content=f"{state['left']}=")]

    @vf.stop
    async def nothing_left(self, state):
        return bool(state["trajectory"]) and state["left"] <= int(
            state["trajectory"][-1]["completion"][-1].content
        )

    @vf.cleanup
    async def count(self, state):
        type(self).ended += 1


class Orderly(Countdown):
    """Counts apart."""

    ended = 0


class Forgetful(Countdown):
    """Shows only the newest message."""

    async def get_prompt_messages(self, state):
        result = await super().get_prompt_messages(state)
        return result[-1:] if state["trajectory"] else result


class Choosy(vf.SingleTurnEnv):
    """Asks for each message with sampling arguments of its own."""

    async def setup_state(self, state):
        state["sampling_args"] = {"min_p": 0.1}


async def double(number: int) -> str:
    """Doubles a number.

    Args:
        number: To be doubled.
    """
    return str(2 * number)


def build(kind):
    """Environments by the name of the module that has them."""
    rubric = vf.Rubric(funcs=[right, half_for_brevity], weights=[1.0, 0.1])
    kinds = {
        "single": lambda: vf.SingleTurnEnv(dataset=rows(), rubric=rubric),
        "countdown": lambda: Countdown(dataset=rows(), rubric=rubric),
        "forgetful": lambda: Forgetful(dataset=rows(), rubric=rubric),
        "tool": lambda: vf.ToolEnv(dataset=rows(), rubric=rubric, tools=[double]),
        "breaks": lambda: vf.SingleTurnEnv(dataset=rows(), rubric=Tidy(funcs=[right, breaks])),
        "breaks in a group": lambda: vf.SingleTurnEnv(
            dataset=rows(), rubric=vf.RubricGroup([vf.Rubric(funcs=[right]), Tidy(funcs=[silent])])
        ),
        "tidy": lambda: Orderly(dataset=rows(), rubric=Tidy(funcs=[right])),
        "blocks": lambda: vf.SingleTurnEnv(dataset=rows(), rubric=vf.Rubric(funcs=[waits])),
        "hasty": lambda: vf.SingleTurnEnv(dataset=rows(), rubric=rubric, timeout_seconds=0.5),
        "columns": lambda: Columns(dataset=rows(COLUMNS), rubric=vf.Rubric(funcs=[twice_a_number])),
        "evaluated": lambda: vf.SingleTurnEnv(
            dataset=rows(), eval_dataset=rows().select(range(3)), rubric=rubric
        ),
        "hot": lambda: vf.SingleTurnEnv(
            dataset=rows(), rubric=rubric, sampling_args={"temperature": 0.1}
        ),
        "asks for more": lambda: Choosy(dataset=rows(), rubric=rubric),
        "wrong": lambda: types.SimpleNamespace(env_id=None, env_args=None),
    }
    return kinds[kind]()


@pytest.fixture(autouse=True)
def module(monkeypatch):
    """Make the module `tiny_env`, in the form of a package of the library."""
    result = types.ModuleType("tiny_env")
    result.load_environment = lambda kind="single": build(kind)
    monkeypatch.setitem(sys.modules, "tiny_env", result)


def play(kind, *lines, text="2+2=", answer="4", **changes):
    engine = Recited(*lines)
    runner = episodes(
        engine, SamplingParameters(temperature=1.0, max_new_tokens=60),
        environment="verifiers:tiny-env", options={"kind": kind}, rewards=(), **changes,
    )  # fmt: skip
    made = asyncio.run(runner.run(lease(text=text, answer=answer), 0))
    return engine, made


@pytest.mark.parametrize(("said", "reward"), [("4", 1.05), ("5", 0.05), ("444", 0.0)])
def test_a_single_turn_earns_what_its_rubric_says(said, reward):
    engine, made = play("single", said)
    assert made.reward == pytest.approx(reward)
    assert made.reward_parts == {"environment": pytest.approx(reward)}
    assert made.turns == 1
    (asked,) = engine.requests
    assert engine.tokenizer.decode(asked[1]).replace(" ", "") == "2+2="


def test_a_conversation_goes_on_as_the_environment_says_and_keeps_every_token():
    before = Countdown.ended
    engine, made = play("countdown", "1", "0", "2", answer="2")
    assert Countdown.ended == before + 1
    assert made.turns == 3
    assert made.reward == pytest.approx(1.05)
    sampled = [t for t, trains in zip(made.token_ids, made.loss_mask, strict=True) if trains]
    spoken = [
        token
        for line in ("1", "0", "2")
        for token in [*engine.tokenizer.encode(line, add_special_tokens=False), 1]
    ]
    assert sampled == spoken
    for (_, earlier, *_), (_, later, *_) in zip(engine.requests, engine.requests[1:], strict=False):
        assert later[: len(earlier)] == earlier, "nothing that was in the context has changed"
    assert made.token_ids[: len(engine.requests[-1][1])] == engine.requests[-1][1]
    shown = [
        token for token, version in zip(made.token_ids, made.versions, strict=True) if version < 0
    ]
    assert "2=" in engine.tokenizer.decode(shown).replace(" ", "")


def test_tools_are_told_of_called_and_what_they_say_comes_back():
    conversation = load_environment("verifiers:tiny-env", {"kind": "tool"})()

    async def talk():
        opening = await conversation.reset(lease(text="double 21", answer="42").prompt)
        call = '<tool_call>{"name": "double", "arguments": {"number": 21}}</tool_call>'
        assert len(find_calls(call, "json", ("<tool_call>", "</tool_call>"))) == 1
        answered = await conversation.step(Message("assistant", f"let me see {call}"))
        wrong = await conversation.step(Message("assistant", "<tool_call>{oh</tool_call>"))
        return opening, answered, wrong, await conversation.step(Message("assistant", "42"))

    opening, answered, wrong, end = asyncio.run(talk())
    assert [message.role for message in opening] == ["system", "user"]
    assert '"name": "double"' in opening[0].content
    assert [(m.role, m.content) for m in answered.messages] == [("tool", "42")]
    assert not answered.done
    assert [m.role for m in wrong.messages] == ["tool"]
    assert not wrong.done
    assert end.done
    assert end.reward == pytest.approx(1.05)


def test_an_environment_that_rewrites_what_was_said_fails_its_rollout():
    with pytest.raises(EnvironmentFailed, match="has rewritten the conversation"):
        play("forgetful", "1", "0", "2")


def test_an_environment_that_asks_for_other_sampling_half_way_fails_its_rollout():
    with pytest.raises(
        EnvironmentFailed, match=r"asks for a message with sampling_args = \{'min_p"
    ):
        play("asks for more", "4")


def test_conversations_that_are_cut_off_leave_nothing_running():
    async def scenario():
        runner = episodes(
            Recited("0", "0", "0"), SamplingParameters(temperature=1.0, max_new_tokens=60),
            environment="verifiers:tiny-env", options={"kind": "tidy"}, rewards=(),
            max_turns=2,
        )  # fmt: skip
        made = await runner.run(lease(), 0)
        await reached(lambda: asyncio.all_tasks(library_loop()) <= others)
        return made

    others = asyncio.all_tasks(library_loop())
    before = Orderly.ended, Tidy.ended
    made = asyncio.run(scenario())
    assert (made.turns, made.reward, made.finish_reason.value) == (2, 0.0, "length")
    assert (Orderly.ended, Tidy.ended) == (before[0] + 1, before[1] + 1), "both cleaned up"


def test_the_data_set_of_an_environment_is_a_source_of_prompts():
    options = {"options": {"kind": "single"}, "heldout_size": 2, "seed": 0}
    train = load_source("verifiers:tiny-env", split="train", **options).next(4)
    heldout = load_source("verifiers:tiny-env", split="heldout", **options).next(2)
    assert sorted(p.text for p in [*train, *heldout]) == [row["question"] for row in SUMS]
    for prompt in train:
        number = int(prompt.text[0])
        assert prompt.answer == str(2 * number)
        assert prompt.metadata["headway:messages"] == [{"role": "user", "content": prompt.text}]
        assert prompt.metadata["verifiers"]["example_id"] == number - 1


def test_a_row_comes_back_to_its_environment_as_it_was():
    options = {"kind": "columns"}
    prompts = load_source("verifiers:tiny-env", options=options, seed=0).next(2)

    async def play_all():
        environment = load_environment("verifiers:tiny-env", options)
        for prompt in prompts:
            conversation = environment()
            await conversation.reset(prompt)
            yield await conversation.step(Message("assistant", str(2 * int(prompt.answer))))

    async def rewards():
        return [turn.reward async for turn in play_all()]

    Columns.rows = ()
    assert asyncio.run(rewards()) == [1.0, 1.0]
    for row, prompt in zip(Columns.rows, prompts, strict=True):
        number = int(prompt.text.removesuffix("?"))
        result = {key: row[key] for key in ("answer", "shape", "info", "example_id")}
        assert result == {
            "answer": number, "shape": {"of": [number, 1.5]}, "info": {"n": number},
            "example_id": number - 2,
        }  # fmt: skip


def test_what_is_held_out_comes_from_the_evaluation_data_set_where_there_is_one():
    options = {"options": {"kind": "evaluated"}, "heldout_size": 3, "seed": 0}
    heldout = load_source("verifiers:tiny-env", split="heldout", **options).next(3)
    train = load_source("verifiers:tiny-env", split="train", **options).next(3)
    assert {p.text for p in heldout} == {row["question"] for row in SUMS[:3]}
    assert {p.text for p in train} == {row["question"] for row in SUMS[3:]}


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("breaks", "breaks of the rubric raised ZeroDivisionError"),
        ("breaks in a group", "silent of the rubric raised TypeError"),
    ],
)
def test_a_function_of_the_rubric_that_raises_fails_its_rollout_and_all_is_cleaned_up(
    kind, message
):
    before = Tidy.ended
    with pytest.raises(EnvironmentFailed, match=message):
        play(kind, "4")
    assert Tidy.ended == before + 1


def test_a_rubric_that_blocks_holds_up_no_engine():
    async def scenario():
        conversation = load_environment("verifiers:tiny-env", {"kind": "blocks"})()
        await conversation.reset(lease(text="2+2=", answer="4").prompt)
        step = asyncio.create_task(conversation.step(Message("assistant", "4")))
        for _ in range(20):
            await asyncio.sleep(0.01)
        assert not step.done()
        ENDED.set()
        return await asyncio.wait_for(step, 10)

    ENDED.clear()
    assert asyncio.run(scenario()).reward == 1.0


def test_an_environment_that_ends_while_the_policy_speaks_names_its_own_limit():
    async def scenario():
        conversation = load_environment("verifiers:tiny-env", {"kind": "hasty"})()
        await conversation.reset(lease(text="2+2=", answer="4").prompt)
        await reached(conversation.task.done)
        await conversation.step(Message("assistant", "4"))

    with pytest.raises(ValueError, match=r"while the policy spoke; its own timeout_seconds is 0.5"):
        asyncio.run(scenario())


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("verifiers:no-such-env", {}, "no_such_env|no-such-env"),
        ("verifiers:tiny-env", {"kind": "wrong"}, "must be a SingleTurnEnv"),
        ("verifiers:tiny-env", {"sort": 1}, "sort"),
        ("verifiers:tiny-env", {"kind": "hot"}, "sampling_args = {'temperature': 0.1}, and roll"),
    ],
)
def test_what_cannot_be_played_is_refused_when_the_run_starts(name, options, message):
    with pytest.raises(InputError, match=message):
        load_environment(name, options)
