"""What errors say when a process gets no more memory.

Imports nothing: there may be no memory to import with.
"""

from __future__ import annotations

# Of Python, the loader of libraries, torch's allocator of host memory, and threads without a stack.
_SIGNS = (
    "failed to map segment",
    "annot allocate memory",
    "can't allocate memory",
    "can't start new thread",
    "Resource temporarily unavailable",
)


def lacks_memory(error: BaseException) -> bool:
    """Tell whether an error says that the host has no memory left, or no room to map more."""
    text = str(error)
    return isinstance(error, MemoryError) or any(sign in text for sign in _SIGNS)
