"""What ships for Prometheus: a run is found once, and alerts speak only of what is wrong."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[3]
SHIPPED = ROOT / "deploy" / "monitoring"
RULES = SHIPPED / "rules.yml"
PLACES = f"{ROOT / '.prometheus' / 'usr' / 'bin'}:{os.environ['PATH']}"
PROMTOOL = shutil.which("promtool", path=PLACES)


def test_a_run_is_found_by_one_job_alone():
    jobs = yaml.safe_load((SHIPPED / "prometheus.yml").read_text())["scrape_configs"]
    assert [job["job_name"] for job in jobs] == ["headway", "ray"]


def series(name, value, **labels):
    inside = ",".join(f'{key}="{text}"' for key, text in labels.items())
    return {"series": f"{name}{{{inside}}}", "values": value}


def up(process, value, **labels):
    labels |= {"run": "r", "process": process, "role": process.partition("-")[0]}
    return series("up", value, **labels)


def firing(folder, alert, given, at="30m"):
    """Return the labels with which an alert fires, as Prometheus' own tool computes it."""
    no_alert = {"eval_time": at, "alertname": alert, "exp_alerts": []}
    test = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "1m",
        "tests": [{"interval": "1m", "input_series": given, "alert_rule_test": [no_alert]}],
    }
    file = folder / "test.yml"
    file.write_text(json.dumps(test))
    said = subprocess.run(
        [PROMTOOL, "test", "rules", file], capture_output=True, text=True, timeout=60
    )
    assert "FAILED" in said.stdout + said.stderr or said.returncode == 0, said.stderr
    return said.returncode != 0


needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="make test-prometheus fetches it")


@needs_promtool
def test_a_process_is_down_where_others_answer_and_not_where_the_run_has_ended(tmp_path):
    one = [up("driver", "1x60"), up("actor-0", "0x60")]
    ended = [up("driver", "1x5 0x55"), up("actor-0", "1x5 0x55")]
    assert firing(tmp_path, "HeadwayProcessDown", one)
    assert not firing(tmp_path, "HeadwayProcessDown", ended)


@needs_promtool
@pytest.mark.parametrize("purpose", [{}, {"purpose": "evaluate"}])
def test_an_actor_that_only_evaluates_may_be_idle_and_stale(tmp_path, purpose):
    idle = series(
        "headway_idle_seconds_total", "0+60x60", run="r", process="actor-1", on="leases", **purpose
    )
    versions = [
        series("headway_version", "9x60", run="r", process="broker"),
        series("headway_engine_version", "1x60", run="r", process="broker", engine="engine-1"),
        series("headway_max_staleness", "2x60", run="r", process="driver"),
        up("actor-1", "1x60", **purpose),
    ]
    assert firing(tmp_path, "HeadwayActorIdle", [idle]) is not bool(purpose)
    assert firing(tmp_path, "HeadwayEngineStale", versions) is not bool(purpose)


@needs_promtool
def test_an_engine_that_drifts_is_named_and_others_are_not(tmp_path):
    given = [
        series("headway_engine_drift", value, run="r", process="driver", engine=engine)
        for engine, value in (("engine-0", "0x60"), ("engine-1", "0x10 1x50"))
    ]
    assert firing(tmp_path, "HeadwayEngineDrifts", given)
    assert not firing(tmp_path, "HeadwayEngineDrifts", given[:1])
    assert not firing(tmp_path, "HeadwayEngineDrifts", given, at="5m")


@needs_promtool
def test_a_reward_that_is_hacked_is_named(tmp_path):
    hacked = series("headway_reward_hackings_total", "0x10 1x50", run="r", process="driver")
    assert firing(tmp_path, "HeadwayRewardHacked", [hacked])
    assert not firing(tmp_path, "HeadwayRewardHacked", [hacked], at="5m")


@needs_promtool
def test_the_first_restart_of_every_process_counts(tmp_path):
    restarts = [
        series(
            "headway_restarts_total", "0x10 1x50", run="r", restarted=f"actor-{index}",
            restarted_role="actor",
        )
        for index in range(4)
    ]  # fmt: skip
    assert firing(tmp_path, "HeadwayRestartsOften", restarts)
    assert not firing(tmp_path, "HeadwayRestartsOften", restarts[:3])


@needs_promtool
def test_much_that_agents_sample_and_does_not_train_is_told(tmp_path):
    def lost(rate):
        name = "headway_agent_tokens_left_out_total"
        return [
            series(name, f"0+{rate}x60", run="r", process="actor-0", reason="undelivered"),
            series(name, "0x60", run="r", process="actor-0", reason="interrupted"),
            *(series("headway_tokens_generated_total", "0+50x60", run="r", process=f"actor-{n}")
              for n in range(2)),
        ]  # fmt: skip

    assert firing(tmp_path, "HeadwayAgentTokensLeftOut", lost(12))
    assert not firing(tmp_path, "HeadwayAgentTokensLeftOut", lost(10))
    assert not firing(tmp_path, "HeadwayAgentTokensLeftOut", lost(0))
