"""The `moewright` program: how each way to end becomes a line on stderr and an exit code."""

from __future__ import annotations

import os
import signal
import sys

from moewright.cli.exit_codes import BAD_INPUT, DONE, FAILED, INTERRUPTED, PIPE_CLOSED
from moewright.spec.errors import lacks_memory

# Little is imported up to here, so that an interrupt soon finds a handler (see `run`).
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType

    from cyclopts import App, CycloptsError, MissingArgumentError

# Packages that some verbs need, and the extra that brings them.
_EXTRAS = (
    ("torch", "engine"),
    ("safetensors", "engine"),
    ("tokenizers", "engine"),
    ("starlette", "studio"),
    ("uvicorn", "studio"),
    ("mcp_types", "mcp"),
    ("mcp", "mcp"),
    ("anyio", "mcp"),
)


def run() -> None:
    """Run the verb that the program was started with, and exit with its code.

    While modules are imported, an interrupt ends the program at once: as an exception it would
    become a traceback, or be lost in a callback of the import system. A signal that comes when the
    code stands changes it no more: the interpreter takes a while to end.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _quit)
    # Where the program was started with streams closed, no file that is opened gets their numbers.
    while (handle := os.open(os.devnull, os.O_RDWR)) < 3:
        pass
    os.close(handle)
    for name in ("stdout", "stderr"):  # None where it was closed
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
    code = main(sys.argv[1:])
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    sys.exit(code)


def _quit(number: int, frame: FrameType | None) -> None:
    try:
        os.write(2, b"moewright: interrupted\n")
    finally:
        os._exit(INTERRUPTED)


def main(arguments: Sequence[str], build_app: Callable[[], App] | None = None) -> int:
    """Run one verb and return its exit code.

    Whatever a user can mend is one line on stderr and code 2. `build_app` makes the command line;
    it is that of `moewright` when not given.
    """
    try:
        return _run_verb(arguments, build_app or _build_verbs)
    except KeyboardInterrupt:
        return _report("interrupted", INTERRUPTED)
    except (MemoryError, ImportError, RuntimeError) as error:
        if not lacks_memory(error):
            raise
        # Nothing is imported or built any more: that would take memory.
        os.write(2, b"moewright: out of memory; raise the limit of this process (ulimit -v)\n")
        return FAILED


def _build_verbs() -> App:
    from moewright.cli.verbs import build_app

    return build_app()


def _run_verb(arguments: Sequence[str], build_app: Callable[[], App]) -> int:
    # Imported here, as the verbs are, because it takes a moment: an interrupt meanwhile must not
    # become a traceback.
    from cyclopts import CycloptsError, MissingArgumentError

    from moewright.spec.errors import BadInput

    try:
        app = build_app()
        if signal.getsignal(signal.SIGINT) is _quit:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        code = app(arguments, print_error=False, exit_on_error=False, result_action="return_value")
        sys.stdout.flush()
    except MissingArgumentError as error:
        return _report(str(_find_misspelling(error)), BAD_INPUT)
    except (BadInput, CycloptsError) as error:
        return _report(str(error), BAD_INPUT) if _reports_refusals() else BAD_INPUT
    except ModuleNotFoundError as error:
        extra = dict(_EXTRAS).get(error.name or "")
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
        # What a user has named is the user's to mend, as any other input is.
        code = BAD_INPUT if error.filename else FAILED
        return _report(f"{error.filename or 'system'}: {error.strerror or error}", code)
    return code if isinstance(code, int) else DONE


def _find_misspelling(error: MissingArgumentError) -> CycloptsError:
    """Return the error of an option that no verb has, which may be why another one is missing."""
    from cyclopts import Token, UnknownOptionError

    if error.app is None:
        return error
    options = error.app.assemble_argument_collection()
    names = {name for option in options for name in option.names}
    for word in error.unused_tokens or ():
        name = word.partition("=")[0]
        if name.startswith("--") and name not in names:
            token = Token(keyword=name, source="cli")
            return UnknownOptionError(token=token, argument_collection=options, verbose=False)
    return error


def _reports_refusals() -> bool:
    """Return whether this process tells of a refusal.

    All ranks that torchrun starts on a machine meet the same refusal, and the first reports it.
    """
    from moewright.engine.run.env import read_torchrun_env
    from moewright.spec.errors import BadInput

    try:
        env = read_torchrun_env()
    except BadInput:
        return True
    return env is None or env.local_rank == 0 or env.local_world_size == 0


def _report(text: str, code: int) -> int:

    from contextlib import suppress

    from moewright.cli.answers import print_now
    from moewright.spec.errors import escape_controls

    # Where nobody can be told, the exit code still says it.
    with suppress(OSError):
        text = f"moewright: {escape_controls(' '.join(text.split()))}"
        print_now(text, sys.stderr)
    return code


if __name__ == "__main__":
    run()
