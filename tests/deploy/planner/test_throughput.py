"""`headway plan`: splits, the best of them and what limits it; what it refuses; what it prints."""

import io
import itertools
import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from deploy.config.loader import load_recipe
from deploy.planner import throughput
from deploy.planner.plan import PlanInputs, parse_bounds, plan, show
from deploy.planner.rates import EngineRates, LearnerRates, Rates
from deploy.planner.throughput import (
    MOST_ACTORS,
    best,
    between,
    most_actors,
    predict,
    predict_split,
    setting_of,
    some_counts,
)
from headway.errors import InputError

GIVEN = PlanInputs(
    tokens=40, tokens_variation=0.5, rollout_rate=100, engine_rate=3000, train_rate=4000, pause=0.05
)
SMALL = ("prompts.groups_per_batch=4", "prompts.group_size=4", "actors.max_concurrent_rollouts=32")


def recipe(*settings):
    return load_recipe("demo", [*SMALL, *settings])


def rates(train, ess_loss=None):
    return Rates(
        engine=EngineRates(step_seconds=0.01),
        learner=LearnerRates(token_seconds=train),
        lengths=((100,) * 4,) * 4,
        ess_loss=ess_loss,
    )


def speed(prospect):
    return prospect.outcome.samples_per_second


@pytest.mark.parametrize(
    ("devices", "workers", "expected"),
    [(2, 1, [(1, 1)]), (4, 1, [(1, 3), (2, 2), (3, 1)]), (8, 2, [(1, 6), (2, 4), (3, 2)])],
)
def test_splits_use_the_devices_up(devices, workers, expected):
    config = recipe(f"actors.tensor_parallel_size={workers}")
    prospects = predict(config, rates(train=0.002), bounds=[1], devices=devices)
    assert [(prospect.actors, prospect.ranks) for prospect in prospects] == expected


@given(most=st.integers(1, 500), own=st.integers(1, 500))
def test_of_many_counts_some_are_tried_with_both_ends_and_the_recipe_s_own(most, own):
    counts = some_counts(most, own)
    assert (counts[0], counts[-1]) == (1, most)
    assert min(most, 12) <= len(counts) <= 13
    assert (own in counts) == (own <= most)
    assert most > 12 or counts == list(range(1, most + 1))


@given(tried=st.sets(st.integers(1, 100), min_size=1).map(sorted), data=st.data())
def test_beside_the_best_count_nothing_stays_untried(tried, data):
    best_count = data.draw(st.sampled_from(tried))
    tried, rounds = list(tried), 0
    while gaps := between(tried, best_count):
        assert not set(gaps) & set(tried)
        tried, rounds = sorted({*tried, *gaps}), rounds + 1
    index = tried.index(best_count)
    neighbours = tried[max(0, index - 1) : index + 2]
    assert all(high - low == 1 for low, high in itertools.pairwise(neighbours))
    assert rounds <= 7


@pytest.mark.slow
def test_the_best_of_many_splits_is_found_and_not_only_the_best_of_those_tried_at_first():
    config = recipe("actors.max_concurrent_rollouts=4")
    prospects = predict(config, rates(train=0.0101), bounds=[4], devices=65)
    all_of_them = [
        prospect
        for count in range(1, 65, 3)
        for prospect in predict_split(config, rates(train=0.0101), count, 65 - count, [4])
    ]
    assert len({prospect.actors for prospect in prospects}) < 24
    assert speed(best(prospects)) >= 0.99 * speed(best(all_of_them))


@pytest.mark.parametrize(
    ("workers", "devices", "message"),
    [
        (1, 1, "1 devices are too few: an engine takes 1"),
        (1, 100_000, r"100000 devices are too many: .* 99999 engines .* 1024"),
        (8, 8 * MOST_ACTORS + 9, "up to 1025 engines of 8 "),
    ],
)
def test_too_few_devices_and_more_engines_than_a_plan_simulates_are_refused(
    workers, devices, message
):
    config = recipe(f"actors.tensor_parallel_size={workers}")
    with pytest.raises(InputError, match=message):
        predict(config, rates(train=0.002), bounds=[1], devices=devices)
    assert most_actors(config, workers * (MOST_ACTORS + 1)) == MOST_ACTORS


def test_a_plan_says_how_many_splits_it_has_simulated(monkeypatch):
    monkeypatch.setattr(throughput, "PROGRESS_SECONDS", 0.0)
    lines = []
    predict(recipe(), rates(train=0.002), bounds=[1], devices=4, report=lines.append)
    assert lines == [f"simulated {n} of 3 splits of 4 devices" for n in (1, 2, 3)]


