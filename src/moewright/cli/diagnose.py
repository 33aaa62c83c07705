"""Verbs that read a run: what holds it back, what others get, its experts' loads, its page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moewright.cli.answers import write_answer
from moewright.cli.option_types import JsonOption
from moewright.cli.options import AnswerOptions, BatchOptions, ComparisonOutputs, DiagnosisOutputs
from moewright.spec.errors import BadInput, Reason
from moewright.spec.units import plural

if TYPE_CHECKING:
    from rich.console import Console

    from moewright.api.diagnosing import Diagnosis
    from moewright.spec.plan import Plan

_SHORT = AnswerOptions()


@dataclass(frozen=True, kw_only=True, slots=True)
class StatedJob:
    """A job as a plan or a launch script; both are None where the run states it or nothing does."""

    plan: Plan | None = None
    script: Path | None = None


def read_stated_job(
    run: Path,
    *,
    script: Path | None,
    model: str,
    on: str,
    layout: str,
    batch: BatchOptions,
) -> StatedJob:
    """Return the job that options state; a run of ours states its own.

    Raises:
        BadInput: the options contradict each other, or say no job that can be planned.
    """
    from moewright.api.diagnosing import is_engine_run, state_logged_job

    if is_engine_run(run):
        return StatedJob()
    if script is not None:
        if layout:
            rule = "cannot be given with --script, which states it"
            raise BadInput(Reason(field="--layout", value=layout, rule=rule))
        return StatedJob(script=script)
    if model:
        plan = state_logged_job(run, model, layout, on=on, options=batch)
        return StatedJob(plan=plan)
    if layout or batch.seq_len:
        option = "--layout" if layout else "--seq-len"
        raise BadInput(Reason(field=option, rule="needs --model beside it"))
    return StatedJob()


_NOTES_SHOWN = 1  # the others under -v
_NO_OPTIONS = BatchOptions()
_NO_OUTPUTS = DiagnosisOutputs()


def diagnose(
    run: Path,
    /,
    *later: Path,
    script: Path | None = None,
    model: str = "",
    on: str = "",
    layout: str = "",
    workload: BatchOptions = _NO_OPTIONS,
    outputs: DiagnosisOutputs = _NO_OUTPUTS,
) -> int:
    """Name the wall that holds a run back, where the step goes, and what to change next.

    Where the job is known (a run of ours, or MODEL, hardware and layout given here), every switch
    that is off and every near layout is priced: the three changes that gain most, what all of them
    gain together, and what to write and leave out for them. -v has the evidence and the waterfall.

    Parameters
    ----------
    run
        The folder of a run, as `moewright train --out` made it, or its plan.json; a trace of the
        PyTorch profiler (.json, .json.gz) or a folder of them, one a rank; an Nsight Systems export
        (.sqlite); or a console log of Megatron-LM.
    later
        A later run, trace or log of the same kind: what changed between the two is told instead, by
        part of the step, phase, layer and kernel.
    script
        The Megatron-LM launch script of a trace or a log, which tells model, batch and layout.
    model
        The model that a trace or a log trained, a name or a config.json; or a job .toml.
    on
        The devices of a trace or a log, count x device.
    layout
        The layout of a trace or a log, such as "tp2,ep8,pp4".
    """
    from moewright.api.diagnosing import diagnose as diagnose_path
    from moewright.api.diagnosing import view_diagnosis
    from moewright.api.run_comparisons import compare_steps
    from moewright.report.diagnosis_text import print_changes

    if len(later) > 1:
        rule = "is one too many: two are compared"
        raise BadInput(Reason(field="diagnose", value=str(later[1]), rule=rule))
    if later:
        changes = compare_steps(run, later[0])
        with write_answer(changes, outputs.json) as console:
            console.print(changes.title())
            print_changes(console, changes.changes)
        return 0
    if outputs.what_if:
        return _replay(run, outputs)
    stated = read_stated_job(run, script=script, model=model, on=on, layout=layout, batch=workload)
    diagnosis = diagnose_path(
        run,
        plan=stated.plan,
        script=stated.script,
        on=on,
        model=model,
        network=workload.network,
        perfetto=outputs.perfetto,
    )
    with write_answer(
        diagnosis,
        outputs.json,
        html=outputs.html,
        views=lambda: [view_diagnosis(diagnosis)],
    ) as console:
        if diagnosis.advice is None or outputs.verbose:
            print_diagnosis(console, diagnosis, verbose=outputs.verbose)
        else:
            print_short_diagnosis(console, diagnosis)
        if outputs.perfetto is not None:
            console.print(f"wrote {outputs.perfetto}: open it in ui.perfetto.dev")
    return 0


def _replay(run: Path, outputs: DiagnosisOutputs) -> int:
    """Print what a step of a trace would take under a change."""
    from moewright.api.run_comparisons import what_if
    from moewright.report.document_text import print_document
    from moewright.report.run_comparison_document import build_what_if_document

    answer = what_if(run, outputs.what_if)
    document = build_what_if_document(str(run), answer.replays)
    with write_answer(answer, outputs.json, html=outputs.html, views=lambda: [document]) as console:
        print_document(console, document, verbose=outputs.verbose)
    return 0


def print_short_diagnosis(console: Console, diagnosis: Diagnosis) -> None:
    """Print a diagnosis in ten lines: the wall, where the step goes, and what to write."""
    from moewright.report.document_text import print_sections
    from moewright.report.estimate_document import job_title
    from moewright.report.finding_sections import build_advice_section, describe_step

    assert diagnosis.job is not None
    assert diagnosis.advice is not None
    console.print(job_title(diagnosis.job))
    # Behind a headline a finding is the second thing that is said.
    label = "then" if diagnosis.headline else "WALL"
    if diagnosis.headline:
        console.print(diagnosis.headline, style="bold")
    if diagnosis.findings:
        first = diagnosis.findings[0]
        text = f"{label}: {first.wall} ({first.cause}): {first.title}"
        console.print(text, style="bold")
    step = describe_step(diagnosis.job, diagnosis.measured_step_s, diagnosis.waterfall)
    console.print(step)
    print_judgement(console, diagnosis)
    print_sections(console, [build_advice_section(diagnosis.advice)])
    for note in diagnosis.notes[:_NOTES_SHOWN]:
        console.print(note)
    hidden = len(diagnosis.notes[_NOTES_SHOWN:]) + bool(diagnosis.hint)
    rest = f", and {plural(hidden, 'further note')}" if hidden else ""
    console.print(f"evidence, fixes by cause and the waterfall{rest}: -v")


def print_judgement(console: Console, diagnosis: Diagnosis) -> None:
    """Print whether the job of a log fits, how far it is from the best, and from measured runs."""
    from rich.text import Text

    from moewright.report.console import print_fact

    judged = diagnosis.judgement
    if judged is None:
        return
    for name, text in (
        ("verdict", judged.fit),
        ("speed", judged.speed),
        ("measured", judged.measured),
    ):
        if text:
            print_fact(console, name, Text(text))


def print_diagnosis(console: Console, diagnosis: Diagnosis, *, verbose: bool) -> None:
    """Print all of a diagnosis; without `verbose` what needs no known job."""
    from moewright.api.diagnosing import DiagnosisSource
    from moewright.report.diagnosis_text import (
        print_breakdown,
        print_details,
        print_log,
        print_waterfall,
    )
    from moewright.report.document_text import print_sections
    from moewright.report.finding_sections import build_advice_section, list_finding_sections

    for note in diagnosis.notes:
        console.print(note)
    print_judgement(console, diagnosis)
    if diagnosis.source is DiagnosisSource.TRACE:
        print_breakdown(console, diagnosis.breakdowns, verbose=verbose)
        if verbose:
            print_details(console, diagnosis.details)
    if diagnosis.log is not None:
        print_log(console, diagnosis.log, diagnosis.job)
        if diagnosis.mfu:
            text = f"MFU {diagnosis.mfu:.1%} of the bf16 peak, by the trainer's own count of FLOPs"
            console.print(text)
    if diagnosis.headline:
        console.print(diagnosis.headline, style="bold")
    sections = list_finding_sections(diagnosis.findings, has_headline=bool(diagnosis.headline))
    print_sections(console, sections, verbose=verbose)
    if diagnosis.waterfall is not None:
        print_waterfall(console, diagnosis.waterfall, diagnosis.model_flops_per_device)
    if diagnosis.advice is not None:
        print_sections(console, [build_advice_section(diagnosis.advice)], verbose=verbose)
    if diagnosis.hint:
        console.print(diagnosis.hint)


_NO_COMPARISON_OUTPUTS = ComparisonOutputs()


def compare(
    run: Path,
    /,
    *,
    script: Path | None = None,
    model: str = "",
    on: str = "",
    layout: str = "",
    workload: BatchOptions = _NO_OPTIONS,
    outputs: ComparisonOutputs = _NO_COMPARISON_OUTPUTS,
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


def report(run: Path, /, *others: Path, out: Path | None = None, json: JsonOption = None) -> int:
    """Write one HTML page about a run, or several over each other, that opens offline.

    The page shows the verdict, what holds the run back with priced fixes, loss, experts, time,
    memory, plan, and the predicted and the counted ledger.

    Parameters
    ----------
    run
        The folder of a run, as `moewright train --out` made it, or the plan.json in it.
    others
        Folders of runs to lay over it: loss, step time and phases side by side.
    out
        The file to write; RUN/report.html when not given.
    json
        Write what the page shows (run, findings, comparisons) to this file; "-": to standard
        output, and all else to standard error.
    """
    from moewright.api.reporting import build_report, write_page
    from moewright.codec import find_run_folder

    first, *rest = (build_report(path) for path in (run, *others))
    page = write_page(first, out or find_run_folder(run) / "report.html", rest)
    # There are no tables: the files alone are named.
    with write_answer((first, *rest) if rest else first, json, written=(page,)):
        return 0


def forecast(
    run: Path,
    /,
    *,
    horizon: int = 1000,
    answer: AnswerOptions = _SHORT,
    json: JsonOption = None,
) -> int:
    """Forecast the load of a run's experts, and say which placement of them would pay.

    From the router statistics of a run of this engine: the hottest rank's rows over the mean, now
    and some steps ahead with the interval of 8 in 10, what a placement or replicas for that load
    would gain of a step, and what moving the experts takes.

    Parameters
    ----------
    run
        The folder of a run of this engine.
    horizon
        Steps ahead.
    json
        Write the forecast (layers, placements) to this file; "-": to standard output, and the text
        to standard error.
    """
    from moewright.api.run_comparisons import forecast_loads
    from moewright.report.document_text import print_document
    from moewright.report.run_comparison_document import build_forecast_document

    told = forecast_loads(run, horizon)
    document = build_forecast_document(str(run), told)
    with write_answer(told, json, html=answer.html, views=lambda: [document]) as console:
        print_document(console, document, verbose=answer.verbose)
    return 0
