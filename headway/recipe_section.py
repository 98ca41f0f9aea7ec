"""The base of every section of a recipe, and the rule by which a key may change on resume.

A rule stands on its field (`steps: Annotated[int, ResumeRule(…)]`, `ranks: Resumable[int]`) or, for
all fields that a section declares without one, in `Section.on_resume`. A section without a rule
follows the section that holds it.
"""

from dataclasses import dataclass
from inspect import get_annotations
from typing import Annotated, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict


@dataclass(frozen=True, slots=True)
class ResumeRule:
    """The rule of a key between two sessions of a run."""

    refusal: str | None = None
    """Reason why the key keeps its value; None: it may change."""
    lowering_refusal: str | None = None
    """Reason why it may only be raised; None: it may be lowered too."""


Value = TypeVar("Value")
MAY_CHANGE = ResumeRule()
Resumable = Annotated[Value, MAY_CHANGE]
"""The type of a key that may change on resume."""


class Section(BaseModel):
    """A frozen section of a recipe: every key has a docstring, and unknown keys are refused."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )
    on_resume: ClassVar[ResumeRule | None] = None
    """Rule of the keys that this class declares without a rule of their own."""


def resume_rule(section: type[BaseModel], key: str) -> tuple[ResumeRule | None, bool]:
    """Return the rule of a key of a section, and True if it covers all keys below it as well."""
    for rule in section.model_fields[key].metadata:
        if isinstance(rule, ResumeRule):
            return rule, True
    declaring = next(part for part in section.__mro__ if key in get_annotations(part))
    return getattr(declaring, "on_resume", None), False
