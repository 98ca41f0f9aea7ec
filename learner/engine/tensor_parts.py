"""Tensors in parts: every rank writes the part it holds, and any other division can be read.

A folder has safetensors files `rank-0-of-2.000.safetensors`, … An entry `NAME@START` is a run of
elements of the flattened tensor NAME, from element START on. Nothing is gathered to write, and a
reader maps the files and copies only the elements that it asks for.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from headway.errors import InputError
from learner.disk_wait import make_folder, write_whole

T = TypeVar("T")

FILE_BYTES = 2**30
"""Bytes of one file, at least one tensor; so much is copied from a GPU while it is written."""


class Part(NamedTuple):
    """A run of elements of a flattened tensor."""

    name: str
    start: int
    """Index of its first element in the flattened tensor."""
    values: Tensor  # [n], n >= 1


def write_parts(
    folder: Path, parts: Iterable[Part], *, rank: int, ranks: int, file_bytes: int = FILE_BYTES
) -> None:
    """Write the parts of one rank; waits while the disk is full."""
    make_folder(folder)
    named = ((f"{name}@{start}", values.detach().cpu()) for name, start, values in parts)
    files = in_buckets(named, lambda entry: entry[1].nbytes, file_bytes)
    for number, tensors in enumerate(map(dict, files)):
        path = folder / f"rank-{rank}-of-{ranks}.{number:03d}.safetensors"
        write_whole(path, partial(save_file, tensors, path))


def in_buckets(items: Iterable[T], bytes_of: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Yield items of at most `most` bytes together, at least one; the last bucket may be empty."""
    bucket, size = list[T](), 0
    for item in items:
        if bucket and size + bytes_of(item) > most:
            yield bucket
            bucket, size = [], 0
        bucket.append(item)
        size += bytes_of(item)
    yield bucket


class PartReader:
    """Reads runs of elements of the tensors in a folder, whoever wrote which part."""

    def __init__(self, folder: Path) -> None:
        """Open the files.

        Raises:
            InputError: One is missing or damaged.
        """
        self._folder = folder
        self._parts: dict[str, list[tuple[int, int, Any]]] = defaultdict(list)
        """By tensor: the first element of each part, its length, and its values, not yet read."""
        paths = sorted(folder.glob("rank-*.safetensors"))
        written = {path.name.partition(".")[0] for path in paths}
        ranks = int(paths[0].name.partition("-of-")[2].partition(".")[0]) if paths else 1
        for rank in range(ranks):
            if f"rank-{rank}-of-{ranks}" not in written:
                raise self._unusable(f"rank-{rank}-of-{ranks}.000.safetensors is missing")
        for path in paths:
            self._open(path)

    def _open(self, path: Path) -> None:
        try:
            file: Any = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise self._unusable(f"{path.name} is damaged ({error})") from error
        for key in file.keys():  # noqa: SIM118  (it is no dictionary)
            name, _, start = key.rpartition("@")
            values = file.get_slice(key)
            (count,) = values.get_shape()
            self._parts[name].append((int(start), count, values))

    def _unusable(self, problem: str) -> InputError:
        checkpoint, name = self._folder.parent, self._folder.name
        return InputError(
            f"the checkpoint {checkpoint} cannot be loaded: {name}/{problem}; put the folder back "
            "from a copy"
        )

    @property
    def names(self) -> list[str]:
        """Names of all tensors, sorted."""
        return sorted(self._parts)

    def read(self, name: str, start: int, count: int) -> Tensor:
        """Return the elements `start` … `start + count - 1` of a flattened tensor, [count].

        Raises:
            InputError: Not all of them were written.
        """
        pieces, position = [], start
        for begin, length, values in sorted(self._parts.get(name, ()), key=itemgetter(0)):
            if begin <= position < begin + length and position < start + count:
                end = min(begin + length, start + count)
                pieces.append(values[position - begin : end - begin])
                position = end
        if position < start + count:
            raise self._unusable(
                f"elements {position} to {start + count - 1} of {name!r} are missing"
            )
        return torch.cat(pieces)
