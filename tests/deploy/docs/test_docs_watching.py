"""deploy/README.md names commands, options, settings, files and pictures that exist."""

import re
import tomllib
from pathlib import Path

import typer

from deploy.cli.app import app
from deploy.config.deploy_config import DeployConfig

DEPLOY = Path(__file__).parents[3] / "deploy"
PAGE = (DEPLOY / "README.md").read_text()
LARGEST_PICTURE = 300_000
"""Bytes."""


def test_every_command_is_on_the_page_but_version():
    for name in typer.main.get_command(app).commands:
        assert f"headway {name}" in PAGE, name


def test_the_settings_of_the_page_are_valid():
    blocks = re.findall(r"^    \[deploy\]\n((?:    .+\n)+)", PAGE, re.MULTILINE)
    assert len(blocks) >= 4
    for block in blocks:
        DeployConfig(**tomllib.loads(re.sub("^    ", "", block, flags=re.MULTILINE)))
    for key in re.findall(r"`deploy\.(\w+)", PAGE):
        assert key in DeployConfig.model_fields, key


def test_every_picture_exists_and_is_small():
    pictures = re.findall(r"\]\((pictures/[^)]+)\)", PAGE)
    assert len(pictures) == 5
    for picture in pictures:
        assert 0 < (DEPLOY / picture).stat().st_size < LARGEST_PICTURE


def test_every_file_that_is_named_exists():
    for name in re.findall(
        r"`((?:monitoring|kubernetes|docker|driver|cli|preflight)/[\w./-]+)`", PAGE
    ):
        assert (DEPLOY / name).exists(), name
