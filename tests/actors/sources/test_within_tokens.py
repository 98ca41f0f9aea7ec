"""Prompts that are too long in tokens are left out, and the cursor still means the same."""

import json

import pytest
from characters import TEMPLATE, character_tokenizer

from actors.rollout.chat_rendering import Renderer
from actors.sources.filters import shorter, within_tokens
from headway.errors import InputError
from queues.records import Prompt


class Growing:
    """Prompts of 1, 2, … `longest` letters, again and again."""

    def __init__(self, longest):
        self.longest, self.position = longest, 0

    def next(self, count):
        positions = range(self.position, self.position + count)
        self.position += count
        return [Prompt(prompt_id=f"g/{p}", text="a" * (p % self.longest + 1)) for p in positions]

    def cursor(self):
        return json.dumps(self.position)

    def restore(self, cursor):
        self.position = json.loads(cursor)


def test_what_is_longer_is_left_out_and_the_source_goes_on_from_its_cursor():
    fits = shorter(Renderer(character_tokenizer()), 3)
    source = within_tokens(Growing(5), fits)
    assert [len(prompt.text) for prompt in source.next(7)] == [1, 2, 3, 1, 2, 3, 1]
    cursor = source.cursor()
    rest = source.next(4)
    again = within_tokens(Growing(5), fits)
    again.restore(cursor)
    assert again.next(4) == rest


def test_what_the_chat_template_writes_counts():
    tokenizer = character_tokenizer(TEMPLATE)
    templated, plain = Renderer(tokenizer), Renderer(tokenizer, False)
    around = len("user:") + 2 + len("assistant:")
    prompt = Prompt(prompt_id="p", text="aaa")
    assert shorter(templated, around + 3)(prompt)
    assert not shorter(templated, around + 2)(prompt)
    assert shorter(plain, 3)(prompt)


def test_a_source_of_long_prompts_alone_is_an_input_error():
    source = within_tokens(Growing(5), lambda prompt: False, patience=20)
    with pytest.raises(InputError, match=r"20 prompts in a row were longer than prompts.max_tok"):
        source.next(1)
