"""Rollouts of agents: their sessions, rewards, limits, interruptions and further attempts."""

import asyncio
from dataclasses import replace

import pytest
from fakes import EOS, POOL, lease

from actors.config import ActorsConfig
from actors.engines.protocol import Generation
from actors.errors import EngineDied, EnvironmentFailed, RolloutFailed, RolloutTimeout
from actors.gateway.open_session import OpenSession
from actors.gateway.session import Session
from actors.gateway.template import ChatTemplate
from actors.programs.agent import AgentGone, AgentResult
from actors.programs.runner import AgentRunner
from actors.rewards.rewards import load_rewards
from actors.rollout.chat_rendering import Renderer
from headway import clock
from headway.errors import HeadwayError
from queues.records import FinishReason, Purpose
from queues.turns import decode_turn
from tests.actors.characters import character_tokenizer

TOKENIZER = character_tokenizer()


def ids(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


class FakeGateway:
    """Opens sessions without a server."""

    address = "http://127.0.0.1:9"

    def __init__(self):
        self.opened, self.closed = {}, []

    def open(self, session, limits, on_turn):
        opened = OpenSession(
            session=session, limits=limits, on_turn=on_turn, address=self.address,
            forget=lambda: self.closed.append(opened),
        )  # fmt: skip
        self.opened[opened.key] = opened
        return opened


class Policy:
    """What an agent of a test asks: its session, without HTTP."""

    def __init__(self, opened, version=3):
        self.opened, self.version, self.messages, self.sampled = opened, version, [], []

    async def ask(self, text, reply, reason=FinishReason.STOP):
        """Ask for the answer `reply`, and return it; that of an earlier attempt comes first."""
        session = self.opened.session
        self.messages.append({"role": "user", "content": text})
        request = session.begin(self.messages)
        recorded = session.recorded(request)
        if recorded is None:
            self.sampled.append(reply)
            tokens = [*ids(reply), *([EOS] if reason is FinishReason.STOP else [])]
        else:
            reply = TOKENIZER.decode(recorded.token_ids, skip_special_tokens=True)
            tokens = recorded.token_ids
        count = len(tokens)
        generation = Generation(
            token_ids=[*tokens], logprobs=[-0.5] * count, versions=[self.version] * count,
            finish_reason=reason, cache_salt="3",
        )  # fmt: skip
        turn = session.complete(request, generation, reply)
        await self.opened.save(turn)
        self.messages.append({"role": "assistant", "content": reply})
        return reply


class FakeAgent:
    """An agent that is a coroutine of its `Policy` and task."""

    def __init__(self, gateway, acts):
        self.gateway, self.acts, self.tasks, self.policies, self.ended = gateway, acts, [], [], 0

    async def play(self, task):
        self.tasks.append(task)
        self.policies.append(Policy(self.gateway.opened[task.api_key]))
        try:
            return await self.acts(self.policies[-1]) or AgentResult()
        finally:
            self.ended += 1

    async def close(self):
        pass


class Work:
    """Keeps the notes of a work queue."""

    def __init__(self):
        self.notes = {}

    async def note(self, engine_id, group_id, attempt, index, name, payload, oldest_version):
        self.notes[index, name] = payload
        return payload


def runner(acts, *, rewards=("last_answer",), work=None, **settings):
    gateway = FakeGateway()
    settings = {"rollout_timeout_seconds": 5.0, "max_new_tokens": 50, **settings}
    renderer = Renderer(character_tokenizer())
    return AgentRunner(
        engine_id="engine-0",
        renderer=renderer,
        config=ActorsConfig(environment="program:x", reward=rewards, **settings),
        rewards=load_rewards(rewards, pool=POOL),
        heldout_rewards=load_rewards(rewards, pool=POOL),
        max_model_len=200,
        agent=FakeAgent(gateway, acts),
        gateway=gateway,
        new_session=lambda turns: Session(ChatTemplate(renderer), turns),
        work=work,
    )


def play(acts, of=None, **options):
    return asyncio.run(runner(acts, **options).run(of or lease(), 1))


async def two_turns(policy):
    await policy.ask("3+4=", "a")
    await policy.ask("b", "=7")


def test_a_rollout_has_the_turns_of_the_agent_and_the_rewards_of_its_last_message():
    rollout = play(two_turns)
    first, second = [*ids("a"), EOS], [*ids("=7"), EOS]
    assert rollout.token_ids == [*ids("3+4="), *first, *ids("b"), *second]
    assert rollout.loss_mask == [False] * 4 + [True] * 2 + [False] + [True] * 3
    assert rollout.versions == [-1] * 4 + [3] * 2 + [-1] + [3] * 3
    assert (rollout.prompt_length, rollout.turns, rollout.sample_index) == (4, 2, 1)
    assert (rollout.reward, rollout.reward_parts) == (1.0, {"last_answer": 1.0})
    assert rollout.finish_reason is FinishReason.STOP
    assert (rollout.environment, rollout.segments, rollout.left_out) == ("program:x", [], {})


@pytest.mark.parametrize(
    ("result", "parts"),
    [
        (AgentResult(completion="=7"), {"last_answer": 1.0}),
        (AgentResult(completion="=8"), {"last_answer": 0.0}),
        (
            AgentResult(reward={"environment/form": 0.5}),
            {"environment/form": 0.5, "last_answer": 0.0},
        ),
    ],
)
def test_a_result_is_a_reward_or_what_rewards_read(result, parts):
    async def acts(policy):
        await policy.ask("3+4=", "a")
        return result

    rollout = play(acts)
    assert (rollout.reward, rollout.reward_parts) == (sum(parts.values()), parts)


def test_a_history_that_is_rewritten_is_a_segment_with_the_reward_of_the_rollout():
    async def acts(policy):
        await policy.ask("3+4=", "a")
        policy.messages = [{"role": "user", "content": "3+4"}]
        await policy.ask("b", "=7")

    rollout = play(acts)
    assert [tuple(segment) for segment in rollout.segments] == [(6, 0, 3)]
    assert rollout.token_ids[6:] == [*ids("b"), *ids("=7"), EOS]
    assert (rollout.turns, rollout.reward) == (2, 1.0)


def test_the_session_has_the_limits_of_the_recipe_and_the_temperature_of_the_lease():
    played = runner(two_turns, max_turns=3)
    asyncio.run(played.run(lease(), 0))
    evaluated = replace(lease(temperature=0.0), purpose=Purpose.EVALUATE)
    asyncio.run(played.run(evaluated, 0))
    first, second = (opened.limits for opened in played.gateway.opened.values())
    assert (first.turns, first.tokens, first.seconds, first.temperature) == (3, 50, 5.0, None)
    assert second.temperature == 0.0
    assert len(played.gateway.closed) == 2
    [task, _] = played.agent.tasks
    assert (task.prompt, task.answer, task.base_url) == ("3+4=", "7", "http://127.0.0.1:9/v1")
    assert task.messages == [{"role": "user", "content": "3+4="}]
    assert task.api_key not in repr(task)


def test_turns_are_noted_and_given_again_to_the_next_attempt():
    work = Work()

    async def dies(policy):
        await policy.ask("3+4=", "a")
        policy.opened.stop(EngineDied("gone"))
        await asyncio.Event().wait()

    played = runner(dies, work=work)
    with pytest.raises(EngineDied, match="gone"):
        asyncio.run(played.run(lease(), 1))
    assert played.agent.ended == 1
    assert len(played.gateway.closed) == 1
    [(name, note)] = work.notes.items()
    assert (name, decode_turn(note).token_ids) == ((1, "turn/0"), [*ids("a"), EOS])

    again = runner(two_turns, work=work)
    rollout = asyncio.run(again.run(replace(lease(attempt=2), notes=dict(work.notes)), 1))
    assert again.agent.policies[0].sampled == ["=7"]
    assert rollout.token_ids == [*ids("3+4="), *ids("a"), EOS, *ids("b"), *ids("=7"), EOS]
    assert [*work.notes] == [(1, "turn/0"), (1, "turn/1")]


def test_an_agent_that_goes_another_way_leaves_out_the_answers_of_the_earlier_attempt():
    work = Work()
    asyncio.run(runner(two_turns, work=work).run(lease(), 1))

    async def otherwise(policy):
        await policy.ask("3+5=", "=7")

    rollout = play(otherwise, replace(lease(attempt=2), notes=work.notes))
    assert rollout.left_out == {"not repeated": 5}
    assert rollout.turns == 1


def test_evaluations_note_nothing():
    work = Work()
    evaluated = replace(lease(temperature=0.0), purpose=Purpose.EVALUATE)
    asyncio.run(runner(two_turns, work=work).run(evaluated, 0))
    assert work.notes == {}


@pytest.mark.parametrize("waits_for_policy", [True, False])
def test_an_interrupted_engine_ends_the_agent_and_fails_the_attempt(waits_for_policy):
    async def interrupted(policy):
        await policy.ask("3+4=", "a")
        if waits_for_policy:
            policy.opened.stop()
        else:
            played.interrupt()
        await asyncio.Event().wait()

    played = runner(interrupted)
    with pytest.raises(RolloutFailed, match="the engine was interrupted while agent 'program:x'"):
        asyncio.run(played.run(lease(), 1))
    assert played.agent.ended == 1


def test_a_failed_agent_fails_its_rollout_unless_a_limit_cut_it_off():
    async def fails(policy):
        await policy.ask("3+4=", "=7")
        raise EnvironmentFailed("ended by exit code 1")

    async def is_cut_off(policy):
        await policy.ask("3+4=", "=7", FinishReason.LENGTH)
        policy.opened.beyond(429, "the session has had its 1 turns")
        raise EnvironmentFailed("ended by exit code 1")

    with pytest.raises(EnvironmentFailed, match="exit code 1"):
        play(fails)
    rollout = play(is_cut_off)
    assert rollout.finish_reason is FinishReason.LENGTH
    assert rollout.reward_parts == {"environment": 0.0, "last_answer": 0.0}


def test_an_agent_without_an_answer_of_the_policy_or_without_a_reward_fails():
    async def asks_nothing(policy):
        return AgentResult(reward={"environment": 1.0})

    with pytest.raises(EnvironmentFailed, match="ended on prompt 'sums/0/1' without an answer"):
        play(asks_nothing)
    with pytest.raises(EnvironmentFailed, match=r"gave no reward on prompt .* names none"):
        play(two_turns, rewards=())


def test_an_agent_that_was_lost_is_played_again_from_its_turns():
    lives = []

    async def lost_once(policy):
        lives.append(policy)
        await policy.ask("3+4=", "a")
        if len(lives) == 1:
            raise AgentGone("its machine is gone")
        await policy.ask("b", "=7")

    rollout = play(lost_once, work=Work())
    assert [life.sampled for life in lives] == [["a"], ["=7"]]
    assert (rollout.turns, rollout.reward) == (2, 1.0)

    async def lost(policy):
        raise AgentGone("its machine is gone")

    with pytest.raises(AgentGone):
        play(lost)


@pytest.mark.parametrize("score", ["fail", -0.5])
def test_an_agent_that_takes_too_long_is_ended(score):
    async def slow(policy):
        await policy.ask("3+4=", "a")
        await asyncio.Event().wait()

    played = runner(slow, rollout_timeout_seconds=0.2, on_timeout=score)
    if score == "fail":
        with pytest.raises(RolloutTimeout):
            asyncio.run(played.run(lease(), 1))
    else:
        rollout = asyncio.run(played.run(lease(), 1))
        assert (rollout.reward, rollout.finish_reason) == (score, FinishReason.TIMEOUT)
        assert rollout.reward_parts == {"timeout": score}
    assert (played.agent.ended, len(played.gateway.closed)) == (1, 1)


def test_a_turn_that_cannot_be_noted_fails_the_rollout_with_the_reason():
    class Broken(Work):
        async def note(self, *arguments):
            raise HeadwayError("the broker is gone")

    async def goes_on(policy):
        with pytest.raises(HeadwayError):
            await policy.ask("3+4=", "a")
        await asyncio.Event().wait()

    with pytest.raises(HeadwayError, match="the broker is gone"):
        play(goes_on, work=Broken())


def test_sessions_are_counted_with_their_time_and_what_is_lost(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(clock, "now", lambda: now[0])

    async def rewrites(policy):
        for text in ("3", "4", "5"):
            policy.messages = []
            with policy.opened.waiting():
                now[0] += 3.0
            await policy.ask(text, "a")
            now[0] += 1.0
        policy.opened.session.leave_out("undelivered", 4)

    played = runner(rewrites)
    asyncio.run(played.run(lease(), 1))
    counts = played.statistics.statistics()
    assert (counts["turns"], counts["segments"], counts["sessions"]) == (3, 2, 0)
    assert counts["sampled"] == 3 * len([*ids("a"), EOS])
    assert {reason: n for reason, n in counts["left_out"].items() if n} == {"undelivered": 4}
    assert counts["seconds"] == {"model": 9.0, "agent": 3.0, "environment": 0.0}


def test_a_gateway_that_cannot_listen_is_a_typed_error():
    class Deaf(FakeGateway):
        async def start(self):
            raise OSError("address already in use")

    played = runner(two_turns)
    played.gateway = Deaf()
    with pytest.raises(HeadwayError, match="the gateway for agents was not started: address"):
        asyncio.run(played.start())
