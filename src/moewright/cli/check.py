"""`moewright check`: what a change of a job costs, and whether it keeps its budgets."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from moewright.cli.answers import write_answer
from moewright.cli.exit_codes import DOES_NOT_FIT, DONE, OVER_BUDGET
from moewright.cli.options import CheckOutputs, ScriptOptions

if TYPE_CHECKING:
    from moewright.diagnosis.checks import Check

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
    their intervals. Exit codes: 0 the change keeps its budgets, 2 bad input, 3 the job fitted, or
    might, and does not any more, 4 a budget is broken. A change of comments, order or spelling
    breaks none.

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
    return DONE if checked.keeps_fit else DOES_NOT_FIT


def _write_files(checked: Check, outputs: CheckOutputs) -> tuple[Path, ...]:
    """Write the answer in the formats that are asked for, and return their files."""
    from moewright.codec import write_text
    from moewright.report.check_document import build_check_document
    from moewright.report.check_formats import render_junit, render_sarif
    from moewright.report.document_markdown import render_markdown

    written = []
    if outputs.markdown is not None:
        write_text(outputs.markdown, render_markdown(build_check_document(checked)))
        written.append(outputs.markdown)
    if outputs.sarif is not None:
        write_text(outputs.sarif, render_sarif(checked))
        written.append(outputs.sarif)
    if outputs.junit is not None:
        write_text(outputs.junit, render_junit(checked))
        written.append(outputs.junit)
    return tuple(written)
