"""Engines that drift are named soon, and honest ones are not, whatever the noise."""

import asyncio
import math
from types import SimpleNamespace

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from deploy.driver.engine_drift import DriftDetector, DriftWatch, probe_check
from deploy.driver.run_metrics import RunMetrics
from learner.config.lora import LoraConfig
from learner.diagnostics.batch_report import EngineFigures
from learner.diagnostics.engine_comparison import compare
from tests.deploy.driver.contexts import make_context, output
from weight_sync.config import WeightSyncConfig
from weight_sync.probe import LEARNER, ProbeReport, ProbeResult, probe_sequences

BATCHES = 20
"""Batches within which a drifting engine is to be named."""


class Noise:
    """Made-up mismatches of groups: the noise of logits times the uncertainty of tokens."""

    def __init__(self, seed=0, *, groups=8, rollouts=4, tokens=20, spread=0.5, hard=(0.5, 0.5)):
        self.rng = np.random.default_rng(seed)
        self.groups, self.rollouts, self.tokens = groups, rollouts, tokens
        self.spread, self.hard = spread, hard
        """Standard deviation of the logarithm of the noise of a group; each engine's share of hard
        prompts, after which tokens are uncertain."""

    def batch(self, wrong=None, factor=1.0, floor=0.01):
        """Return the figures of each engine; that of `wrong` has `factor` times the noise."""
        by_engine = {}
        for engine in self.rng.integers(0, len(self.hard), self.groups).tolist():
            shape = (3, 2) if self.rng.random() < self.hard[engine] else (0.3, 6)
            count = self.rollouts * int(self.rng.integers(1, self.tokens + 1))
            uncertainty = self.rng.beta(*shape, count)
            noise = floor * math.exp(self.spread * self.rng.normal())
            noise *= factor if engine == wrong else 1.0
            difference = np.abs(self.rng.standard_t(3, count)) * noise * uncertainty
            value = difference.sum() / (uncertainty.sum() + 0.01 * count)
            by_engine.setdefault(f"engine-{engine}", []).append(float(value))
        compared = {}
        for engine, own in by_engine.items():
            others = [x for name, values in by_engine.items() if name != engine for x in values]
            score, ratio = compare([(own, others)])
            compared[engine] = figures(score, ratio)
        return compared


def figures(score, ratio):
    return EngineFigures(
        mismatch_fresh=None, tokens_fresh=0, rank_score=score, mismatch_ratio=ratio
    )


def batches_until_named(noise, **wrong):
    """Return how many batches it takes until the wrong engine, and nobody else, is named."""
    detector = DriftDetector("alert", resends=True)
    for version in range(3 * BATCHES):
        if findings := detector.observe(version, noise.batch(wrong=1, **wrong)):
            assert [finding.engine_id for finding in findings] == ["engine-1"]
            return version + 1
    return math.inf


@pytest.mark.parametrize(
    ("settings", "wrong"),
    [
        ({"groups": 16}, {"factor": 3.0}),
        ({"groups": 8}, {"factor": 4.0}),
        ({"groups": 8, "hard": (0.5,) * 4}, {"factor": 6.0}),
        ({"groups": 4}, {"factor": 1e3}),
        ({"groups": 64, "hard": (0.5,) * 64}, {"factor": 1e3}),
        ({"groups": 8, "spread": 1.5}, {"factor": 1e3}),
        ({"groups": 8}, {"factor": 1e5, "floor": 1e-7}),
        ({"groups": 2, "rollouts": 2, "tokens": 8}, {"factor": 1e6, "floor": 1e-7}),
    ],
)
def test_an_engine_that_drifts_is_named_within_20_batches(settings, wrong):
    taken = [batches_until_named(Noise(seed, **settings), **wrong) for seed in range(20)]
    print(f"{np.mean(taken):.1f} batches on average, {max(taken)} at most")
    assert max(taken) <= BATCHES


HONEST = {
    "plain": {},
    "two groups of few tokens": {"groups": 2, "rollouts": 1, "tokens": 2, "spread": 2.0},
    "noise of one group ten times that of another": {"groups": 4, "spread": 2.0},
    "many engines": {"groups": 16, "hard": (0.5,) * 8},
    "one engine has the hard prompts": {"groups": 8, "hard": (0.1, 0.9)},
    "another has the easy ones": {"groups": 12, "hard": (0.9, 0.9, 0.9, 0.1)},
}


