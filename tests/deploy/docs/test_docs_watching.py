"""The page on watching names commands, settings, files and pictures that there are."""

import re
import tomllib
from pathlib import Path

import typer

from deploy.cli.app import app
from deploy.cli.bench import BENCHMARKS
from deploy.config.deploy_config import DeployConfig

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "watching.md").read_text()
BYTES = 300_000


def test_every_command_and_every_option_of_the_page_exists():
    commands = typer.main.get_command(app).commands
    lines = re.findall(r"^    headway (\w+)(.*)$", PAGE, re.MULTILINE)
    assert {name for name, _ in lines} == {"submit", "attach", "cancel", "top", "report", "bench"}
    for name, rest in lines:
        said = rest.partition("#")[0]
        known = {option for each in commands[name].params for option in each.opts}
        assert set(re.findall(r"--[a-z-]+", said)) <= known, rest
        if name == "bench":
            assert said.split()[0] in BENCHMARKS


def test_the_settings_of_the_page_are_valid():
    blocks = re.findall(r"^    \[deploy\]\n((?:    .+\n)+)", PAGE, re.MULTILINE)
    assert len(blocks) == 2
    for block in blocks:
        DeployConfig(**tomllib.loads(re.sub("^    ", "", block, flags=re.MULTILINE)))
    for key in re.findall(r"`deploy\.(\w+)", PAGE):
        assert key in DeployConfig.model_fields, key


def test_every_picture_is_there_and_small():
    pictures = re.findall(r"\]\((pictures/[^)]+)\)", PAGE)
    assert len(pictures) == 5
    for picture in pictures:
        assert 0 < (ROOT / "docs" / picture).stat().st_size < BYTES


def test_every_file_that_is_named_exists():
    for name in re.findall(r"`((?:deploy|tests)/[\w./-]+)`", PAGE):
        assert (ROOT / name).exists(), name
