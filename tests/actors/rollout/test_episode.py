"""One rollout: what is recorded of it, and how it fails."""

import asyncio
import threading
from dataclasses import replace

import pytest
import user_module
from fakes import EOS, Recited, episodes, lease

from actors.engines.protocol import SamplingParameters
from actors.environments.load_environment import load_environment
from actors.environments.protocol import Message, Turn
from actors.errors import (
    EngineDied,
    EngineStale,
    EnvironmentFailed,
    PromptRefused,
    RewardFailed,
    RolloutFailed,
    RolloutTimeout,
)
from headway.clean_text import register
from headway.errors import HeadwayError, InputError
from queues.records import FinishReason, RolloutGroup
from queues.schema import decode, encode

SAMPLING = SamplingParameters(temperature=0.7, max_new_tokens=40, top_p=0.9, top_k=5)


def play(engine, *, of=None, sampling=SAMPLING, **settings):
    return asyncio.run(episodes(engine, sampling, **settings).run(of or lease(), 1))


def ids(text):
    return Recited().tokenizer.encode(text, add_special_tokens=False)


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


def test_what_turns_earned_is_kept_though_it_adds_up_to_nothing():
    rollout = play(Recited("a", "b=2"), of=lease(answer="2"), environment="user_module:Seesaw")
    assert rollout.turn_rewards == ((5, 1.0), (15, -1.0))
    assert rollout.reward_parts == {"environment": 0.0, "last_answer": 1.0}
    assert rollout.reward == 1.0


def test_an_environment_that_gives_nothing_gives_a_zero():
    rollout = play(Recited("a", "b=2"), of=lease(answer="2"), environment="user_module:Flat")
    assert rollout.turn_rewards == ((5, 0.0), (15, 0.0))
    assert rollout.reward_parts == {"environment": 0.0, "last_answer": 1.0}
    single = play(Recited("b=7"))
    assert "environment" not in single.reward_parts
    assert single.turn_rewards == ()


def test_a_turn_without_a_reward_earns_nothing_and_is_not_among_those_that_have_one():
    rollout = play(Recited("a", "b=2"), of=lease(answer="2"), environment="user_module:Unpaid")
    assert rollout.turn_rewards == ((5, 0.5),)
    assert rollout.reward_parts == {"environment": 0.5, "last_answer": 1.0}


def test_every_turn_is_salted_with_the_version_that_the_first_one_began_at():
    engine = Recited("a", "b", "c=3", version=6)
    play(engine, of=lease(answer="3", start=5), environment="user_module:Countdown")
    assert [salt for _, _, _, salt in engine.requests] == [None, "6", "6"]


def test_a_conversation_ends_when_no_token_may_be_sampled_any_more():
    sampling = SamplingParameters(temperature=1, max_new_tokens=4)
    engine = Recited("a", "b", "c")
    rollout = play(
        engine, of=lease(answer="9"), sampling=sampling, environment="user_module:Countdown"
    )
    assert rollout.turns == 2
    assert rollout.finish_reason is FinishReason.LENGTH
    assert rollout.token_ids == [*ids("3+4=a"), EOS, *ids("left 8b"), EOS]
    assert rollout.turn_rewards == ((5, 0.5), (13, 0.5))


def test_a_conversation_is_cut_off_after_its_most_turns():
    engine = Recited("a", "b", "c")
    rollout = play(engine, of=lease(answer="9"), environment="user_module:Countdown", max_turns=2)
    assert (rollout.turns, len(engine.requests)) == (2, 2)
    assert rollout.finish_reason is FinishReason.LENGTH
    assert rollout.reward_parts["environment"] == 1.0
    assert rollout.token_ids == [*ids("3+4=a"), EOS, *ids("left 8b"), EOS]
    assert rollout.loss_mask == [False] * 4 + [True] * 2 + [False] * 6 + [True] * 2
    assert rollout.turn_rewards == ((5, 0.5), (13, 0.5))


def test_what_is_said_in_the_turn_that_ends_a_conversation_is_not_in_it():
    rollout = play(Recited("a"), of=lease(answer="1"), environment="user_module:Countdown")
    assert rollout.token_ids == [*ids("3+4=a"), EOS]
    assert rollout.finish_reason is FinishReason.STOP
    assert rollout.turn_rewards == ((5, 0.5),)


@pytest.mark.parametrize(("max_model_len", "turns"), [(12, 1), (13, 2)])
def test_a_conversation_goes_on_where_one_token_can_be_sampled(max_model_len, turns):
    """Prompt, first message and what is said after it are 12 tokens."""
    engine, settings = Recited("a", "b"), {"environment": "user_module:Countdown"}
    rollout = play(engine, of=lease(answer="9"), max_model_len=max_model_len, **settings)
    assert rollout.turns == turns
    assert rollout.token_ids == [*ids("3+4=a"), EOS, *(ids("left 8b") if turns == 2 else [])]
    assert rollout.loss_mask[-1]
    assert rollout.finish_reason is FinishReason.LENGTH
    assert rollout.reward_parts["environment"] == 0.5 * turns


def test_what_is_longer_than_the_context_is_never_in_a_rollout():
    rollout = play(Recited("b=7"), of=lease(answer="7"), environment="user_module:Verbose")
    assert rollout.token_ids == [*ids("3+4=b=7"), EOS]
    assert rollout.loss_mask == [False] * 4 + [True] * 4
    assert rollout.turn_rewards == ((7, 0.5),)
    assert (rollout.turns, rollout.finish_reason) == (1, FinishReason.LENGTH)
    assert rollout.reward_parts == {"environment": 0.5, "last_answer": 0.0}


