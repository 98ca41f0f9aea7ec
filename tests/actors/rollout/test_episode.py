"""One rollout: what is recorded of it, and how it fails."""

import asyncio
import http.client
import socket
import threading
import time
from dataclasses import replace

import pytest
import user_module
from fakes import EOS, POOL, SAMPLING, Recited, episodes, ids, lease, play

from actors import outages
from actors.engines.protocol import SamplingParameters
from actors.environments.load_environment import load_environment
from actors.environments.protocol import Message
from actors.errors import (
    EngineDied,
    EngineStale,
    EnvironmentFailed,
    PromptRefused,
    RewardFailed,
    RolloutFailed,
    RolloutTimeout,
    ServiceLost,
)
from actors.rewards.find_reward import StepParts, StepScore
from actors.rewards.rewards import load_rewards
from headway.clean_text import register
from headway.errors import HeadwayError, InputError
from queues.records import FinishReason, Purpose, RolloutGroup
from queues.schema import decode, encode


def test_a_rollout_keeps_what_the_engine_sampled_after_the_prompt():
    rollout = play(Recited("b=7"))
    sampled = [*ids("b=7"), EOS]
    assert rollout.token_ids == ids("3+4=") + sampled
    assert rollout.prompt_length == 4
    assert rollout.loss_mask == [False] * 4 + [True] * 4
    assert rollout.behavior_logprobs == [0.0] * 4 + [-0.5] * 4
    assert rollout.versions == [-1] * 4 + [3] * 4
    assert (rollout.reward, rollout.reward_parts) == (1.0, {"last_answer": 1.0})
    assert (rollout.sample_index, rollout.turns) == (1, 1)
    assert rollout.finish_reason is FinishReason.STOP
    assert (rollout.environment, rollout.engine_id) == ("single_turn", "engine-0")
    assert rollout.turn_rewards == ()
    assert rollout.created_at <= rollout.finished_at


def test_the_engine_is_asked_as_the_configuration_and_the_lease_say():
    engine = Recited("=7", "=7")
    play(engine, of=lease("g9", attempt=2))
    play(engine, of=lease(temperature=0.0))
    (first_id, prompt, first, salt), (second_id, _, second, _) = engine.requests
    assert (first_id, prompt, salt) == ("g9/2/1/1", ids("3+4="), None)
    assert first == SAMPLING
    assert second.temperature == 0.0
    assert first_id != second_id


def test_what_was_cut_off_says_so_and_earns_nothing():
    rollout = play(Recited("b3+4=7"), sampling=SamplingParameters(temperature=1, max_new_tokens=6))
    assert rollout.finish_reason is FinishReason.LENGTH
    assert rollout.token_ids == ids("3+4=b3+4=7")
    assert rollout.reward == 0.0


def test_a_prompt_and_its_answer_fit_into_the_context():
    engine = Recited("aaaaaaaa")
    rollout = play(engine, max_model_len=7)
    assert engine.requests[0][2].max_new_tokens == 3
    assert len(rollout.token_ids) == 7


def test_what_the_environment_says_is_in_the_context_and_out_of_the_loss():
    engine = Recited("a", "b=2")
    rollout = play(engine, of=lease(answer="2"), environment="user_module:Countdown")
    first, between, second = [*ids("a"), EOS], ids("left 1"), [*ids("b=2"), EOS]
    assert rollout.token_ids == ids("3+4=") + first + between + second
    assert rollout.loss_mask == [False] * 4 + [True] * 2 + [False] * 6 + [True] * 4
    assert rollout.versions == [-1] * 4 + [3] * 2 + [-1] * 6 + [3] * 4
    assert [lp for lp in rollout.behavior_logprobs if lp] == [-0.5] * 6
    assert engine.requests[1][1] == ids("3+4=") + first + between
    assert engine.requests[1][2].max_new_tokens == SAMPLING.max_new_tokens - 2
    assert rollout.turns == 2
    assert rollout.reward == 2.0
    assert rollout.reward_parts == {"environment": 1.0, "last_answer": 1.0}


