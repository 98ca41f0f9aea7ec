"""Conversations of several turns, token by token, under the chat templates of real models.

What is trained is what the engine sampled after what the engine saw, and nothing else.
"""

import pytest
from dialogues import KNOWS_TOOLS, NAMES, Engine, play
from hypothesis import given
from hypothesis import strategies as st
from real_tokenizers import real_tokenizer

from actors.environments.protocol import Message
from actors.errors import PromptRefused
from queues.records import FinishReason
from tests.property_examples import costly

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
@costly
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
    positions = range(len(rollout.token_ids))
    assert rollout.loss_mask == [position in sampled for position in positions]
    assert rollout.versions == [sampled.get(position, -1) for position in positions]
    assert rollout.behavior_logprobs == [-0.25 * (position in sampled) for position in positions]
    assert rollout.prompt_length == len(engine.seen[0][0])
    ends = [len(seen) + len(sampled_ids) - 1 for seen, sampled_ids in engine.seen]
    paid = [0.5] * len(messages) + [0.0]
    assert rollout.turn_rewards == tuple(zip(ends, paid, strict=True))


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
