"""The README shows the tree with one line per file, taken from what each file says of itself.

`python tests/test_readme.py` writes it anew.
"""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
FOLDERS = ("actors", "queues", "weight_sync", "learner", "deploy", "benchmarks")
BEGIN, END = "<!-- tree -->\n", "<!-- end of tree -->\n"
OTHER = {
    "cpu.txt": "The locked environment for machines without a GPU.",
}


def purpose(path):
    """The first line of a module's docstring or of a recipe's comment."""
    if path.name in OTHER:
        return OTHER[path.name]
    if path.suffix in (".toml", ".txt"):
        first = path.read_text().splitlines()[0].removeprefix("# ").rstrip()
        named, sourced, _ = first.partition("). ")
        return f"{named})" if sourced else first
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    assert docstring, f"{path} does not say what it is for"
    return docstring.splitlines()[0]


def tree():
    lines = []
    for top in FOLDERS:
        files = [p for suffix in ("py", "toml", "txt") for p in (ROOT / top).rglob(f"*.{suffix}")]
        for folder in sorted({path.parent for path in files}):
            named = sorted(p for p in files if p.parent == folder and p.name != "__init__.py")
            if named:
                lines.append(f"    {folder.relative_to(ROOT)}/")
                lines += [f"        {path.name:<23} {purpose(path)}" for path in named]
    return "\n".join(lines) + "\n"


def test_the_readme_shows_every_file_with_its_purpose():
    text = README.read_text()
    assert text[text.index(BEGIN) + len(BEGIN) : text.index(END)] == f"\n{tree()}\n"


if __name__ == "__main__":
    text = README.read_text()
    start, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    README.write_text(f"{text[:start]}\n{tree()}\n{text[end:]}")
