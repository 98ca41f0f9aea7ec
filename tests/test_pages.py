"""Pages are short, their links and paths lead somewhere, their commands and recipes are valid."""

import re
import textwrap
import tomllib
from pathlib import Path

import pytest
import typer
from pydantic import ValidationError

from deploy.cli.app import app
from deploy.cli.bench import BENCHMARKS
from deploy.config.deploy_config import STALL_FACTOR, DeployConfig
from deploy.config.messages import key_paths, section_of
from deploy.config.run_config import RunConfig

ROOT = Path(__file__).parent.parent
PACKAGES = ("actors", "deploy", "headway", "learner", "queues", "weight_sync")
ROOMS = (*PACKAGES, "benchmarks", "examples", "tests")
"""Folders at the root that have pages."""
PAGES = {
    str(path.relative_to(ROOT)): path
    for folder in ROOMS
    for path in sorted((ROOT / folder).rglob("*.md"))
    if not {"runs", ".venv"} & {*path.relative_to(ROOT).parts}
} | {path.name: path for path in sorted(ROOT.glob("*.md"))}
LONGEST = {
    "README.md": 180,
    **dict.fromkeys((f"{folder}/README.md" for folder in ROOMS), 250),
    **{name: 40 for name in PAGES if re.fullmatch(r"examples/\w+/README\.md", name)},
}
"""Lines."""
LARGEST_PICTURE = 300_000
"""Bytes."""
KEYS = {*key_paths(RunConfig)}
SECTIONS = {key.partition(".")[0] for key in KEYS if "." in key}

PRESENT = [name for name in PAGES if name != "CHANGELOG.md"]
"""Pages that describe what there is."""

pages = pytest.mark.parametrize("name", PRESENT)


def text_of(name):
    """Return a page."""
    return PAGES[name].read_text()


def blocks_of(name):
    """Return the indented and fenced blocks of a page, without their indentation."""
    text = text_of(name)
    indented = re.findall(r"(?:^    .*\n|^\n(?=    ))+", text, re.MULTILINE)
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(block) for block in (*indented, *fenced)]


def anchors_of(path):
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.replace(" ", "-") for heading in plain}


@pytest.mark.parametrize(("name", "lines"), LONGEST.items())
def test_a_readme_is_short(name, lines):
    assert len(text_of(name).splitlines()) <= lines


@pytest.mark.parametrize("folder", ROOMS)
def test_every_package_has_a_readme(folder):
    assert f"{folder}/README.md" in PAGES


@pages
def test_links_lead_to_files_and_headings(name):
    page, wrong = PAGES[name], []
    for link in re.findall(r"\]\(([^)]+)\)", text_of(name)):
        target, _, anchor = link.partition("#")
        if target.startswith("http"):
            continue
        path = page.parent / target if target else page
        if not path.exists() or (anchor and anchor not in anchors_of(path)):
            wrong.append(link)
    assert wrong == []


@pages
def test_pictures_are_small(name):
    links = re.findall(r"\]\(([^)]+\.(?:png|svg))\)", text_of(name))
    assert [
        link for link in links if (PAGES[name].parent / link).stat().st_size > LARGEST_PICTURE
    ] == []


@pages
def test_paths_that_are_named_exist(name):
    """A path begins in a folder of the page, its package or the root; a module may be bare."""
    page = PAGES[name]
    package = ROOT / page.relative_to(ROOT).parts[0]
    roots = {page.parent, ROOT} | ({package} if package.is_dir() else set())
    wrong = []
    for path in re.findall(r"`([\w./-]+)`", text_of(name)):
        first, slash, _ = path.partition("/")
        if slash and first and any((root / first).is_dir() for root in roots - {page.parent}):
            if not any((root / path).exists() for root in roots):
                wrong.append(path)
        elif re.fullmatch(r"(?!my_)\w+\.py", path):
            searched = [package] if package.is_dir() else [ROOT / folder for folder in ROOMS]
            if not any(path in {file.name for file in root.rglob("*.py")} for root in searched):
                wrong.append(path)
    assert wrong == []


