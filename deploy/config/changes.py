"""Differences between two recipes, and those of them that a run cannot go on with."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel

from deploy.config.messages import section_of
from deploy.config.recipe_text import toml_value
from deploy.config.run_config import RunConfig
from headway.recipe_section import ResumeRule, resume_rule


class Change(NamedTuple):
    """A setting that differs between two recipes."""

    name: str
    before: str
    """TOML of the value; "none" where it is not set."""
    after: str

    def __str__(self) -> str:
        return f"{self.name}: {self.before} → {self.after}"

    @property
    def refusal(self) -> str | None:
        """Reason why a run cannot go on with the change; None if it can."""
        rule = rule_of(self.name)
        if rule.lowering_refusal is None:
            return rule.refusal
        try:
            return rule.lowering_refusal if float(self.after) < float(self.before) else None
        except ValueError:  # "auto" or none, of which `resumed_recipe` knows the number
            return None


def rule_of(name: str) -> ResumeRule:
    """Return the rule by which a key may change between the sessions of a run.

    `name` may go on inside a table that is a key's value, as learner.loss_options.cap_high.
    """
    section: type[BaseModel] = RunConfig
    rule: ResumeRule | None = None
    for part in name.split("."):
        own, covers_all = resume_rule(section, part)
        rule, inner = own or rule, section_of(section, part)
        if covers_all or inner is None:
            break
        section = inner
    if rule is None:
        raise LookupError(f"{name} has no rule for resuming, and no section that it is in has one")
    return rule


def changes(before: Any, after: Any) -> list[Change]:
    """Return the settings that differ between two recipes, given as JSON values, by name."""
    return [Change(name, *values) for name, values in differing([before, after]).items()]


def differing(recipes: Sequence[Any]) -> dict[str, list[str]]:
    """Return the settings that are not the same in all recipes, with the value in each as TOML."""
    settings = [dict(_settings(recipe)) for recipe in recipes]
    values = {
        name: [known.get(name, "none") for known in settings]
        for name in sorted(set().union(*settings))
    }
    return {name: row for name, row in values.items() if len(set(row)) > 1}


def _settings(section: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted name and the value, as TOML, of every setting that is set."""
    if isinstance(section, dict):
        for key, value in section.items():
            yield from _settings(value, f"{name}.{key}" if name else key)
    elif section is not None:
        yield name, toml_value(section)
