"""Memory of the C library that a learner on a CPU keeps instead of giving it back.

Tensors of every step are as large as those of the last one. glibc maps large ones anew each time, and
the kernel fills every page with zeros first: a tenth of a step of 60 M parameters. Leaves out
learners on GPUs, whose allocator keeps memory anyway.
"""

import ctypes

TRIM_THRESHOLD, MMAP_MAX = -1, -4
"""Names of options in glibc's malloc.h."""
KEPT_BYTES = 2**31 - 1
"""The most that may be asked for: free memory at the heap's end is kept up to this."""


def keep_freed_memory() -> None:
    """From now on freed memory stays with this process; nothing happens without glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(MMAP_MAX, 0)
        mallopt(TRIM_THRESHOLD, KEPT_BYTES)
