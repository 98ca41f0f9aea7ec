"""The README is short, names every folder of the packages, and links to files that exist."""

import re
from pathlib import Path

import pytest

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
