"""Verbs for runs and jobs of others: a log watched as it grows, a change held to its budgets."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from moewright.cli.answers import STANDARD_OUTPUT, open_console, write_answer
from moewright.cli.exit_codes import ALARMED, DOES_NOT_FIT, OVER_BUDGET, exit_code
from moewright.cli.option_types import LogPath
from moewright.cli.options import BatchOptions, CheckOutputs, ScriptOptions, WatchOptions
from moewright.spec.errors import BadInput, Reason

if TYPE_CHECKING:
    from moewright.api.watching import LogWatcher
    from moewright.diagnosis.checks import Check
    from moewright.diagnosis.run_watch import RunWatch


_NO_OPTIONS = BatchOptions()
_NO_WATCH = WatchOptions()


def watch(
    log: LogPath,
    /,
    *,
    plan: Path | None = None,
    script: Path | None = None,
    model: str = "",
    on: str = "",
    workload: BatchOptions = _NO_OPTIONS,
    watching: WatchOptions = _NO_WATCH,
) -> int:
    """Follow the log of a run: its speed beside the plan, changes of it, and alarms.

    Shifts and drifts of the step time are told from spikes; what recurs (checkpoints, evaluations,
    garbage collection) is named with what it costs. Each new alarm is a line, and one request to
    --webhook.

    Parameters
    ----------
    log
        A console log of Megatron-LM, Megatron Bridge, NeMo or torchtitan, "-" for standard input; a
        run folder of this engine; the folder of a step recorder; a folder of logs, of which the
        newest is taken; or a folder of TensorBoard's event files, which are read together.
    plan
        A plan.json or a job .toml: what is expected.
    script
        The launch script of the run, in place of a plan; --on says its devices.
    model
        The model, beside --on and --layout, in place of a plan.
    on
        The devices, count x device; alone, for the arguments that the log has printed.
    """
    from moewright.api.watching import LogWatcher, WatchedJob, copy_stream

    if watching.interval <= 0:
        rule = "must be seconds, above 0"
        value = f"{watching.interval:g}"
        raise BadInput(Reason(field="--interval", value=value, rule=rule, nearest="10"))
    job = WatchedJob(
        plan=plan,
        script=script,
        model=model,
        on=on,
        layout=watching.layout,
        options=workload,
    )
    with ExitStack() as stack:
        path = log
        name = ""
        reader: threading.Thread | None = None
        if log == Path("-"):
            folder = stack.enter_context(TemporaryDirectory(prefix="moewright-"))
            path = Path(folder) / "stdin.log"
            name = "standard input"
            # The first look may come before the first piece.
            path.touch()
            arguments = (sys.stdin.buffer, path)
            # A daemon: it may still wait for input when the watch is over.
            reader = threading.Thread(target=copy_stream, args=arguments, daemon=True)
            reader.start()
            if watching.once:
                reader.join()
        return _watch(LogWatcher(path, job, name=name), watching, reader)


def _watch(watcher: LogWatcher, watching: WatchOptions, reader: threading.Thread | None) -> int:
    """Tell alarms as they come, and the state of the run at the end."""
    from moewright.api.webhook import Webhook
    from moewright.report.document_text import print_document
    from moewright.report.watch_document import WatchPanel, build_watch_document

    told: set[tuple[str, int]] = set()
    shown: RunWatch | None = None
    webhook = Webhook(watching.webhook, _tell_failure) if watching.webhook else None
    console = open_console(watching.json)
    panel = WatchPanel(console) if watching.live and console.is_terminal else None
    try:
        for shown in _look(watcher, watching, reader):
            for alarm in shown.alarms:
                # A run that stays slow is told once, and not at each step.
                key = (alarm.kind.value, alarm.step if alarm.kind in ("slower", "drift") else 0)
                if key in told:
                    continue
                told.add(key)
                if not watching.once and panel is None:
                    console.print(f"{alarm.kind}: {alarm.text}")
                if webhook is not None:
                    webhook.post(alarm, shown.source)
            if panel is not None:
                panel.draw(shown)
            elif not watching.once and sys.stdout.isatty() and watching.json != STANDARD_OUTPUT:
                console.print(shown.title())
    except KeyboardInterrupt:  # it is how a watch ends
        if shown is None:
            raise
    finally:
        if panel is not None:
            panel.close()
        if webhook is not None:
            webhook.close()
    assert shown is not None
    document = build_watch_document(shown)
    with write_answer(
        shown, watching.json, html=watching.html, views=lambda: [document]
    ) as console:
        print_document(console, document, verbose=watching.verbose)
    return exit_code(holds=not told, otherwise=ALARMED)


def _tell_failure(failure: str) -> None:
    print(f"moewright: {failure}", file=sys.stderr)


def _look(
    watcher: LogWatcher, watching: WatchOptions, reader: threading.Thread | None
) -> Iterator[RunWatch]:
    from moewright.api.watching import follow

    if watching.once:
        yield watcher.look()
        return
    yield from follow(
        watcher,
        interval_s=watching.interval,
        patience_s=watching.patience,
        has_ended=None if reader is None else lambda: not reader.is_alive(),
    )


_NO_SCRIPTS = ScriptOptions()
_NO_OUTPUTS = CheckOutputs()


def check(
    before: str,
    after: str = "",
    /,
    *,
    scripts: ScriptOptions = _NO_SCRIPTS,
    budgets: Path | None = None,
    outputs: CheckOutputs = _NO_OUTPUTS,
) -> int:
    """Say exactly what a change of a job costs, and fail over budgets.

    Bytes a rank, calls, FLOPs and saved activations are counts; step and peak are predicted, with
    their intervals. A change of comments, order or spelling breaks no budget.

    Parameters
    ----------
    before
        A launch script of Megatron-LM, a configuration in YAML, a job .toml, a plan.json; a file of
        a commit as git writes it, main:train.sh; or a commit, for all jobs of the file of budgets.
    after
        The same after the change; what the working folder has now when not given.
    budgets
        The file of budgets; moewright.toml when not given, where there is one.
    """
    from moewright.api.checking import check as check_change
    from moewright.report.check_document import build_check_document
    from moewright.report.document_text import print_document

    checked = check_change(
        before,
        after,
        on=scripts.on,
        model=scripts.model,
        arguments=scripts.script_args,
        network=scripts.network,
        overrides=tuple(scripts.set_ or ()),
        budgets=budgets,
    )
    document = build_check_document(checked)
    written = _write_files(checked, outputs)
    with write_answer(
        checked, outputs.json, html=outputs.html, views=lambda: [document], written=written
    ) as console:
        print_document(console, document, verbose=outputs.verbose)
    if not checked.keeps_budgets:
        return OVER_BUDGET
    return exit_code(holds=checked.keeps_fit, otherwise=DOES_NOT_FIT)


def _write_files(checked: Check, outputs: CheckOutputs) -> tuple[Path, ...]:
    """Write the answer in the formats that are asked for, and return their files."""
    from datetime import UTC, datetime

    from moewright.codec import write_text
    from moewright.report.check_document import build_check_document, render_junit, render_sarif
    from moewright.report.document import render_markdown

    written = []
    if outputs.markdown is not None:
        write_text(outputs.markdown, render_markdown(build_check_document(checked)))
        written.append(outputs.markdown)
    if outputs.sarif is not None:
        write_text(outputs.sarif, render_sarif(checked))
        written.append(outputs.sarif)
    if outputs.junit is not None:
        write_text(outputs.junit, render_junit(checked, datetime.now(UTC)))
        written.append(outputs.junit)
    return tuple(written)
