"""The verbs of the command line, apart from `main`, which handles an interrupt of their import."""

from __future__ import annotations

from cyclopts import App

from moewright.cli.bench import bench_machine, bench_search
from moewright.cli.budget import budget
from moewright.cli.capture import capture
from moewright.cli.catalogues import hardware, models
from moewright.cli.chat import chat
from moewright.cli.check import check
from moewright.cli.compare import compare
from moewright.cli.completion import build_completion_verb
from moewright.cli.convert import convert_export, convert_import
from moewright.cli.data import data_build
from moewright.cli.design import design
from moewright.cli.diagnose import diagnose
from moewright.cli.dryrun import dryrun
from moewright.cli.estimate import estimate
from moewright.cli.export import export
from moewright.cli.finetune import finetune
from moewright.cli.fit import fit
from moewright.cli.mcp import mcp
from moewright.cli.plan import plan
from moewright.cli.report import report
from moewright.cli.studio import studio
from moewright.cli.sweep import bench_sweep
from moewright.cli.train import train
from moewright.cli.tune import tune
from moewright.cli.upcycle import upcycle
from moewright.cli.validate import validate
from moewright.cli.verify import verify
from moewright.cli.watch import watch
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
