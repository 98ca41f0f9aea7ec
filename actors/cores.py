"""Lists of CPU cores, as recipes write them."""

from typing import Annotated

from pydantic import AfterValidator, Field


def cores_of(text: str) -> list[int]:
    """Core numbers of a list such as "0,2-5", ascending, each once."""
    cores: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return sorted(cores)


def _forwards(text: str) -> str:
    for part in text.split(","):
        if not cores_of(part):
            raise ValueError(f"{part!r} is empty; a range begins with its first core")
    return text


Cores = Annotated[str, Field(pattern=r"^\d+(-\d+)?(,\d+(-\d+)?)*$"), AfterValidator(_forwards)]
"""CPU cores, as "0", "2-5" or "2-5,8"."""
