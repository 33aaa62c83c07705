"""Verbs that serve the planner: in a browser, and as tools of an agent."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from moewright.cli.answers import print_now
from moewright.cli.option_types import Count, Flag
from moewright.spec.errors import BadInput, Reason

_STUDIO_PORT = 8765  # free on most machines: notebooks take 8888, TensorBoard 6006
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
    confinement = Confinement(
        root=root.resolve(),
        folder=(root / folder).resolve(),
        hub_cache=_find_hub_cache(),
        is_read_only=read_only,
    )
    with suppress(KeyboardInterrupt):  # it is how a studio ends
        serve(
            confinement,
            print_now,
            port=_STUDIO_PORT if port is None else port,
            socket_path=socket,
        )
    return 0


_MCP_PORT = 8766  # beside the studio's
_LIMIT_S = 120.0  # the longest search of a large space takes less, on a machine that is shared
_TOKEN = "MOEWRIGHT_MCP_TOKEN"


def mcp(
    *,
    http: Flag = False,
    port: Count | None = None,
    root: Path = Path(),
    time_limit: float = _LIMIT_S,
) -> int:
    """Serve plan, estimate, diagnose and other verbs to an agent, by the Model Context Protocol.

    It answers on standard input and output; with --http on 127.0.0.1 alone, to those who send a
    token: that of the variable MOEWRIGHT_MCP_TOKEN, or a new one that is printed. A tool's answer
    is what the verb of its name writes as --json, and a refusal is data too. No tool writes a file
    or asks another machine. It needs the extra: pip install 'moewright[mcp]'.

    Parameters
    ----------
    http
        Listen on a port of this machine in place of standard input.
    port
        The port of --http, 8766 when not given; 0 takes a free one.
    root
        The folder that tools may read: no file outside of it is opened. Relative paths begin there.
    time_limit
        Seconds that an answer may take once it is begun; of design and budget five times as many.
    """
    from moewright.agents.server import serve_http, serve_stdio
    from moewright.studio.confinement import Confinement

    if port is not None and not http:
        raise BadInput(Reason(field="--port", rule="goes with --http", nearest="--http"))
    if not 0 < time_limit < 1e6:
        rule = "must be seconds, above 0"
        raise BadInput(
            Reason(field="--time-limit", value=f"{time_limit:g}", rule=rule, nearest="120")
        )
    if not root.is_dir():
        raise BadInput(Reason(field="--root", value=str(root), rule="no such folder"))
    confinement = Confinement(
        root=root.resolve(), folder=root.resolve(), hub_cache=_find_hub_cache(), is_read_only=True
    )
    with suppress(KeyboardInterrupt):  # it is how a server ends
        if http:
            serve_http(
                confinement,
                time_limit,
                print_now,
                port=_MCP_PORT if port is None else port,
                token=os.environ.get(_TOKEN, ""),
            )
        else:
            serve_stdio(confinement, time_limit)
    return 0


def _find_hub_cache() -> Path:
    """Return where models of the hub are kept: outside of the root, and read all the same."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("HF_HOME") or f"{cache}/huggingface").expanduser().resolve()
