"""`headway bench train`: operations, packing and shares by hand, and the way through, tiny."""

import pytest
import torch

from benchmarks.harness.synthetic_load import SIZES, batch, build, lengths_of
from benchmarks.training.checkpoint import costs
from benchmarks.training.train import (
    evenness,
    fullness,
    gap_of,
    misses,
    packing_figures,
    padded,
)
from benchmarks.training.utilisation import Shape, figures_of, shape_of, training_flops
from queues.schema import encode, summarize


def test_operations_are_those_of_products_and_of_pairs_that_may_see_each_other():
    # 6 an element and token; 3 tokens are 6 pairs of 12 operations a layer and dimension.
    assert training_flops(Shape(matrices=10, head=5, layers=1, attention_width=2), [3]) == 414.0
    scored = training_flops(Shape(matrices=10, head=5, layers=1, attention_width=2), [3], scored=2)
    assert scored == 384.0
    alone = training_flops(Shape(matrices=0, head=0, layers=1, attention_width=1), [2, 2])
    together = training_flops(Shape(matrices=0, head=0, layers=1, attention_width=1), [4])
    assert (alone, together) == (12 * 6, 12 * 10)


def test_the_head_counts_once_and_the_embedding_not_at_all():
    with torch.device("meta"):
        shape = shape_of(build(SIZES["60m"]))
    size = SIZES["60m"]
    attention = 2 * size.hidden * size.head_size * (size.heads + size.kv_heads)
    of_layer = attention + 3 * size.hidden * size.intermediate
    assert shape == Shape(
        matrices=size.layers * of_layer,
        head=size.vocabulary * size.hidden,
        layers=size.layers,
        attention_width=size.heads * size.head_size,
    )
    assert 55e6 < shape.matrices + shape.head < 65e6


def test_what_is_trained_is_what_the_broker_would_take():
    groups = batch(SIZES["tiny"], seed=1)
    figures = [summarize(encode(group)) for group in groups]
    assert sum(group.tokens for group in figures) == sum(lengths_of(groups)) - 8 * len(figures) * 4
    assert [group.oldest_version for group in figures] == [0, 0]


def test_rows_are_as_full_as_tokens_fill_their_room():
    lengths = [5, 6, 4, 3]
    assert fullness(lengths, [[0], [1, 2], [3]], 10) == pytest.approx(18 / 30)
    assert fullness([12], [[0]], 10) == 1.0
    assert padded(lengths, 2) == pytest.approx(18 / (2 * 6 + 2 * 4))
    assert evenness([3, 5]) == pytest.approx(1.25)


def test_rows_of_lognormal_lengths_are_full_and_ranks_even():
    for seed in range(3):
        figures = packing_figures(seed)
        assert figures["full_packed"] >= 0.97
        assert figures["full_packed"] > figures["full_packed_over_ranks"] > figures["full_padded"]
        assert figures["balance"] <= 1.01 < figures["balance_in_turn"]


def test_utilisation_is_held_against_the_peaks_beside_a_batch():
    def round_(seconds, peak):
        parts = {"forward": 0.3, "backward": 0.5, "step": 0.1, "between": 0.06, "host": 0.04}
        shares = {name: share * seconds for name, share in parts.items()}
        used = {"cpu_seconds": 0.75 * seconds}
        return {"seconds": seconds, "peak": peak, "peak_after": peak + 20.0, **used, **shares}

    figures = figures_of([round_(2.0, 90.0), round_(1.0, 190.0), round_(4.0, 40.0)], 100.0, 8)
    assert figures["tokens_per_second"] == 4.0
    assert figures["utilisation"] == pytest.approx(0.5)
    assert figures["peak"] == pytest.approx(100.0)
    assert figures["shares"]["host"] == pytest.approx(0.04)
    assert figures["cpu"] == pytest.approx(0.75)


def test_the_gap_is_the_median_share_of_a_step():
    batches = [{"gap": gap, "step": 12.0} for gap in (6.0, 3.0, 0.0)]
    assert gap_of(batches) == {"gap": 0.25, "raw": batches}


def test_large_models_have_an_aim_for_the_peak_and_all_of_them_for_the_gap():
    sizes = {
        name: {"utilisation": used, "loop": {"gap": gap}}
        for name, used, gap in (("demo", 0.2, 0.04), ("60m", 0.5, 0.03), ("0.5b", 0.6, 0.01))
    }
    assert misses({"sizes": sizes}) == [
        "60m has 50% of the peak, at least 60%",
        "the gap of demo is 4.00% of a step, at most 3%",
    ]


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.deepspeed
def test_the_learner_is_measured(measured):
    options = ("--sizes", "tiny", "--rounds", "2", "--threads", "1")
    figures = measured("train", *options, timeout=180)
    (tiny,) = figures["sizes"].values()
    assert len(tiny["raw"]) == 2
    assert 0 < tiny["utilisation"] < 1
    assert sum(tiny["shares"].values()) == pytest.approx(1.0, abs=0.2)
    assert figures["threads"] == 1
    assert all(rate > 0 for rate in tiny["ways"].values())
    assert list(tiny["ways"]) == ["beside", "alone"]
    loop = tiny["loop"]
    assert len(loop["raw"]) == 2
    for row in loop["raw"]:
        assert 0 < row["gap"] < row["step"]


def test_a_checkpoint_costs_what_the_batch_after_it_takes_longer_than_others():
    steps = [3.0, 8.0, 3.0, 7.0, 4.0]
    assert costs(steps, 2, 2.0) == {"waited_seconds": [5.0, 4.0], "copies": [2.5, 2.0]}
