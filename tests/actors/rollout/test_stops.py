"""Stops: where a message ends, what of it trains, and what rewards and environments see."""

import asyncio
import copy
from dataclasses import replace

import pytest
from characters import character_tokenizer
from dialogues import NAMES, Engine
from fakes import EOS, SAMPLING, Recited, episodes, ids, lease, play
from hypothesis import given
from hypothesis import strategies as st
from real_tokenizers import real_tokenizer

from actors.rewards.rewards import Score
from actors.rollout.chat_rendering import Renderer
from actors.rollout.stops import load_stops
from headway.errors import InputError
from queues.records import FinishReason


class Noted:
    """A reward that notes what it is given."""

    def __init__(self):
        self.seen = []

    async def score(self, prompt, completion, finish_reason, *, by_step=False):
        self.seen.append((completion, finish_reason))
        return Score(1.0, {})


@pytest.mark.parametrize(
    ("stop", "include", "sampled", "seen"),
    [
        (["/"], False, "b=7/", "b=7"),
        (["/"], True, "b=7/", "b=7/"),
        (["7/"], False, "b=7/", "b="),
        (["|", "7/a"], True, "b=7/a", "b=7/a"),
        ([], False, "b=7/ab<eos>", "b=7/ab"),
        (["z"], False, "b=7/ab<eos>", "b=7/ab"),
        (["<eos>"], True, "b=7/ab<eos>", "b=7/ab<eos>"),
        (["<eos>"], False, "b=7/ab<eos>", "b=7/ab"),
    ],
)
def test_tokens_end_with_the_stop_and_the_text_before_it_or_with_it(stop, include, sampled, seen):
    settings = {"stop": stop, "include_stop": include and bool(stop)}
    runner = replace(episodes(Recited("b=7/ab"), SAMPLING, **settings), rewards=Noted())
    rollout = asyncio.run(runner.run(lease(), 0))
    assert rollout.token_ids == ids(f"3+4={sampled}")
    assert rollout.loss_mask == [False] * 4 + [True] * (len(rollout.token_ids) - 4)
    assert len(rollout.behavior_logprobs) == len(rollout.versions) == len(rollout.token_ids)
    assert rollout.finish_reason is FinishReason.STOP
    assert runner.rewards.seen == [(seen, "stop")]


@pytest.mark.parametrize(
    ("limit", "tokens", "ended", "parts"),
    [
        (4, "b=7/", FinishReason.STOP, {"last_answer": 1.0, "missing_eos": 0.0}),
        (3, "b=7", FinishReason.LENGTH, {"last_answer": 0.0, "missing_eos": -1.0}),
    ],
)
def test_a_limit_that_is_reached_with_the_stop_is_no_truncation(limit, tokens, ended, parts):
    sampling = replace(SAMPLING, max_new_tokens=limit)
    rollout = play(Recited("b=7/ab"), sampling=sampling, stop=["/"], missing_eos_penalty=1.0)
    assert rollout.token_ids == ids(f"3+4={tokens}")
    assert (rollout.finish_reason, rollout.reward_parts) == (ended, parts)


def test_a_token_that_is_a_stop_ends_the_message():
    slash = ids("/")[0]
    for stop in ([slash], [slash, "z"]):
        rollout = play(Recited("b=7/ab"), stop=stop)
        assert rollout.token_ids == ids("3+4=b=7/")
        assert rollout.reward_parts == {"last_answer": 1.0}


def test_engines_are_told_what_to_stop_at():
    engine = Recited("b=7")
    play(engine, stop=["/", 5, "<eos>"])
    assert engine.requests[0][2] == replace(SAMPLING, stop=("/",), stop_ids=(5, EOS))


def test_a_stop_counts_though_the_rollout_was_interrupted_within_it():
    """The first part was sampled by an engine that was interrupted; no engine sees it whole."""
    whole = play(Recited("b=7//ab"), stop=["//"])
    begun = replace(
        whole,
        **{
            name: getattr(whole, name)[:-1]
            for name in ("token_ids", "loss_mask", "behavior_logprobs", "versions")
        },
        finish_reason=FinishReason.ABORTED,
    )
    assert begun.token_ids == ids("3+4=b=7/")
    rollout = play(Recited("/ab"), saved=begun, stop=["//"])
    assert rollout.token_ids == whole.token_ids == ids("3+4=b=7//")
    assert rollout.reward_parts == {"last_answer": 1.0}


@pytest.mark.parametrize(("stop", "ended"), [("/", FinishReason.STOP), ("z", FinishReason.ABORTED)])
def test_a_message_that_had_ended_is_whole_though_its_engine_was_interrupted(stop, ended):
    engine = Recited(("b=7/", FinishReason.ABORTED))
    assert play(engine, stop=[stop]).finish_reason is ended


