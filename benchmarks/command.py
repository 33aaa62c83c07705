"""Benchmarks as commands, with the options, refusals and exit codes of `moewright`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NoReturn

from cyclopts import App

from moewright.cli.main import main


def run_command(name: str, command: Callable[..., int]) -> NoReturn:
    """Run `command` with the arguments of this process, and exit with its code.

    `name` is the module that a user starts it by, such as "benchmarks.engine".
    """

    def build_app() -> App:
        app = App(
            name=f"python -m {name}",
            version_flags=[],
            help_format="plaintext",
            suppress_keyboard_interrupt=False,
        )
        app.default(command)
        return app

    sys.exit(main(sys.argv[1:], build_app))