@pytest.mark.parametrize("settings", HONEST)
def test_engines_that_serve_the_same_weights_are_not_named_in_a_thousand_batches(settings):
    noise, detector = Noise(**HONEST[settings]), DriftDetector("alert", resends=True)
    assert not [f for version in range(1_000) for f in detector.observe(version, noise.batch())]


def test_the_evidence_alone_errs_as_seldom_as_its_bound_says():
    """The size of the mismatch is left out: every batch says a million times."""
    noise, alarms, batches, limit = Noise(3, groups=6), 0, 4_000, math.log(20)
    evidence = {}
    for _ in range(batches):
        for engine, figure in noise.batch().items():
            if figure.rank_score is not None:
                evidence[engine] = max(evidence.get(engine, 0.0) + figure.rank_score - 0.5, 0.0)
            if evidence.get(engine, 0.0) >= limit:
                alarms, evidence[engine] = alarms + 1, 0.0
    assert 0 < alarms < 2 * batches / 20


WRONG, RIGHT, NOTHING = figures(2.5, 1e4), figures(-0.7, 1.0), figures(None, None)


def responses(setting, *, engine=WRONG, batches=60, delay=5, resends=True, well_after=math.inf):
    """Return version and response of each finding; every response takes `delay` batches."""
    detector, made, due = DriftDetector(setting, resends=resends), [], {}
    for version in range(batches):
        if version in due:
            detector.settle("engine-1", version)
        bad = engine if version < well_after else RIGHT
        for finding in detector.observe(version, {"engine-0": RIGHT, "engine-1": bad}):
            made.append((version, finding.response))
            due[version + delay] = True
    return made, detector.named


@pytest.mark.parametrize(
    ("setting", "batches", "resends", "expected"),
    [
        ("alert", 60, True, [(1, "alert")]),
        ("resend", 18, True, [(1, "resend"), (7, "resend"), (13, "resend")]),
        ("restart", 24, True, [(1, "resend"), (7, "restart"), (13, "resend"), (19, "restart")]),
        ("restart", 18, False, [(1, "restart"), (7, "restart"), (13, "restart")]),
    ],
)
def test_the_response_is_that_of_the_recipe_and_nothing_is_counted_until_it_is_over(
    setting, batches, resends, expected
):
    made, named = responses(setting, batches=batches, resends=resends)
    assert made == expected
    assert named == {"engine-0": False, "engine-1": True}


def test_an_engine_that_is_well_again_is_no_longer_named():
    made, named = responses("restart", well_after=3, batches=20)
    assert (made, named["engine-1"]) == ([(1, "resend")], True)
    made, named = responses("restart", well_after=3, batches=40)
    assert (made, named["engine-1"]) == ([(1, "resend")], False)


def test_batches_without_a_comparison_change_nothing():
    assert responses("alert", engine=NOTHING)[0] == []


class Supervisor:
    def __init__(self, number, events):
        self.engine_id, self.events = f"engine-{number}", events

    async def resend(self):
        self.events.append(("resend", self.engine_id))

    def restart(self, reason):
        self.events.append(("restart", self.engine_id))


async def test_the_driver_says_what_it_found_and_does_what_the_recipe_says(tmp_path):
    context, events = make_context(tmp_path, on_drift="restart"), []
    watch = DriftWatch(context, [Supervisor(number, events) for number in range(2)])

    def batch(version):
        engines = {"engine-0": RIGHT, "engine-1": WRONG, "engine-2": WRONG}
        return SimpleNamespace(version=version, report=SimpleNamespace(engines=engines))

    following = asyncio.create_task(watch.follow())
    for version in range(18):
        context.record.batches.append(batch(version))
        watch.observe(context.record.batches[-1:])
        for _ in range(3):
            await asyncio.sleep(0)  # let `follow` respond
    following.cancel()
    assert events == [("resend", "engine-1"), ("restart", "engine-1"), ("resend", "engine-1")]
    assert context.record.drifting == {"engine-0": False, "engine-1": True}
    registry = CollectorRegistry()
    registry.register(RunMetrics(context.record, tmp_path, list))
    for number in range(2):
        labels = {"engine": f"engine-{number}"}
        assert registry.get_sample_value("headway_engine_drift", labels) == number
    printed = output(context)
    assert "engine-1 drifts: its log-probabilities differ from the learner's 144 times" in printed
    assert "its actor is restarted" in printed
    assert "engine-0" not in printed


