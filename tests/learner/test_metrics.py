"""What the learner shows of trained batches."""

from prometheus_client import CollectorRegistry

from learner.diagnostics.batch_report import TrainedBatch
from learner.metrics import LearnerMetrics


def engine(**figures):
    return {"rank_score": 0.5, "mismatch_ratio": 1.0, **figures}


def batch(**changes):
    row = {
        "version": 0,
        "weights_checksum": "",
        "tokens_trained": 10,
        "rollouts_trained": 4,
        "optimizer_steps": 1,
        "tied_groups": 0.0,
        "unscored": 1,
        "lag_histogram": {"0": 7, "3": 3},
        "group_lag_histogram": {"0": 1, "3": 1},
        "reward_mean": 0.5,
        "ess": None,
        "kl_fresh": 0.25,
        "kl_stale": None,
        "fractions": {"capped": 0.125, "rejected": None},
        "learning_rate": 1e-4,
        "reward_parts": {"style": 0.25, "judge": None},
        "teacher_divergence": {"~/teacher": 0.75, "other": None},
        "engines": {
            "engine-0": engine(mismatch_fresh=1e-6, tokens_fresh=7),
            "engine-1": engine(mismatch_fresh=None, tokens_fresh=0),
        },
        "wait_started_at": 100.0,
        "wait_finished_at": 101.0,
        "step_started_at": 101.0,
        "step_finished_at": 103.0,
        "published_at": 103.5,
        **changes,
    }
    return TrainedBatch.from_dict(row)


def test_counts_add_up_over_batches_and_figures_are_the_newest():
    metrics, registry = LearnerMetrics(), CollectorRegistry()
    registry.register(metrics)
    metrics.observe(batch())
    metrics.observe(batch(reward_mean=0.75, lag_histogram={"20": 10}))

    def value(name, **labels):
        return registry.get_sample_value(f"headway_{name}", labels)

    assert value("batches_trained_total") == 2
    assert value("tokens_trained_total") == 20
    assert value("unscored_total") == 2
    assert value("reward_mean") == 0.75
    assert value("ess") is None
    assert value("origin_kl", origin="fresh") == 0.25
    assert value("origin_kl", origin="stale") is None
    assert value("token_fraction", kind="capped") == 0.125
    assert value("token_fraction", kind="rejected") is None
    assert value("learning_rate") == 1e-4
    assert value("reward_part", part="style") == 0.25
    assert value("reward_part", part="judge") is None
    assert value("teacher_divergence", teacher="~/teacher") == 0.75
    assert value("teacher_divergence", teacher="other") is None
    assert value("mismatch_fresh", engine="engine-0") == 1e-6
    assert value("mismatch_fresh", engine="engine-1") is None
    assert value("learner_seconds_total", phase="wait") == 2
    assert value("learner_seconds_total", phase="step") == 4
    assert value("learner_seconds_total", phase="publish") == 1
    assert value("token_lag_bucket", le="0.0") == 7
    assert value("token_lag_bucket", le="3.0") == 10
    assert value("token_lag_bucket", le="16.0") == 10
    assert value("token_lag_bucket", le="+Inf") == 20
    assert value("token_lag_sum") == 209
    assert value("group_lag_bucket", le="2.0") == 2
    assert value("group_lag_bucket", le="3.0") == 4
    assert value("group_lag_sum") == 6


def test_a_learner_that_has_trained_nothing_shows_zeros_and_no_figures():
    registry = CollectorRegistry()
    registry.register(LearnerMetrics())
    assert registry.get_sample_value("headway_batches_trained_total") == 0
    assert registry.get_sample_value("headway_token_lag_count") == 0
    assert registry.get_sample_value("headway_reward_mean") is None
