"""The verbs of the command line, apart from `main`, which handles an interrupt of their import."""

from __future__ import annotations

from typing import Final

from cyclopts import App

from moewright.cli.bench import bench_machine, bench_search, bench_sweep, fit, validate
from moewright.cli.catalogues import build_completion_verb, hardware, models
from moewright.cli.chat import chat
from moewright.cli.convert import convert_export, convert_import
from moewright.cli.data import data_build
from moewright.cli.diagnose import compare, diagnose, forecast, report
from moewright.cli.export import capture, export
from moewright.cli.plan import budget, design, estimate, plan
from moewright.cli.serve import mcp, studio
from moewright.cli.train import finetune, train, upcycle
from moewright.cli.tune import tune
from moewright.cli.verify import dryrun, verify
from moewright.cli.watch import check, watch
from moewright.version import __version__

# A page of help wraps its paragraphs anew, as Markdown; the list of verbs is there sooner without.
_REFLOWED: Final = "markdown"


def build_app() -> App:
    """Build the command line of `moewright`."""
    app = App(
        name="moewright",
        help="Plan, train, measure and retune Mixture-of-Experts language models.",
        version=__version__,
        help_format="plaintext",
        suppress_keyboard_interrupt=False,
    )
    verbs = (
        plan,
        estimate,
        budget,
        design,
        validate,
        fit,
        train,
        finetune,
        chat,
        verify,
        dryrun,
        upcycle,
        report,
        diagnose,
        watch,
        forecast,
        compare,
        check,
        studio,
        mcp,
        tune,
        export,
        capture,
        models,
        hardware,
        build_completion_verb(app),
    )
    for verb in verbs:
        app.command(verb, help_format=_REFLOWED)
    data = App(help_format=_REFLOWED, name="data", help="Make training data.")
    data.command(data_build, name="build")
    app.command(data)
    convert = App(
        help_format=_REFLOWED,
        name="convert",
        help="Convert Hugging Face folders to checkpoints, and back.",
    )
    convert.command(convert_import, name="import")
    convert.command(convert_export, name="export")
    app.command(convert)
    bench = App(
        help_format=_REFLOWED,
        name="bench",
        help="Measure this machine, the planner, and layouts of a sweep.",
    )
    bench.command(bench_machine, name="machine")
    bench.command(bench_search, name="search")
    bench.command(bench_sweep, name="sweep")
    app.command(bench)
    return app
