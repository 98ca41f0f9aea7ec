"""The page of objectives lists the options of every function, taken from their signatures.

`python tests/learner/objective/test_objective_options.py` writes the lists anew.
"""

import inspect
import tomllib
from pathlib import Path

from headway.user_code import options_of
from learner.config.learner import LearnerConfig
from learner.config.traits import CORRECTIONS, ESTIMATORS, LOSSES
from learner.objective.checks import check_objective

PAGE = Path(__file__).parents[3] / "learner" / "docs" / "objectives.md"
BEGIN, END = "<!-- options -->\n", "<!-- end of options -->\n"


def written(value):
    if value is None or isinstance(value, bool):
        return {None: "unset", True: "true", False: "false"}[value]
    return f'"{value}"' if isinstance(value, str) else str(value)


def options(function):
    parameters = inspect.signature(function).parameters
    shown = (
        name
        if parameters[name].default is inspect.Parameter.empty
        else f"{name} = {written(parameters[name].default)}"
        for name in options_of(function, "inputs")
    )
    return ", ".join(f"`{text}`" for text in shown)


def lists():
    lines = []
    for setting, registry in (
        ("advantage_options", ESTIMATORS),
        ("loss_options", LOSSES),
        ("correction_options", CORRECTIONS),
    ):
        lines += ["", f"| `{setting}` of | options and defaults |", "|---|---|"]
        lines += [
            f"| `{name}` | {options(registry[name].function)} |"
            for name in sorted(registry)
            if options_of(registry[name].function, "inputs")
        ]
    return "\n".join(lines) + "\n\n"


def test_the_page_lists_every_option_with_its_default():
    text = PAGE.read_text()
    assert text[text.index(BEGIN) + len(BEGIN) : text.index(END)] == lists()


def test_the_recipe_that_the_page_shows_is_an_objective():
    _, _, rest = PAGE.read_text().partition("## In a recipe")
    shown = tomllib.loads(rest.split("```toml\n")[1].split("```")[0])["learner"]
    check_objective(LearnerConfig(**shown | {"correction": tuple(shown["correction"])}))


if __name__ == "__main__":
    text = PAGE.read_text()
    start, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    PAGE.write_text(f"{text[:start]}{lists()}{text[end:]}")
