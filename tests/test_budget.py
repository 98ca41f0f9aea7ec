"""A budget of lines for each package, and the first words of docstrings.

A change that needs more lines raises its number in a commit of its own that says why, and looks
first for what it makes needless.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BUDGET = {
    "headway": 1977,
    "queues": 6808,
    "weight_sync": 4512,
    "actors": 17200,
    "learner": 12514,
    "deploy": 22179,
    "benchmarks": 9865,
    "examples": 550,
}
"""Most lines of Python of each package."""
FRAGMENTS = {"Of", "What", "Whether", "That", "Those", "Likewise", "How", "Does"}
"""First words by which a docstring's first line cannot be understood without its caller."""


def modules(package):
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize(("package", "most"), BUDGET.items())
def test_a_package_keeps_to_its_budget_of_lines(package, most):
    assert sum(path.read_text().count("\n") for path in modules(package)) <= most


@pytest.mark.parametrize("package", BUDGET)
def test_the_first_line_of_a_docstring_is_a_whole_sentence(package):
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    fragments = [
        f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"
        for path in modules(package)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, documented)
        and (ast.get_docstring(node) or "-").split(None, 1)[0].rstrip(",:;.") in FRAGMENTS
    ]
    assert fragments == []
