"""The page of all keys of a recipe, which is generated from the fields of the configuration.

Written anew by `python tests/deploy/docs/test_key_reference.py`.
"""

import json
from pathlib import Path
from typing import Annotated, Literal, get_args, get_origin

from pydantic_core import PydanticUndefined, to_jsonable_python

from deploy.config.changes import rule_of
from deploy.config.messages import section_of
from deploy.config.run_config import RunConfig

PAGE = Path(__file__).parents[3] / "deploy" / "docs" / "keys.md"


def cell(text):
    return " ".join(text.split()).replace("|", "\\|").replace("<", "\\<")


def default(field):
    """Return the default of a key as in a recipe; "" for a key without one, which is required."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return (
        "" if value in (None, PydanticUndefined) else f"`{json.dumps(to_jsonable_python(value))}`"
    )


def allowed(field):
    """Return the choices and bounds of a key, or "" if it has none."""
    kinds = [field.annotation, *get_args(field.annotation)]
    choices = [c for kind in kinds if get_origin(kind) is Literal for c in get_args(kind)]
    inner = [info for kind in kinds for info in getattr(kind, "__metadata__", ())]
    inner = [bound for info in inner for bound in getattr(info, "metadata", ())]
    bounds = [
        f"{sign} {getattr(bound, name):g}"
        for bound in [*field.metadata, *inner]
        for name, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))
        if isinstance(getattr(bound, name, None), int | float)
    ]
    lists = ["a list"] if choices and any(map(_is_list, get_args(field.annotation))) else []
    return ", ".join([f"`{json.dumps(choice)}`" for choice in choices] + lists + bounds)


def _is_list(kind):
    return get_origin(get_args(kind)[0] if get_origin(kind) is Annotated else kind) is tuple


def tables(model, section=""):
    """Yield the table of a section, and those of the sections in it."""
    inner = {name: section_of(model, name) for name in model.model_fields}
    keys = {name: field for name, field in model.model_fields.items() if inner[name] is None}
    about = cell((model.__doc__ or "").partition("\n\n")[0])
    yield f"## {f'[{section}]' if section else 'Top level'}\n\n{about}\n"
    if keys:
        rows = (
            f"| `{name}` | {cell(default(field))} | {cell(allowed(field))} | "
            f"{resume(rule_of(f'{section}.{name}'.lstrip('.')))} | "
            f"{cell(field.description or '')} |\n"
            for name, field in keys.items()
        )
        heading = "| key | default | allowed | resume | meaning |\n|---|---|---|---|---|\n"
        yield heading + "".join(rows)
    for name, part in inner.items():
        if part is not None:
            yield from tables(part, f"{section}.{name}".lstrip("."))


def resume(rule):
    """Return what may become of a key when a run is resumed."""
    if rule.refusal:
        return ""
    return "only raised" if rule.lowering_refusal else "yes"


def reference():
    return (
        "# Keys of a recipe\n\n"
        "Generated from the fields of the configuration. An empty default is none. Keys with a yes "
        "under\n*resume* may change when a run is resumed.\n\n" + "\n".join(tables(RunConfig))
    )


def test_the_page_is_that_of_the_fields():
    assert PAGE.read_text() == reference(), f"run python {Path(__file__).relative_to(Path.cwd())}"


def test_every_key_has_its_place_and_most_a_meaning():
    rows = [line.split(" | ") for line in reference().splitlines() if line.startswith("| `")]
    assert len(rows) > 150
    assert [row[0] for row in rows if "max_staleness" in row[0]] == ["| `max_staleness`"]
    without = [row[0] for row in rows if row[4].strip() == "|"]
    assert without == []


if __name__ == "__main__":
    PAGE.write_text(reference())
