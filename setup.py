"""The page of the package: its addresses, and README.md with links and pictures that lead there."""

import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
REPOSITORY = "https://github.com/headway-rl/headway"
"""A placeholder, and the only one: the project has no public address yet."""
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)]+)\)")


def absolute(text: str, repository: str) -> str:
    """Return Markdown whose relative links and pictures point into a repository."""

    def link(match: re.Match[str]) -> str:
        kind = "raw" if match[1] else "blob"
        return f"{match[1]}[{match[2]}]({repository}/{kind}/main/{match[3]})"

    return LINK.sub(link, text)


setup(
    project_urls={
        "Repository": REPOSITORY,
        "Documentation": f"{REPOSITORY}#readme",
        "Changelog": f"{REPOSITORY}/blob/main/CHANGELOG.md",
        "Issues": f"{REPOSITORY}/issues",
    },
    long_description=absolute((ROOT / "README.md").read_text(), REPOSITORY),
    long_description_content_type="text/markdown",
)
