"""A source less its held-out prompts, or those that are too long in tokens."""

import pytest
from characters import TEMPLATE, character_tokenizer

from actors.errors import SourceFailed
from actors.rollout.chat_rendering import Renderer
from actors.sources.filters import PATIENCE, shorter, within_tokens, without_heldout
from headway.errors import InputError
from queues.records import Prompt


class Cycle:
    """Some texts, over and over."""

    def __init__(self, *texts):
        self.texts, self.position, self.asked = texts, 0, []

    def next(self, count):
        self.asked.append(count)
        start, self.position = self.position, self.position + count
        return [
            Prompt(prompt_id=f"cycle/0/{i}", text=self.texts[i % len(self.texts)])
            for i in range(start, self.position)
        ]

    def cursor(self):
        return str(self.position)

    def restore(self, cursor):
        self.position = int(cursor)


DIGITS = "0123456789"
SHORT = shorter(Renderer(character_tokenizer()), 3)


@pytest.mark.parametrize(
    ("leave_out", "texts", "drawn"),
    [
        (lambda source: without_heldout(source, frozenset("0489")), DIGITS, "12356712"),
        (lambda source: within_tokens(source, SHORT), ["a", "aaaa", "bb", "b€"], "abbb€abbb€abb"),
    ],
    ids=["held out", "too long"],
)
def test_what_is_left_out_is_made_up_for_and_the_source_goes_on_from_its_cursor(
    leave_out, texts, drawn
):
    source = leave_out(Cycle(*texts))
    assert "".join(prompt.text for prompt in source.next(8)) == drawn
    again = leave_out(Cycle(*texts))
    again.restore(source.cursor())
    assert again.next(4) == source.next(4)


def test_without_held_out_prompts_the_source_is_asked_once():
    digits = Cycle(*DIGITS)
    texts = [prompt.text for prompt in without_heldout(digits, frozenset()).next(12)]
    assert "".join(texts) == "012345678901"
    assert digits.asked == [12]


def test_a_source_of_which_everything_is_left_out_is_refused():
    digits = Cycle(*DIGITS)
    with pytest.raises(InputError, match=f"{PATIENCE} prompts in a row were held out"):
        without_heldout(digits, frozenset(DIGITS)).next(7)
    assert PATIENCE <= digits.position < PATIENCE + 7
    with pytest.raises(
        InputError, match=f"{PATIENCE} prompts in a row were longer than prompts.max"
    ):
        within_tokens(Cycle(*DIGITS), lambda prompt: False).next(1)


def test_a_source_that_ends_is_refused():
    digits = Cycle(*DIGITS)
    digits.next = lambda count: []
    with pytest.raises(SourceFailed, match="must be endless"):
        without_heldout(digits, frozenset()).next(1)


def test_what_the_chat_template_writes_counts():
    tokenizer = character_tokenizer(TEMPLATE)
    templated, plain = Renderer(tokenizer), Renderer(tokenizer, False)
    around = len("user:") + 2 + len("assistant:")
    prompt = Prompt(prompt_id="p", text="aaa")
    assert shorter(templated, around + 3)(prompt)
    assert not shorter(templated, around + 2)(prompt)
    assert shorter(plain, 3)(prompt)
