"""Builds prompt sources by name; `actors.shipped.SOURCES` lists them."""

from functools import partial
from typing import Any

from actors.shipped import SOURCES
from actors.sources.protocol import PromptSource, Split
from headway.errors import InputError
from headway.user_code import PARAGRAPH, cut, shown, where_raised


def load_source(
    name: str,
    *,
    options: dict[str, Any],
    seed: int,
    split: Split = "train",
    heldout_size: int = 0,
    setting: str = "prompts.source",
) -> PromptSource:
    """Build a prompt source; raise InputError for an unknown one, or one that refuses its options.

    Args:
        name: A name of `SOURCES`, or "module:Class".
        options: Keywords of the source.
        seed: Decides the training prompts. The held-out prompts are the same for every seed.
        split: Problems to draw.
        heldout_size: Number of held-out problems; must be the same for both splits.
        setting: Key of the recipe that names the source, for messages.
    """
    build = SOURCES.load(name, setting=setting).function
    if SOURCES.get(name) is not None and ":" in name:
        build = partial(build, name.partition(":")[2])
    try:
        source: PromptSource = build(
            options=options, seed=seed, split=split, heldout_size=heldout_size
        )
    except InputError as error:
        raise InputError(f"{setting} = {name!r}: {error}") from error
    except Exception as error:
        reason = str(error) if isinstance(error, (TypeError, ValueError)) else shown(error)
        given = shown(options, PARAGRAPH)
        raise InputError(
            f"{setting} = {name!r} with options {given}: {cut(reason, PARAGRAPH)}"
            f"{where_raised(error)}"
        ) from error
    missing = [method for method in ("next", "cursor", "restore") if not hasattr(source, method)]
    if missing:
        raise InputError(f"{setting} = {name!r} has no method {', '.join(missing)}")
    return source
