"""The verbs of the command line, apart from `main`, which handles an interrupt of their import."""

from __future__ import annotations

from cyclopts import App

from moewright.cli.bench import bench_machine, bench_search, bench_sweep, fit, validate
from moewright.cli.catalogues import build_completion_verb, hardware, models
from moewright.cli.chat import chat
from moewright.cli.convert import convert_export, convert_import
from moewright.cli.data import data_build
from moewright.cli.diagnose import compare, diagnose, report
from moewright.cli.export import capture, export
from moewright.cli.forecast import forecast
from moewright.cli.plan import budget, design, estimate, plan
from moewright.cli.serve import mcp, studio
from moewright.cli.train import finetune, train, upcycle
from moewright.cli.tune import tune
from moewright.cli.verify import dryrun, verify
from moewright.cli.watch import check, watch
from moewright.version import __version__


def build_app() -> App:
    """Build the command line of `moewright`."""
    app = App(
        name="moewright",
        help="Plan, train, measure and retune Mixture-of-Experts language models.",
        version=__version__,
        help_format="plaintext",
        suppress_keyboard_interrupt=False,
    )
    app.command(plan)
    app.command(estimate)
    app.command(budget)
    app.command(design)
    app.command(validate)
    app.command(fit)
    app.command(train)
    app.command(finetune)
    app.command(chat)
    app.command(verify)
    app.command(dryrun)
    app.command(upcycle)
    app.command(report)
    app.command(diagnose)
    app.command(watch)
    app.command(forecast)
    app.command(compare)
    app.command(check)
    app.command(studio)
    app.command(mcp)
    app.command(tune)
    app.command(export)
    app.command(capture)
    app.command(models)
    app.command(hardware)
    app.command(build_completion_verb(app))
    data = App(name="data", help="Make training data.")
    data.command(data_build, name="build")
    app.command(data)
    convert = App(name="convert", help="Convert Hugging Face folders to checkpoints, and back.")
    convert.command(convert_import, name="import")
    convert.command(convert_export, name="export")
    app.command(convert)
    bench = App(name="bench", help="Measure this machine, the planner, and layouts of a sweep.")
    bench.command(bench_machine, name="machine")
    bench.command(bench_search, name="search")
    bench.command(bench_sweep, name="sweep")
    app.command(bench)
    return app
