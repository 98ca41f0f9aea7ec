"""The tiny tasks: right answers, distinct splits, demonstrations, and mixtures of them."""

from functools import reduce
from itertools import islice

import pytest

from actors.environments.calculator import calculator
from actors.environments.protocol import Message
from actors.sources.examples import DEMONSTRATIONS, load_examples
from actors.sources.load_source import load_source
from headway.errors import InputError

PARTS = {"parts": [{"source": "tiny:distance", "weight": 3}, {"source": "tiny:twice"}]}


def source(task="product", *, seed=0, split="train", size=50):
    return load_source(f"tiny:{task}", options={}, seed=seed, split=split, heldout_size=size)


def demonstrations(name, heldout=frozenset(), **options):
    return load_examples(DEMONSTRATIONS, name, options=options, seed=0, heldout=heldout)


def last(change):
    """Solves a chain of digits by what each of them makes of what there was."""

    def solve(asked):
        return str(reduce(change, map(int, asked[2::2])))

    return solve


@pytest.mark.parametrize("task", ["product", "distance", "twice"])
def test_answers_are_right_and_splits_share_nothing(task):
    heldout = source(task, split="heldout").next(50)
    train = source(task).next(500)
    solve = {
        "product": calculator,
        "distance": last(lambda reached, digit: abs(reached - digit)),
        "twice": last(lambda reached, digit: (2 * reached + digit) % 10),
    }[task]
    for prompt in [*heldout, *train]:
        assert prompt.answer == solve(prompt.text.removesuffix("="))
    texts = {prompt.text for prompt in heldout}
    assert len(texts) == 50
    assert not texts & {prompt.text for prompt in train}


def test_a_worked_product_is_a_conversation_with_the_calculator():
    result = demonstrations("tiny:product", worked_share=1.0)
    for (question,), (call, reply, answer) in islice(result, 5):
        assert call == Message("assistant", f"[{question.content.removesuffix('=')}]")
        assert reply == Message("tool", calculator(call.content[1:-1]))
        assert answer == Message("assistant", f"={reply.content}")


def test_a_share_of_the_demonstrations_is_worked():
    result = demonstrations("tiny:distance", worked_share=0.4)
    worked = sum("," in completion for _, completion in islice(result, 1000))
    assert 340 <= worked <= 460


def test_the_worked_answers_of_a_chain_name_every_step():
    for task in ("distance", "twice"):
        result = demonstrations(f"tiny:{task}", worked_share=1.0)
        for asked, worked in islice(result, 200):
            names = asked[3:-1:2]
            assert [step[0] for step in worked.partition("=")[0].split(",")] == list(names)
            assert worked[-1] == worked.partition("=")[0][-1]


def test_a_mixture_demonstrates_its_parts_by_weight_and_no_held_out_problem():
    heldout = load_source("mixture", options=PARTS, seed=0, split="heldout", heldout_size=40)
    texts = frozenset(prompt.text for prompt in heldout.next(40))
    result = demonstrations("mixture", texts, source_options=PARTS, worked_share=0.0)
    prompts = [prompt for prompt, _ in islice(result, 1000)]
    assert 690 <= sum(prompt[0] == "D" for prompt in prompts) <= 810
    assert not texts & set(prompts)


def test_a_mixture_with_a_part_that_has_no_demonstrations_says_so():
    parts = {"parts": [{"source": "reasoning_gym:chain_sum"}]}
    with pytest.raises(InputError, match="'reasoning_gym:chain_sum' has no demonstrations"):
        next(demonstrations("mixture", source_options=parts))
