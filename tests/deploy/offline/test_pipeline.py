"""A pipeline does what is left of it, and refuses what does not fit what is done."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from dataclasses import replace

import pytest

from deploy.config.loader import SHIPPED_RECIPES
from deploy.config.pipeline import load_pipeline
from deploy.errors import Interrupted, RunFailed
from deploy.offline import pipeline as module
from deploy.offline.pipeline import PipelineRun, todo
from deploy.report.pipeline_report import pipeline_report, rows_of
from deploy.runtime.session_process import PIPELINE, resume_hint
from deploy.storage.stage_records import DoneStage
from headway.errors import InputError
from tests.deploy.conftest import call_main

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
import json, os, shutil, signal, sys, time
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
if (stop := here / f"{command}-leaves-a-checkpoint").exists():
    stop.unlink()
    (here / "runs/road" / made[command]).parent.joinpath("unfinished/v000002").mkdir(parents=True)
    sys.exit(130)
if command in made:
    folder = here / "runs/road" / made[command]
    shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(folder.with_name("unfinished"), ignore_errors=True)
    folder.mkdir(parents=True)
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


@pytest.mark.parametrize(
    ("command", "function"),
    [
        ("sft", "deploy.offline.warm_start.warm_start"),
        ("prefer", "deploy.offline.preferences.prefer_model"),
        ("reward-model", "deploy.offline.reward_models.train_reward_models"),
    ],
)
def test_a_command_names_the_next_one_but_in_a_pipeline(command, function, monkeypatch, tmp_path):
    monkeypatch.setattr(function, lambda *_, **__: "made")
    assert "go on with: headway run demo" in call_main([command, "demo"], tmp_path).stdout
    assert "go on with: headway resume mine" in resume_hint("mine")
    monkeypatch.setenv(PIPELINE, "headway pipeline road.toml")
    said = call_main([command, "demo"], tmp_path).stdout + resume_hint("mine")
    assert "in made" in said
    assert "go on with" not in said


def test_commands_know_that_they_are_in_a_pipeline(play, tmp_path, monkeypatch):
    file = tmp_path / "commands.py"
    told = f"assert os.environ[{PIPELINE!r}] == 'headway pipeline road.toml'\n"
    file.write_text(file.read_text().replace("command, *rest", told + "command, *rest", 1))
    assert play() == WHOLE


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


@pytest.mark.parametrize("again", [(), ("liked",)], ids=["plain", "the same command"])
def test_a_stage_begun_anew_goes_on_from_its_checkpoint(play, tmp_path, again):
    play()
    (tmp_path / "prefer-leaves-a-checkpoint").touch()
    with pytest.raises(Interrupted):
        play(redo=["liked"])
    assert play.calls() == [("prefer", "--replace")]
    assert play(redo=again) == [
        ("prefer",), ("eval",), ("run", "--replace"), ("export",), ("eval",),
    ]  # fmt: skip
    assert play() == []


def test_a_checkpoint_of_what_an_earlier_stage_made_before_is_not_gone_on_from(play, tmp_path):
    (tmp_path / "prefer-leaves-a-checkpoint").touch()
    with pytest.raises(Interrupted):
        play()
    assert play(redo=["warm"]) == [
        ("sft", "--replace"), ("eval",), ("prefer", "--replace"), ("eval",),
        ("run", "--replace"), ("export",), ("eval",),
    ]  # fmt: skip


def test_marks_of_a_command_that_was_killed_while_it_wrote_them_are_completed(play, road):
    play()
    (road.folder / ".stages/liked.anew").touch()
    assert play() == [
        ("prefer", "--replace"), ("eval",), ("run", "--replace"), ("export",), ("eval",),
    ]  # fmt: skip


TASK = """
[prefer]
pairs = "liked.jsonl"
[heldout.sets.other]
source = "files"
options = { path = "other.jsonl" }
"""


@pytest.fixture
def task(play, tmp_path):
    """Return a function that does a pipeline whose stages share a recipe, with another text."""
    recipe = (SHIPPED_RECIPES / "demo.toml").read_text() + TASK
    sft = 'demonstrations = "lettered_chain_sum"\noptions = { worked_share = 0.4 }'
    assert sft in recipe
    recipe = recipe.replace(sft, 'demonstrations = "worked.jsonl"')
    text = ROAD.replace('"demo"', '"task.toml"').replace(
        'prefer = { pairs = "lettered_chain_sum" }', "seed = 0"
    )
    (tmp_path / "road.toml").write_text(text)
    for name in ("worked", "liked", "other"):
        (tmp_path / f"{name}.jsonl").write_text("1\n")

    def play_changed(old="", new="", **play_options):
        assert old in recipe
        (tmp_path / "task.toml").write_text(recipe.replace(old, new, 1))
        return play(load_pipeline(str(tmp_path / "road.toml"), tmp_path / "runs"), **play_options)

    assert play_changed() == WHOLE
    return play_changed


@pytest.mark.parametrize(
    ("file", "redo", "commands"),
    [
        ("worked", ["warm"], WHOLE),
        ("liked", ["liked"], WHOLE[2:]),
        ("other", ["warm"], WHOLE),
    ],
)
def test_another_data_file_of_a_stage_that_is_done_is_noticed(
    task, play, tmp_path, file, redo, commands
):
    data = tmp_path / f"{file}.jsonl"
    os.utime(data, (1, 1))
    assert task() == [], "it is the same"
    data.write_text("2\n")
    with pytest.raises(InputError) as refused:
        task()
    assert play.calls() == []
    assert re.findall("--redo (\\w+)", str(refused.value)) == redo
    assert f"another {file}.jsonl (2 bytes, " in str(refused.value)
    anew = [call[0] for call in task(redo=redo)]
    assert anew == [call[0] for call in commands]
    assert task() == []
    data.unlink()
    assert task() == [], "what is done needs it no more"


@pytest.mark.parametrize(
    ("old", "new", "redo"),
    [
        ("learning_rate = 3e-4", "learning_rate = 4e-4", ["policy"]),
        ("steps = 80", "steps = 90", ["policy"]),
        ("steps = 850", "steps = 900\ncheckpoint_every = 7", ["warm"]),
        ('pairs = "liked.jsonl"', 'pairs = "liked.jsonl"\nloss = "ipo"', ["liked"]),
        ("microbatch_tokens = 256", "microbatch_tokens = 256\ncheckpoint_every = 7", []),
        ("members = 2", "members = 3", []),
        ("seed = 0", "seed = 0\n# a comment", []),
    ],
)
def test_only_settings_that_the_command_of_a_stage_reads_count(task, old, new, redo):
    if not redo:
        assert task(old, new) == []
        return
    with pytest.raises(InputError) as refused:
        task(old, new)
    assert re.findall("--redo (\\w+)", str(refused.value)) == redo


def test_what_is_scored_by_another_suite_alone_is_scored_again(play, road, tmp_path):
    text = ROAD.replace('[scores]\nrecipe = "demo"', '[scores]\nrecipe = "suite.toml"')
    (tmp_path / "road.toml").write_text(text)
    suite = (SHIPPED_RECIPES / "demo.toml").read_text()
    sets = '\n[heldout.sets.other]\nsource = "files"\noptions = { path = "other.jsonl" }\n'
    (tmp_path / "other.jsonl").write_text("1\n")

    def scored(suite):
        (tmp_path / "suite.toml").write_text(suite)
        return play(load_pipeline(str(tmp_path / "road.toml"), tmp_path / "runs"))

    assert scored(suite) == WHOLE
    assert scored(suite.replace("learning_rate = 3e-4", "learning_rate = 4e-4")) == []
    assert scored(suite + sets) == [("eval",)] * 3
    (tmp_path / "other.jsonl").write_text("2\n")
    assert scored(suite + sets) == [("eval",)] * 3
    assert scored(suite + sets) == []


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
