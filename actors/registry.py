"""The prompt sources, environments, tools and rewards that ship with Headway, by name.

A table names each class or function as "module:attribute", so that reading it imports nothing
heavy. The checks of a recipe and error messages derive from it; `actors/README.md` describes each.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from actors.user_code import load_dotted
from headway.errors import InputError
from headway.nearest_name import nearest


@dataclass(frozen=True, slots=True)
class Entry:
    """A class or function that a recipe can name."""

    name: str
    """As in a recipe; a part in capitals, as in "tiny:TASK", stands for an argument."""
    path: str
    """Its place, as "module:attribute" below `actors`."""
    needs_answer: bool = False
    """A reward that compares with the prompt's answer."""
    inline: bool = False
    """A reward whose time is proportional to the text: it cannot hang, and needs no process."""
    verifier: bool = False
    """A reward that reads completions with more than plain string work, in the sandbox
    (`rewards.verifier_main`): a function of prompt, answer and metadata that returns a function of
    the completion."""


class Registry:
    """The names that one setting of a recipe may have, besides dotted paths of user code.

    `dotted` is the form of a dotted path, such as "module:Class".
    """

    def __init__(self, setting: str, dotted: str, *entries: Entry) -> None:
        self._setting, self._dotted, self._entries = setting, dotted, entries
        self.names = tuple(entry.name for entry in entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    def find(self, name: str) -> Entry | None:
        """Return the shipped entry of a name, its argument included; None for any other name."""
        kind, _, argument = name.partition(":")
        wanted = f"{kind}:" if argument else name
        for entry in self._entries:
            known, colon, _ = entry.name.partition(":")
            if wanted == known + colon:
                return entry
        return None

    def check(self, name: str) -> str:
        """Return a name that is known or a dotted path; raise ValueError with all names if not."""
        if name in self.names or all(name.partition(":")):
            return name
        raise ValueError(
            f"{name!r} is not one of {', '.join(self.names)}, nor a dotted path "
            f'"{self._dotted}"{nearest(name, self.names)}'
        )

    def load(self, name: str, setting: str | None = None) -> Callable[..., Any]:
        """Import the class or function behind a name; raise InputError if that is impossible.

        Messages name `setting`, the key of the name in a recipe, by default the registry's own.
        """
        setting = setting or self._setting
        try:
            self.check(name)
        except ValueError as error:
            raise InputError(f"{setting} = {error}") from None
        entry = self.find(name)
        path = name if entry is None else f"actors.{entry.path}"
        kinds = [name.partition(":")[0] for name in self.names if ":" in name]
        loaded = load_dotted(path, setting=setting, kinds=kinds)
        if not callable(loaded):
            kind = self._dotted.partition(":")[2].lower()
            raise InputError(f"{setting} = {name!r} is a {type(loaded).__name__}, not a {kind}")
        return loaded  # type: ignore[no-any-return]


SOURCES = Registry(
    "prompts.source",
    "module:Class",
    Entry("files", "sources.files:file_source"),
    Entry("datasets:NAME", "sources.hub_dataset:dataset_source"),
    Entry("mixture", "sources.mixture:Mixture"),
    Entry("lettered_chain_sum", "sources.lettered_chain_sum:LetteredChainSum"),
    Entry("tiny:TASK", "sources.tiny_task:TinyTask"),
    Entry("reasoning_gym:TASK", "sources.reasoning_gym:ReasoningGymSource"),
    Entry("verifiers:ID", "sources.verifiers_source:verifiers_source"),
)

ENVIRONMENTS = Registry(
    "actors.environment",
    "module:Class",
    Entry("single_turn", "environments.single_turn:SingleTurn"),
    Entry("tools", "environments.tools:load_tools"),
    Entry("verifiers:ID", "environments.verifiers_environment:load_conversations"),
)
"""Classes are built with actors.environment_options as keywords; functions load the others."""

TOOLS = Registry(
    "actors.environment_options.tools",
    "module:function",
    Entry("calculator", "environments.calculator:calculator"),
    Entry("python", "environments.tools:python"),
)

REWARDS = Registry(
    "actors.reward",
    "module:function",
    Entry("exact_match", "rewards.answers:exact_match", needs_answer=True, inline=True),
    Entry("last_answer", "rewards.answers:last_answer", needs_answer=True, inline=True),
    Entry("numeric_match", "rewards.answers:numeric_match", needs_answer=True, inline=True),
    Entry("tags", "rewards.patterns:tags", inline=True),
    Entry("regex", "rewards.patterns:regex", verifier=True),
    Entry("json_schema", "rewards.patterns:json_schema", verifier=True),
    Entry("similarity", "rewards.answers:similarity", needs_answer=True, verifier=True),
    Entry("math_verify", "rewards.libraries:math_verify", needs_answer=True, verifier=True),
    Entry("reasoning_gym", "rewards.libraries:reasoning_gym", verifier=True),
    Entry("code", "rewards.code:code"),
    Entry("reward_model", "rewards.learned:LearnedReward"),
    Entry("llm_judge", "rewards.llm_judge:LlmJudge"),
)
"""Functions are called with prompt, completion, answer and metadata, except verifiers; the two
classes ask others."""