@pytest.mark.parametrize(
    ("environment", "turn_rewards", "earned"),
    [
        ("Seesaw", ((5, 1.0), (15, -1.0)), 0.0),
        ("Flat", ((5, 0.0), (15, 0.0)), 0.0),
        ("Unpaid", ((5, 0.5),), 0.5),
    ],
)
def test_what_turns_earned_is_kept_and_a_turn_without_a_reward_is_not_among_them(
    environment, turn_rewards, earned
):
    rollout = play(
        Recited("a", "b=2"), of=lease(answer="2"), environment=f"user_module:{environment}"
    )
    assert rollout.turn_rewards == turn_rewards
    assert rollout.reward_parts == {"environment": earned, "last_answer": 1.0}
    assert rollout.reward == 1.0 + earned


def test_every_turn_is_salted_with_the_version_that_the_first_one_began_at():
    engine = Recited("a", "b", "c=3", version=6)
    play(engine, of=lease(answer="3", start=5), environment="user_module:Countdown")
    assert [salt for _, _, _, salt in engine.requests] == [None, "6", "6"]


ONE_TURN = [*ids("3+4=a"), EOS]
TWO_TURNS = [*ONE_TURN, *ids("left 8b"), EOS]


@pytest.mark.parametrize(
    ("settings", "tokens", "turn_rewards", "finish_reason"),
    [
        ({"sampling": SamplingParameters(temperature=1, max_new_tokens=4)},
         TWO_TURNS, ((5, 0.5), (13, 0.5)), FinishReason.LENGTH),
        ({"max_turns": 2}, TWO_TURNS, ((5, 0.5), (13, 0.5)), FinishReason.LENGTH),
        # Prompt, first message and what is said after it are 12 tokens.
        ({"max_model_len": 12}, ONE_TURN, ((5, 0.5),), FinishReason.LENGTH),
        ({"max_model_len": 13}, TWO_TURNS[:-1], ((5, 0.5), (12, 0.5)),
         FinishReason.LENGTH),
        ({"of": lease(answer="1")}, ONE_TURN, ((5, 0.5),), FinishReason.STOP),
        ({"environment": "user_module:Verbose"}, ONE_TURN, ((5, 0.5),), FinishReason.LENGTH),
    ],
    ids=["no token left", "most turns", "no space", "space for one", "done", "too long a reply"],
)  # fmt: skip
def test_a_conversation_ends_when_it_is_done_or_has_no_turn_or_token_left(
    settings, tokens, turn_rewards, finish_reason
):
    """The answer of the environment to the turn that ends it is not in it."""
    engine = Recited("a", "b", "c")
    settings = {"of": lease(answer="9"), "environment": "user_module:Countdown", **settings}
    rollout = play(engine, **settings)
    assert rollout.token_ids == tokens
    assert rollout.loss_mask[-1]
    assert rollout.turns == len(engine.requests) == len(turn_rewards)
    assert (rollout.turn_rewards, rollout.finish_reason) == (turn_rewards, finish_reason)
    assert rollout.reward_parts == {"environment": 0.5 * len(turn_rewards), "last_answer": 0.0}


def test_an_environment_that_says_nothing_does_not_make_the_policy_repeat_itself():
    rollout = play(Recited("a", "b"), of=lease(answer="2"), environment="user_module:Listener")
    assert rollout.token_ids == [*ids("3+4=a"), EOS, *ids("b"), EOS]
    assert rollout.reward_parts["environment"] == 2.0


@pytest.mark.parametrize(
    ("environment", "turns", "count"), [("Meeting", 2, 16), ("BuiltTogether", 1, 4)]
)
async def test_environments_that_block_do_not_hold_up_others(environment, turns, count):
    """They wait for each other, asked or built, and end only where all are called at once."""
    user_module.MEETING = threading.Barrier(count)
    runner = episodes(
        Recited(*["a"] * turns * count), SAMPLING, environment=f"user_module:{environment}"
    )
    leases = [lease(f"g{i}", answer="1") for i in range(count)]
    rollouts = await asyncio.gather(*(runner.run(of, 0) for of in leases))
    assert [rollout.turns for rollout in rollouts] == [turns] * count


