"""`moewright studio`: the planner in a browser."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from moewright.cli.answers import print_now
from moewright.cli.options import Count

_DEFAULT_PORT = 8765
_DEFAULT_FOLDER = Path("runs") / "studio"


def studio(*, port: Count = _DEFAULT_PORT, folder: Path = _DEFAULT_FOLDER) -> int:
    """Open the planner's pages to a browser on this machine, until Ctrl-C.

    The server listens on 127.0.0.1 alone. What a page shows is in its address, so an address can be
    kept and sent. It needs the extra: pip install 'moewright[studio]'.

    Parameters
    ----------
    port
        The port to listen on; 0 takes a free one.
    folder
        Where files that are dropped on a page are kept; nothing is written elsewhere.
    """
    from moewright.studio.serve import serve

    with suppress(KeyboardInterrupt):  # it is how a studio ends
        serve(folder, port, print_now)
    return 0