def result(version, *, wrong, engine="engine-1", nearest=None):
    return ProbeResult(
        engine_id=engine, version=version, difference=0.5 if wrong else 1e-7, tolerance=1e-6,
        nearest=nearest,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("setting", "resends", "expected"),
    [
        ("alert", True, {2: "alert", 6: "alert"}),
        ("resend", True, {2: "resend", 4: "resend", 6: "resend"}),
        ("restart", True, {2: "resend", 4: "restart", 6: "resend"}),
        ("restart", False, {2: "restart", 4: "restart", 6: "restart"}),
    ],
)
def test_an_engine_whose_probe_fails_is_responded_to_until_one_passes(setting, resends, expected):
    """Versions 2, 3, 4, 6 and 7 are wrong, and every response takes one version."""
    detector, made = DriftDetector(setting, resends=resends), {}
    for version in range(8):
        detector.settle("engine-1", 0) if version - 2 in made else None
        honest = result(version, wrong=False, engine="engine-0")
        assert detector.probed(honest) is None
        if finding := detector.probed(result(version, wrong=version in (2, 3, 4, 6, 7))):
            made[version] = finding.response
        assert detector.named == {"engine-0": False, "engine-1": version not in (0, 1, 5)}
    assert made == expected


async def test_one_engine_alone_with_old_weights_is_named_at_once_with_their_version(tmp_path):
    context, events = make_context(tmp_path, on_drift="resend"), []
    watch = DriftWatch(context, [Supervisor(number, events) for number in range(2)])
    scores = [tuple(-4 + 0.01 * place + version / 100 for place in range(78)) for version in (0, 1)]
    last = [(of[38], of[77]) for of in scores]
    shared = {"sequences": probe_sequences(SimpleNamespace(vocab_size=50), None)}

    def reports(version, served):
        learned = {"source": LEARNER, "version": version, "scores": scores[version]}
        sampled = {"scores": scores[served], "sampled": last[served]}
        yield ProbeReport(**learned, **shared)
        yield ProbeReport(source="engine-0", version=version, **sampled, **shared)

    following = asyncio.create_task(watch.follow())
    results, found = watch.probed(reports(0, served=0))
    assert ([probe.fails for probe in results], found) == ([False], [])
    [probe], [found] = watch.probed(reports(1, served=0))
    await asyncio.sleep(0)
    following.cancel()
    assert (probe.fails, probe.nearest, found.response) == (True, 0, "resend")
    assert events == [("resend", "engine-0")]
    registry = CollectorRegistry()
    registry.register(RunMetrics(context.record, tmp_path, list))
    values = {
        name: registry.get_sample_value(f"headway_{name}", {"engine": "engine-0"})
        for name in ("engine_drift", "probe_difference", "probe_tolerance", "probe_failures_total")
    }
    assert values == {
        "engine_drift": 1, "probe_difference": pytest.approx(0.01),
        "probe_tolerance": probe.tolerance, "probe_failures_total": 1,
    }  # fmt: skip
    assert (
        "engine-0 does not serve the weights of version 1: its log-probabilities of the probe "
        "differ from the learner's by 0.01 nats, where rounding explains "
    ) in output(context)
    assert "and are those of version 0; it is sent the newest weights again" in output(context)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 1e-4),
        ({"learner": "bfloat16"}, 0.25),
        ({"learner": "bfloat16", "actors": "bfloat16"}, 0.25),
        ({"wire": "bfloat16"}, 0.25),
        ({"lora": LoraConfig()}, 1e-4),
        ({"options": {"kv_cache_dtype": "fp8_e5m2"}}, 4.0),
        ({"options": {"kv_cache_dtype": "nvfp4"}}, 4.0),
        ({"options": {"kv_cache_dtype": "bfloat16"}}, 0.25),
        ({"options": {"kv_cache_dtype": "auto"}}, 1e-4),
    ],
)
def test_the_tolerance_is_that_of_the_coarsest_dtype(tmp_path, settings, expected):
    context = make_context(tmp_path)
    config = context.config
    config.learner.dtype = settings.get("learner", "float32")
    config.learner.lora = settings.get("lora")
    config.actors.dtype = settings.get("actors", "float32")
    config.actors.vllm_options = settings.get("options", {})
    config.weight_sync = WeightSyncConfig(wire_dtype=settings.get("wire", "as_trained"))
    assert probe_check(context).limit == pytest.approx(expected)
