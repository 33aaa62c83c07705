"""The `moewright` program: how each way to end becomes a line on stderr and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import TYPE_CHECKING

from moewright.cli.exit_codes import BAD_INPUT, DONE, FAILED, INTERRUPTED, PIPE_CLOSED
from moewright.spec.errors import BadInput
from moewright.spec.printable import escape_controls

if TYPE_CHECKING:
    from cyclopts import App
# Packages that some verbs need, by the extra that brings them.
_EXTRAS = MappingProxyType(
    dict.fromkeys(("torch", "safetensors", "tokenizers"), "engine")
    | dict.fromkeys(("starlette", "uvicorn"), "studio")
)


def run() -> None:
    """Run the verb that the program was started with, and exit with its code."""
    for name in ("stdout", "stderr"):
        # A stream is None when the program was started with it closed. It is opened here, so that
        # no file that is written gets its number.
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
    sys.exit(main(sys.argv[1:]))


def main(arguments: Sequence[str], build_app: Callable[[], App] | None = None) -> int:
    """Run one verb and return its exit code.

    Whatever a user can mend is one line on stderr and code 2. `build_app` makes the command line;
    it is that of `moewright` when not given.
    """
    try:
        return _run_verb(arguments, build_app or _build_verbs)
    except KeyboardInterrupt:
        return _report("interrupted", INTERRUPTED)


def _build_verbs() -> App:
    from moewright.cli.verbs import build_app

    return build_app()


def _run_verb(arguments: Sequence[str], build_app: Callable[[], App]) -> int:
    # Imported here, as the verbs are, because it takes a moment: an interrupt meanwhile must not
    # become a traceback.
    from cyclopts import CycloptsError

    try:
        code = build_app()(
            arguments, print_error=False, exit_on_error=False, result_action="return_value"
        )
        sys.stdout.flush()
    except (BadInput, CycloptsError) as error:
        return _report(str(error), BAD_INPUT) if _reports_refusals() else BAD_INPUT
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get(error.name or "")
        if extra is None:
            raise
        return _report(
            f"this verb needs {error.name}; install it with: pip install 'moewright[{extra}]'",
            BAD_INPUT,
        )
    except BrokenPipeError:
        # The reader, say `head`, has seen enough. What is still buffered goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except OSError as error:
        return _report(f"{error.filename or 'system'}: {error.strerror or error}", FAILED)
    return code if isinstance(code, int) else DONE


def _reports_refusals() -> bool:
    """Return whether this process tells of a refusal.

    All ranks that torchrun starts on a machine meet the same refusal, and the first reports it.
    """
    from moewright.engine.run.env import read_torchrun_env

    try:
        env = read_torchrun_env()
    except BadInput:
        return True
    return env is None or env.local_rank == 0 or env.local_world_size == 0


def _report(text: str, code: int) -> int:
    # Where nobody can be told, the exit code still says it.
    with suppress(OSError):
        text = escape_controls(" ".join(text.split()))
        print(f"moewright: {text}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    run()
