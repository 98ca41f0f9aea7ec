"""Prompts that are mastered: known again in every epoch, and the end of a source without others."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import InputError
from queues.policy.prompt_retirement import Retirement, split
from queues.records import Prompt
from tests.queues.simulated_run import Run, make_state


def prompt(epoch, index):
    return Prompt(prompt_id=f"sums/{epoch}/{index}", text=f"{index}+1=")


@pytest.mark.parametrize(
    ("prompt_id", "expected"),
    [
        ("sums/0/7", ("sums/7", 0)),
        ("sums/12/7", ("sums/7", 12)),
        ("my/own/sums/3/x-7", ("my/own/sums/x-7", 3)),
    ],
)
def test_a_prompt_is_known_by_its_id_without_the_epoch(prompt_id, expected):
    assert split(prompt_id) == expected


@pytest.mark.parametrize("prompt_id", ["7", "sums/7", "sums/first/7", "sums/-1/7", ""])
def test_an_id_that_does_not_tell_its_epoch_is_refused(prompt_id):
    with pytest.raises(InputError, match=r"must be of the form source/epoch/index"):
        split(prompt_id)


@pytest.mark.parametrize(
    ("cap", "threshold", "rewards", "retires"),
    [
        (0.9, 1.0, [1.0] * 9 + [0.0], True),
        (0.9, 1.0, [1.0] * 8 + [0.0] * 2, False),
        (1.0, 1.0, [1.0, 1.0], True),
        (1.0, 1.0, [1.0, 0.7 + 0.1 + 0.2], True),
        (1.0, 1.0, [1.0, 0.999], False),
        (0.5, 0.0, [0.0, -0.1], True),
        (0.5, -2.0, [-1.0, -3.0], True),
        (0.3, 0.5, [0.6, 0.4, 0.4], True),
    ],
)
def test_a_prompt_is_retired_from_the_cap_on(cap, threshold, rewards, retires):
    retirement = Retirement(cap=cap, threshold=threshold)
    assert retirement.retire("sums/2/7", rewards) == ("sums/7" if retires else None)
    assert retirement.names == ({"sums/7"} if retires else set())
    assert retirement.retire("sums/3/7", rewards) is None, "it is news only once"


def test_retired_prompts_are_left_out_and_the_others_keep_their_order():
    retirement = Retirement(cap=1.0, threshold=1.0)
    for index in (1, 3):
        retirement.retire(f"sums/0/{index}", [1.0])
    kept, exhausted = retirement.select([prompt(1, index) for index in (4, 3, 0, 1, 2)])
    assert [x.prompt_id for x in kept] == ["sums/1/4", "sums/1/0", "sums/1/2"]
    assert not exhausted


@given(st.integers(1, 8), st.integers(0, 2**32), st.integers(1, 12), st.floats(0.0, 1.0))
def test_a_source_ends_after_all_its_prompts_are_retired_and_never_before(
    size, seed, at_once, pass_rate
):
    """Epochs are shuffled, prompts asked for in any number, and results come at any time."""
    chance = random.Random(seed)
    retirement = Retirement(cap=1.0, threshold=1.0)
    epochs = [chance.sample(range(size), size) for _ in range(40)]
    line = [prompt(epoch, index) for epoch, order in enumerate(epochs) for index in order]
    place, skipped, running = 0, 0, []
    while place < len(line):
        drawn = line[place : place + at_once]
        place += len(drawn)
        everything = len(retirement.names) == size
        kept, exhausted = retirement.select(drawn)
        if exhausted:
            assert everything
            break
        skipped = skipped + len(drawn) if everything else 0
        assert skipped <= 2 * size + at_once, "an end that is known takes two epochs to see"
        running += kept
        while running and chance.random() < 0.7:
            done = running.pop(chance.randrange(len(running)))
            retirement.retire(done.prompt_id, [float(chance.random() < pass_rate)])


@given(
    st.integers(0, 2**32), st.sampled_from([0.2, 0.8, 1.0]), st.integers(0, 4), st.integers(1, 5),
    st.integers(1, 12), st.sampled_from([0.5, 1.0]),
)  # fmt: skip
def test_a_source_of_epochs_ends_when_all_its_prompts_are_mastered(
    seed, tie_rate, staleness, size, distinct, cap
):
    state = make_state(staleness, size, 60, 2)
    state.retirement = Retirement(cap=cap, threshold=1.0)
    run = Run(state, seed, tie_rate, distinct=distinct)
    run.run()
    sizes = [len(batch) for batch in run.batches]
    assert all(trained == size for trained in sizes[:-1])
    gone = len(state.retirement.names | state.retirement.failed)
    if state.version < 60:
        assert state.ended
        assert gone == distinct
    if cap == 0.5:  # half of every group passes, or more, or none
        assert gone == distinct or sum(sizes) >= 60 * size
