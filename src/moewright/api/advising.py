"""What to change in a run whose job is known, in the words of its trainer."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache

from moewright.codec import format_layout
from moewright.codec.megatron_options import SAME_OPTIONS
from moewright.diagnosis.advice import AdvisedJob, advise, measured_parts
from moewright.diagnosis.job_changes import ChangePricer, JobObjections
from moewright.diagnosis.judgement import Judgement, judge_plan
from moewright.diagnosis.priced_fixes import Trainer
from moewright.exporters.megatron.script import all_flags, environment_variables
from moewright.rules.job import plan_job
from moewright.rules.limits.trainers import TargetTrainer, trainer_refusals
from moewright.spec.errors import Reason
from moewright.spec.finding import Basis, Finding, Waterfall
from moewright.spec.plan import Plan

_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*=")
_TARGETS = {Trainer.OURS: TargetTrainer.ENGINE, Trainer.MEGATRON: TargetTrainer.MEGATRON}


def advise_job(
    job: Plan,
    *,
    trainer: Trainer,
    findings: Sequence[Finding] = (),
    waterfall: Waterfall | None = None,
    options: frozenset[str] = frozenset(),
    must_shrink: bool = False,
) -> AdvisedJob:
    """Return the changes of a job that a trainer takes, the most gainful first, and the job after.

    Args:
        job: the job as it ran.
        trainer: in whose settings the changes are written.
        findings: what was measured that no layout changes.
        waterfall: where the measured step goes; its measured parts weigh the changes.
        options: names of the options that the run's command has.
        must_shrink: whether the job ran out of memory.
    """
    pricer = ChangePricer(
        before=job,
        object_to=_objections(trainer),
        measured_s=measured_parts(waterfall),
        must_shrink=must_shrink,
    )
    advised = advise(pricer, findings)
    written = _write(advised, trainer, options)
    advice = replace(
        advised.advice,
        write=written.write,
        leave_out=written.leave_out,
        export=written.export,
        training=tuple(
            replace(change, settings=_write_training(advised.after, plan, trainer))
            for change, plan in zip(advised.advice.training, advised.retrained, strict=True)
        ),
    )
    return replace(advised, advice=advice)


def has_times(job: Plan) -> bool:
    """Return whether a step of a job is predicted, without which no change of it has a price."""
    return bool(job.estimate.shares) and not job.estimate.untimed


def judge_advised_job(advised: AdvisedJob) -> Judgement:
    """Judge a job beside itself with all changes that help; its list of changes tells which."""
    return judge_plan(advised.before, advised.after, names_change=False)


@cache  # the same function for the same trainer, so that searches with it are done once
def _objections(trainer: Trainer) -> JobObjections:
    """Return what a trainer has against a plan."""
    target = _TARGETS.get(trainer)

    def object_to(plan: Plan) -> tuple[Reason, ...]:
        if target is None:
            return ()
        return trainer_refusals(target, plan_job(plan), plan.hardware)

    return object_to


def _write(advised: AdvisedJob, trainer: Trainer, names: frozenset[str]) -> WrittenChanges:
    """Return the settings of all changes: those of the layout, then those that no layout has."""
    before, after = advised.before, advised.after
    settings = [
        change.settings
        for change in advised.advice.changes
        # Changes of the layout follow from both layouts, below.
        if change.basis is Basis.MEASURED and change.settings
    ]
    written = WrittenChanges()
    if trainer is Trainer.MEGATRON and before.hardware.device.kind.runs_cuda:
        written = write_megatron_changes(before, after, names)
    elif before.layout != after.layout:
        written = WrittenChanges(write=f'layout = "{format_layout(after.layout)}"')
    # NAME=VALUE stands before a command, an option behind it.
    variables = [text for text in dict.fromkeys(settings) if _VARIABLE.match(text)]
    options = [text for text in dict.fromkeys(settings) if not _VARIABLE.match(text)]
    return replace(
        written,
        write=" ".join((written.write, *options)).strip(),
        export=" ".join((written.export, *variables)).strip(),
    )


def _write_training(before: Plan, after: Plan, trainer: Trainer) -> str:
    """Return the settings of a change of what is trained, in the words of a trainer."""
    if trainer is Trainer.MEGATRON and before.hardware.device.kind.runs_cuda:
        return write_megatron_changes(before, after).write
    if trainer is not Trainer.OURS:
        return ""
    settings = []
    for name in ("precision", "tensor_scaling", "global_batch"):
        value = getattr(after.workload, name)
        if value != getattr(before.workload, name):
            settings.append(f"train.{name} = {json.dumps(value)}")
    return ", ".join(settings)


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenChanges:
    """What to write in a launch command, to leave out, and to export beside it; "" for nothing."""

    write: str = ""
    leave_out: str = ""
    export: str = ""


def write_megatron_changes(
    before: Plan, after: Plan, options: Collection[str] = ()
) -> WrittenChanges:
    """Return Megatron-LM's options of a change.

    `options` are those that the command has: what says the same as a changed option by another name
    is left out too.
    """
    was = {name: shlex.join(values) for name, *values in all_flags(before)}
    now = {name: shlex.join(values) for name, *values in all_flags(after)}
    written = {name: value for name, value in now.items() if was.get(name) != value}
    dropped = [name for name in was if name not in now]
    changed = {*written, *dropped}
    for name in options:
        if name not in changed and changed & set(SAME_OPTIONS.get(name, ())):
            dropped.append(name)
    variables = set(environment_variables(after.layout)) - set(environment_variables(before.layout))
    return WrittenChanges(
        write=" ".join(f"{name} {value}".rstrip() for name, value in written.items()),
        leave_out=" ".join(dropped),
        export=" ".join(f"{name}={value}" for name, value in sorted(variables)),
    )
