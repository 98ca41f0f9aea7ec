"""Packing of sequences into microbatches, and their balance over ranks, by their lengths."""

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence

from headway.errors import InputError


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack sequences into microbatches of at most `capacity` tokens: best fit, longest first.

    A sequence longer than the capacity gets one of its own. Deterministic; at most
    11/9 · optimum + 1 microbatches (Johnson 1974).

    Returns:
        Microbatches of ascending indices into `lengths`; each index once.

    Raises:
        InputError: The capacity is not positive.

    Example:
        >>> pack([5, 9, 3, 2], capacity=10)
        [[1], [0, 2, 3]]
    """
    if capacity < 1:
        raise InputError(f"capacity must be at least 1 token, found {capacity}")
    packed: list[list[int]] = []
    space: list[tuple[int, int]] = []  # (free tokens, number of the microbatch), ascending
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fit = bisect_left(space, (lengths[index], -1))
        if fit < len(space):
            free, number = space.pop(fit)
            packed[number].append(index)
        else:
            free, number = capacity, len(packed)
            packed.append([index])
        insort(space, (free - lengths[index], number))
    return [sorted(members) for members in packed]


def balance(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Share work out so that the busiest rank has little more than the mean.

    Longest processing time first (Graham 1969): the busiest rank has at most the mean plus one
    item, and at most 4/3 of the optimum. Deterministic. `lengths` may be any non-negative cost.

    Returns:
        `ranks` lists of ascending indices; empty lists where there are fewer items than ranks.

    Raises:
        InputError: There is no rank.

    Example:
        >>> balance([5, 9, 3, 2], ranks=2)
        [[1], [0, 2, 3]]
    """
    if ranks < 1:
        raise InputError(f"ranks must be at least 1, found {ranks}")
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        load, rank = heapq.heappop(loads)
        shares[rank].append(index)
        heapq.heappush(loads, (load + lengths[index], rank))
    return [sorted(share) for share in shares]
