"""Demonstrations: the ids of a rollout that said them, with the loss on what the policy says."""

import copy

import pytest
from characters import TEMPLATE, character_tokenizer
from dialogues import KNOWS_TOOLS, NAMES, Engine, play
from real_tokenizers import real_tokenizer

from actors.environments.protocol import Message
from actors.errors import PromptRefused
from actors.rollout.chat_rendering import Renderer
from actors.rollout.demonstrations import DemonstrationRenderer, judged
from actors.rollout.stops import load_stops
from queues.records import FinishReason

ASK = [Message("user", "What is 3+4?")]


def demonstrations(tokenizer, *, stop=(), ends=None, options=None):
    renderer = Renderer(tokenizer, options=options)
    eos = tokenizer.eos_token_id
    return DemonstrationRenderer(
        renderer, load_stops(renderer, stop), end_ids=ends or [eos], eos=eos
    )


def tokenizer_of(name):
    return real_tokenizer(name) if name in NAMES else character_tokenizer(FORMATS[name])


FORMATS = {
    "none": None,
    "eos": TEMPLATE,
    "no eos": (
        "{% for m in messages %}{{ 'u:' if m.role == 'user' else 'a:' }}{{ m.content }}\n"
        "{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
    ),
}


def said(tokenizer, tokens):
    """Return the text of the tokens in the loss, special tokens included."""
    return tokenizer.decode([i for i, learned in zip(*tokens, strict=True) if learned])


@pytest.mark.parametrize("name", [*NAMES, *FORMATS])
def test_a_pair_is_the_prompt_of_a_rollout_and_then_the_completion_with_its_end(name):
    tokenizer = tokenizer_of(name)
    ask = ASK if name in NAMES else [Message("user", "3+4=")]
    ids, mask = tokens = demonstrations(tokenizer).pair(ask, "it is 7")
    prompt = Renderer(tokenizer).prompt(ask)
    assert ids[: len(prompt)] == prompt
    assert mask == [False] * len(prompt) + [True] * (len(ids) - len(prompt))
    assert said(tokenizer, tokens) == f"it is 7{tokenizer.eos_token}"
    if Renderer(tokenizer).templated and name != "no eos":
        text = tokenizer.decode(ids)
        assert text.replace(" ", "").endswith(f"itis7{tokenizer.eos_token}")


@pytest.mark.parametrize("name", NAMES)
def test_a_conversation_is_the_rollout_in_which_the_policy_says_the_same(name):
    tokenizer = real_tokenizer(name)
    role = "tool" if name in KNOWS_TOOLS else "user"
    turns = [
        Message("assistant", "I ask."), Message(role, "first 12"),
        Message("assistant", "Once more?"), Message(role, "second"), Message("assistant", "7."),
    ]  # fmt: skip
    ids, mask = demonstrations(tokenizer).conversation(ASK, turns)
    speeches, before = [], False
    for token, learned in zip(ids, mask, strict=True):
        if learned and not before:
            speeches.append(([], FinishReason.STOP))
        if learned:
            speeches[-1][0].append(token)
        before = learned
    texts = [tokenizer.decode(speech, skip_special_tokens=True) for speech, _ in speeches]
    assert [text.removeprefix("<think>\n\n</think>\n\n") for text in texts] == [
        "I ask.", "Once more?", "7.",
    ]  # fmt: skip
    assert all(speech[-1] == tokenizer.eos_token_id for speech, _ in speeches)
    rollout = play(name, Engine(speeches), [turns[1], turns[3]], ASK[0].content)
    assert (rollout.token_ids, rollout.loss_mask) == (ids, mask)


def test_a_conversation_without_a_template_is_its_texts_one_after_the_other():
    tokenizer = character_tokenizer()
    turns = [Message("assistant", "a"), Message("tool", "12"), Message("assistant", "b")]
    tokens = demonstrations(tokenizer).conversation([Message("user", "3+4=")], turns)
    assert tokenizer.decode(tokens[0]) == "3+4=a<eos>12b<eos>"
    assert said(tokenizer, tokens) == "a<eos>b<eos>"


@pytest.mark.parametrize("name", NAMES)
def test_a_single_message_of_the_assistant_is_what_the_template_writes(name):
    tokenizer = real_tokenizer(name)
    ids, _ = demonstrations(tokenizer).conversation(ASK, [Message("assistant", " It is 7. ")])
    plain = [{"role": "user", "content": ASK[0].content},
             {"role": "assistant", "content": " It is 7. "}]  # fmt: skip
    whole = tokenizer.apply_chat_template(plain, tokenize=False)
    assert ids == tokenizer.encode(whole.rstrip("\n"), add_special_tokens=False)


