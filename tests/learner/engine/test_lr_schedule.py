"""Learning-rate schedules by table."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.config.optimizer import ScheduleConfig
from learner.engine.lr_schedule import rate_factor


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, [1, 1, 1, 1, 1]),
        ({"warmup_steps": 3}, [0.25, 0.5, 0.75, 1, 1]),
        ({"kind": "linear"}, [1, 0.8, 0.6, 0.4, 0.2]),
        ({"kind": "linear", "final_fraction": 0.0}, [1, 0.75, 0.5, 0.25, 0]),
        ({"kind": "linear", "final_fraction": 0.2}, [1, 0.8, 0.6, 0.4, 0.2]),
        ({"kind": "linear", "decay_from": 0.4}, [1, 1, 1, 2 / 3, 1 / 3]),
        ({"kind": "linear", "decay_from": 0.4, "final_fraction": 0.0}, [1, 1, 1, 0.5, 0]),
        ({"kind": "cosine", "final_fraction": 0.0}, [1, 0.85355339, 0.5, 0.14644661, 0]),
        ({"kind": "cosine"}, [1, 0.90450850, 0.65450850, 0.34549150, 0.09549150]),
        ({"kind": "linear", "warmup_steps": 1}, [0.5, 1, 0.75, 0.5, 0.25]),
    ],
)
def test_factor_by_step(config, expected):
    schedule = ScheduleConfig(**config)
    assert [rate_factor(schedule, step, 5) for step in range(5)] == pytest.approx(expected)


@given(
    kind=st.sampled_from(["constant", "linear", "cosine"]),
    warmup=st.integers(0, 20),
    decay_from=st.floats(0, 0.99),
    final=st.none() | st.floats(0, 1),
    total=st.integers(1, 60),
)
def test_factor_rises_in_the_warm_up_and_never_after_it(kind, warmup, decay_from, final, total):
    schedule = ScheduleConfig(
        kind=kind, warmup_steps=warmup, decay_from=decay_from, final_fraction=final
    )
    factors = [rate_factor(schedule, step, total) for step in range(total)]
    assert all(0 <= factor <= 1 for factor in factors)
    assert all(factors) or final == 0, "a step is without effect only where that is asked for"
    assert factors[:warmup] == sorted(factors[:warmup])
    later = factors[warmup:]
    assert all(b <= a + 1e-12 for a, b in pairwise(later))
