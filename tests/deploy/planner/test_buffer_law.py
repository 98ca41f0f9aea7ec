"""The finite-buffer law against exact lines, and against a line that is simulated by recursion."""

import math
import random
from statistics import fmean

import pytest

from deploy.errors import InputError
from deploy.planner.buffer_law import Phase, batches_per_second


def simulated(generate, train, room, batches=12_000, seed=0):
    """Batches a second of a line of two with gamma times: who finishes when, batch by batch."""
    chance = random.Random(seed)

    def draw(phase):
        if not phase.variation:
            return phase.seconds
        shape = 1 / phase.variation**2
        return chance.gammavariate(shape, phase.seconds / shape)

    handed_over, trained, began = [], [], []
    for number in range(batches):
        finished = (handed_over[-1] if number else 0.0) + draw(generate)
        began.append(max(finished, trained[-1] if number else 0.0))
        # It is out of the way once the batch `room` before it is being trained.
        handed_over.append(max(finished, began[number - room]) if room <= number else finished)
        trained.append(began[-1] + draw(train))
    return batches / trained[-1]


def test_exponential_times_have_the_exact_throughput_of_the_textbook():
    for room in (0, 1, 2, 4, 8, 16):
        even = batches_per_second(Phase(1, 1), Phase(1, 1), room + 2)
        assert even == pytest.approx((room + 2) / (room + 3), abs=1e-6)
        rho, k = 2.0, room + 2
        uneven = batches_per_second(Phase(0.5, 1), Phase(1, 1), room + 2)
        assert uneven == pytest.approx(2 * (1 - rho**k) / (1 - rho ** (k + 1)))


@pytest.mark.parametrize(("live", "expected"), [(1, 1 / 5), (1.5, 4 / 15), (2, 1 / 3), (9, 1 / 3)])
def test_without_variation_the_slower_side_decides_as_soon_as_both_work_at_once(live, expected):
    assert batches_per_second(Phase(3), Phase(2), live) == pytest.approx(expected)


@pytest.mark.parametrize("variation", [0.1, 0.3, 1.0, 1.4])
@pytest.mark.parametrize("train", [1.0, 0.9, 0.6])
def test_simulated_lines_agree(variation, train):
    generate, train = Phase(1.0, variation), Phase(train, variation / 2)
    for room in (0, 1, 3, 8):
        law = batches_per_second(generate, train, room + 2)
        assert law == pytest.approx(simulated(generate, train, room), abs=0.02)


def test_lines_of_equal_sides_agree():
    for variation in (0.1, 0.3, 0.6, 1.0):
        for room in (0, 1, 4, 16):
            phase = Phase(1.0, variation)
            law = batches_per_second(phase, phase, room + 2)
            assert law == pytest.approx(simulated(phase, phase, room), abs=0.015)


def test_it_does_not_matter_which_side_is_slower_and_room_never_hurts():
    one, other = Phase(1.3, 0.5), Phase(0.8, 0.9)
    rates = [batches_per_second(one, other, live) for live in (1, 1.5, 2, 2.5, 3, 5, 9, 17)]
    assert rates == [batches_per_second(other, one, live) for live in (1, 1.5, 2, 2.5, 3, 5, 9, 17)]
    assert rates == sorted(rates)
    assert fmean(rates) < rates[-1] < 1 / 1.3


def test_nearly_equal_rates_have_the_limit_of_equal_ones():
    phase = Phase(1.0, 0.4)
    for shift in (1e-3, 1e-6, 1e-9, 1e-13):
        near = batches_per_second(phase, Phase(1.0 + shift, 0.4), 3)
        assert math.isclose(near, batches_per_second(phase, phase, 3), rel_tol=2 * shift + 1e-6)


@pytest.mark.parametrize(
    ("phase", "live", "message"),
    [
        ((0.0, 0.1), 2, "a phase of 0.0 s"),
        ((1.0, -0.1), 2, "a variation of -0.1"),
        ((math.nan, 0.1), 2, "a phase of nan s"),
        ((1.0, 0.1), 0.9, "0.9 batches are live; at least 1"),
    ],
)
def test_what_is_no_time_is_refused(phase, live, message):
    with pytest.raises(InputError, match=message):
        batches_per_second(Phase(*phase), Phase(1.0), live)
