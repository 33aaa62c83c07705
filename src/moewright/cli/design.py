"""`moewright design`: which model to train."""

from __future__ import annotations

from pathlib import Path

from moewright.cli.answers import write_answer
from moewright.cli.options import BatchOptions, DesignOutputs, ShapeOptions
from moewright.cli.progress import show_elapsed

_NO_WORKLOAD = BatchOptions()
_NO_OPTIONS = ShapeOptions()
_NO_OUTPUTS = DesignOutputs()


def design(
    *,
    on: str,
    like: str = "Qwen3-30B-A3B",
    workload: BatchOptions = _NO_WORKLOAD,
    options: ShapeOptions = _NO_OPTIONS,
    outputs: DesignOutputs = _NO_OUTPUTS,
) -> int:
    """Find the shape of model with the least predicted loss in the time, and its plan.

    Shapes of other width, depth, number of experts, experts a token and width of experts are
    compared by published laws of the loss, by the tokens that they see in the time, and by size.

    Parameters
    ----------
    on
        Hardware as count x device, "256xH100".
    like
        The model whose family, attention, router and vocabulary the shapes have.
    """
    from moewright.api.design_document import build_design_document
    from moewright.api.designing import compute_design
    from moewright.report.document_text import print_document

    with show_elapsed("comparing shapes"):
        answer = compute_design(on, like, workload, options)
    document = build_design_document(answer)
    written: tuple[Path, ...] = ()
    if options.out is not None:
        written = tuple(options.out / name for name in ("config.json", "plan.json", "job.toml"))
    with write_answer(
        answer, outputs.json, html=outputs.html, views=lambda: [document], written=written
    ) as console:
        print_document(console, document, verbose=outputs.verbose)
    return 0