def test_an_environment_answers_what_stands_before_the_stop_and_the_tokens_go_on_after_it():
    engine = Recited("a/ab", "b=2/a")
    rollout = play(engine, of=lease(answer="2"), stop=["/"], environment="user_module:Countdown")
    first, between, second = ids("a/"), ids("left 1"), ids("b=2/")
    assert rollout.token_ids == [*ids("3+4="), *first, *between, *second]
    assert engine.requests[1][1] == [*ids("3+4="), *first, *between]
    assert rollout.loss_mask == [False] * 4 + [True] * 2 + [False] * 6 + [True] * 4
    assert engine.requests[1][2].max_new_tokens == SAMPLING.max_new_tokens - 2
    assert rollout.reward_parts == {"environment": 1.0, "last_answer": 1.0}


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
def test_the_cut_is_after_the_first_token_whose_text_completes_a_stop(name, data):
    tokenizer = real_tokenizer(name)
    texts = st.text("ab \n.é€</x>", max_size=24)
    text = data.draw(texts)
    stop = data.draw(st.lists(st.text("ab \n.é€</x>", min_size=1, max_size=3), min_size=1))
    renderer = Renderer(tokenizer)
    stops = load_stops(renderer, stop)
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    decoded = [renderer.text(token_ids[:end]) for end in range(len(token_ids) + 1)]
    expected = next((n for n, t in enumerate(decoded) if any(s in t for s in stop)), None)
    length = stops.find(token_ids)
    assert length == expected
    kept = token_ids if length is None else token_ids[:length]
    completion = stops.text(kept)
    assert not any(s in completion for s in stop)
    assert decoded[len(kept)].startswith(completion)
    if length is not None:
        with_stop = load_stops(renderer, stop, include=True).text(kept)
        assert any(with_stop == completion + s for s in stop)


def test_a_special_token_as_text_stands_for_its_id():
    renderer = Renderer(real_tokenizer("qwen3"))
    end = renderer.tokenizer.convert_tokens_to_ids("<|endoftext|>")
    stops = load_stops(renderer, ["<|endoftext|>", "x", 7], include=True)
    assert (stops.strings, stops.ids) == (("x",), (end, 7))
    assert stops.text([7, end]) == renderer.text([7]) + "<|endoftext|>"


@pytest.mark.parametrize("stop", ["<|im_end|>\n", "user<|im_end|>", "<|im_end|><|im_end|>"])
def test_a_text_that_is_a_special_token_and_more_is_refused(stop):
    renderer = Renderer(real_tokenizer("qwen3"))
    with pytest.raises(InputError, match=r"'<\|im_end\|>', which can only be a stop by itself"):
        load_stops(renderer, [stop])


def test_an_id_that_no_token_has_is_refused():
    with pytest.raises(InputError, match=r"actors.stop has the id 999, and the tokenizer has ids"):
        load_stops(Renderer(character_tokenizer()), [999])


@pytest.mark.reported("eos_not_turn_end")
def test_a_token_that_ends_turns_in_the_template_is_a_stop_and_no_part_of_the_text():
    tokenizer = real_tokenizer("gemma")
    eos, turn = tokenizer.convert_tokens_to_ids(["<eos>", "<end_of_turn>"])
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.eos_token = "<eos>"
    stops = load_stops(Renderer(tokenizer), ["<eos>"], include=True)
    assert stops.ids == (eos, turn)
    seven = tokenizer.encode("7", add_special_tokens=False)
    said = [*seven, turn, *seven]
    assert stops.find(said) == len(seven) + 1
    assert stops.text(said[: len(seven) + 1]) == "7"
    assert load_stops(Renderer(tokenizer, False), []).ids == ()


MARKED = "<think>hm</think><tool_call>7</tool_call>"


@pytest.mark.reported("special_markers")
@pytest.mark.parametrize(("skip", "text"), [(False, MARKED), (True, "hm7")])
@pytest.mark.parametrize(("end", "ended"), [([EOS], True), ([], False)])
def test_markers_that_are_special_tokens_are_in_the_text_of_a_message(skip, text, end, ended):
    tokenizer = character_tokenizer()
    markers = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
    tokenizer.add_special_tokens({"additional_special_tokens": markers})
    stops = load_stops(Renderer(tokenizer, skip_special_tokens=skip), [])
    said = tokenizer.encode(MARKED, add_special_tokens=False)
    assert len(said) == len(markers) + len("hm7")
    unseen = [tokenizer.pad_token_id]
    assert stops.text([*said, *unseen, *end], ended=ended) == text


def test_a_token_at_which_an_engine_stops_by_itself_is_no_part_of_the_text():
    """The settings of a model name more of them than its tokenizer does."""
    tokenizer = real_tokenizer("llama3")
    end = tokenizer.convert_tokens_to_ids("<|end_of_text|>")
    runner = replace(episodes(Engine([([5, end], FinishReason.STOP)]), SAMPLING), rewards=Noted())
    runner = replace(runner, renderer=Renderer(tokenizer))
    asyncio.run(runner.run(lease(), 0))
    assert runner.rewards.seen == [(tokenizer.decode([5]), "stop")]


@pytest.mark.reported("special_markers")
def test_tools_run_though_the_markers_of_calls_are_special_tokens():
    tokenizer = copy.deepcopy(real_tokenizer("qwen3"))
    markers = ["<tool_call>", "</tool_call>"]
    tokenizer.add_special_tokens({"additional_special_tokens": markers})
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "3+4"}}</tool_call>'
    said = [tokenizer.encode(text, add_special_tokens=False) for text in (call, "=7")]
    engine = Engine([([*ids, tokenizer.eos_token_id], FinishReason.STOP) for ids in said])
    sampling = replace(SAMPLING, max_new_tokens=200)
    runner = episodes(
        engine, sampling, environment="tools", renderer=Renderer(tokenizer), max_model_len=1000
    )
    rollout = asyncio.run(runner.run(lease(), 0))
    assert (rollout.turns, rollout.reward_parts["last_answer"]) == (2, 1.0)
    shown, _ = engine.seen[1]
    assert tokenizer.decode(shown).endswith(
        "<tool_response>\n7\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
