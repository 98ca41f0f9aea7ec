"""The command where the locale is not UTF-8, and in another folder than its recipe."""

import shutil
import sys
import tomllib

import pytest

from tests.deploy.conftest import Headway, call_main

ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
RECIPE = """# größer
name = "mine"
steps = 2
model.path = "model"
prompts = { source = "files", source_options = { path = "aufgaben.jsonl" }, group_size = 2 }
actors.reward = ["größe:score"]
heldout = { size = 1, every = 1 }
"""
REWARD = """
with open(__file__) as file:
    assert file.read().endswith("# π\\n")  # what a user's code opens is read as UTF-8 too

def score(prompt, completion, answer, metadata):
    return 1.0

# π
"""


@pytest.fixture
def task(tmp_path):
    """Provide a folder with a recipe, its prompts and its reward in a folder `sub`."""
    folder = tmp_path / "sub"
    folder.mkdir()
    (folder / "task.toml").write_text(RECIPE, encoding="utf-8")
    (folder / "größe.py").write_text(REWARD, encoding="utf-8")
    rows = "".join(f'{{"prompt": "Wie groß ist {n}?", "answer": "{n}"}}\n' for n in range(32))
    (folder / "aufgaben.jsonl").write_text(rows, encoding="utf-8")
    return tmp_path


def test_files_are_utf_8_in_every_locale_and_a_terminal_gets_what_it_can_show(task):
    headway = Headway(task)
    headway.environment |= ASCII
    result = headway("validate", "sub/task.toml", "--strict")
    assert result.returncode == 0, result.stderr
    assert "aufgaben.jsonl" in result.stdout
    for encoding, shown in (("utf-8", "groß"), ("ascii", "gro?")):
        headway.environment["PYTHONIOENCODING"] = encoding
        result = headway("validate", "sub/task.toml", "--set", "name=groß")
        assert (result.returncode, "Traceback" in result.stderr) == (2, False)
        assert f'name = "{shown}": must be letters' in result.stderr


def test_modules_and_files_that_a_recipe_names_may_be_beside_it(task, monkeypatch):
    def validate(recipe, folder, *settings):
        monkeypatch.delitem(sys.modules, "größe", raising=False)
        return call_main(["validate", recipe, "--strict", *settings], folder)

    result = validate("sub/task.toml", task)
    assert result.returncode == 0, result.stderr
    assert tomllib.loads(result.stdout)["deploy"]["code_dir"] == str(task / "sub")
    here = validate("task.toml", task / "sub")
    assert (here.returncode, "code_dir" in here.stdout) == (0, False)
    shutil.copy(task / "sub" / "task.toml", task)
    result = validate("task.toml", task)
    assert (result.returncode, "cannot import größe" in result.stderr) == (2, True)
    assert validate("task.toml", task, "--set", f"deploy.code_dir={task / 'sub'}").returncode == 0
