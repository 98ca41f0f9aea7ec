"""Random damage to the files of a run's folder."""

import random
from pathlib import Path

PAGE = 4096


def flip(content: bytearray, draw: random.Random) -> str:
    offsets = [draw.randrange(len(content)) for _ in range(draw.choice([1, 1, 2, 8]))]
    for offset in offsets:
        content[offset] ^= 1 << draw.randrange(8)
    return f"a bit flipped of bytes {offsets}"


def cut(content: bytearray, draw: random.Random) -> str:
    length = draw.randrange(len(content))
    del content[length:]
    return f"cut to {length} bytes"


def zero(content: bytearray, draw: random.Random) -> str:
    page = draw.randrange(0, len(content), PAGE)
    content[page : page + PAGE] = bytes(len(content[page : page + PAGE]))
    return f"page at {page} zeroed"


def append(content: bytearray, draw: random.Random) -> str:
    content += draw.randbytes(draw.randrange(1, 200))
    return "bytes appended"


def overwrite(content: bytearray, draw: random.Random) -> str:
    begin = draw.randrange(len(content))
    content[begin : begin + 64] = draw.randbytes(len(content[begin : begin + 64]))
    return f"up to 64 bytes at {begin} overwritten"


CHANGES = (flip, flip, cut, zero, append, overwrite)


def files_of(folder: Path) -> list[Path]:
    """Return every file of a run's folder, relative to it, sorted."""
    return sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())


def damage(folder: Path, number: int) -> tuple[Path, str]:
    """Damage one file; successive numbers take the files in turn. Return it, and what was done."""
    draw = random.Random(number)
    files = files_of(folder)
    name = files[number % len(files)]
    path = folder / name
    content = bytearray(path.read_bytes())
    if not content or draw.random() < 0.12:
        path.unlink()
        return name, "removed"
    done = draw.choice(CHANGES)(content, draw)
    path.write_bytes(content)
    return name, done
