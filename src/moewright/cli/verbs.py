"""The verbs of the command line, apart from `main`, which handles an interrupt of their import."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from cyclopts import App

from moewright.cli.bench import bench_machine, bench_search, bench_sweep, fit, validate
from moewright.cli.catalogues import build_completion_verb, hardware, models
from moewright.cli.chat import chat
from moewright.cli.convert import convert_export, convert_import
from moewright.cli.data import data_build
from moewright.cli.diagnose import compare, diagnose, forecast, report
from moewright.cli.exit_codes import describe_exits
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
        exits = describe_exits(verb.__name__)
        app.command(verb, help_format=_REFLOWED, help_epilogue=exits)
    groups: tuple[tuple[str, str, Mapping[str, Callable[..., int]]], ...] = (
        ("data", "Make training data.", {"build": data_build}),
        (
            "convert",
            "Convert Hugging Face folders to checkpoints, and back.",
            {"import": convert_import, "export": convert_export},
        ),
        (
            "bench",
            "Measure this machine, the planner, and layouts of a sweep.",
            {"machine": bench_machine, "search": bench_search, "sweep": bench_sweep},
        ),
    )
    for group, summary, members in groups:
        part = App(help_format=_REFLOWED, name=group, help=summary)
        for name, member in members.items():
            exits = describe_exits(f"{group} {name}")
            part.command(member, name=name, help_epilogue=exits)
        app.command(part)
    return app


def list_verbs(app: App, group: str = "") -> Iterator[tuple[str, App]]:
    """Yield every verb that does something, by its whole name: "bench sweep" is one."""
    for name in app:
        part = app[name]
        if name.startswith("-"):
            continue
        if part.default_command is None:
            yield from list_verbs(part, f"{name} ")
        else:
            yield f"{group}{name}", part
