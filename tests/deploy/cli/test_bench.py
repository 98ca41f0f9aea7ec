"""`headway bench`: what it refuses, and the figures of `headway bench async`, by hand."""

import dataclasses
import importlib
import json
import os
import subprocess
import sys

import pytest

from benchmarks.harness.provenance import reserve, store
from benchmarks.harness.study import Study
from benchmarks.loop.run_figures import (
    actors_limit,
    compare_with_limits,
    generation,
    medians,
    samples_per_second,
    training,
)
from deploy.cli.app import app
from deploy.cli.bench import BENCHMARKS, ROOT, start
from deploy.report.summary import WARM_UP
from headway.errors import InputError
from tests.deploy.conftest import RECIPE


def rows(seconds=2.0, rollouts=10, tokens=200, count=WARM_UP + 4):
    """Long warm-up batches, then equal ones: half a second of waiting, one of training."""
    ends = [100.0 * (step + 1) for step in range(WARM_UP)]
    ends += [ends[-1] + seconds * (step + 1) for step in range(count - WARM_UP)]
    return [
        {
            "version": version,
            "wait_started_at": end - 1.5,
            "wait_finished_at": end - 1.0,
            "step_started_at": end - 1.0,
            "step_finished_at": end,
            "rollouts_trained": rollouts,
            "tokens_trained": tokens,
            "lag_mean": 1.5,
            "max_lag": 2,
            "ess": 0.9,
            "kl": 0.25,
            "reward_mean": 0.5,
        }
        for version, end in enumerate(ends)
    ]


def test_the_warm_up_is_left_out_of_every_figure():
    assert samples_per_second(rows(seconds=2.0, rollouts=10)) == pytest.approx(5.0)
    figures = training(rows(), actors_idle=0.25)
    assert figures["learner_idle"] == pytest.approx(0.5 / 2.0)
    assert figures["learner_step_seconds"] == pytest.approx(1.0)
    assert figures["learner_other_seconds"] == pytest.approx(0.5)
    assert (figures["lag_mean"], figures["lag_max"]) == (pytest.approx(1.5), 2)
    assert figures["tokens_per_rollout"] == 20.0
    assert figures["kl"] == 0.25
    assert len(figures["raw"]["step_finished_at"]) == WARM_UP + 4


def test_the_limit_of_actors_counts_a_fixed_time_and_a_time_for_each_token():
    # 10 ms a rollout and 1 ms a token: 50/s at 10 tokens, 20/s at 40 tokens, 25/s at 30.
    initial = generation(rows(seconds=1.0, rollouts=50, tokens=500))
    trained = generation(rows(seconds=1.0, rollouts=20, tokens=800))
    limit = actors_limit(initial, trained, tokens=30.0)
    assert limit["samples_per_second"] == pytest.approx(25.0)
    assert limit["by_tokens_of_initial_policy"] == pytest.approx(500 / 30)
    assert limit["by_tokens_of_trained_policy"] == pytest.approx(800 / 30)


@pytest.mark.parametrize(
    "trained",
    [(50, 500), (60, 1200)],
    ids=["the same length tells nothing", "longer and yet faster"],
)
def test_the_limit_of_actors_falls_back_on_tokens(trained):
    rollouts, tokens = trained
    initial = generation(rows(seconds=1.0, rollouts=50, tokens=500))
    other = generation(rows(seconds=1.0, rollouts=rollouts, tokens=tokens))
    limit = actors_limit(initial, other, tokens=20.0)
    assert limit["samples_per_second"] == pytest.approx((500 / 20 + tokens / 20) / 2)


def one_round(speed):
    limits = {"actors": {"samples_per_second": 10.0}, "learner_samples_per_second": 8.0}
    figures = {"0": {"samples_per_second": speed}, "2": {"samples_per_second": 2 * speed}}
    return compare_with_limits(figures, limits)


def test_an_arm_is_held_against_the_smaller_limit_of_its_own_round():
    result = one_round(4.0)
    assert result["limits"]["samples_per_second"] == 8.0
    assert [result["arms"][name]["ratio_to_limit"] for name in ("0", "2")] == [0.5, 1.0]


