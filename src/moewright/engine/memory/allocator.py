"""The C allocator of a training process: what it does with freed memory."""

from __future__ import annotations

import ctypes

# <malloc.h>
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_NEVER = 2**31 - 1


def keep_freed_memory() -> None:
    """Make glibc reuse freed blocks of any size instead of returning them to the kernel.

    Elsewhere do nothing. By default blocks above 32 MiB are mapped anew each time, and clearing
    their pages costs several times the pass over a tensor in them. The process then never shrinks
    below its peak. Call it once, before the first large tensor.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, _NEVER)
