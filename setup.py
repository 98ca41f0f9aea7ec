"""The package's long description: README.md, with links and pictures that work elsewhere."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)]+)\)")


def absolute(text: str, repository: str) -> str:
    """Return Markdown whose relative links and pictures point into a repository."""

    def link(match: re.Match[str]) -> str:
        kind = "raw" if match[1] else "blob"
        return f"{match[1]}[{match[2]}]({repository}/{kind}/main/{match[3]})"

    return LINK.sub(link, text)


project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
setup(
    long_description=absolute((ROOT / "README.md").read_text(), project["urls"]["Repository"]),
    long_description_content_type="text/markdown",
)
