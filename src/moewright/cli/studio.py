"""`moewright studio`: the planner in a browser."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from moewright.cli.answers import print_now
from moewright.cli.options import Count
from moewright.spec.errors import BadInput, Reason

_DEFAULT_PORT = 8765
_DEFAULT_FOLDER = Path("runs") / "studio"


def studio(
    *,
    port: Count | None = None,
    socket: Path | None = None,
    root: Path = Path(),
    folder: Path = _DEFAULT_FOLDER,
    read_only: bool = False,
) -> int:
    """Open the planner's pages to a browser on this machine, until Ctrl-C.

    The server listens on 127.0.0.1 alone, and answers those who open the address that it prints:
    it holds a token, which is another one at each start. What a page shows is in its address, so an
    address can be kept and sent. It needs the extra: pip install 'moewright[studio]'.

    Parameters
    ----------
    port
        The port to listen on, 8765 when not given; 0 takes a free one.
    socket
        Listen at this unix socket, which this user alone can open, in place of a port.
    root
        The folder that pages may read: no file outside of it is opened. Relative paths on pages
        begin there.
    folder
        Where files that are dropped on a page are kept, below the root; nothing is written
        elsewhere.
    read_only
        Take no files, write nothing and ask no other machine, as for those that the token is
        shared with.
    """
    from moewright.studio.confinement import Confinement
    from moewright.studio.serve import serve

    if port is not None and socket is not None:
        raise BadInput(Reason(field="--port", rule="does not go with --socket"))
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    hub_cache = Path(os.environ.get("HF_HOME") or f"{cache}/huggingface").expanduser()
    confinement = Confinement(
        root=root.resolve(),
        folder=(root / folder).resolve(),
        hub_cache=hub_cache.resolve(),
        is_read_only=read_only,
    )
    with suppress(KeyboardInterrupt):  # it is how a studio ends
        serve(
            confinement,
            print_now,
            port=_DEFAULT_PORT if port is None else port,
            socket_path=socket,
        )
    return 0