def test_medians_are_taken_over_rounds_figure_by_figure():
    middle = medians([one_round(4.0), one_round(1.0), one_round(2.0)])
    assert middle["arms"]["2"] == {"samples_per_second": 4.0, "ratio_to_limit": 0.5}
    assert middle["limits"] == {"actors": 10.0, "learner": 8.0, "samples_per_second": 8.0}


def test_the_help_names_every_benchmark(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert app(["bench", "--help"], standalone_mode=False) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert all(f" {name}" in text for name in BENCHMARKS), text


@pytest.fixture(params=sorted(BENCHMARKS))
def study(request) -> Study:
    """Return every benchmark."""
    module = importlib.import_module(f"benchmarks.{BENCHMARKS[request.param]}")
    assert module.STUDY.name == request.param
    return module.STUDY


def test_the_help_of_a_benchmark_names_it_and_explains_every_option(study):
    parser = study.parser()
    assert parser.prog == f"headway bench {study.name}"
    settings = ["settings"]  # --set KEY=VALUE explains itself
    assert [action.dest for action in parser._actions if not action.help] in ([], settings)
    assert f"headway bench {study.name}" in parser.format_help()


HEAVY = {"torch", "ray", "vllm", "deepspeed", "transformers", "matplotlib", "scipy", "datasets"}


def test_the_help_of_no_benchmark_waits_for_a_heavy_library():
    program = (
        "import sys, importlib\n"
        "for module in sys.argv[1:]:\n"
        "    importlib.import_module(f'benchmarks.{module}').STUDY.parser().format_help()\n"
        f"    print(module, *sorted({HEAVY} & sys.modules.keys()))\n"
    )
    command = [sys.executable, "-c", program, *BENCHMARKS.values()]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.stdout.split() == list(BENCHMARKS.values()), result.stdout + result.stderr


def test_figures_that_could_not_be_stored_are_not_measured(study, tmp_path):
    (tmp_path / "file").touch()
    options = study.parse(["--out", str(tmp_path / "file" / "below" / "x")])
    with pytest.raises(InputError, match="cannot be written: Not a directory"):
        dataclasses.replace(study, check=None, measure=_must_not_measure).run(options)


def _must_not_measure(options):
    pytest.fail("it was measured")


def test_the_folder_of_figures_is_made_before_they_are_measured(tmp_path):
    file = tmp_path / "a" / "b" / "c.json"
    reserve(file)
    assert list(file.parent.iterdir()) == []
    store({"figure": 1}, file)
    reserve(file)
    assert json.loads(file.read_text()) == {"figure": 1}
    with pytest.raises(InputError):
        reserve(file.parent)


def test_an_unknown_benchmark_names_those_there_are():
    known = (
        "there are async, chaos, checkpoint, episodes, generate, lora, metrics, plan, presets, "
        "queue, rewards, scale, staleness, train, update-pause, versus-trl, "
        "weight-sync"
    )
    with pytest.raises(InputError, match=known):
        start("speed", [])


def test_an_installed_package_says_that_benchmarks_need_a_checkout(tmp_path):
    with pytest.raises(InputError, match=r"has no benchmarks/broker/queue\.py: .*checkout"):
        start("queue", [], root=tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "6"], "--steps 6 must be at least 7"),
        (["--rounds", "0"], "--rounds 0 must be at least 1"),
        (["--bounds", "0,two"], "--bounds '0,two': give whole numbers"),
        (["--set", "actors.cors=1"], "did you mean 'cores'"),
        ([str(RECIPE), "--set", "deploy.ray_address=h:1"], "needs actors.cores and learner.cores"),
        (["--set", 'actors.reward=["my_task:score"]'], "cannot import my_task"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(tmp_path, arguments, message):
    program = "from deploy.cli import main; main()"
    command = [sys.executable, "-c", program, "bench", "async", *arguments]
    result = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (result.returncode, message in result.stderr) == (2, True), result.stderr
    assert result.stderr.count("headway: ") == 1
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []
