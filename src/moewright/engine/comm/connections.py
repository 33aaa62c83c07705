"""The TCP connections of this process: which there are, and an end of some of them.

A thread that waits in gloo for another rank waits until that rank's connection ends. The rank may
live, and wait for others itself; and torch closes the connections of a group when nothing uses the
group any more, which that thread does. So the connections are shut beneath it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Set
from contextlib import suppress

_TCP = ((socket.AF_INET, socket.SOCK_STREAM), (socket.AF_INET6, socket.SOCK_STREAM))


def list_connections() -> frozenset[str]:
    """Return Linux's names of this process's connected TCP sockets."""
    return frozenset(name for name, _ in _open_sockets())


def shut_connections(names: Set[str]) -> None:
    """Shut these connections: who reads or writes one, here or at its other end, gets an error."""
    for name, connection in _open_sockets():
        if name in names:
            with suppress(OSError):  # the other end was faster
                connection.shutdown(socket.SHUT_RDWR)


def _open_sockets() -> Iterator[tuple[str, socket.socket]]:
    """Yield connected TCP sockets with their names; each is closed here when the next one comes."""
    for number in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{number}")
            if not name.startswith("socket:"):
                continue
            # A duplicate: a socket object closes its handle, and torch goes on with the original.
            connection = socket.socket(fileno=os.dup(int(number)))
        except OSError:  # it has been closed meanwhile
            continue
        with connection:
            if (connection.family, connection.type) in _TCP and _is_connected(connection):
                yield name, connection


def _is_connected(connection: socket.socket) -> bool:
    try:
        connection.getpeername()
    except OSError:
        return False
    return True
