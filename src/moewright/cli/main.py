"""The command line: names of the verbs, and how each way to end becomes a line and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from cyclopts import App, CycloptsError

from moewright import __version__
from moewright.cli.bench import bench_machine, bench_search
from moewright.cli.data import data_build
from moewright.cli.diagnose import diagnose
from moewright.cli.dryrun import dryrun
from moewright.cli.estimate import estimate
from moewright.cli.export import export
from moewright.cli.fit import fit
from moewright.cli.plan import plan
from moewright.cli.report import report
from moewright.cli.train import train
from moewright.cli.validate import validate
from moewright.cli.verify import verify
from moewright.spec.errors import BadInput

DONE, FAILED, BAD_INPUT, INTERRUPTED, PIPE_CLOSED = 0, 1, 2, 130, 141
_ENGINE_PACKAGES = ("torch", "safetensors", "tokenizers")


def run() -> None:
    """Entry point of the `moewright` program."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # started with it closed; unwritten files must not get its number
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
    sys.exit(main(sys.argv[1:]))


def main(arguments: Sequence[str]) -> int:
    """Run one verb; its exit code. Whatever a user can mend is one line on stderr and code 2."""
    try:
        code = _app()(arguments, print_error=False, exit_on_error=False, result_action="return_value")
        sys.stdout.flush()
    except (BadInput, CycloptsError) as error:
        return _say(str(error), BAD_INPUT)
    except ModuleNotFoundError as error:
        if error.name not in _ENGINE_PACKAGES:
            raise
        return _say(f"this verb needs {error.name}; install it with: pip install 'moewright[engine]'", BAD_INPUT)
    except BrokenPipeError:  # the reader, say `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except OSError as error:
        return _say(f"{error.filename or 'system'}: {error.strerror or error}", FAILED)
    except KeyboardInterrupt:
        return _say("interrupted", INTERRUPTED)
    return code if isinstance(code, int) else DONE


def _app() -> App:
    app = App(
        name="moewright",
        help="Plan, train, measure and retune Mixture-of-Experts language models.",
        version=__version__,
        help_format="plaintext",
        suppress_keyboard_interrupt=False,
    )
    data = App(name="data", help="Make training data.")
    bench = App(name="bench", help="Measure this machine and the planner.")
    app.command(plan)
    app.command(estimate)
    app.command(validate)
    app.command(fit)
    app.command(train)
    app.command(verify)
    app.command(dryrun)
    app.command(report)
    app.command(diagnose)
    app.command(export)
    app.command(data)
    app.command(bench)
    data.command(data_build, name="build")
    bench.command(bench_machine, name="machine")
    bench.command(bench_search, name="search")
    return app


def _say(text: str, code: int) -> int:
    with suppress(OSError):  # nobody can be told, but the code still says it
        print(f"moewright: {' '.join(text.split())}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    run()
