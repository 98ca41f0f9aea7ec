"""README names every folder of the packages, and its recipe of twelve lines is valid."""

import re
import tomllib
from pathlib import Path

import pytest

from deploy.config.run_config import RunConfig

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PACKAGES = ("actors", "deploy", "examples", "headway", "learner", "queues", "weight_sync")


@pytest.mark.parametrize("package", PACKAGES)
def test_the_tree_names_every_folder_of_a_package(package):
    tree = README.partition("## The tree, and how to develop")[2].partition("\n## ")[0]
    shown = re.search(rf"^    {package}/(.*?)(?=^    \w|\Z)", tree, re.MULTILINE | re.DOTALL)
    folders = {
        path.parent.name
        for path in (ROOT / package).glob("*/*")
        if path.suffix != ".pyc" and path.parent.name not in ("__pycache__", "runs")
    }
    assert folders == set(re.findall(r"(\w+)/", shown[1]))


def test_the_recipe_has_twelve_lines_and_is_valid():
    [block] = re.findall(r"^    name = .*\n(?:    .*\n)+", README, re.MULTILINE)
    lines = re.findall(r"^    (.*)$", block, re.MULTILINE)
    assert len(lines) == 12
    config = RunConfig.model_validate({**tomllib.loads("\n".join(lines)), "preset": None})
    assert config.queues.max_staleness == 2