def test_a_setting_is_that_of_the_run():
    config = recipe("queues.patience_seconds=0.7", "weight_sync.update_fraction=0.5")
    setting = setting_of(config, staleness=3, actors=4, last=30)
    assert setting.queues.window == 4 + 4 * (32 // 4) + 1, "one window for all engines"
    assert (setting.queues.max_staleness, setting.spec.groups_per_batch) == (3, 4)
    assert (setting.engines, setting.slots, setting.spec.group_size) == (4, 32, 4)
    assert (setting.swaps_at_once, setting.queues.patience_seconds) == (2, 0.7)


def test_more_devices_go_to_the_side_that_is_slower():
    """An engine generates two batches a second; a rank of the learner trains one in 3.2 s."""
    prospects = predict(recipe(), rates(train=0.002), bounds=[1], devices=4)
    assert best(prospects).ranks == 3
    assert [p.limit for p in prospects] == ["learner"] * 3
    assert speed(prospects[0]) == pytest.approx(16 / (3.2 / 3), rel=0.01)


def test_the_smallest_bound_that_is_as_good_is_the_best():
    config = recipe("actors.max_concurrent_rollouts=16")  # a batch: the second waits
    prospects = predict(config, rates(train=0.0001), bounds=[0, 1, 2, 4], devices=2)
    by_bound = {prospect.max_staleness: prospect for prospect in prospects}
    assert by_bound[0].limit == "staleness"
    assert speed(by_bound[0]) == pytest.approx(16 / 1.16, rel=0.01)
    assert best(prospects).max_staleness == 1
    assert best(prospects).limit == "actors"


def test_lag_costs_sample_size_by_its_square():
    prospects = predict(recipe(), rates(train=0.002, ess_loss=0.1), bounds=[0, 2], devices=2)
    assert prospects[0].ess == 1.0
    assert prospects[1].ess == pytest.approx(math.exp(-0.1 * prospects[1].outcome.lag_square_mean))
    assert 0.6 < prospects[1].ess < math.exp(-0.1 * prospects[1].outcome.lag_mean)


def test_lengths_are_cut_where_the_recipe_cuts_them():
    long = rates(train=0.0001)
    cut = predict(recipe("actors.max_new_tokens=50"), long, bounds=[0], devices=2)[0]
    whole = predict(recipe(), long, bounds=[0], devices=2)[0]
    assert speed(cut) == pytest.approx(2 * speed(whole), rel=0.01)


def test_a_plan_of_given_rates_is_json_and_a_table():
    document = plan(recipe(), run=None, given=GIVEN, bounds=[0, 1], devices=3)
    assert json.loads(json.dumps(document)) == document
    assert document["best"] in document["prospects"]
    rows = [(row["actors"], row["max_staleness"]) for row in document["prospects"]]
    assert rows == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert document["rates"]["lengths"]["mean"] == pytest.approx(40, rel=0.1)
    document["notes"] = ["the recipe has [model.tiny], in the run '/a/model'"]
    console = Console(width=140, record=True, file=io.StringIO())
    show(document, console)
    text = console.export_text()
    assert f"note: {document['notes'][0]}\n" in text, "brackets included"
    assert "demo on 3 devices, predicted" in text
    assert f"{document['best']['samples_per_second']:.1f} samples/s" in text
    assert "limited by" in text


@pytest.mark.parametrize(("gpus", "shared"), [(1, []), (0.5, ["learner.gpus, actors.gpus"])])
def test_what_is_not_predicted_is_said(gpus, shared):
    config = recipe("queues.filter_tied=true", "queues.ess_target=0.9")
    config = config.updated(learner={"gpus": gpus}, actors={"gpus": gpus})
    notes = plan(config, run=None, given=GIVEN, bounds=[1], devices=2)["notes"]
    keys = [*shared, "queues.filter_tied", "queues.ess_target"]
    assert [note.split(":")[0] for note in notes] == keys


@pytest.mark.parametrize("text", ["", "1,", "a", "-1", "0,1.5", "99999", "0 1"])
def test_bounds_that_are_not_whole_numbers_are_refused(text):
    with pytest.raises(InputError, match="--bounds"):
        parse_bounds(text)
    assert parse_bounds("4,0,4,1") == [0, 1, 4]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": None, "train_rate": None}, "no rates: name a run .* with --run, or give "
         "--tokens, --train-rate too"),
        ({"train_rate": 0.0}, "--train-rate 0.0 must be above 0"),
    ],
)  # fmt: skip
def test_rates_that_are_missing_or_none_are_refused_by_their_options(changes, message):
    with pytest.raises(InputError, match=message):
        plan(recipe(), run=None, given=replace(GIVEN, **changes), bounds=[1], devices=2)
