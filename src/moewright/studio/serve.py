"""Start the studio's server on this machine's own address, or behind a socket of one user."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from moewright.spec.errors import BadInput, Reason
from moewright.studio.app import build_app
from moewright.studio.confinement import Confinement
from moewright.studio.folder import StudioFolder
from moewright.studio.guard import Access

HOST = "127.0.0.1"
_MOST_CONNECTIONS = 64  # one page opens six; this is for one person
# Within one to two of these a connection has to send the whole head of its next request.
_PATIENCE_S = 10.0


class PromptConnection(H11Protocol):
    """A connection that is closed where it begins no request.

    The server counts all open connections, so those that never end the head of a request would
    take every place, and nobody would be answered.
    """

    _last_cycle: RequestResponseCycle | None = None

    def connection_made(  # type: ignore[override]  # as uvicorn narrows it
        self, transport: asyncio.Transport
    ) -> None:
        """Watch the connection from now on."""
        super().connection_made(transport)
        self.loop.call_later(_PATIENCE_S, self._close_if_silent)

    def _close_if_silent(self) -> None:
        """Close the connection if no request began since the last look, and none is answered."""
        if self.transport.is_closing():
            return
        is_idle = self.cycle is None or self.cycle.response_complete
        if is_idle and self.cycle is self._last_cycle:
            self.transport.close()
            return
        self._last_cycle = self.cycle
        self.loop.call_later(_PATIENCE_S, self._close_if_silent)


class SocketServer(uvicorn.Server):
    """A server that removes its unix socket before the signal that ended it takes its own action.

    uvicorn sends itself that signal again, and SIGTERM ends the process there.
    """

    def __init__(self, config: uvicorn.Config, path: Path | None) -> None:
        super().__init__(config)
        self._path = path

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close all connections, and remove the socket."""
        await super().shutdown(sockets)
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def serve(
    confinement: Confinement,
    tell: Callable[[str], None],
    *,
    port: int = 0,
    socket_path: Path | None = None,
) -> None:
    """Serve the studio until it is interrupted; `tell` gets its address, with the token.

    It listens at a port of this machine, or at a unix socket that this user alone can open. This
    process can open no file outside of its confinement afterwards.

    Raises:
        BadInput: the port is taken or no port, the socket cannot be made, or the folder is not
            below the root.
    """
    root = confinement.root
    if not root.is_dir():
        raise BadInput(Reason(field="--root", value=str(root), rule="no such folder"))
    if not confinement.folder.is_relative_to(root):
        rule = f"must lie below --root {root}: the studio writes nothing elsewhere"
        nearest = str(root / "runs" / "studio")
        reason = Reason(field="--folder", value=str(confinement.folder), rule=rule, nearest=nearest)
        raise BadInput(reason)
    listener = listen_at_port(port) if socket_path is None else _listen_at_path(socket_path)
    port = 0 if socket_path is not None else listener.getsockname()[1]
    access = Access(port=port, is_read_only=confinement.is_read_only)
    config = uvicorn.Config(
        build_app(confinement, access),
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=1,
        limit_concurrency=_MOST_CONNECTIONS,
        http=PromptConnection,
        ws="none",
    )
    confinement.enter(unlinks=() if socket_path is None else (socket_path.absolute(),))
    if not confinement.is_read_only:
        folder = StudioFolder(confinement.folder)
        folder.remove_uploads()
        folder.prune()
    if socket_path is None:
        tell(f"the studio is at http://{HOST}:{port}/?token={access.token} (Ctrl-C ends it)")
    else:
        tell(f"the studio is at the socket {socket_path}: forward a port to it, such as")
        tell(f"ssh -L 8765:{socket_path.absolute()} {socket.gethostname()}")
        tell(f"and open http://{HOST}:8765/?token={access.token} (Ctrl-C ends it)")
    server = SocketServer(config, socket_path)
    # An answer that Ctrl-C cuts off is no fault of the studio, whose log would show it as one.
    logging.getLogger("uvicorn.error").addFilter(lambda _: not server.should_exit)
    server.run(sockets=[listener])


def listen_at_port(port: int) -> socket.socket:
    """Listen at a port of this machine alone, 0 for a free one.

    Raises:
        BadInput: the port is taken or no port.
    """
    if not 0 <= port <= 65535:
        nearest = str(min(max(port, 0), 65535))
        rule = "must be in 0..65535, 0 for a free one"
        raise BadInput(Reason(field="--port", value=str(port), rule=rule, nearest=nearest))
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
    except OSError as error:
        rule = f"cannot be used: {error.strerror}"
        reason = Reason(field="--port", value=str(port), rule=rule, nearest="0 for a free one")
        raise BadInput(reason) from None
    listener.listen()  # whoever comes once the address is told waits, and is not refused
    return listener


def _listen_at_path(path: Path) -> socket.socket:
    """Listen at a socket that nobody but this user can ever open."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)
    try:
        _remove_dead_socket(path)
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        rule = f"cannot be made: {error.strerror or error}"
        raise BadInput(Reason(field="--socket", value=str(path), rule=rule)) from None
    finally:
        os.umask(mask)
    listener.listen()
    return listener


def _remove_dead_socket(path: Path) -> None:
    """Remove the socket of a server that was killed; one that answers stays."""
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()
