"""A source less the held-out prompts."""

import pytest

from actors.errors import SourceFailed
from actors.sources.filters import PATIENCE, without_heldout
from actors.sources.lettered_chain_sum import LetteredChainSum
from headway.errors import InputError
from queues.records import Prompt


class Digits:
    """0 to 9, over and over."""

    def __init__(self):
        self.position = 0
        self.asked = []

    def next(self, count):
        self.asked.append(count)
        start, self.position = self.position, self.position + count
        return [
            Prompt(prompt_id=f"digits/0/{i}", text=str(i % 10)) for i in range(start, self.position)
        ]

    def cursor(self):
        return str(self.position)

    def restore(self, cursor):
        self.position = int(cursor)


def texts(prompts):
    return "".join(prompt.text for prompt in prompts)


def test_prompts_with_a_held_out_text_are_skipped_and_made_up_for():
    source = without_heldout(Digits(), frozenset("0489"))
    assert texts(source.next(8)) == "12356712"
    assert texts(source.next(1)) == "3"


def test_without_held_out_prompts_the_source_is_asked_once():
    digits = Digits()
    assert texts(without_heldout(digits, frozenset()).next(12)) == "012345678901"
    assert digits.asked == [12]


def test_a_restored_source_continues_with_the_same_prompts():
    heldout = frozenset(p.text for p in LetteredChainSum(seed=1).next(30))
    source, other = (without_heldout(LetteredChainSum(seed=1), heldout) for _ in range(2))
    source.next(20)
    other.restore(source.cursor())
    assert (following := other.next(25)) == source.next(25)
    assert not heldout & {prompt.text for prompt in following}


def test_a_source_of_which_everything_is_held_out_is_refused():
    digits = Digits()
    with pytest.raises(InputError, match=f"{PATIENCE} prompts in a row were held out"):
        without_heldout(digits, frozenset("0123456789")).next(7)
    assert PATIENCE <= digits.position < PATIENCE + 7


def test_a_source_that_ends_is_refused():
    digits = Digits()
    digits.next = lambda count: []
    with pytest.raises(SourceFailed, match="must be endless"):
        without_heldout(digits, frozenset()).next(1)
