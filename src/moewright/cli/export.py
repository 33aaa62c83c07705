"""`moewright export`: a plan as a trainer's launch file, or a Megatron-LM script as a plan."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from moewright.cli.options import EngineJobOptions, ExportTarget, JsonOption, LaunchScriptOptions
from moewright.spec.errors import BadInput, Reason

if TYPE_CHECKING:
    from moewright.spec.plan import Plan

_NO_ENGINE_JOB = EngineJobOptions()
_NO_SCRIPT = LaunchScriptOptions()


def export(
    plan: Path | None = None,
    /,
    *,
    to: ExportTarget | None = None,
    engine: EngineJobOptions = _NO_ENGINE_JOB,
    script: LaunchScriptOptions = _NO_SCRIPT,
    on: str = "",
    model: str = "",
    json: JsonOption = None,
) -> int:
    """Print a plan as the launch file of a trainer; what the target cannot say is refused.

    With --from-flags a launch script of Megatron-LM stands in the plan's place: alone it is
    estimated beside what would be better, with --to it is written for another target.

    Parameters
    ----------
    plan
        A plan, as `plan --json`, `estimate --json` or a run folder holds it.
    to
        megatron: a Megatron-LM launch script. bridge: a Megatron Bridge recipe. torchtitan: its
        configuration. slurm: a batch script. k8s: a TrainJob of Kubeflow Trainer. torchrun: the
        line that starts our own engine.
    on
        The hardware of the script, "H800" or "256xH800".
    model
        The model of a script that gives no sizes: a name, a config.json or its folder.
    json
        Write the script's plan to this file.
    """
    from moewright.api.running import export as render_launch_file
    from moewright.codec import read_json, write_json
    from moewright.spec.plan import Plan

    if plan is not None and script.from_flags is None:
        if to is None:
            rule = "is needed with a plan: the target"
            raise BadInput(Reason(field="--to", rule=rule, nearest="--to megatron"))
        exported = read_json(Plan, plan)
    elif plan is None and script.from_flags is not None:
        exported = _read_script(script, on=on, model=model, is_shown=to is None)
        if json is not None:
            write_json(json, exported)
    else:
        rule = "exactly one is needed: a plan, or a launch script"
        raise BadInput(Reason(field="PLAN or --from-flags", rule=rule))
    if to is not None:
        job = str(engine.job) if engine.job else ""
        run_dir = str(plan.parent if plan else Path())
        text = render_launch_file(exported, to=to, job=job, image=engine.image, run_dir=run_dir)
        print(text, end="")
    return 0


def _read_script(script: LaunchScriptOptions, *, on: str, model: str, is_shown: bool) -> Plan:
    """Return the plan of a launch script, printed in full where it is shown.

    Notes on how it was read go to stderr where a launch file goes to stdout.
    """
    from moewright.api.launch_scripts import read_flags
    from moewright.cli.estimate import print_better_layouts
    from moewright.report.console import make_console, print_estimate

    assert script.from_flags is not None
    reading = read_flags(script.from_flags, on=on, model=model, arguments=script.script_args)
    console = make_console(sys.stdout if is_shown else sys.stderr)
    for line in reading.notes:
        console.print(line, soft_wrap=True)
    if is_shown:
        print_estimate(console, reading.plan)
        print_better_layouts(console, reading.plan)
    return reading.plan
