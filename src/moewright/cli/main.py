"""The command line: names of the verbs, and how each way to end becomes a line and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from moewright.spec.errors import BadInput

DONE, FAILED, BAD_INPUT, INTERRUPTED, PIPE_CLOSED = 0, 1, 2, 130, 141
_ENGINE_PACKAGES = ("torch", "safetensors", "tokenizers")


def run() -> None:
    """Entry point of the `moewright` program."""
    for name in ("stdout", "stderr"):
        if (
            getattr(sys, name) is None
        ):  # started with it closed; unwritten files must not get its number
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
    sys.exit(main(sys.argv[1:]))


def main(arguments: Sequence[str]) -> int:
    """Run one verb; its exit code. Whatever a user can mend is one line on stderr and code 2."""
    try:
        return _answer(arguments)
    except KeyboardInterrupt:
        return _say("interrupted", INTERRUPTED)


def _answer(arguments: Sequence[str]) -> int:
    from cyclopts import (
        CycloptsError,
    )  # takes a moment, as the verbs do: an interrupt meanwhile is no traceback

    from moewright.cli.verbs import build_app

    try:
        code = build_app()(
            arguments, print_error=False, exit_on_error=False, result_action="return_value"
        )
        sys.stdout.flush()
    except (BadInput, CycloptsError) as error:
        return _say(str(error), BAD_INPUT) if _speaks() else BAD_INPUT
    except ModuleNotFoundError as error:
        if error.name not in _ENGINE_PACKAGES:
            raise
        return _say(
            f"this verb needs {error.name}; install it with: pip install 'moewright[engine]'",
            BAD_INPUT,
        )
    except BrokenPipeError:  # the reader, say `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except OSError as error:
        return _say(f"{error.filename or 'system'}: {error.strerror or error}", FAILED)
    return code if isinstance(code, int) else DONE


def _speaks() -> bool:
    """Whether this process tells of a refusal: the ranks that torchrun starts on a machine all find
    the same."""
    from moewright.engine.run.env import read_torchrun_env

    try:
        env = read_torchrun_env()
    except BadInput:
        return True
    return env is None or env.local_rank == 0 or env.local_world_size == 0


def _say(text: str, code: int) -> int:
    with suppress(OSError):  # nobody can be told, but the code still says it
        print(f"moewright: {' '.join(text.split())}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    run()
