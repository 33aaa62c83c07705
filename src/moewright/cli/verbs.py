"""The verbs of the command line. Apart from `main`, which answers an interrupt while these are
being imported."""

from __future__ import annotations

from cyclopts import App

from moewright import __version__
from moewright.cli.bench import bench_engine, bench_machine, bench_peers, bench_search
from moewright.cli.bench_tune import bench_tune
from moewright.cli.convert import convert_export, convert_import
from moewright.cli.data import data_build
from moewright.cli.diagnose import diagnose
from moewright.cli.dryrun import dryrun
from moewright.cli.estimate import estimate
from moewright.cli.export import export
from moewright.cli.fit import fit
from moewright.cli.plan import plan
from moewright.cli.report import report
from moewright.cli.sweep import bench_sweep
from moewright.cli.train import train
from moewright.cli.tune import tune
from moewright.cli.upcycle import upcycle
from moewright.cli.validate import validate
from moewright.cli.verify import verify


def build_app() -> App:
    verbs = App(
        name="moewright",
        help="Plan, train, measure and retune Mixture-of-Experts language models.",
        version=__version__,
        help_format="plaintext",
        suppress_keyboard_interrupt=False,
    )
    data = App(name="data", help="Make training data.")
    convert = App(name="convert", help="Hugging Face folders to checkpoints, and back.")
    bench = App(name="bench", help="Measure this machine, the planner and the engine.")
    verbs.command(plan)
    verbs.command(estimate)
    verbs.command(validate)
    verbs.command(fit)
    verbs.command(train)
    verbs.command(verify)
    verbs.command(dryrun)
    verbs.command(upcycle)
    verbs.command(report)
    verbs.command(diagnose)
    verbs.command(tune)
    verbs.command(export)
    verbs.command(data)
    verbs.command(convert)
    verbs.command(bench)
    data.command(data_build, name="build")
    convert.command(convert_import, name="import")
    convert.command(convert_export, name="export")
    bench.command(bench_machine, name="machine")
    bench.command(bench_engine, name="engine")
    bench.command(bench_peers, name="peers")
    bench.command(bench_search, name="search")
    bench.command(bench_sweep, name="sweep")
    bench.command(bench_tune, name="tune")
    return verbs
