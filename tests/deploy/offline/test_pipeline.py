"""A pipeline does what is left of it, and refuses what does not fit what is done."""

import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace

import pytest

from deploy.config.pipeline import load_pipeline
from deploy.errors import RunFailed
from deploy.offline import pipeline as module
from deploy.offline.pipeline import PipelineRun, todo
from deploy.report.pipeline_report import pipeline_report, rows_of
from deploy.storage.stage_records import DoneStage
from headway.errors import InputError

ROAD = """
name = "road"
[set]
prefer = { pairs = "lettered_chain_sum" }
[[stages]]
name = "warm"
command = "sft"
recipe = "demo"
[[stages]]
name = "liked"
command = "prefer"
recipe = "demo"
[[stages]]
name = "policy"
command = "run"
recipe = "demo"
[scores]
recipe = "demo"
"""
COMMANDS = """
import json, os, signal, sys, time
from pathlib import Path
command, *rest = sys.argv[1:]
here = Path(__file__).parent
with (here / "calls").open("a") as calls:
    calls.write(json.dumps([command, *rest]) + "\\n")
if (wait := here / f"{command}-waits").exists():
    code = int(wait.read_text())
    wait.unlink()
    signal.signal(signal.SIGRTMIN, lambda *_: sys.exit(code))
    (here / "waiting").touch()
    time.sleep(60)
if (fault := here / f"{command}-fails").exists():
    fault.unlink()
    sys.exit(2)
made = {"sft": "road-sft/model", "prefer": "road-prefer/model", "run": "policy"}
if command in made:
    folder = here / "runs/road" / made[command]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.toml").write_text("")
elif command == "export":
    Path(rest[-1]).mkdir()
else:
    score = {"value": 0.5, "low": 0.4, "high": 0.6, "n": 100}
    print(json.dumps({"sets": {"heldout": {"mean": score}}}))
"""


@pytest.fixture
def road(tmp_path, monkeypatch):
    (tmp_path / "commands.py").write_text(COMMANDS)
    (tmp_path / "road.toml").write_text(ROAD)
    monkeypatch.setattr(module, "LAUNCHER", [sys.executable, str(tmp_path / "commands.py")])
    return load_pipeline(str(tmp_path / "road.toml"), tmp_path / "runs")


@pytest.fixture
def play(road, tmp_path):
    """Provide a function that does a pipeline, and returns the commands that were called."""

    def play(pipeline=road, redo=()):
        (tmp_path / "calls").write_text("")
        PipelineRun(pipeline, "headway pipeline road.toml", lambda line: None).run(redo)
        return calls()

    def calls():
        rows = map(json.loads, (tmp_path / "calls").read_text().splitlines())
        return [(row[0], *({"--replace", "--resume"} & set(row))) for row in rows]

    play.calls = calls
    return play


WHOLE = [
    ("sft",), ("eval",), ("prefer",), ("eval",), ("run", "--resume"), ("export",), ("eval",),
]  # fmt: skip


def test_stages_are_done_in_order_scored_and_then_left_out(play, road, tmp_path):
    assert play() == WHOLE
    assert play() == []
    done = PipelineRun(road, "", print).run()
    assert [*done] == ["warm", "liked", "policy"]
    assert rows_of(done)["heldout, mean"] == ["0.500 (0.400 to 0.600)"] * 3
    page = pipeline_report(road, done).read_text()
    assert "road: 3 of 3 stages" in page
    assert "0.500 (0.400 to 0.600)" in page
    assert "policy: its own page is policy/report.html" in page


def test_what_is_made_but_not_scored_has_the_settings_it_was_made_with(play, road, tmp_path):
    (tmp_path / "eval-fails").touch()
    with pytest.raises(RunFailed):
        play()
    warm, *others = road.stages
    changed = replace(warm, config=warm.config.model_copy(update={"seed": 7}))
    with pytest.raises(InputError, match="'warm' is done, but with seed = 0, not 7; --redo warm"):
        play(replace(road, stages=(changed, *others)))
    assert play() == WHOLE[1:]


def test_another_suite_scores_what_is_done_again(play, road):
    play()
    assert play(replace(road, scores=(*road.scores, "--samples", "9"))) == [("eval",)] * 3
    assert play(replace(road, scores=None)) == []