async def test_an_environment_that_is_never_built_fails_its_rollout_alone():
    settings = {"environment": "user_module:Unbuilt", "environment_timeout_seconds": 0.05}
    stuck = episodes(Recited(), SAMPLING, **settings)
    other = episodes(Recited("b=7"), SAMPLING)

    failure, rollout = await asyncio.gather(
        stuck.run(lease(), 0), other.run(lease("g2"), 0), return_exceptions=True
    )
    assert isinstance(failure, EnvironmentFailed)
    assert str(failure) == (
        "environment 'user_module:Unbuilt' took longer than 0.05 s on prompt 'sums/0/1'"
    )
    assert rollout.reward == 1.0


@pytest.mark.parametrize(
    ("line", "settings", "kind", "reason"),
    [
        (HeadwayError("no luck"), {}, RolloutFailed, "engine"),
        (("", FinishReason.ERROR), {}, RolloutFailed, "engine"),
        ("=7", {"max_model_len": 4}, PromptRefused, "prompt"),
        ("=7", {"of": lease(text="")}, PromptRefused, "prompt"),
        ("=7", {"environment": "user_module:Unbuildable"}, EnvironmentFailed, "environment"),
        ("=7", {"environment": "user_module:Broken"}, EnvironmentFailed, "environment"),
        ("=7", {"environment": "user_module:Mute"}, EnvironmentFailed, "environment"),
        ("=7", {"environment": "user_module:Wordy"}, EnvironmentFailed, "environment"),
        ("=7", {"environment": "user_module:Priceless"}, EnvironmentFailed, "environment"),
        ("=7", {"environment": "user_module:Boundless"}, EnvironmentFailed, "environment"),
        ("=7", {"environment": "user_module:Wordless"}, EnvironmentFailed, "environment"),
        ("=7", {"environment": "user_module:Blocked", "environment_timeout_seconds": 0.05},
         EnvironmentFailed, "environment"),
        ("=7", {"rewards": ["user_module:raises"]}, RewardFailed, "reward"),
        ("=7", {"rewards": ["user_module:hangs_politely"], "rollout_timeout_seconds": 0.05},
         RolloutTimeout, "timeout"),
    ],
)  # fmt: skip
def test_a_rollout_without_a_result_says_why(line, settings, kind, reason):
    with pytest.raises(RolloutFailed) as caught:
        play(Recited(line), **settings)
    assert type(caught.value) is kind
    assert caught.value.reason == reason
    subject = "request g1/1/1/1" if kind is RolloutFailed else "prompt 'sums/0/1'"
    assert subject in str(caught.value)


class Dialled(user_module.Countdown):
    """Asks a service that is away at first."""

    calls = 0

    def step(self, message):
        type(self).calls += 1
        if type(self).calls < 3:
            raise ConnectionError("no sandbox host")
        return super().step(message)


class Hanging(user_module.Countdown):
    """Waits for the answer of a service in a thread."""

    def step(self, message):
        one, other = socket.socketpair()
        with one, other:
            other.settimeout(1)
            return http.client.HTTPResponse(other).begin()


class HangingPolitely(user_module.Countdown):
    """Waits for the answer of a service in a coroutine."""

    async def step(self, message):
        one, other = socket.socketpair()
        with one, other:
            reader, _ = await asyncio.open_connection(sock=other)
            return await reader.read()


class Slow(user_module.Countdown):
    """Computes for long on what the policy said."""

    def step(self, message):
        time.sleep(0.2)
        return super().step(message)


LATE = {"environment_timeout_seconds": 0.1}
WHOLE = {"rollout_timeout_seconds": 0.5}


