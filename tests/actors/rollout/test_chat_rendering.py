"""Messages to ids and back, with and without a chat template."""

import pytest
from characters import TEMPLATE, character_tokenizer
from real_tokenizers import real_tokenizer
from tokenizers import models
from tokenizers.processors import TemplateProcessing

from actors.environments.protocol import Message
from actors.rollout.chat_rendering import Renderer, encode
from headway.errors import InputError

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


def beginning(template=None, *, ends=False):
    """Return a tokenizer that begins texts with <bos>, and perhaps ends them with <eos>."""
    tokenizer = character_tokenizer(template)
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A <eos>" if ends else "<bos> $A",
        special_tokens=[("<bos>", bos), ("<eos>", eos)],
    )
    return tokenizer


@pytest.mark.parametrize("ends", [False, True])
def test_what_a_tokenizer_puts_before_texts_begins_a_prompt_once(ends):
    renderer = Renderer(beginning(ends=ends))
    assert characters(renderer, renderer.prompt(ASK)) == "<bos>3+4="
    assert characters(renderer, renderer.prompt([Message("user", "<bos>3+4=")])) == "<bos>3+4="
    assert characters(renderer, renderer.prompt([Message("user", "")])) == "<bos>"
    assert characters(renderer, renderer.continuation(ASK, 1)) == "3+4="
    assert characters(renderer, renderer.following("7")) == "7"


def test_a_tokenizer_without_digits_begins_its_prompts_too():
    tokenizer = beginning()
    letters = {text: i for text, i in tokenizer.get_vocab().items() if not text.isdigit()}
    tokenizer.backend_tokenizer.model = models.BPE(letters, merges=[])
    renderer = Renderer(tokenizer)
    assert characters(renderer, renderer.prompt([Message("user", "ab")])) == "<bos>ab"


def test_a_template_alone_decides_what_begins_its_prompts():
    without = Renderer(beginning(TEMPLATE))
    assert characters(without, without.prompt(ASK)) == "user:3+4=<eos>\nassistant:"
    with_bos = Renderer(beginning("{{ bos_token }}" + TEMPLATE))
    assert characters(with_bos, with_bos.prompt(ASK)) == "<bos>user:3+4=<eos>\nassistant:"


THINKING = (
    "{% for m in messages %}{{ m.role }}:"
    "{% if m.role == 'assistant' and loop.last and not thinking %};;{% endif %}"
    "{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% if not thinking %};;{% endif %}{% endif %}"
)
"""Writes an empty thought (;;) where the policy speaks without thinking, and in no earlier turn."""


def test_options_of_a_template_reach_it_in_every_turn():
    tokenizer = character_tokenizer(THINKING)
    thinks = Renderer(tokenizer, options={"thinking": True})
    assert characters(thinks, thinks.prompt(ASK)) == "user:3+4=<eos>\nassistant:"
    silent = Renderer(tokenizer, options={"thinking": False})
    assert characters(silent, silent.prompt(ASK)) == "user:3+4=<eos>\nassistant:;;"
    follows = characters(silent, silent.continuation([Message("user", "2+2=")], 1))
    assert follows == "\nuser:2+2=<eos>\nassistant:;;"


@pytest.mark.parametrize("name", ["thinkin", "tokenize", "add_generation_prompt"])
def test_an_option_that_a_template_does_not_read_is_refused(name):
    tokenizer = character_tokenizer(THINKING)
    with pytest.raises(InputError, match=f"names {name}, which the chat template"):
        Renderer(tokenizer, options={name: True})
    with pytest.raises(InputError, match=f"names {name}, but prompts are rendered without a chat"):
        Renderer(tokenizer, False, options={name: True})


@pytest.mark.parametrize("name", ["mistral", "gemma", "qwen3"])
@pytest.mark.parametrize("text", ["7", " 7", "\n7", "a b", "é€"])
def test_a_text_that_follows_another_gets_no_space_of_the_tokenizers(name, text):
    tokenizer = real_tokenizer(name)
    renderer = Renderer(tokenizer, False)
    ids = renderer.prompt([Message("user", "3+4=")])
    assert renderer.text([*ids, *renderer.following(text)]) == f"3+4={text}"


def test_a_reply_with_the_character_that_stands_for_the_policy_is_continued():
    renderer = Renderer(real_tokenizer("qwen3"))
    ids = renderer.continuation([Message("user", "a\ue000b")], renderer.tokenizer.eos_token_id)
    assert "a\ue000b<|im_end|>" in renderer.tokenizer.decode(ids)