@pytest.mark.parametrize("command", ["sft", "prefer", "run", "export", "eval"])
def test_a_stage_that_failed_goes_on_where_it_was(play, tmp_path, command):
    (tmp_path / f"{command}-fails").touch()
    with pytest.raises(RunFailed, match=rf"headway {command} .*exit code 2\n.*go on with: headway"):
        play()
    failed = play.calls()
    assert failed[-1][0] == command
    whole = [*failed[:-1], *play()]
    assert [call for call in whole if call[0] != "run"] == [it for it in WHOLE if it[0] != "run"]


@pytest.mark.parametrize("code_of_command", ["130", "0"])
def test_an_interrupt_ends_the_command_first(road, tmp_path, code_of_command):
    (tmp_path / "prefer-waits").write_text(code_of_command)
    code = (
        "import sys; from deploy.offline import pipeline; from pathlib import Path\n"
        "from deploy.config.pipeline import load_pipeline\n"
        "from deploy.errors import Interrupted\n"
        "from deploy.runtime.signals import raise_interrupts\n"
        "raise_interrupts()\n"
        f"pipeline.LAUNCHER[:] = [sys.executable, {str(tmp_path / 'commands.py')!r}]\n"
        f"road = load_pipeline({str(tmp_path / 'road.toml')!r}, Path({str(tmp_path / 'runs')!r}))\n"
        "try: pipeline.PipelineRun(road, 'headway pipeline', print).run()\n"
        "except Interrupted as error: print(error); sys.exit(130)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], text=True, stdout=subprocess.PIPE, cwd=os.getcwd()
    )
    waiting = tmp_path / "waiting"
    deadline = threading.Event()
    while not waiting.exists() and process.poll() is None:
        deadline.wait(0.05)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert output.endswith("stopped by the user\ngo on with: headway pipeline\n")


def test_what_is_redone_takes_with_it_what_was_made_of_it(play):
    play()
    assert play(redo=["liked"]) == [
        ("prefer", "--replace"), ("eval",), ("run", "--replace"), ("export",), ("eval",),
    ]  # fmt: skip
    assert play() == []


def test_a_stage_begun_anew_and_interrupted_is_resumed(play, tmp_path):
    play()
    (tmp_path / "export-fails").touch()
    with pytest.raises(RunFailed):
        play(redo=["policy"])
    assert play() == [("run", "--resume"), ("export",), ("eval",)]


def test_stages_that_do_not_fit_what_is_done_are_refused(road):
    def record(stage, at, **inputs):
        return DoneStage(stage.command, stage.config.settings(), inputs, at, 1.0, None)

    warm, liked, policy = road.stages
    whole = {
        "warm": record(warm, 1.0),
        "liked": record(liked, 2.0, warm=1.0),
        "policy": record(policy, 3.0, warm=1.0, liked=2.0),
    }
    assert todo(road.stages, {}, ()) == [warm, liked, policy]
    assert todo(road.stages, whole, ()) == []
    assert todo(road.stages, whole, ["liked"]) == [liked, policy]
    assert todo(road.stages, {"warm": whole["warm"]}, ()) == [liked, policy]
    other = replace(whole["liked"], settings={**whole["liked"].settings, "seed": 5})
    for done, message in (
        ({**whole, "liked": other}, "'liked' is done, but with seed = 5, not 0; --redo liked"),
        (
            {**whole, "warm": replace(whole["warm"], done_at=9.0)},
            "'liked' is done, but stage 'warm'",
        ),
        ({"liked": whole["liked"]}, "'liked' is done, but stage 'warm'"),
    ):
        with pytest.raises(InputError, match=message):
            todo(road.stages, done, ())
    with pytest.raises(InputError, match="--redo x: the stages are warm, liked, policy"):
        todo(road.stages, whole, ["x"])


def test_two_commands_do_not_work_on_one_pipeline(road, play):
    from headway.file_lock import locked

    road.folder.mkdir(parents=True)
    with locked(road.folder / ".pipeline.lock"), pytest.raises(InputError, match="another command"):
        play()
