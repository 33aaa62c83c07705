"""The job that options state beside a run, a trace or a log."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from moewright.cli.options import BatchOptions
from moewright.spec.errors import BadInput, Reason

if TYPE_CHECKING:
    from moewright.spec.plan import Plan


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
    from moewright.api.diagnosing import is_engine_run, read_logged_sizes
    from moewright.api.planning import estimate_request

    if is_engine_run(run):
        return StatedJob()
    if script is not None:
        if layout:
            rule = "cannot be given with --script, which states it"
            raise BadInput(Reason(field="--layout", value=layout, rule=rule))
        return StatedJob(script=script)
    if model:
        if not model.endswith(".toml"):
            # What the log says wins over defaults; what is said otherwise is held against it.
            global_batch, seq_len = read_logged_sizes(run)
            batch = replace(
                batch,
                global_batch=batch.global_batch or global_batch or None,
                seq_len=batch.seq_len or seq_len or None,
            )
        plan, _ = estimate_request(model, layout, on=on, options=batch)
        return StatedJob(plan=plan)
    if layout or batch.seq_len:
        option = "--layout" if layout else "--seq-len"
        raise BadInput(Reason(field=option, rule="needs --model beside it"))
    return StatedJob()
