"""Freed memory that a learner on a CPU keeps instead of giving it back.

Tensors of a step are as large as those of the last one. glibc maps large ones anew each time and
gives the top of its heap back, and the kernel fills every page with zeros before it is used again:
a tenth of a step of 60 M parameters. Leaves out GPUs, whose allocator keeps memory by itself.
"""

import ctypes

TRIM_THRESHOLD, TOP_PAD, MMAP_MAX = -1, -2, -4
"""Names of options in glibc's malloc.h."""
KEPT_BYTES = 2**31 - 1
"""The most that may be asked for: free memory at the heap's end is kept up to this."""
GROWTH_BYTES = 256 * 2**20
"""By which the heap grows at least, touched only where it is used."""


def keep_freed_memory() -> None:
    """From now on freed memory stays with this process; nothing happens without glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(MMAP_MAX, 0)
        mallopt(TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(TOP_PAD, GROWTH_BYTES)
