"""Loads prompt sources by name."""

from collections.abc import Callable
from typing import Any

from actors.config import SOURCES
from actors.errors import InputError
from actors.sources.protocol import PromptSource, Split
from actors.user_code.dotted_path import load_dotted


def load_source(
    name: str,
    *,
    options: dict[str, Any],
    seed: int,
    split: Split = "train",
    heldout_size: int = 0,
) -> PromptSource:
    """Builds a prompt source.

    Args:
        name: `files`, `datasets:NAME`, `mixture`, `lettered_chain_sum`, `tiny:TASK`,
            `reasoning_gym:TASK`, `verifiers:ID`, or "module:Class".
        options: Keywords of the source.
        seed: Of the training prompts. The held-out ones are the same for every seed.
        split: Which problems to draw.
        heldout_size: Problems that are held out; the same number must be given for both splits.

    Raises:
        InputError: No such source, or one that refuses its options.
    """
    build = _builder(name)
    try:
        source: PromptSource = build(
            options=options, seed=seed, split=split, heldout_size=heldout_size
        )
    except InputError:
        raise
    except Exception as error:
        what = f"{error}" if isinstance(error, (TypeError, ValueError)) else f"{error!r}"
        raise InputError(f"source {name!r} with options {options}: {what}") from error
    missing = [method for method in ("next", "cursor", "restore") if not hasattr(source, method)]
    if missing:
        raise InputError(f"source {name!r} has no method {', '.join(missing)}")
    return source


def _builder(name: str) -> Callable[..., Any]:
    if name == "files":
        from actors.sources.files import FileSource

        return FileSource
    if name == "lettered_chain_sum":
        from actors.sources.lettered_chain_sum import LetteredChainSum

        return LetteredChainSum
    if name == "mixture":
        from actors.sources.mixture import Mixture

        return Mixture
    kind, _, task = name.partition(":")
    if kind == "datasets" and task:
        from actors.sources.hub_dataset import DatasetSource

        return lambda **keywords: DatasetSource(task, **keywords)
    if kind == "reasoning_gym" and task:
        from actors.sources.reasoning_gym import ReasoningGymSource

        return lambda **keywords: ReasoningGymSource(task, **keywords)
    if kind == "verifiers" and task:
        from actors.sources.verifiers_source import VerifiersSource

        return lambda **keywords: VerifiersSource(name, **keywords)
    if kind == "tiny" and task:
        from actors.sources.tiny_task import TinyTask

        return lambda **keywords: TinyTask(task, **keywords)
    found = load_dotted(name, setting="prompts.source", known=SOURCES)
    if not callable(found):
        raise InputError(f"prompts.source = {name!r} is a {type(found).__name__}, not a class")
    builder: Callable[..., Any] = found
    return builder
