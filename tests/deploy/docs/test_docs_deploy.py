"""The blocks of deploy/README.md are valid recipes and Python that runs."""

import re
import textwrap
import tomllib
from pathlib import Path

from deploy.config.deploy_config import STALL_FACTOR, DeployConfig
from deploy.config.run_config import RunConfig

PAGE = (Path(__file__).parents[3] / "deploy" / "README.md").read_text()
BLOCKS = [textwrap.dedent(text) for text in re.findall(r"(?:^    .*\n|^\n(?=    ))+", PAGE, re.M)]


def test_recipe_sections_are_valid_and_show_the_defaults():
    recipes = [text for text in BLOCKS if "[deploy]" in text and "runs_dir" in text]
    sections = [tomllib.loads(text) for text in recipes]
    shown, cluster = (DeployConfig.model_validate(read["deploy"]) for read in sections)
    assert shown == DeployConfig()
    assert cluster.placement.actors.resources == {"rack": 0.01}
    transport = sections[1]["weight_sync"]["transport"]
    assert transport == "object_store"
    assert RunConfig.model_fields["weight_sync"].annotation(transport=transport)
    assert f"{STALL_FACTOR} × `watchdog_seconds`" in PAGE


def test_the_python_runs():
    [program] = [text for text in BLOCKS if "load_recipe" in text]
    exec(program, {})


def test_every_folder_has_its_line():
    table = PAGE[PAGE.index("| folder | content |") :]
    folders = {path.name for path in (Path(__file__).parents[3] / "deploy").iterdir()}
    packages = {name for name in folders if "." not in name and not name.startswith("_")}
    assert {name for name in packages if f"`{name}/`" not in table} == set()
