"""`moewright compare`: what others get, and where the gap to them lies."""

from __future__ import annotations

from pathlib import Path

from moewright.cli.answers import write_answer
from moewright.cli.options import BatchOptions, ComparisonOutputs
from moewright.cli.stated_job import read_stated_job

_NO_OPTIONS = BatchOptions()
_NO_OUTPUTS = ComparisonOutputs()


def compare(
    run: Path,
    /,
    *,
    script: Path | None = None,
    model: str = "",
    on: str = "",
    layout: str = "",
    workload: BatchOptions = _NO_OPTIONS,
    outputs: ComparisonOutputs = _NO_OUTPUTS,
) -> int:
    """Put a run beside its prediction and the nearest published runs, and say what closes the gap.

    Published runs are named with their sources, and how near they are: by model, device,
    precision and layout. What closes the gap stands in the order of its parts, the largest first.

    Parameters
    ----------
    run
        The folder of a run, as `moewright train --out` made it, or its plan.json; a trace of the
        PyTorch profiler (.json, .json.gz), an Nsight Systems export (.sqlite), or a folder of them;
        or a console log of Megatron-LM.
    script
        The Megatron-LM launch script of a trace or a log, which tells model, batch and layout.
    model
        The model that a trace or a log trained, a name or a config.json; or a job .toml.
    on
        The devices of a trace or a log, count x device.
    layout
        The layout of a trace or a log, such as "tp2,ep8,pp4".
    """
    from moewright.api.run_comparisons import compare_run
    from moewright.report.document_text import print_document
    from moewright.report.run_comparison_document import build_run_comparison_document

    stated = read_stated_job(run, script=script, model=model, on=on, layout=layout, batch=workload)
    comparison = compare_run(
        run, plan=stated.plan, script=stated.script, on=on, model=model, network=workload.network
    )
    document = build_run_comparison_document(comparison)
    with write_answer(
        comparison, outputs.json, html=outputs.html, views=lambda: [document]
    ) as console:
        print_document(console, document, verbose=outputs.verbose)
    return 0
