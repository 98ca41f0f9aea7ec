"""The README is short and names every folder of the packages; its commands, keys, links exist."""

import re
import tomllib
from pathlib import Path

import pytest
import typer

from deploy.cli.app import app
from deploy.cli.bench import BENCHMARKS
from deploy.config.messages import key_paths
from deploy.config.run_config import RunConfig

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PACKAGES = ("actors", "learner", "queues", "weight_sync", "deploy")
PAGES = sorted(
    path
    for pattern in ("*.md", "*/README.md", "*/*/README.md")
    for path in ROOT.glob(pattern)
    if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
)


def test_the_readme_has_at_most_200_lines():
    assert len(README.splitlines()) <= 200


@pytest.mark.parametrize("package", PACKAGES)
def test_the_tree_names_every_folder_of_a_package(package):
    tree = README.partition("## The tree")[2].partition("\n## ")[0]
    shown = re.search(rf"^    {package}/(.*?)(?=^    \w|\Z)", tree, re.MULTILINE | re.DOTALL)
    folders = {
        path.parent.name
        for path in (ROOT / package).glob("*/*")
        if path.suffix != ".pyc" and path.parent.name != "__pycache__"
    }
    assert folders <= set(re.findall(r"(\w+)/", shown[1]))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_lead_to_files(page):
    links = re.findall(r"\]\(([^)#]+)", page.read_text())
    missing = [
        link for link in links if not link.startswith("http") and not (page.parent / link).exists()
    ]
    assert missing == []


@pytest.mark.parametrize("page", ["README.md", "deploy/README.md"])
def test_every_command_of_a_page_exists_with_its_options(page):
    commands = typer.main.get_command(app).commands
    lines = re.findall(r"^    headway ([\w-]+)(.*)$", (ROOT / page).read_text(), re.MULTILINE)
    assert len(lines) > 10
    for name, rest in lines:
        arguments = rest.partition("#")[0]
        if name == "bench":
            assert arguments.split()[0] in BENCHMARKS
            continue
        known = {option for parameter in commands[name].params for option in parameter.opts}
        assert set(re.findall(r"--[a-z-]+", arguments)) <= known, rest


def test_keys_that_the_readme_names_exist():
    known = set(key_paths(RunConfig))
    sections = {key.partition(".")[0] for key in known if "." in key}
    named = re.findall(rf"`((?:{'|'.join(sections)})\.\w+)", README)
    assert len(named) > 5
    assert set(named) <= known


def test_the_recipe_of_the_readme_is_valid():
    block = README.partition("## Write a recipe")[2].partition("\n\nSources,")[0]
    recipe = tomllib.loads("\n".join(re.findall(r"^    (.*)$", block, re.MULTILINE)))
    config = RunConfig.model_validate({**recipe, "preset": None})
    assert config.queues.max_staleness == 2
