"""A run in simulated time with filtering and retirement: nothing starves, nothing is lost."""

from hypothesis import given
from hypothesis import strategies as st

from queues.policy.prompt_retirement import Retirement
from tests.queues.simulated_run import Run, make_state

RATES = st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.99, 1.0])


@given(
    st.integers(0, 2**32), RATES, st.integers(0, 4), st.integers(1, 5), st.integers(1, 8),
    st.integers(1, 4), st.booleans(),
)  # fmt: skip
def test_every_batch_is_full_and_within_the_bound_however_much_is_filtered(
    seed, tie_rate, staleness, size, steps, limit, baseline
):
    run = Run(make_state(staleness, size, steps, limit, baseline=baseline), seed, tie_rate)
    run.run()
    assert [len(batch) for batch in run.batches] == [size] * steps
    if tie_rate == 1.0:
        assert run.tied_trained == size * steps
        assert run.dropped[0] == limit * size, "what is let through early leaves less to drop"
    if tie_rate == 0.0:
        assert not run.dropped


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
