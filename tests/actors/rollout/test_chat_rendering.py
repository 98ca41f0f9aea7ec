"""Messages to ids and back, with and without a chat template."""

import pytest
from characters import TEMPLATE, character_tokenizer

from actors.environments.protocol import Message
from actors.errors import InputError
from actors.rollout.chat_rendering import Renderer, encode

ASK = [Message("user", "3+4=")]


def characters(renderer, ids):
    return "".join(renderer.tokenizer.convert_ids_to_tokens(ids))


def test_without_a_template_a_prompt_is_the_plain_text():
    renderer = Renderer(character_tokenizer())
    assert characters(renderer, renderer.prompt(ASK)) == "3+4="
    assert characters(renderer, renderer.continuation(ASK, 1)) == "3+4="


def test_a_template_is_used_where_there_is_one_unless_switched_off():
    tokenizer = character_tokenizer(TEMPLATE)
    templated = Renderer(tokenizer, "auto")
    assert templated.text(templated.prompt(ASK)) == "user:3+4=\nassistant:"
    plain = Renderer(tokenizer, False)
    assert characters(plain, plain.prompt(ASK)) == "3+4="


def test_a_prompt_is_written_once_for_all_rollouts_that_ask_in_turn(monkeypatch):
    tokenizer = character_tokenizer(TEMPLATE)
    written, write = [], tokenizer.apply_chat_template
    monkeypatch.setattr(
        tokenizer, "apply_chat_template", lambda *a, **k: (written.append(a), write(*a, **k))[1]
    )
    renderer = Renderer(tokenizer)
    first = renderer.prompt(ASK)
    first.append(1)  # a rollout goes on from its prompt
    again = [renderer.prompt([*ASK]) for _ in range(3)]
    assert all([*ids, 1] == first for ids in again)
    assert len(written) == 1
    other = renderer.prompt([Message("system", ASK[0].content)])
    assert renderer.text(other) == "system:3+4=\nassistant:"
    assert renderer.prompt(ASK) == again[0]
    assert len(written) == 3


def test_a_continuation_completes_the_conversation_that_the_template_would_have_written():
    renderer = Renderer(character_tokenizer(TEMPLATE))
    reply = encode(renderer.tokenizer, "7<eos>")
    grown = renderer.prompt(ASK) + reply + renderer.continuation([Message("user", "2+2=")], 1)
    whole = renderer.prompt([*ASK, Message("assistant", "7"), Message("user", "2+2=")])
    assert grown == whole


def test_a_template_that_rewrites_history_cannot_be_continued():
    rewriting = "{{ messages | length }}" + TEMPLATE
    renderer = Renderer(character_tokenizer(rewriting))
    with pytest.raises(InputError, match="rewrites earlier messages"):
        renderer.continuation(ASK, 1)


def test_a_template_that_is_asked_for_must_exist():
    with pytest.raises(InputError, match="no chat template"):
        Renderer(character_tokenizer(), True)


def test_the_text_of_a_reply_has_no_special_tokens():
    renderer = Renderer(character_tokenizer())
    assert renderer.text([*renderer.prompt(ASK), 1]) == "3+4="
