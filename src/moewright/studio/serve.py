"""Start the studio's server on this machine's own address."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import uvicorn

from moewright.spec.errors import BadInput, Reason
from moewright.studio.app import build_app

HOST = "127.0.0.1"


def serve(folder: Path, port: int, tell: Callable[[str], None]) -> None:
    """Serve the studio until it is interrupted; `tell` gets its address.

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
    port = listener.getsockname()[1]
    config = uvicorn.Config(
        build_app(folder, port), log_level="warning", access_log=False, timeout_graceful_shutdown=1
    )
    tell(f"the studio is at http://{HOST}:{port}/ (Ctrl-C ends it)")
    uvicorn.Server(config).run(sockets=[listener])