def test_thoughts_of_earlier_turns_stay_as_they_were_said():
    tokenizer = real_tokenizer("qwen3")
    turns = [
        Message("assistant", "<think>\nhm\n</think>\n\nYes."), Message("user", "Sure?"),
        Message("assistant", "<think>\nwell\n</think>\n\nNo."),
    ]  # fmt: skip
    tokens = demonstrations(tokenizer).conversation(ASK, turns)
    assert said(tokenizer, tokens) == (
        "<think>\nhm\n</think>\n\nYes.<|im_end|><think>\nwell\n</think>\n\nNo.<|im_end|>"
    )


OPENED = (
    "{% for m in messages %}{{ m.role + ':' + m.content.split('|')[-1] + '<eos>' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:;{% endif %}"
)
"""A template that opens a thought (;) for the policy and takes thoughts (|) out of messages."""


@pytest.mark.parametrize(
    ("template", "completion", "expected"),
    [
        (OPENED, "hm|7", "user:3+4=<eos>assistant:;hm|7<eos>"),
        ("{{ messages | length }}" + TEMPLATE, "7", "1user:3+4=<eos>\nassistant:7<eos>"),
    ],
    ids=["takes out thoughts", "writes no second turn"],
)
def test_a_message_that_cannot_be_told_apart_is_refused_and_a_completion_is_not(
    template, completion, expected
):
    tokenizer, ask = character_tokenizer(template), [Message("user", "3+4=")]
    render = demonstrations(tokenizer)
    told = "cannot be told apart exactly; give demonstrations as prompt and completion"
    with pytest.raises(PromptRefused, match=told):
        render.conversation(ask, [Message("assistant", "7")])
    assert tokenizer.decode(render.pair(ask, completion)[0]) == expected


@pytest.mark.parametrize(
    ("name", "stop", "completion", "learned"),
    [
        ("none", (), "7", "7<eos>"),
        ("none", ("\n",), "7\n", "7\n"),
        ("none", ("\n",), "7", "7<eos>"),
        ("none", ("<eos>",), "7", "7<eos>"),
        ("none", (), "7<eos>", "7<eos>"),
        ("no eos", (), "7", "7<eos>"),
        ("no eos", ("\n",), "7", "7\n"),
        ("eos", ("\n",), "7", "7<eos>"),
    ],
)
def test_a_demonstration_ends_with_the_stop_that_a_rollout_waits_for(
    name, stop, completion, learned
):
    tokenizer = character_tokenizer(FORMATS[name])
    tokens = demonstrations(tokenizer, stop=stop).pair([Message("user", "3+4=")], completion)
    assert said(tokenizer, tokens) == learned


def test_a_turn_ends_with_the_token_that_the_template_ends_it_with():
    """The eos of a chat model may be another token; engines stop at both."""
    tokenizer = real_tokenizer("gemma")
    turn, eos = tokenizer.convert_tokens_to_ids(["<end_of_turn>", "<eos>"])
    renderer = Renderer(tokenizer)
    render = DemonstrationRenderer(renderer, load_stops(renderer, ()), end_ids=[eos, turn], eos=eos)
    assert render.pair(ASK, "7")[0][-1] == turn
    plain = Renderer(tokenizer, False)
    render = DemonstrationRenderer(plain, load_stops(plain, ()), end_ids=[eos, turn], eos=eos)
    assert render.pair(ASK, "7")[0][-1] == eos


@pytest.mark.reported("eos_not_turn_end")
def test_a_turn_ends_as_the_template_ends_it_though_the_model_has_another_end_of_sequence():
    tokenizer = copy.deepcopy(real_tokenizer("qwen3"))
    tokenizer.eos_token = "<|endoftext|>"
    turns = [Message("assistant", "a"), Message("user", "b"), Message("assistant", "c")]
    tokens = demonstrations(tokenizer).conversation(ASK, turns)
    thought = "<think>\n\n</think>\n\n"
    assert said(tokenizer, tokens) == f"{thought}a<|im_end|>{thought}c<|im_end|>"
    assert "<|endoftext|>" not in tokenizer.decode(tokens[0])


@pytest.mark.parametrize("stop", ["\n", "<eos>"])
def test_a_stop_in_the_middle_of_a_demonstration_is_refused(stop):
    render = demonstrations(character_tokenizer(), stop=("\n",))
    with pytest.raises(PromptRefused, match="has a stop before its end, where a rollout would end"):
        render.pair([Message("user", "3+4=")], f"a{stop}b")


@pytest.mark.parametrize("name", [*NAMES, *FORMATS])
def test_a_reward_model_reads_the_prompt_of_the_rollout(name):
    tokenizer = tokenizer_of(name)
    renderer, ask = Renderer(tokenizer), [Message("user", "3+4=")]
    for completion in ("7", "\n7", " 7"):
        ids = judged(renderer, ask, completion)
        prompt = renderer.prompt(ask)
        assert ids[: len(prompt)] == prompt
        assert tokenizer.eos_token_id in ids[len(prompt) :] or name == "no eos"
