"""`moewright export`: a plan as the launch file of a trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from moewright.spec.errors import BadInput, Reason


def export(plan: Path, /, *, to: Literal["megatron", "torchrun"], job: Path | None = None) -> int:
    """Print a plan as the launch file of a trainer; what the target cannot say is refused.

    Parameters
    ----------
    plan
        A plan, as `plan --json`, `estimate --json` or a run folder holds it.
    to
        megatron: a Megatron-LM launch script. torchrun: the line that starts our own engine on every node.
    job
        The job file of the plan; torchrun needs it.
    """
    from moewright.codec import read_json
    from moewright.export.megatron import megatron
    from moewright.export.torchrun import torchrun
    from moewright.spec.plan import Plan

    given = read_json(Plan, plan)
    if to == "megatron":
        print(megatron(given), end="")
        return 0
    if job is None:
        raise BadInput(Reason(field="--job", rule="is needed for torchrun: the job file of the plan"))
    print(torchrun(given, job=str(job), run_dir=str(plan.parent)))
    return 0
