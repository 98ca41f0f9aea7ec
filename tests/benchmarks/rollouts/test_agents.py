"""`headway bench agents`: sums, ratios inside a round, missed aims, a trial."""

import pytest

from benchmarks.rollouts.agents import figures_of, misses, table

ROUND = {
    "gateway": 2.0, "alone": 1.9, "prompts": 10, "retokenised": 0, "would_differ": 9,
    "segments": 0, "sampled": 400, "stamped": 400, "logprob_difference": 1e-6,
}  # fmt: skip


def test_counts_are_added_and_rates_compared_inside_a_round():
    slow = {**ROUND, "gateway": 4.0, "alone": 2.0, "logprob_difference": 3e-6}
    figures = figures_of([ROUND, ROUND, slow])
    assert (figures["prompts"], figures["sampled"], figures["would_differ"]) == (30, 1200, 27)
    assert figures["of_alone"] == pytest.approx(0.95)
    assert figures["tokens_per_second"]["gateway"] == 200
    assert figures["logprob_difference"] == 3e-6
    assert misses(figures) == []
    assert "0 tokens tokenised again in 30 prompts" in table(figures)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"retokenised": 1}, "again"),
        ({"stamped": 399}, "lack"),
        ({"logprob_difference": 2e-4}, "differ"),
        ({"gateway": 3.0}, "less than"),
    ],
)
def test_a_missed_aim_is_named(change, says):
    (missed,) = misses(figures_of([{**ROUND, **change}]))
    assert says in missed


@pytest.mark.slow
@pytest.mark.vllm
def test_agents_are_measured_beside_the_engine_alone(measured):
    record = measured("agents", "--rounds", "1", "--sessions", "8", timeout=600)
    assert record["retokenised"] == 0 < record["would_differ"]
    assert record["stamped"] == record["sampled"] > 0
    assert record["logprob_difference"] < 1e-4