@pytest.mark.parametrize("limit", [LATE, WHOLE])
@pytest.mark.parametrize("score", [-1.0, 0.0])
def test_an_environment_that_the_policy_makes_slow_scores_by_the_rule(limit, score):
    lines, of = ["a"] * 9, lease(answer="9")
    rollout = play(Recited(*lines), of=of, new_environment=Slow, on_timeout=score, **limit)
    assert (rollout.reward, rollout.reward_parts) == (score, {"timeout": score})
    assert rollout.finish_reason is FinishReason.TIMEOUT
    assert sum(rollout.loss_mask) >= 2
    group = RolloutGroup(group_id="g1", prompt_id="p", attempt=1, rollouts=[rollout])
    assert decode(encode(group)).rollouts[0].finish_reason is FinishReason.TIMEOUT


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"new_environment": Slow, **LATE}, EnvironmentFailed),
        ({"new_environment": Slow, **WHOLE}, RolloutTimeout),
        ({"environment": "user_module:Unbuilt", "on_timeout": -1.0, **LATE}, EnvironmentFailed),
        ({"rewards": ["user_module:hangs_politely"], "on_timeout": -1.0, **WHOLE}, RolloutTimeout),
        ({"new_environment": Hanging, "on_timeout": -1.0, **LATE}, ServiceLost),
        ({"new_environment": HangingPolitely, "on_timeout": -1.0, **LATE}, ServiceLost),
        ({"new_environment": HangingPolitely, "on_timeout": -1.0, **WHOLE}, RolloutTimeout),
    ],
)
def test_without_a_rule_and_by_no_fault_of_the_policy_a_timeout_is_a_failure(settings, error):
    settings = {"environment": "user_module:Countdown", "outage_seconds": 0.0, **settings}
    with pytest.raises(error):
        play(Recited(*["a"] * 9), of=lease(answer="9"), **settings)


def test_an_answer_whose_service_is_away_is_asked_for_again(monkeypatch):
    monkeypatch.setattr(outages, "FIRST_PAUSE", 0.001)
    engine = Recited("a", "=7")
    rollout = play(
        engine, of=lease(answer="2"), new_environment=Dialled, rewards=["user_module:length"]
    )
    assert (Dialled.calls, rollout.turns, len(engine.requests)) == (4, 2, 2)
    assert rollout.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("error", [EngineDied("gone"), EngineStale("not yet")])
def test_an_engine_that_is_gone_is_not_the_fault_of_one_rollout(error):
    with pytest.raises(type(error)):
        play(Recited(error))


def test_an_environment_without_its_methods_is_an_input_error():
    with pytest.raises(InputError, match="missing: reset, step"):
        load_environment("user_module:length")


def test_an_environment_is_built_with_its_options():
    built = load_environment("user_module:Painted", {"colour": "red"})
    assert (built().colour, built().colour) == ("red", "red")
    with pytest.raises(InputError, match="has no option color"):
        load_environment("user_module:Painted", {"color": "red"})


def test_an_interrupted_rollout_is_gone_on_with_and_judged_by_all_that_was_said():
    engine = Recited(("b3", FinishReason.ABORTED), "3+4=7", version=3)
    runner = episodes(engine, SAMPLING)
    begun = asyncio.run(runner.run(lease(), 1))
    assert begun.token_ids == ids("3+4=b3")
    assert (begun.finish_reason, begun.reward, begun.reward_parts) == (
        FinishReason.ABORTED, 0.0, {},
    )  # fmt: skip
    engine.version = 4
    group = RolloutGroup(group_id="g1", prompt_id="p", attempt=1, rollouts=[begun])
    [saved] = decode(encode(group)).rollouts
    done = asyncio.run(runner.run(lease(attempt=2), 1, saved))
    name, context, sampling, salt = engine.requests[1]
    assert (name, context, salt) == ("g1/2/1/1", ids("3+4=b3"), None)
    assert sampling.max_new_tokens == SAMPLING.max_new_tokens - 2
    assert done.token_ids == [*ids("3+4=b33+4=7"), EOS]
    assert done.versions == [-1] * 4 + [3] * 2 + [4] * 6
    assert done.loss_mask == [False] * 4 + [True] * 8
    assert done.prompt_length == 4
    assert (done.reward, done.finish_reason, done.turns) == (1.0, FinishReason.STOP, 1)
    assert done.created_at == begun.created_at


