"""Curriculum by success: the stated rule, its measurements, and its independence of order."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import InputError
from queues.policy.curriculum import Curriculum, CurriculumConfig
from queues.records import Prompt


def prompt(epoch, index, **metadata):
    return Prompt(prompt_id=f"sums/{epoch}/{index}", text="1+1=", metadata=metadata)


@pytest.mark.parametrize(
    ("groups", "results", "weight"),
    [
        (4, [], 1.0),
        (4, [(0, 8)], 0.1),
        (4, [(8, 8)], 0.1),
        (4, [(4, 8)], 1.0),
        (4, [(1, 8)], 0.4375),
        (4, [(7, 8)], 0.4375),
        (4, [(0, 8), (8, 8)], 1.0),
        (1, [(4, 8), (8, 8)], 0.1),
        (2, [(8, 8), (0, 4), (2, 4)], 0.75),
        (4, [(0, 8), (1, 1)], 4 / 9 * 8 / 9),
    ],
)
def test_the_weight_is_the_variance_of_success_over_the_newest_groups(groups, results, weight):
    curriculum = Curriculum(CurriculumConfig(groups=groups), seed=0)
    for number, (passes, rollouts) in enumerate(results):
        curriculum.measure(prompt(number, 7), number=number, passes=passes, rollouts=rollouts)
    assert curriculum.weight(prompt(9, 7)) == pytest.approx(weight)
    assert curriculum.weight(prompt(9, 8)) == 1.0, "another prompt was not measured"
    assert curriculum.mean_weight == pytest.approx(weight)


@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(1, 4))
def test_selection_does_not_depend_on_the_order_in_which_results_came(seed, groups, distinct):
    chance = random.Random(seed)
    results = [
        {"number": number, "passes": chance.randint(0, 4), "rollouts": 4} for number in range(20)
    ]
    prompts = [prompt(result["number"], result["number"] % distinct) for result in results]
    chosen = []
    for order in (range(20), chance.sample(range(20), 20)):
        curriculum = Curriculum(CurriculumConfig(groups=groups), seed=seed)
        for number in order:
            curriculum.measure(prompts[number], **results[number])
        chosen.append(curriculum.select(prompt(epoch, 0) for epoch in range(50)))
    assert chosen[0] == chosen[1]


def test_prompts_are_issued_in_proportion_to_their_weights_and_by_the_seed():
    def issued(seed):
        curriculum = Curriculum(CurriculumConfig(by="level"), seed=seed)
        for level, passes in enumerate((0, 4, 7)):
            curriculum.measure(prompt(0, 0, level=level), number=1, passes=passes, rollouts=8)
        return curriculum.select(prompt(0, n, level=n % 3) for n in range(6000))

    counts = Counter(chosen.metadata["level"] for chosen in issued(0))
    assert counts[1] == 2000
    assert counts[0] == pytest.approx(200, abs=60)
    assert counts[2] == pytest.approx(875, abs=90)
    assert issued(0) == issued(0) != issued(1)


def test_prompts_without_what_they_are_measured_by_are_refused():
    curriculum = Curriculum(CurriculumConfig(by="level"), seed=0)
    with pytest.raises(InputError, match=r"by = 'level', .*'sums/0/1' has 'part'; name an entry"):
        curriculum.select([prompt(0, 1, part="a")])
