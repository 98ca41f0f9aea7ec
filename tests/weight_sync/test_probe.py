"""An engine with other weights than its version has is named, whatever the size of the rounding."""

import math
import random
from types import SimpleNamespace

import pytest

from weight_sync.probe import (
    LEARNER,
    ProbeBudget,
    ProbeCheck,
    ProbeReport,
    probe_sequences,
)

MODEL = SimpleNamespace(vocab_size=50)
SEQUENCES = probe_sequences(MODEL, None)
TOKENS = sum(len(sequence) - 1 for sequence in SEQUENCES)
ENDS = [38, 77]
"""Places of the last tokens of the two sequences among the scores."""


class World:
    """A learner whose scores move by `step` nats a version, and engines that round by `noise`."""

    def __init__(self, *, step, noise, dtype="float32", seed=0):
        self.random = random.Random(seed)
        self.check = ProbeCheck([dtype])
        self.step, self.noise = step, noise
        self.learned = {-1: [self.random.gauss(-4, 1) for _ in range(TOKENS)]}

    def train(self, version):
        before = self.learned[version - 1]
        self.learned[version] = [a + self.random.gauss(0, self.step) for a in before]
        scores = tuple(self.learned[version])
        report = ProbeReport(source=LEARNER, version=version, sequences=SEQUENCES, scores=scores)
        assert self.check.observe(report) is None

    def scores(self, of):
        return [a + self.random.gauss(0, self.noise) for a in self.learned[of]]

    def probe(self, version, *, scores=None, sampled=None, engine="engine-0"):
        scores = self.scores(version) if scores is None else scores
        sampled = [scores[end] for end in ENDS] if sampled is None else sampled
        return self.check.observe(
            ProbeReport(
                source=engine, version=version, sequences=SEQUENCES, scores=tuple(scores),
                sampled=tuple(sampled),
            )
        )  # fmt: skip

    def follow(self, versions):
        """Train and probe honestly; return the results that fail."""
        results = []
        for version in range(versions):
            self.train(version)
            results.append(self.probe(version))
        return [result for result in results if result.fails]


SIZES = {
    "float32, steps of RL": {"step": 1e-3, "noise": 3e-7},
    "float32, steps near the rounding": {"step": 3e-6, "noise": 3e-7},
    "float32, nothing moves": {"step": 0.0, "noise": 1e-7},
    "float32, nothing rounds": {"step": 1e-2, "noise": 0.0},
    "float32, a deep model": {"step": 1e-3, "noise": 2e-5},
    "bfloat16": {"step": 3e-3, "noise": 0.03, "dtype": "bfloat16"},
    "bfloat16, large steps": {"step": 0.3, "noise": 0.03, "dtype": "bfloat16"},
}


def moves(size):
    return SIZES[size]["step"] > 5 * SIZES[size]["noise"]


@pytest.mark.parametrize("size", SIZES)
def test_an_honest_engine_is_not_named_in_a_thousand_versions(size):
    assert World(**SIZES[size]).follow(1000) == []


@pytest.mark.parametrize("size", [name for name in SIZES if moves(name)])
@pytest.mark.parametrize("seed", range(5))
def test_old_weights_are_named_at_once_with_their_version_from_steps_of_a_few_roundings_on(
    size, seed
):
    world = World(**SIZES[size], seed=seed)
    assert world.follow(2) == []
    world.train(2)
    result = world.probe(2, scores=world.scores(1))
    assert (result.fails, result.nearest) == (True, 1)
    assert world.probe(2, engine="engine-1").fails is False


def test_old_weights_are_named_without_any_history_of_the_engine():
    world = World(step=3e-6, noise=3e-7)
    world.train(0)
    world.train(1)
    assert world.probe(1, scores=world.scores(0)).nearest == 0


@pytest.mark.parametrize("served", [6, 5, 3, 0])
def test_weights_of_another_version_are_named_with_it(served):
    world = World(step=1e-4, noise=3e-7)
    assert world.follow(7) == []
    world.train(7)
    assert world.probe(7, scores=world.scores(served)).nearest == served


