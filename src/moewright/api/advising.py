"""What to change in a run whose job is known, in the words of its trainer."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache

from moewright.codec import format_layout
from moewright.codec.megatron_options import SAME_OPTIONS
from moewright.diagnosis.advice import Advice, AdvisedJob, advise, measured_parts
from moewright.diagnosis.job_changes import ChangePricer, JobObjections
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
) -> Advice:
    """Return the changes of a job that a trainer takes, the most gainful first.

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
    return replace(
        advised.advice,
        write=written.write,
        leave_out=written.leave_out,
        export=written.export,
    )


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


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenChanges:
    """What to write in a launch command, to leave out, and to export beside it; "" for nothing."""

    write: str = ""
    leave_out: str = ""
    export: str = ""

    def lines(self) -> tuple[str, ...]:
        """Return a line for each that is not empty."""
        named = (("write", self.write), ("leave out", self.leave_out), ("export", self.export))
        return tuple(f"{name}: {text}" for name, text in named if text)


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
