"""Why a run is slow: the walls, the evidence and the fixes of a run, a trace or a log."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from statistics import fmean

from moewright.api.advising import advise_job, has_times, judge_advised_job
from moewright.api.launch_scripts import read_flags, read_logged_flags, read_logged_job
from moewright.api.planning import estimate_request, is_plan_file
from moewright.api.requests import read_hardware
from moewright.codec import PLAN_FILE, find_run_folder, read_json
from moewright.codec import read_run as read_run_folder
from moewright.codec.run_files import MERGED_TRACE_FILE, TRACE_FOLDER
from moewright.diagnosis.advice import Advice, AdvisedJob
from moewright.diagnosis.compare_ledgers import compare_ranks
from moewright.diagnosis.engine_run import build_run_waterfall, diagnose_run, find_critical_rank
from moewright.diagnosis.judgement import Judgement, add_judgement, judge_quickly
from moewright.diagnosis.priced_fixes import FixContext, Trainer, price_findings
from moewright.diagnosis.traces.breakdown import Breakdown, break_down_step
from moewright.diagnosis.traces.capture import Capture
from moewright.diagnosis.traces.log_findings import (
    check_logged_job,
    compare_flops,
    describe_gap,
    diagnose_log,
    suggest_switches,
)
from moewright.diagnosis.traces.megatron_log import MegatronLog, read_log
from moewright.diagnosis.traces.megatron_timers import measure_parts
from moewright.diagnosis.traces.nsight import is_export
from moewright.diagnosis.traces.rank_skew import measure_rank_skew
from moewright.diagnosis.traces.step_details import StepDetails, detail_step
from moewright.diagnosis.traces.trace_files import Progress, ignore_progress, read_captures
from moewright.diagnosis.traces.trace_findings import diagnose_traces
from moewright.diagnosis.traces.trace_waterfall import build_trace_waterfall, find_peak_rate
from moewright.diagnosis.traces.worst_step import WorstStep, find_worst_step
from moewright.diagnosis.utilization import describe_use
from moewright.diagnosis.waterfall import build_log_waterfall, peak_flops
from moewright.report.diagnosis_text import describe_log
from moewright.report.trace import write_findings_tracks
from moewright.spec.errors import BadInput, Reason
from moewright.spec.finding import Finding, Waterfall
from moewright.spec.hardware import Hardware
from moewright.spec.options import WorkloadOptions
from moewright.spec.plan import Plan, Verdict
from moewright.spec.record import Record, Row
from moewright.spec.run import RunRecord
from moewright.spec.units import TERA
from moewright.spec.workload import Dtype
from moewright.view.run_view import DiagnosisView, build_diagnosis_view, build_trace_view

_NSIGHT_REPORTS = (".nsys-rep", ".qdrep", ".ncu-rep")


class DiagnosisSource(StrEnum):
    """What was diagnosed: a run of this engine, traces of a profiler, or a console log."""

    RUN = "run"
    TRACE = "trace"
    LOG = "log"


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Diagnosis(Record):
    """The walls of a run, largest first, and where its step goes.

    `headline` says what the findings do not explain, "" where they explain the step. `waterfall` is
    None where the job is not known; `notes` say what was read otherwise than written, and how busy
    the devices of a run are; `hint` what else to say for a fuller answer, "" where nothing is
    missing. `mfu` is by the rate that a log prints and the peak of the hardware that was named; 0
    where either is missing.
    """

    source: DiagnosisSource
    findings: tuple[Finding, ...]
    waterfall: Waterfall | None
    job: Plan | None
    notes: tuple[str, ...] = ()
    hint: str = ""
    breakdowns: tuple[Breakdown, ...] = ()  # of traces, one a rank
    details: tuple[StepDetails, ...] = ()  # the same, finer
    log: MegatronLog | None = None
    headline: str = ""
    mfu: float = 0.0
    worst_step: WorstStep | None = None  # of traces
    advice: Advice | None = None  # None where the job is not known
    judgement: Judgement | None = None  # of a trace or a log whose job is known
    missing: tuple[str, ...] = ()  # what would tell the job: model, on, layout

    @property
    def model_flops_per_device(self) -> float:
        """Return the model FLOPs of a step on one device; 0 where the job is not known."""
        if self.job is None:
            return 0.0
        return self.job.estimate.model_flops_per_step / self.job.layout.world_size

    @property
    def measured_step_s(self) -> float:
        """Return the measured seconds of a step; 0 where none was timed."""
        if self.waterfall is not None:
            return self.waterfall.measured_s
        if self.log is not None:
            return self.log.step_s
        return fmean([rank.step_s for rank in self.breakdowns] or [0.0])

    def title(self) -> str:
        """Return the headline, else the first finding in one line, and the judgement of the job."""
        title = self.headline or "no wall found"
        if self.findings and not self.headline:
            first = self.findings[0]
            title = f"{first.wall} wall: {first.title} ({first.share:.0%})"
        return add_judgement(title, self.judgement)

    def to_rows(self) -> list[Row]:
        """Return a row for each finding, with the first fix."""
        return [
            {
                "wall": finding.wall,
                "cause": finding.cause,
                "share": finding.share,
                "title": finding.title,
                "fix": finding.fixes[0].text if finding.fixes else "",
            }
            for finding in self.findings
        ]


def view_diagnosis(diagnosis: Diagnosis) -> DiagnosisView:
    """Return a diagnosis as pages show it."""
    measured = describe_log(diagnosis.log) if diagnosis.log is not None else ()
    notes = (diagnosis.headline, *measured, *diagnosis.notes, diagnosis.hint)
    trace = build_trace_view(diagnosis.breakdowns, diagnosis.worst_step)
    view = build_diagnosis_view(
        diagnosis.findings,
        diagnosis.waterfall,
        notes,
        trace=trace,
        advice=diagnosis.advice,
        has_headline=bool(diagnosis.headline),
    )
    return replace(
        view,
        judgement=diagnosis.judgement,
        missing=diagnosis.missing,
        headline=diagnosis.headline,
    )


def diagnose(
    path: Path | str,
    *,
    plan: Plan | None = None,
    script: Path | str | None = None,
    on: str | Hardware = "",
    model: str = "",
    network: str = "",
    perfetto: Path | str | None = None,
) -> Diagnosis:
    """Name the walls that hold a run back, with evidence, a waterfall and priced fixes.

    Args:
        path: the folder of a run of this engine, or its plan.json; a PyTorch profiler trace or a
            folder of them, one a rank; an Nsight Systems export (.sqlite); or a console log of
            Megatron-LM.
        plan: the job of a trace or a log, as `estimate` returns it; it prices the fixes.
        script: the Megatron-LM launch script of a trace or a log, in place of a plan.
        on: the hardware of the script or of the log.
        model: the model of a script or a log that gives no sizes.
        network: kinds of network of the script or of the log, in place of the hardware's own.
        perfetto: where to write the trace with its findings as tracks, for Perfetto: a file, or a
            folder where `path` holds more than one trace.

    Raises:
        BadInput: there is nothing to read, or the options contradict each other.

    Example:
        >>> import moewright as mw
        >>> diagnosis = mw.diagnose("runs/quickstart")
        >>> diagnosis.findings[0].wall in ("memory", "communication", "host", "compute")
        True
    """
    path = find_run_folder(Path(path))
    if perfetto is not None and (is_engine_run(path) or not is_trace(path)):
        rule = "needs a trace: a log and the record of a run have no times of kernels"
        raise BadInput(Reason(field="--perfetto", value=str(perfetto), rule=rule))
    stated = _StatedJob(plan=plan, on=on, model=model, network=network)
    if script is not None and not is_engine_run(path):
        if plan is not None:
            rule = "states the job, and so does the plan"
            raise BadInput(Reason(field="script", value=str(script), rule=rule))
        stated = _read_script(script, stated)
    return _diagnose_path(path, stated, None if perfetto is None else Path(perfetto))


def diagnose_file(
    path: Path,
    *,
    plan: Plan | None,
    on: str,
    network: str,
    report_progress: Progress,
) -> Diagnosis:
    """Diagnose a file as `diagnose` does, and tell how many bytes of traces are read, and of all.

    Raises:
        BadInput: there is nothing to read.
    """
    stated = _StatedJob(plan=plan, on=on, network=network)
    return _diagnose_path(find_run_folder(path), stated, None, report_progress)


@dataclass(frozen=True, kw_only=True, slots=True)
class _StatedJob:
    """What was said of a job beside its file; `source` says where the plan comes from."""

    plan: Plan | None = None
    source: str = "the job given beside it"
    on: str | Hardware = ""
    model: str = ""
    network: str = ""
    notes: tuple[str, ...] = ()
    options: frozenset[str] = frozenset()


def _read_script(script: Path | str, stated: _StatedJob) -> _StatedJob:
    """Return the job that a launch script states; without a plan where none can be made of it."""
    stated = replace(stated, source=f"the script {script}")
    try:
        reading = read_flags(script, on=stated.on, model=stated.model, network=stated.network)
    except BadInput as error:
        # Those are mistakes of the call; else the file is diagnosed without a job.
        if not stated.on or not Path(script).is_file():
            raise
        return replace(stated, notes=(f"the script makes no job that can be planned: {error}",))
    options = frozenset(reading.options)
    return replace(stated, plan=reading.plan, notes=reading.notes, options=options)


def _diagnose_path(
    path: Path,
    stated: _StatedJob,
    perfetto: Path | None,
    report_progress: Progress = ignore_progress,
) -> Diagnosis:
    if is_engine_run(path):
        return _diagnose_engine_run(path)
    if not path.exists():
        raise BadInput(Reason(field=str(path), rule="no such run folder, trace or log"))
    if not (path.is_dir() or path.is_file()):
        raise BadInput(Reason(field=str(path), rule="is not a regular file"))
    if path.name.endswith(_NSIGHT_REPORTS):
        rule = "is a report that only Nsight Systems reads"
        nearest = f"nsys export --type sqlite {path.name}, then diagnose the .sqlite"
        raise BadInput(Reason(field=str(path), rule=rule, nearest=nearest))
    if path.name == MERGED_TRACE_FILE and (path.parent / TRACE_FOLDER).is_dir():
        path = path.parent / TRACE_FOLDER  # the same, rank by rank
    plan_path = path.parent / PLAN_FILE
    if stated.plan is None and plan_path.exists():
        note = f"the job is that of {plan_path}, which lies beside the file"
        stated = replace(
            stated,
            plan=read_json(Plan, plan_path),
            source=f"the {PLAN_FILE} beside it",
            notes=(*stated.notes, note),
        )
    job, notes = stated.plan, stated.notes
    if is_trace(path):
        captures = read_captures(path, report_progress)
        return _diagnose_traces(captures, job, notes, stated.options, perfetto)
    log = read_log(path)
    if job is not None:
        check_logged_job(log, job, source=stated.source)
        _check_logged_choices(log, job, stated.source)
    elif log.arguments and stated.on:
        job, reasons = _read_logged_job(
            log, path, model=stated.model, on=stated.on, network=stated.network
        )
        notes = (*notes, *reasons)
    return _diagnose_log(log, job, notes, stated.options, on=stated.on)


def read_logged_sizes(path: Path) -> tuple[int, int]:
    """Return the global batch and the tokens a sequence that a log states; 0: it does not.

    Both are 0 for what is no log.
    """
    if not path.is_file() or is_trace(path):
        return 0, 0
    log = read_log(path)
    return log.find_size("global_batch_size") or 0, log.find_size("seq_length") or 0


def state_logged_job(
    path: Path, model: str, layout: str, *, on: str, options: WorkloadOptions
) -> Plan:
    """Return the plan of a job that is stated beside a log, a trace or a run.

    What the log says wins over defaults; what is said otherwise is held against it, and so is what
    a job or a plan says.

    Raises:
        BadInput: the job cannot be planned.
    """
    if not (model.endswith(".toml") or is_plan_file(Path(model))):
        global_batch, seq_len = read_logged_sizes(path)
        options = replace(
            options,
            global_batch=options.global_batch or global_batch or None,
            seq_len=options.seq_len or seq_len or None,
        )
    return estimate_request(model, layout, on=on, options=options)[0]


def is_engine_run(path: Path) -> bool:
    """Tell whether a path is the folder of a run of this engine, or the plan.json in it."""
    return (find_run_folder(path) / PLAN_FILE).exists()


def is_trace(path: Path) -> bool:
    """Tell whether a path is read as a trace or an export, or as a folder of them."""
    return path.is_dir() or path.name.endswith((".json", ".gz")) or is_export(path)


def _diagnose_engine_run(folder: Path) -> Diagnosis:
    record = read_run_folder(folder)
    findings = diagnose_run(record, compare_ranks(record))
    if not findings:
        rule = "holds no finished steps to diagnose"
        raise BadInput(Reason(field=str(folder), rule=rule, nearest="a run that trained"))
    job = record.plan
    critical = find_critical_rank(record)
    findings = price_findings(findings, FixContext(job=job, trainer=Trainer.OURS))
    waterfall = build_run_waterfall(record, critical, job)
    advised = _advise(job, Trainer.OURS, findings, waterfall)
    return Diagnosis(
        source=DiagnosisSource.RUN,
        findings=findings,
        waterfall=waterfall,
        job=job,
        notes=tuple(describe_use(record, critical)),
        advice=_list_changes(advised),
    )


def _advise(
    job: Plan | None,
    trainer: Trainer,
    findings: tuple[Finding, ...],
    waterfall: Waterfall | None,
    options: frozenset[str] = frozenset(),
    *,
    must_shrink: bool = False,
) -> AdvisedJob | None:
    """Return what to change in a job; None where it is not known, or has no predicted time."""
    if job is None or not has_times(job):
        return None
    return advise_job(
        job,
        trainer=trainer,
        findings=findings,
        waterfall=waterfall,
        options=options,
        must_shrink=must_shrink,
    )


def _list_changes(advised: AdvisedJob | None) -> Advice | None:
    return None if advised is None else advised.advice


def _diagnose_traces(
    captures: tuple[Capture, ...],
    job: Plan | None,
    notes: tuple[str, ...],
    options: frozenset[str],
    perfetto: Path | None,
) -> Diagnosis:
    layout = job.layout if job else None
    breakdowns = tuple(break_down_step(capture, layout) for capture in captures)
    skew = measure_rank_skew(captures, breakdowns, layout)
    peak = find_peak_rate(breakdowns, job)
    waterfall = build_trace_waterfall(breakdowns, skew, job, peak)
    hint = ""
    if waterfall is None:
        missing = peak.note
        if peak.flops:
            missing = "no shapes were recorded (record_shapes=True)"
        hint = f"no waterfall: {missing}; say the job with --model, --on, --layout"
    findings = diagnose_traces(breakdowns, skew, job, peak, options)
    if perfetto is not None:
        write_findings_tracks(perfetto, captures, findings, layout)
    # Options are known of a script of Megatron-LM alone.
    trainer = Trainer.MEGATRON if options else Trainer.UNKNOWN
    advised = _advise(job, trainer, findings, waterfall, options)
    return Diagnosis(
        source=DiagnosisSource.TRACE,
        findings=findings,
        waterfall=waterfall,
        job=job,
        notes=notes,
        hint=hint,
        breakdowns=breakdowns,
        details=tuple(detail_step(capture, layout) for capture in captures),
        worst_step=find_worst_step(captures, layout),
        missing=() if job is not None else ("model", "on", "layout"),
        judgement=_judge(job, advised),
        advice=_list_changes(advised),
    )


def _diagnose_log(
    log: MegatronLog,
    job: Plan | None,
    notes: tuple[str, ...],
    options: frozenset[str],
    *,
    on: str | Hardware,
) -> Diagnosis:
    waterfall = None
    hints = []
    if job is None:
        untold = "what nobody timed" if log.timers else "a wall of time"
        missing = (
            "--model and --layout, or --script"
            if on
            else "--on (and --model, --layout, or --script)"
        )
        hints.append(f"the log alone does not tell {untold}: say {missing}")
    elif log.step_s:
        waterfall = build_log_waterfall(job, log.step_s, measure_parts(log.timers))
    if other_flops := compare_flops(log, job):
        notes = (*notes, other_flops)
    if not log.iterations and log.timers:
        notes = (*notes, "no iteration has a line: a step is the sum of its timers")
    if switches := suggest_switches(log):
        hints.append(switches)
    findings = diagnose_log(log, job, options)
    # A run that has steps does fit, whatever is predicted.
    does_not_fit = job is not None and job.estimate.verdict is Verdict.OOM and not log.iterations
    advised = _advise(
        job,
        Trainer.MEGATRON,
        findings,
        waterfall,
        options or log.options,
        must_shrink=bool(log.failures) or does_not_fit,
    )
    return Diagnosis(
        source=DiagnosisSource.LOG,
        missing=_list_missing(log, job, on),
        judgement=_judge(job, advised),
        findings=findings,
        waterfall=waterfall,
        job=job,
        notes=notes,
        hint="; ".join(hints),
        log=log,
        headline=describe_gap(waterfall, job),
        mfu=_find_mfu(log, on),
        advice=_list_changes(advised),
    )


def _judge(job: Plan | None, advised: AdvisedJob | None) -> Judgement | None:
    """Judge a job beside itself with all changes that help; without those as far as it goes."""
    if job is None:
        return None
    return judge_quickly(job) if advised is None else judge_advised_job(advised)


def _list_missing(log: MegatronLog, job: Plan | None, on: str | Hardware) -> tuple[str, ...]:
    """Return what would tell the job of a log; its own arguments may say all but the devices."""
    if job is not None:
        return ()
    if log.arguments and not on:
        return ("on",)
    return ("model", "on", "layout")


def _find_mfu(log: MegatronLog, on: str | Hardware) -> float:
    """Return the rate that the log prints over the bf16 peak of the hardware; 0: not known."""
    if not on or not log.tflops_per_device:
        return 0.0
    peak = peak_flops(read_hardware(on, ""), Dtype.BF16)
    if peak:
        return log.tflops_per_device * TERA / peak
    return 0.0


# Fields of a layout that the arguments of a log decide, whatever its environment was.
_CHOICES = ("sp", "vpp", "etp", "zero", "cp_comm", "recompute", "offload", "dispatcher", "graphs")


def _check_logged_choices(log: MegatronLog, job: Plan, source: str) -> None:
    """Refuse a job whose choices are not those of all the arguments that its log has printed.

    Raises:
        BadInput: a reason for each choice that differs.
    """
    try:
        logged = read_logged_job(log.arguments)
    except BadInput:
        return  # what it ran cannot be planned, so that nothing can be compared
    if logged is None:
        return
    pairs = [
        (f"layout.{name}", getattr(logged.layout, name), getattr(job.layout, name))
        for name in _CHOICES
    ]
    pairs.append(("--precision", logged.workload.precision, job.workload.precision))
    reasons = [
        Reason(
            field=field,
            value=_spell_choice(stated),
            rule=f"the log's arguments say {_spell_choice(own)}, {source} says otherwise",
            nearest=_spell_choice(own),
        )
        for field, own, stated in pairs
        if own != stated
    ]
    if reasons:
        raise BadInput(*reasons)


def _spell_choice(value: object) -> str:
    if isinstance(value, tuple):
        return "+".join(map(str, value)) or "none"
    return str(value)


def _read_logged_job(
    log: MegatronLog, path: Path, *, model: str, on: str | Hardware, network: str
) -> tuple[Plan | None, tuple[str, ...]]:
    """Return the job by the arguments that the log printed, or the reason why there is none."""
    try:
        reading = read_logged_flags(log.arguments, path, model=model, on=on, network=network)
    except BadInput as error:
        return None, (f"the log's arguments make no job that can be planned: {error}",)
    if reading is None:
        return None, ()
    return reading.plan, reading.notes


def read_run(folder: Path | str) -> RunRecord:
    """Read back what a run of this engine recorded: plan, steps, evaluations, ledgers.

    Raises:
        BadInput: the folder holds no run, or a file of it is damaged.

    Example:
        >>> import moewright as mw
        >>> run = mw.read_run("runs/quickstart")
        >>> run.steps[0].step
        1
    """
    return read_run_folder(Path(folder))