@pytest.mark.parametrize(("step", "versions"), [(1e-2, 1), (5e-3, 1), (1e-3, 8)])
@pytest.mark.parametrize("every", [1, 40])
def test_scores_that_stay_the_same_are_named_below_the_rounding(step, versions, every):
    world = World(step=step, noise=0.03, dtype="bfloat16")
    world.train(0)
    kept = world.scores(0)
    assert not world.probe(0, scores=kept).fails
    assert not world.probe(0, scores=kept).fails, "of one version it may score twice"
    named = []
    for version in range(every, 9 * every, every):
        world.learned[version - 1] = world.learned[version - every]  # others are not probed
        world.train(version)
        named.append(world.probe(version, scores=kept).nearest)
    assert named[versions - 1 :] == [0] * (9 - versions)


@pytest.mark.parametrize(
    ("size", "error"),
    [
        ("float32, steps of RL", 5e-6),
        ("float32, a deep model", 4e-4),
        ("bfloat16", 0.4),
    ],
)
def test_a_small_fault_of_any_kind_is_named_by_what_the_run_showed_before(size, error):
    world = World(**SIZES[size])
    assert world.follow(5) == []
    world.train(5)
    wrong = [a + world.random.choice((-error, error)) for a in world.scores(5)]
    result = world.probe(5, scores=wrong)
    assert (result.fails, result.nearest) == (True, None)
    assert world.probe(5).fails is False


@pytest.mark.parametrize(("dtype", "nats"), [("float32", 1e-3), ("float16", 0.1), ("bfloat16", 1)])
def test_a_large_fault_is_named_at_the_first_version(dtype, nats):
    world = World(step=0.0, noise=0.0, dtype=dtype)
    world.train(0)
    assert world.probe(0, scores=[a + nats for a in world.scores(0)]).fails


def test_an_old_prefix_cache_is_named_and_one_token_of_other_experts_is_not():
    world = World(step=1e-3, noise=3e-7)
    assert world.follow(3) == []
    world.train(3)
    honest, old = world.scores(3), world.scores(2)
    assert world.probe(3, scores=honest, sampled=[old[end] for end in ENDS]).fails
    assert not world.probe(3, scores=honest, sampled=[honest[38], old[77]]).fails
    flipped = [-1.0 if place % 5 == 0 else score for place, score in enumerate(honest)]
    assert not world.probe(3, scores=flipped).fails


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_scores_that_are_not_finite_are_no_scores_of_the_version(value):
    world = World(step=0.0, noise=0.0)
    world.train(0)
    assert world.probe(0, scores=[value] * TOKENS).fails


def test_what_the_learner_did_not_score_or_scored_anew_is_compared_with_nothing_old():
    world = World(step=1e-2, noise=1e-7)
    for version in range(4):
        world.train(version)
    assert world.probe(7, scores=world.scores(3)) is None
    world.train(2)  # made again from an older checkpoint
    assert world.probe(3, scores=world.scores(3)) is None
    assert not world.probe(2).fails


def test_sequences_are_the_same_everywhere_and_more_of_them_reach_rare_experts():
    assert probe_sequences(MODEL, 511) == SEQUENCES
    assert {len(sequence) for sequence in SEQUENCES} == {40}
    assert {len(sequence) for sequence in probe_sequences(MODEL, 15)} == {15}
    tokens = [token for sequence in SEQUENCES for token in sequence]
    assert 0 <= min(tokens) <= max(tokens) < 50
    of_experts = SimpleNamespace(vocab_size=50, n_routed_experts=256)
    assert [len(probe_sequences(model, 99)) for model in (MODEL, of_experts)] == [2, 8]


@pytest.mark.parametrize(
    ("probing", "first", "later", "probes"),
    [
        ("always", 1.0, 1.0, 100),
        ("never", 0.0, 0.0, 0),
        ("auto", 0.001, 0.001, 100),
        ("auto", 30.0, 0.001, 100),
        ("auto", 0.05, 0.05, 11),
    ],
)
def test_probes_take_half_a_percent_of_the_time_by_the_fastest_so_far(
    monkeypatch, probing, first, later, probes
):
    """One version a second, a hundred of them."""
    now = [0.0]
    monkeypatch.setattr("weight_sync.probe.time.monotonic", lambda: now[0])
    budget, seconds = ProbeBudget(probing), []
    for version in range(100):
        now[0] = float(version)
        if budget.allows():
            seconds.append(later if seconds else first)
            with budget.spend():
                now[0] += seconds[-1]
    assert len(seconds) == probes
