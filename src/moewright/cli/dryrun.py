"""`moewright dryrun`: become one rank of a job of any size, without data and other ranks."""

from __future__ import annotations

from pathlib import Path

from moewright.cli.answers import reserve_stdout, write_answer
from moewright.cli.options import AnswerOptions, Count, JsonOption, SetOption
from moewright.cli.progress import show_share

_SHORT = AnswerOptions()


def dryrun(
    job: Path,
    /,
    *,
    rank: Count,
    set_: SetOption = None,
    answer: AnswerOptions = _SHORT,
    json: JsonOption = None,
) -> int:
    """Count what one rank of a job would hold, send and compute in a step.

    The planner's prediction for the rank stands beside. Every layer, collective and update of the
    rank runs, on tensors without data; routing is even. What the job leaves open of the layout
    takes its default. Exit code 1 when a count that should equal its prediction does not.

    Parameters
    ----------
    job
        The job file; its layout is over train.nproc ranks.
    rank
        The rank to become, from 0.
    set_
        Another value for a key of the job, section.key=value; may be given again.
    json
        Write what was counted and predicted to this file, with rule and verdict of every row; "-":
        to standard output, and the tables to standard error.
    """
    from moewright.api.dry_runs import count_rank
    from moewright.codec import format_layout
    from moewright.report.document import DocumentSection
    from moewright.report.document_text import print_document
    from moewright.report.ledger_document import build_dry_run_document

    work = f"running rank {rank} on tensors without data"
    with reserve_stdout(json), show_share(work) as show:
        counts = count_rank(job, rank, tuple(set_ or ()), show)
    counted = counts.counted
    document = build_dry_run_document(
        counts.comparison,
        subject=(
            f"{counts.model.name or 'model'}, rank {rank} of {counts.layout.world_size} "
            f"(pipeline rank {counted.ledger.pp_rank})"
        ),
        introduction=DocumentSection(
            facts=(("layout", format_layout(counts.layout)),),
            notes=(
                f"{counts.run_micro_batches} of the step's {counts.step_micro_batches} "
                "micro-batches were run: the peak does not grow after them, and the other figures "
                "count them alone",
            ),
        ),
        states_bytes=counted.states_bytes,
        tensor_bytes=counted.peak_by_module,
        planned=counts.planned,
    )
    with write_answer(
        counts.to_record(), json, html=answer.html, views=lambda: [document]
    ) as console:
        print_document(console, document, verbose=answer.verbose)
    return 0 if counts.comparison.keeps_rules else 1