def test_an_environment_that_says_nothing_does_not_make_the_policy_repeat_itself():
    rollout = play(Recited("a", "b"), of=lease(answer="2"), environment="user_module:Listener")
    assert rollout.token_ids == [*ids("3+4=a"), EOS, *ids("b"), EOS]
    assert rollout.reward_parts["environment"] == 2.0


def test_environments_that_block_or_wait_do_not_hold_up_others():
    """Sixteen that wait for each other end only where all of them are asked at once."""
    user_module.MEETING = threading.Barrier(16)
    engine = Recited(*["a"] * 32)
    runner = episodes(engine, SAMPLING, environment="user_module:Meeting")

    async def play_all():
        return await asyncio.gather(*(runner.run(lease(f"g{i}"), 0) for i in range(16)))

    rollouts = asyncio.run(play_all())
    assert [rollout.turns for rollout in rollouts] == [2] * 16


def test_environments_that_block_while_they_are_built_do_not_hold_up_others():
    """Four that wait for each other are built only where all of them are at once."""
    user_module.MEETING = threading.Barrier(4)
    runner = episodes(Recited(*["a"] * 4), SAMPLING, environment="user_module:BuiltTogether")

    async def play_all():
        return await asyncio.gather(*(runner.run(lease(f"g{i}", answer="1"), 0) for i in range(4)))

    assert [rollout.turns for rollout in asyncio.run(play_all())] == [1] * 4


def test_an_environment_that_is_never_built_fails_its_rollout_alone():
    settings = {"environment": "user_module:Unbuilt", "environment_timeout_seconds": 0.05}
    stuck = episodes(Recited(), SAMPLING, **settings)
    other = episodes(Recited("b=7"), SAMPLING)

    async def play_both():
        return await asyncio.gather(
            stuck.run(lease(), 0), other.run(lease("g2"), 0), return_exceptions=True
        )

    failure, rollout = asyncio.run(play_both())
    assert isinstance(failure, EnvironmentFailed)
    assert str(failure) == (
        "environment 'user_module:Unbuilt' took longer than 0.05 s on prompt 'sums/0/1'"
    )
    assert rollout.reward == 1.0


def test_rollouts_of_every_kind_pass_the_schema():
    rollouts = [
        play(Recited("=7")),
        play(Recited("a", "b=2"), of=lease(answer="2"), environment="user_module:Countdown"),
    ]
    for rollout in rollouts:
        group = RolloutGroup(group_id="g", prompt_id="p", attempt=1, rollouts=[rollout])
        assert decode(encode(group)).rollouts[0].token_ids == rollout.token_ids


@pytest.mark.parametrize(
    ("line", "settings", "kind", "reason"),
    [
        (HeadwayError("no luck"), {}, RolloutFailed, "engine"),
        (FinishReason.ERROR, {}, RolloutFailed, "engine"),
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
    place = "request g1/1/1/1" if kind is RolloutFailed else "prompt 'sums/0/1'"
    assert place in str(caught.value)


@pytest.mark.parametrize("error", [EngineDied("gone"), EngineStale("not yet")])
def test_an_engine_that_is_gone_is_not_the_fault_of_one_rollout(error):
    with pytest.raises(type(error)):
        play(Recited(error))


@pytest.mark.parametrize(
    ("name", "message"),
    [("user_module:length", "missing: reset, step"), ("tool", "single_turn, tools")],
)
def test_an_environment_without_its_methods_is_an_input_error(name, message):
    with pytest.raises(InputError, match=message):
        load_environment(name)


@pytest.mark.parametrize("name", ["single_turn", "user_module:Countdown"])
def test_options_that_an_environment_does_not_have_are_an_input_error(name):
    with pytest.raises(InputError, match=r"has no option colour"):
        load_environment(name, {"colour": "red"})


def test_an_environment_is_built_with_its_options():
    built = load_environment("user_module:Painted", {"colour": "red"})
    assert (built().colour, built().colour) == ("red", "red")


class Cut(Recited):
    """An engine that is interrupted in the middle of its first line."""

    async def generate(self, *args, **options):
        whole = await super().generate(*args, **options)
        if self.lines:
            count = len(whole.token_ids) // 2
            return replace(
                whole,
                token_ids=whole.token_ids[:count],
                logprobs=whole.logprobs[:count],
                versions=whole.versions[:count],
                finish_reason=FinishReason.ABORTED,
            )
        return whole


def test_an_interrupted_rollout_is_gone_on_with_and_judged_by_all_that_was_said():
    engine = Cut("b3+4", "3+4=7", version=3)
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


def test_a_rollout_that_is_interrupted_in_a_later_turn_fails():
    engine = Recited("a", FinishReason.ABORTED)
    with pytest.raises(RolloutFailed, match="ended as aborted"):
        play(engine, environment="user_module:Countdown")


class Says:
    """An environment that answers with a text."""

    def __init__(self, text):
        self._text = text

    def reset(self, prompt):
        return [Message("user", prompt.text)]

    def step(self, message):
        return Turn([Message("user", self._text)], 0.0, done=False)


def test_secrets_in_what_the_environment_says_do_not_reach_the_policy(monkeypatch):
    monkeypatch.setenv("A_TOKEN", "abc123abc")
    register([])
    with pytest.raises(PromptRefused, match="'\\['"):  # the tokenizer of these tests has none
        play(Recited("a", "b"), new_environment=lambda: Says("abc123abc"), environment="m:Says")


def test_far_more_text_than_fits_into_a_rollout_is_not_tokenised():
    said = "7" * 40_001 + "\ud800"
    rollout = play(Recited("a"), new_environment=lambda: Says(said), environment="m:Says")
    assert (rollout.turns, rollout.finish_reason) == (1, FinishReason.LENGTH)
