"""Rules of what a prompt source goes together with, by the traits of sources and rewards."""

from actors.config import ActorsConfig, PromptsConfig
from actors.shipped import REWARDS, SOURCES


def check_source(prompts: PromptsConfig, actors: ActorsConfig) -> None:
    """Refuse a source that never comes back to a capped prompt, or that a reward cannot score.

    Raises:
        ValueError: Names both settings, and what would fit. Nothing is said of user code.
    """
    entry, cap = SOURCES.get(prompts.source), prompts.pass_rate_cap
    if entry is None:
        return
    if cap is not None and entry.traits.endless:
        raise ValueError(
            f"prompts.pass_rate_cap = {cap} has no effect with prompts.source = "
            f'{prompts.source!r}, which always draws new problems; it is for "files", and for '
            "sources of your own that come back to theirs"
        )
    libraries = {name: e.traits.library for name in REWARDS if (e := REWARDS.get(name)) is not None}
    for name in actors.reward:
        library = libraries.get(name)
        if library is not None and entry.traits.library is None:
            fitting = ", ".join(other for other, needed in libraries.items() if needed is None)
            raise ValueError(
                f'actors.reward = ["{name}"] scores problems of {library}:TASK alone, and '
                f"prompts.source = {prompts.source!r}; set actors.reward to one or more of "
                f'{fitting}, or to your own "module:function"'
            )
