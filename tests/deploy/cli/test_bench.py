"""`headway bench`: its names, the help of each benchmark, and what is refused."""

import dataclasses
import importlib
import json
import os
import subprocess
import sys

import pytest

from benchmarks.harness.record import reserve, store
from benchmarks.harness.study import Study
from deploy.cli.bench import BENCHMARKS, ROOT, start
from headway.errors import InputError
from tests.deploy.conftest import RECIPE


@pytest.fixture(params=sorted(BENCHMARKS))
def study(request) -> Study:
    """Return every benchmark."""
    module = importlib.import_module(f"benchmarks.{BENCHMARKS[request.param]}")
    assert module.STUDY.name == request.param
    return module.STUDY


def test_the_help_of_a_benchmark_names_it_and_explains_every_option(study, capsys):
    command = study.typer_command()
    assert [parameter.name for parameter in command.params if not parameter.help] == []
    with pytest.raises(SystemExit):
        command(["--help"], prog_name=f"headway bench {study.name}")
    assert f"headway bench {study.name}" in capsys.readouterr().out


HEAVY = {"torch", "ray", "vllm", "deepspeed", "transformers", "matplotlib", "scipy", "datasets"}


def test_the_help_of_no_benchmark_waits_for_a_heavy_library():
    program = (
        "import sys, importlib\n"
        "for module in sys.argv[1:]:\n"
        "    importlib.import_module(f'benchmarks.{module}').STUDY.typer_command()\n"
        f"    print(module, *sorted({HEAVY} & sys.modules.keys()))\n"
    )
    command = [sys.executable, "-c", program, *BENCHMARKS.values()]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.stdout.split() == list(BENCHMARKS.values()), result.stdout + result.stderr


def test_figures_that_could_not_be_stored_are_not_measured(study, tmp_path):
    (tmp_path / "file").touch()
    options = study.options(out=tmp_path / "file" / "below" / "x")
    with pytest.raises(InputError, match="cannot be written: Not a directory"):
        dataclasses.replace(study, plan=lambda options: options, measure=_must_not_measure).run(
            options
        )


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
        "there are agents, async, chaos, checkpoint, episodes, generate, lora, metrics, peers, "
        "plan, presets, queue, rewards, scale, staleness, train, update-pause, weight-sync"
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
        (["--rounds", "0"], "Invalid value for '--rounds'"),
        (["--bounds", "0,two"], "two must be a whole number, at least 0"),
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
    assert result.stderr.count("headway: ") + result.stderr.count("Error: ") == 1
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []
