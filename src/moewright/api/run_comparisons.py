"""A run, trace or log beside the nearest published runs and the prediction of its job."""

from __future__ import annotations

from pathlib import Path

from moewright.api.diagnosing import Diagnosis, diagnose
from moewright.diagnosis.run_comparison import RunComparison, compare_with_published
from moewright.spec.errors import BadInput, Reason
from moewright.spec.hardware import Hardware
from moewright.spec.plan import Plan


def compare_run(
    path: Path | str,
    *,
    plan: Plan | None = None,
    script: Path | str | None = None,
    on: str | Hardware = "",
    model: str = "",
    network: str = "",
) -> RunComparison:
    """Put a run beside the nearest published runs and its prediction, and say what closes the gap.

    Args:
        path: the folder of a run of this engine; a trace, or a folder of them; or a console log of
            Megatron-LM.
        plan: the job of a trace or a log, as `estimate` returns it.
        script: the Megatron-LM launch script of a trace or a log, in place of a plan.
        on: the hardware of the script or of the log.
        model: the model of a script or a log that gives no sizes.
        network: kinds of network of the script or of the log, in place of the hardware's own.

    Raises:
        BadInput: there is nothing to read, or the job is not known.

    Example:
        >>> import moewright as mw
        >>> comparison = mw.compare_run("runs/quickstart")
        >>> comparison.nearest[0].run.source != ""
        True
    """
    diagnosis = diagnose(path, plan=plan, script=script, on=on, model=model, network=network)
    job = diagnosis.job
    if job is None:
        rule = "does not say its job, without which nothing is near it"
        nearest = "--script RUN.sh --on DEVICE, or --model, --on and --layout"
        raise BadInput(Reason(field=str(path), rule=rule, nearest=nearest), *_reasons(diagnosis))
    measured_s = diagnosis.measured_step_s
    if not measured_s:
        rule = "holds no timed step to compare"
        raise BadInput(Reason(field=str(path), rule=rule, nearest="a run that trained"))
    notes = tuple(note for note in (*diagnosis.notes, diagnosis.hint) if note)
    return compare_with_published(job, measured_s, diagnosis.waterfall, diagnosis.advice, notes)


def _reasons(diagnosis: Diagnosis) -> tuple[Reason, ...]:
    return tuple(Reason(field="read", rule=note) for note in diagnosis.notes)
