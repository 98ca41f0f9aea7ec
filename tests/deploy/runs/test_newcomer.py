"""The path of a newcomer: what README.md says to type, in its order, and its cell in a notebook.

Commands and cell are taken from README's section "Your own task" as they stand there. What follows
an output is taken from that output. `make test-notebook` installs nbconvert and ipykernel for it.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.conftest import read_rows
from tests.waiting import until

README = (Path(__file__).parents[3] / "README.md").read_text()
SECTION = README.partition("\n## Your own task\n")[2].partition("\n## ")[0]
COMMANDS = re.findall(r"^    (headway .*?)(?: +#.*)?$", SECTION, re.MULTILINE)
[CELL] = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"},
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "HF_HUB_OFFLINE": "1",
}
SECONDS = 900

pytestmark = [
    pytest.mark.slow, pytest.mark.ray, pytest.mark.vllm, pytest.mark.deepspeed,
    pytest.mark.timeout(3600),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the folder that the first command of README writes."""
    here = tmp_path_factory.mktemp("newcomer")
    first = COMMANDS[0]
    output = type_in(first, here)
    *_, target = first.split()
    assert f"cd {target}" in output
    return here / target


@pytest.fixture(scope="module")
def done():
    """Return the outputs of the commands so far, by command."""
    return {}


def type_in(command, folder, seconds=SECONDS):
    """Run a command line in a shell, as a user does, and return its output."""
    result = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True,
        timeout=seconds,
    )  # fmt: skip
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def next_commands(output):
    """Return the commands that an output says to go on with."""
    return re.findall(r"(?:go on with|or): (headway .*)$", output, re.MULTILINE)


def interrupted(command, folder, batches):
    """Run a command until it has trained some batches, type Ctrl-C, and return output and code."""
    process = subprocess.Popen(
        ["bash", "-c", f"exec {command}"], cwd=folder, env=ENVIRONMENT, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    metrics = folder / "runs" / "mine" / "metrics.jsonl"
    until(lambda: len(read_rows(metrics)) >= batches, SECONDS, process=process)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    return output, process.returncode


def test_readme_has_the_path_and_the_files_repeat_it(folder):
    names = [command.split()[1] for command in COMMANDS]
    assert names == [
        "init", "validate", "sft", "try", "run", "resume", "report", "rollouts", "export", "bench",
    ]  # fmt: skip
    written = re.findall(r"headway [\w-]+ [\w.]+", (folder / "my_task.toml").read_text())
    assert {"headway sft my_task.toml", "headway run my_task.toml"} <= set(written)


def test_every_command_of_readme_works_in_its_order(folder, done):
    for command in COMMANDS[1:]:
        name = command.split()[1]
        if name == "run":
            output, code = interrupted(command, folder, batches=5)
            assert code == 130, output
            assert "Traceback" not in output
            log = (folder / "runs/mine/logs/driver.log").read_text()
            assert log.replace("\n    ", "\n").endswith(f"{output.rpartition('headway: ')[2]}")
        else:
            output = type_in(command, folder)
        done[name] = output
    assert done["validate"].startswith('name = "mine"')
    assert done["try"].count("sampled, trains") == 3
    assert "headway run my_task.toml" in next_commands(done["sft"])
    assert "headway run my_task.toml" in next_commands(done["try"])
    [resume] = next_commands(done["run"])
    assert shlex.split(resume)[:2] == ["headway", "resume"]
    assert Path(shlex.split(resume)[2]) == folder / "runs" / "mine"
    assert "was edited" not in done["resume"]
    assert Path(done["report"].strip()).read_text().startswith("<!doctype html>")
    assert done["rollouts"].count("reward") >= 3
    assert (folder / "my-model" / "config.json").exists()


def test_the_run_has_learned_the_task_and_says_how_to_go_on(folder, done):
    summary = json.loads((folder / "runs" / "mine" / "summary.json").read_text())
    assert (summary["status"], summary["version"]) == ("done", summary["steps"])
    first, last = summary["heldout"][0], summary["heldout"][-1]
    assert first["score"] < 0.7 < 0.9 < last["score"]
    for command in next_commands(done["resume"]):
        type_in(command.replace("FOLDER", "another-model"), folder)
    assert (folder / "another-model" / "config.json").exists()


def test_the_comparison_has_a_picture_of_both_bounds(folder, done):
    *_, stored = done["bench"].strip().splitlines()
    record, *pictures = re.fullmatch(r"stored in (.*)", stored)[1].split(", ")
    assert {run["name"] for run in json.loads(Path(record).read_text())["arms"]} == {"0", "2"}
    assert pictures == ["staleness.png", "staleness.svg"]
    for picture in pictures:
        assert (Path(record).parent / picture).stat().st_size > 10_000


def test_the_cell_of_readme_works_in_a_notebook(folder):
    nbformat = pytest.importorskip("nbformat", reason="make test-notebook installs it")
    pytest.importorskip("nbconvert")
    form = nbformat.v4
    cell = form.new_code_cell(CELL)
    nbformat.write(form.new_notebook(cells=[cell]), folder / "first.ipynb")
    convert = "-m nbconvert --to notebook --execute first.ipynb --output executed.ipynb"
    type_in(f"{shlex.quote(sys.executable)} {convert}", folder)
    [executed] = nbformat.read(folder / "executed.ipynb", as_version=4).cells
    printed = "".join(output.get("text", "") for output in executed.outputs)
    assert len(re.findall(r"^\d+ \d", printed, re.MULTILINE)) == 20
    assert "'score'" in printed
    [table] = [output for output in executed.outputs if output.output_type == "execute_result"]
    assert "reward_mean" in table["data"]["text/plain"]
