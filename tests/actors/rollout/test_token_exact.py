"""Conversations of several turns, token by token, under the chat templates of real models.

What is trained is what the engine sampled after what the engine saw, and nothing else.
"""

import asyncio
from dataclasses import replace

import pytest
from fakes import episodes, lease
from hypothesis import given
from hypothesis import strategies as st
from real_tokenizers import real_tokenizer

from actors.engines.protocol import Generation, SamplingParameters
from actors.environments.protocol import Message, Turn
from actors.errors import PromptRefused
from actors.rollout.chat_rendering import Renderer
from queues.records import FinishReason

NAMES = ["qwen3", "llama3", "mistral", "gemma"]
KNOWS_TOOLS = ["qwen3", "llama3"]
SAMPLING = SamplingParameters(temperature=1.0, max_new_tokens=400)


class Engine:
    """Samples given token ids, ended or cut off, and writes down what it saw and sampled_ids."""

    def __init__(self, speeches):
        self.speeches, self.seen = list(speeches), []

    async def generate(self, request_id, prompt_ids, sampling, *, cache_salt=None):
        sampled_ids, reason = self.speeches[len(self.seen)]
        version = len(self.seen)
        self.seen.append((list(prompt_ids), sampled_ids))
        return Generation(
            token_ids=list(sampled_ids),
            logprobs=[-0.25] * len(sampled_ids),
            versions=[version] * len(sampled_ids),
            finish_reason=reason,
            cache_salt="0",
        )


class Scripted:
    """An environment that says given messages, then ends."""

    def __init__(self, messages):
        self.messages = list(messages)

    async def reset(self, prompt):
        return [Message("user", prompt.text)]

    async def step(self, message):
        if not self.messages:
            return Turn([], 0.0, done=True)
        return Turn([self.messages.pop(0)], 0.5, done=False)


def play(name, engine, messages, text="3+4="):
    runner = episodes(
        engine,
        SAMPLING,
        environment="single_turn",
        renderer=Renderer(real_tokenizer(name)),
        rewards=["last_answer"],
        max_model_len=100_000,
    )
    config = runner.config.model_copy(update={"environment": "test_token_exact:Scripted"})
    runner = replace(runner, config=config, new_environment=lambda: Scripted(messages))
    return asyncio.run(runner.run(lease(text=text), 0))


texts = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Co"]), max_size=20)


@st.composite
def conversations(draw, name):
    """Draw messages of the policy, any tokens at all, and replies of the environment."""
    tokenizer = real_tokenizer(name)
    special = set(tokenizer.all_special_ids)
    ids = st.integers(0, len(tokenizer) - 1).filter(lambda i: i not in special)
    turns = draw(st.integers(1, 4))
    speeches = [
        ([*draw(st.lists(ids, max_size=12)), tokenizer.eos_token_id], FinishReason.STOP)
        for _ in range(turns)
    ]
    if draw(st.booleans()):  # the last one is cut off
        speeches[-1] = (draw(st.lists(ids, min_size=1, max_size=12)), FinishReason.LENGTH)
    roles = st.sampled_from(["user", "tool"] if name in KNOWS_TOOLS else ["user"])
    messages = [Message(draw(roles), draw(texts)) for _ in range(turns - 1)]
    return speeches, messages, draw(texts.filter(str.strip))


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
def test_what_trains_is_what_was_sampled_after_what_was_seen(name, data):
    speeches, messages, text = data.draw(conversations(name))
    engine = Engine(speeches)
    rollout = play(name, engine, messages, text)
    assert len(engine.seen) == rollout.turns == len(speeches)
    sampled = {}
    for turn, (seen, sampled_ids) in enumerate(engine.seen):
        assert rollout.token_ids[: len(seen) + len(sampled_ids)] == seen + sampled_ids
        sampled |= dict.fromkeys(range(len(seen), len(seen) + len(sampled_ids)), turn)
    last_seen, last_said = engine.seen[-1]
    assert rollout.token_ids == last_seen + last_said
    places = range(len(rollout.token_ids))
    assert rollout.loss_mask == [place in sampled for place in places]
    assert rollout.versions == [sampled.get(place, -1) for place in places]
    assert rollout.behavior_logprobs == [-0.25 * (place in sampled) for place in places]
    assert rollout.prompt_length == len(engine.seen[0][0])
    ends = [len(seen) + len(sampled_ids) - 1 for seen, sampled_ids in engine.seen]
    paid = [0.5] * len(messages) + [0.0]
    assert rollout.metadata["turn_rewards"] == list(zip(ends, paid, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_a_conversation_reads_as_its_template_would_have_written_it(name):
    tokenizer = real_tokenizer(name)
    replies = ["I ask.", "Once more?", "It is 7."]
    role = "tool" if name in KNOWS_TOOLS else "user"
    messages = [Message(role, "first 12"), Message(role, "second")]
    speeches = [
        ([*tokenizer.encode(reply, add_special_tokens=False), tokenizer.eos_token_id],
         FinishReason.STOP)
        for reply in replies
    ]  # fmt: skip
    engine = Engine(speeches)
    rollout = play(name, engine, messages, "What is 3+4?")
    conversation = [{"role": "user", "content": "What is 3+4?"}]
    for reply, answer in zip(replies, [*messages, None], strict=True):
        conversation.append({"role": "assistant", "content": reply})
        if answer:
            conversation.append({"role": answer.role, "content": answer.content})
    # Qwen's template shows no thoughts but those of the last answer, which here has none.
    whole = tokenizer.apply_chat_template(conversation, tokenize=False)
    whole = whole.replace("<think>\n\n</think>\n\n", "")
    # What follows the last end of a turn is nobody's: the conversation is over.
    whole = whole[: whole.rindex(tokenizer.eos_token) + len(tokenizer.eos_token)]

    def plain(text):
        return "".join(text.split())  # sentencepiece begins every text with a space

    assert plain(tokenizer.decode(rollout.token_ids)) == plain(whole)


@pytest.mark.parametrize("name", ["mistral", "gemma"])
def test_a_role_that_a_template_does_not_know_refuses_the_prompt(name):
    end = real_tokenizer(name).eos_token_id
    engine = Engine([([end], FinishReason.STOP)] * 2)
    with pytest.raises(PromptRefused, match="cannot write messages of user, assistant, tool"):
        play(name, engine, [Message("tool", "7")])
