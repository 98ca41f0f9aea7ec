"""Freed memory that a learner on a CPU keeps instead of giving it back.

Tensors of a step are as large as those of the last one. glibc maps large ones anew each time and
gives the top of its heap back, and the kernel fills every page with zeros before it is used again:
a tenth of a step of 60 M parameters. Leaves out GPUs, whose allocator keeps memory by itself, and C
libraries other than glibc, which do not know these variables.
"""

from collections.abc import Mapping

KEEP_FREED_MEMORY: Mapping[str, str] = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(10**11),
    "MALLOC_TOP_PAD_": str(256 * 2**20),
}
"""Environment of a process, read when it starts: one heap for all threads, in which everything
lies, which grows by much and never shrinks."""
