"""Lists of CPU cores, as recipes write them."""


def cores_of(text: str) -> list[int]:
    """Core numbers of a list such as "0,2-5", ascending, each once."""
    cores: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return sorted(cores)