def says(text):
    """Return an environment that answers with a text."""
    message = Message("user", text)
    return user_module.answering(lambda turn: replace(turn, messages=[message]))


def fails(text):
    """Return an environment that raises an error with a text."""

    def change(turn):
        raise ValueError(text)

    return user_module.answering(change)


@pytest.mark.parametrize(
    "text", ["a\ud800b", "\udfff", "\udc00\ud800", b"caf\xe9".decode(errors="surrogateescape")]
)
@pytest.mark.parametrize("origin", ["prompt", "environment", "tool", "error"])
def test_a_text_that_cannot_be_encoded_fails_its_rollout_and_names_the_prompt(
    monkeypatch, origin, text
):
    tools = {"tools": ["user_module:speak"], "style": "plain", "markers": [":", ";"]}
    settings = {
        "prompt": {"of": lease(text=text)},
        "environment": {"new_environment": says(text), "environment": "m:Says"},
        "tool": {"environment": "tools", "options": tools},
        "error": {"new_environment": fails(text), "environment": "m:Fails"},
    }
    monkeypatch.setattr(user_module, "speak", lambda word: text, raising=False)
    with pytest.raises(RolloutFailed, match="prompt 'sums/0/1'") as caught:
        play(Recited(":a;", "b"), **settings[origin])
    assert caught.value.reason == ("environment" if origin == "error" else "prompt")
    assert origin == "error" or "lone surrogate" in str(caught.value)


def test_secrets_in_what_the_environment_says_do_not_reach_the_policy(monkeypatch):
    monkeypatch.setenv("A_TOKEN", "abc123abc")
    register([])
    with pytest.raises(PromptRefused, match="'\\['"):  # the tokenizer of these tests has none
        play(Recited("a", "b"), new_environment=says("abc123abc"), environment="m:Says")


def test_far_more_text_than_fits_into_a_rollout_is_not_tokenised():
    text = "7" * 40_001 + "\ud800"
    rollout = play(Recited("a"), new_environment=says(text), environment="m:Says")
    assert (rollout.turns, rollout.finish_reason) == (1, FinishReason.LENGTH)


class StepJudge:
    """Gives steps, which end with a comma, the scores 0.5, 0.25 and so on, and the text 2."""

    async def score(self, prompt, completion):
        ends = [i for i, c in enumerate(completion) if c == ","] + [len(completion)]
        scores = [
            StepScore("reward_model/right", end, 0.5 ** (n + 1)) for n, end in enumerate(ends)
        ]
        parts = StepParts({"reward_model/right": scores[-1].score, "reward_model/kind": 2.0})
        parts.steps = (*scores, StepScore("reward_model/kind", len(completion), 2.0))
        return parts


@pytest.mark.parametrize(
    ("each_step", "purpose", "turns", "reward"),
    [
        (True, Purpose.TRAIN, [(2, 1.5), (6, 0.75), (10, 0.375), (10, 6.0)], 9.625),
        (False, Purpose.TRAIN, [], 7.375),
        (True, Purpose.EVALUATE, [], 7.375),
    ],
)
def test_each_step_of_a_training_rollout_earns_its_score_at_its_last_token(
    each_step, purpose, turns, reward
):
    weights = {"reward_model": 3.0, "reward_model/right": 1.0}
    rewards = load_rewards(
        ["last_answer", "reward_model"], weights=weights, reward_model_client=StepJudge(), pool=POOL
    )
    runner = episodes(Recited("3=3,4=4,=7"), SAMPLING, reward_model={"each_step": each_step})
    runner.rewards = runner.heldout_rewards = rewards
    of = replace(lease(), purpose=purpose)
    rollout = asyncio.run(runner.run(of, 1))
    ends = [(turn.end - rollout.prompt_length, turn.reward) for turn in rollout.turn_rewards]
    assert ends == turns
    assert rollout.reward == reward
    assert rollout.reward_parts["reward_model/right"] == 0.125
