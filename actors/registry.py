"""The prompt sources, environments, tools and rewards that ship with Headway, by name.

A table names each class or function as "module:attribute", so that reading it imports nothing
heavy. The checks of a recipe, error messages and the tables in `actors/README.md` derive from here.
"""

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from actors.errors import InputError
from actors.user_code.dotted_path import load_dotted


@dataclass(frozen=True, slots=True)
class Entry:
    """A class or function that a recipe can name."""

    name: str
    """As in a recipe; a part in capitals, as in "tiny:TASK", stands for an argument."""
    path: str
    """Where it is, as "module:attribute" below `actors`."""
    description: str
    needs_answer: bool = False
    """A reward that compares with the prompt's answer."""
    inline: bool = False
    """A reward whose time is proportional to the text: it cannot hang, and needs no process."""


class Registry:
    """The names that one setting of a recipe may have, besides dotted paths of user code.

    Args:
        setting: Key of the recipe.
        dotted: Form of a dotted path, such as "module:Class".
        entries: What ships with Headway.
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
        """Return a name that is known or has the form of a dotted path.

        Raises:
            ValueError: It is neither; lists the known names and the nearest of them.
        """
        if name in self.names or all(name.partition(":")):
            return name
        close = difflib.get_close_matches(name, self.names, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(
            f"{name!r} is not one of {', '.join(self.names)}, nor a dotted path "
            f'"{self._dotted}"{hint}'
        )

    def load(self, name: str) -> Any:
        """Import what a name or dotted path stands for.

        Raises:
            InputError: There is none, or its module cannot be imported.
        """
        try:
            self.check(name)
        except ValueError as error:
            raise InputError(f"{self._setting} = {error}") from None
        entry = self.find(name)
        path = name if entry is None else f"actors.{entry.path}"
        return load_dotted(path, setting=self._setting)


SOURCES = Registry(
    "prompts.source",
    "module:Class",
    Entry("files", "sources.files:file_source", "rows of a JSONL, Parquet or Arrow file"),
    Entry(
        "datasets:NAME",
        "sources.hub_dataset:dataset_source",
        "a data set of Hugging Face's `datasets`, by name or from a folder",
    ),
    Entry("mixture", "sources.mixture:Mixture", "several sources, by weights that may change"),
    Entry(
        "lettered_chain_sum",
        "sources.lettered_chain_sum:LetteredChainSum",
        "sums of one-digit numbers with worked examples: the task of the demo",
    ),
    Entry(
        "tiny:TASK",
        "sources.tiny_task:TinyTask",
        "`product`, `distance` or `twice`, which a very small model learns in a minute",
    ),
    Entry(
        "reasoning_gym:TASK",
        "sources.reasoning_gym:ReasoningGymSource",
        "a procedural task of reasoning-gym, endless",
    ),
    Entry(
        "verifiers:ID",
        "sources.verifiers_source:verifiers_source",
        "the data set of an environment of the library verifiers",
    ),
)

ENVIRONMENTS = Registry(
    "actors.environment",
    "module:Class",
    Entry("single_turn", "environments.single_turn:SingleTurn", "one question, one answer"),
    Entry("tools", "environments.tools:load_tools", "the policy calls tools until it answers"),
    Entry(
        "verifiers:ID",
        "environments.verifiers_environment:load_conversations",
        "an environment of the library verifiers, with its rubric",
    ),
)
"""Classes are built with actors.environment_options as keywords; functions load the others."""

TOOLS = Registry(
    "actors.environment_options.tools",
    "module:function",
    Entry("calculator", "environments.calculator:calculator", "evaluates arithmetic"),
    Entry(
        "python",
        "environments.python_tool:python_tool",
        'runs programs in the sandbox; needs `code_execution = "sandbox"`',
    ),
)

REWARDS = Registry(
    "actors.reward",
    "module:function",
    Entry(
        "exact_match",
        "rewards.answers:exact_match",
        "1 where the completion is the answer",
        needs_answer=True,
        inline=True,
    ),
    Entry(
        "last_answer",
        "rewards.answers:last_answer",
        'the same for what follows the last "="',
        needs_answer=True,
        inline=True,
    ),
    Entry(
        "numeric_match",
        "rewards.answers:numeric_match",
        "the same for the last number, within a tolerance",
        needs_answer=True,
        inline=True,
    ),
    Entry(
        "tags",
        "rewards.patterns:tags",
        "1 where the completion is `<think>…</think><answer>…</answer>`",
        inline=True,
    ),
    Entry("regex", "rewards.patterns:regex", "1 where a regular expression matches"),
    Entry("json_schema", "rewards.json_schema:json_schema", "1 where JSON fits a schema"),
    Entry(
        "similarity",
        "rewards.similarity:similarity",
        "1 − edits / length, against the answer",
        needs_answer=True,
    ),
    Entry(
        "math_verify",
        "rewards.math_verify:math_verify",
        "mathematical equality with the answer, by math-verify",
        needs_answer=True,
    ),
    Entry(
        "reasoning_gym",
        "rewards.reasoning_gym:reasoning_gym",
        "the verifier of the prompt's reasoning-gym task",
    ),
    Entry("code", "rewards.code:code", "1 where a program passes the prompt's tests, sandboxed"),
    Entry(
        "reward_model", "rewards.learned:LearnedReward", "the score of one reward model or several"
    ),
    Entry("llm_judge", "rewards.llm_judge:LlmJudge", "the mark that a language model gives"),
)
"""Functions are called with prompt, completion, answer and metadata; the two classes ask others."""
