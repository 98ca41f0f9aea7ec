"""The wheel: its packages, its data, and its page for a package index."""

import re
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
COMMAND = "from deploy.cli import main; main()"
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Return the folder of an unpacked wheel, built from the files that git knows."""
    folder = tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    for name in filter(None, listed.split("\0")):
        if not name.startswith("tests/") and (ROOT / name).exists():
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / "source" / name)
    command = [sys.executable, "-c", BUILD, str(folder)]
    result = subprocess.run(command, cwd=folder / "source", capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    [file] = folder.glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        archive.extractall(folder / "unpacked")
    return folder / "unpacked"


def test_the_wheel_has_headway_once_and_what_commands_read(wheel):
    names = {str(path.relative_to(wheel)) for path in wheel.rglob("*")}
    assert {
        "headway/__init__.py", "headway/__init__.pyi", "headway/py.typed",
        "deploy/api/training_run.py", "deploy/starter/my_task.toml", "deploy/starter/my_task.py",
        "deploy/recipes/demo.toml", "deploy/monitoring/prometheus.yml",
    } <= names  # fmt: skip


def test_the_installed_package_runs_from_python(wheel, tmp_path):
    program = (
        "import headway, deploy\n"
        "print(headway.__file__, deploy.__file__)\n"
        "try: headway.run('demo', {'learning_rate': 1})\n"
        "except headway.InputError as error: print(error)\n"
        "import sys; sys.argv = ['headway', 'init', 'task']\n"
        "from deploy.cli import main; main()\n"
    )
    result = subprocess.run(
        [sys.executable, "-P", "-c", program],
        cwd=tmp_path, env={"PYTHONPATH": str(wheel), "PATH": ""}, capture_output=True, text=True,
    )  # fmt: skip
    assert (
        result.stdout.splitlines()[0] == f"{wheel}/headway/__init__.py {wheel}/deploy/__init__.py"
    )
    assert "did you mean 'learner.learning_rate'" in result.stdout
    assert (tmp_path / "task" / "my_task.py").exists(), result.stderr


@pytest.mark.slow
def test_comparisons_of_whole_runs_are_in_the_wheel_and_other_benchmarks_say_what_they_need(
    wheel, tmp_path
):
    shipped = {path.name for path in (wheel / "benchmarks").iterdir() if path.is_dir()}
    assert shipped - {"__pycache__"} == {"harness", "loop"}
    environment = {"PYTHONPATH": str(wheel), "PATH": ""}
    for name, code in (("async", 0), ("plan", 0), ("staleness", 0), ("queue", 2)):
        ended = subprocess.run(
            [sys.executable, "-P", "-c", COMMAND, "bench", name, "--help"],
            cwd=tmp_path, env=environment, capture_output=True, text=True,
        )  # fmt: skip
        assert ended.returncode == code, ended.stderr
        assert f"headway bench {name}" in ended.stdout or "this benchmark comes" in ended.stderr


def test_the_page_of_the_package_has_absolute_links_pictures_urls_and_classifiers(wheel):
    [file] = wheel.glob("*.dist-info/METADATA")
    metadata = Parser().parsestr(file.read_text())
    urls = dict(line.split(", ", 1) for line in metadata.get_all("Project-URL"))
    assert {"Repository", "Documentation", "Changelog", "Issues"} <= urls.keys()
    classifiers = metadata.get_all("Classifier")
    assert "Programming Language :: Python :: 3.11" in classifiers
    assert not any(
        name.startswith("License ::") for name in classifiers
    )  # License-Expression has it
    page = metadata.get_payload()
    targets = re.findall(r"!?\[[^\]]*\]\(([^)]+)\)", page)
    assert len(targets) > 5
    assert [target for target in targets if not target.startswith(("https://", "#"))] == []
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page)
    assert all(picture.startswith(f"{urls['Repository']}/raw/main/") for picture in pictures)
    for target in targets:
        local = target.partition("/main/")[2].partition("#")[0]
        assert (ROOT / local).exists() or not target.startswith(urls["Repository"])
