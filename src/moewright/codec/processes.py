"""What a process asks of the kernel about itself (Linux)."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import struct
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType

# prctl(2), seccomp(2), and the architecture and number of socket(2) of the machines that we know.
_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38
_PR_SET_SECCOMP = 22
_SECCOMP_MODE_FILTER = 2
_SOCKET_CALLS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {"x86_64": (0xC000003E, 41), "aarch64": (0xC00000B7, 198)}
)
# Instructions of a filter, and what it answers.
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW = 0x7FFF0000
_REFUSE = 0x00050000 | 1  # EPERM
_AF_UNIX = 1
_ORPHAN_CODE = 3


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when process `parent` ends, however it ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the call
        os._exit(_ORPHAN_CODE)


def forbid_network() -> None:
    """Have the kernel refuse this process all sockets but those of files (AF_UNIX), for good.

    Where the numbers of the machine's calls are not known, or it allows no filters, nothing is
    refused.
    """
    socket_numbers = _SOCKET_CALLS.get(platform.machine())
    if socket_numbers is None:
        return
    architecture, socket_call = socket_numbers
    # Loads are from the kernel's record of a call; jumps are over so many lines.
    program = (
        (_LOAD, 0, 0, 4),  # the architecture
        (_JUMP_IF_EQUAL, 0, 5, architecture),
        (_LOAD, 0, 0, 0),  # the number of the call
        (_JUMP_IF_EQUAL, 0, 3, socket_call),
        (_LOAD, 0, 0, 16),  # its first argument, the family
        (_JUMP_IF_EQUAL, 1, 0, _AF_UNIX),
        (_RETURN, 0, 0, _REFUSE),
        (_RETURN, 0, 0, _ALLOW),
    )
    lines = b"".join(struct.pack("=HBBI", *line) for line in program)
    code = ctypes.create_string_buffer(lines, len(lines))
    filter_program = struct.pack("@HP", len(program), ctypes.addressof(code))
    with suppress(OSError):
        _prctl(_PR_SET_NO_NEW_PRIVS, 1)
        _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.create_string_buffer(filter_program))


def _prctl(option: int, value: int, data: ctypes.Array[ctypes.c_char] | None = None) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    zero = ctypes.c_ulong(0)
    result = libc.prctl(option, ctypes.c_ulong(value), zero if data is None else data, zero, zero)
    if result != 0:
        raise OSError(ctypes.get_errno(), "prctl")