@pages
def test_commands_exist_with_their_options(name):
    commands = typer.main.get_command(app).commands
    lines = [line for block in blocks_of(name) for line in block.splitlines()]
    for line in lines:
        words = re.match(r"headway ([a-z][\w-]*)(.*)$", line)
        if not words:
            continue
        command, arguments = words[1], words[2].partition("#")[0]
        if command == "bench":
            assert arguments.split()[0] in {*BENCHMARKS, "NAME", "--help"}, line
            continue
        assert command in commands, line
        own = arguments.partition("&&")[0]
        known = {option for parameter in commands[command].params for option in parameter.opts}
        assert set(re.findall(r"--[a-z-]+", own)) <= {*known, "--help"}, line


def test_every_command_is_on_the_page_of_deploy():
    page = text_of("deploy/README.md")
    for command in typer.main.get_command(app).commands:
        assert f"headway {command}" in page, command


@pages
def test_keys_of_recipes_that_are_named_exist(name):
    wrong = []
    for key in re.findall(
        rf"`((?:{'|'.join(SECTIONS)})\.\w+(?:\.\w+)?)(?: ?=[^`]*)?`", text_of(name)
    ):
        section, _, rest = key.partition(".")
        module = ROOT / section / rest.partition(".")[0]
        is_file = (
            rest in ("py", "toml", "jsonl") or module.is_dir() or module.with_suffix(".py").exists()
        )
        if key not in KEYS and not is_file:
            wrong.append(key)
    assert wrong == []


@pages
def test_sections_of_recipes_are_valid(name):
    """Each block that is TOML with sections of a recipe; required keys may be missing."""
    for block in blocks_of(name):
        try:
            read = tomllib.loads(block)
        except tomllib.TOMLDecodeError:
            continue
        for section, values in read.items():
            if not isinstance(values, dict) or section not in SECTIONS:
                continue
            try:
                section_of(RunConfig, section)(**values)
            except ValidationError as error:
                wrong = [found for found in error.errors() if found["type"] != "missing"]
                assert wrong == [], block


def test_the_page_of_deploy_shows_the_defaults():
    [block] = [block for block in blocks_of("deploy/README.md") if "runs_dir" in block]
    assert DeployConfig.model_validate(tomllib.loads(block)["deploy"]) == DeployConfig()
    assert f"{STALL_FACTOR} × `watchdog_seconds`" in text_of("deploy/docs/failures.md")


def test_the_page_of_deploy_loads_a_recipe():
    [program] = [block for block in blocks_of("deploy/README.md") if "load_recipe" in block]
    exec(program, {})


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_names_its_folders(package):
    folders = {
        path.name
        for path in (ROOT / package).iterdir()
        if path.is_dir() and path.name not in ("__pycache__", "docs")
    }
    page = text_of(f"{package}/README.md")
    assert folders <= set(re.findall(r"`(\w+)/`", page))
    rows = re.findall(r"^\| (.*?) \|", page.partition("## Parts")[2], re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(\w+)/`", row)} <= {*folders, "docs"}


@pytest.mark.parametrize("package", [*PACKAGES, "examples"])
def test_the_tree_names_every_folder_of_a_package(package):
    after = text_of("README.md").partition("## The tree, and how to develop")[2]
    tree = after.partition("\n## ")[0]
    shown = re.search(rf"^    {package}/(.*?)(?=^    \w|\Z)", tree, re.MULTILINE | re.DOTALL)
    folders = {
        path.parent.name
        for path in (ROOT / package).glob("*/*")
        if path.suffix != ".pyc" and path.parent.name not in ("__pycache__", "runs")
    }
    assert folders == set(re.findall(r"(\w+)/", shown[1]))


def test_the_recipe_has_twelve_lines_and_is_valid():
    [block] = re.findall(r"^    name = .*\n(?:    .*\n)+", text_of("README.md"), re.MULTILINE)
    lines = re.findall(r"^    (.*)$", block, re.MULTILINE)
    assert len(lines) == 12
    config = RunConfig.model_validate({**tomllib.loads("\n".join(lines)), "preset": None})
    assert config.queues.max_staleness == 2


@pytest.mark.parametrize(
    ("package", "printed"),
    [("queues", "['g00000001']\n1\n"), ("weight_sync", "3 {'bias': [1.0, 1.0]}\n")],
)
def test_the_example_of_a_package_runs(package, printed, capsys):
    page = ROOT / package / "README.md"
    (example,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    exec(compile(example, str(page), "exec"), {})
    assert capsys.readouterr().out == printed
