"""`moewright export`: a plan as the launch file of a trainer; a launch script of Megatron-LM as a
plan."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from moewright.spec.errors import BadInput, Reason

if TYPE_CHECKING:
    from moewright.spec.plan import Plan as PlanNoun

Target = Literal["megatron", "bridge", "torchtitan", "slurm", "k8s", "torchrun"]


def export(
    plan: Path | None = None,
    /,
    *,
    to: Target | None = None,
    job: Path | None = None,
    image: str = "",
    from_flags: Path | None = None,
    script_args: str = "",
    on: str = "",
    model: str = "",
    json: Annotated[Path | None, Parameter(name="--json")] = None,
) -> int:
    """Print a plan as the launch file of a trainer; what the target cannot say is refused.

    With --from-flags a launch script of Megatron-LM stands in the plan's place: alone it is
    estimated beside what would be better, with --to it is written for another target.

    Parameters
    ----------
    plan
        A plan, as `plan --json`, `estimate --json` or a run folder holds it.
    to
        megatron: a Megatron-LM launch script. bridge: a Megatron Bridge recipe. torchtitan: its configuration.
        slurm: a batch script. k8s: a TrainJob of Kubeflow Trainer. torchrun: the line that starts our own engine.
    job
        The job file of the plan; torchrun needs it, slurm and k8s start our own engine with it and Megatron-LM without.
    image
        The container image of k8s.
    from_flags
        A launch script of Megatron-LM. Variables that it does not set are taken from the environment.
    script_args
        What stands behind the script's name, in quotes.
    on
        The hardware of the script, "H800" or "256xH800".
    model
        The model of a script that gives no sizes: a name, a config.json or its folder.
    json
        Write the script's plan to this file.
    """
    from moewright.codec import read_json, write_json
    from moewright.spec.plan import Plan

    if (plan is None) == (from_flags is None):
        rule = "exactly one is needed: a plan, or a launch script"
        raise BadInput(Reason(field="PLAN or --from-flags", rule=rule))
    if plan is not None:
        if to is None:
            raise BadInput(
                Reason(
                    field="--to", rule="is needed with a plan: the target", nearest="--to megatron"
                )
            )
        given = read_json(Plan, plan)
    else:
        assert from_flags is not None  # one of the two is given
        given = _read_back(from_flags, arguments=script_args, on=on, model=model, shown=to is None)
        if json is not None:
            write_json(json, given)
    if to is not None:
        run_dir = str(plan.parent if plan else Path())
        print(
            _written(given, to, job=str(job) if job else "", image=image, run_dir=run_dir), end=""
        )
    return 0


def _read_back(script: Path, *, arguments: str, on: str, model: str, shown: bool) -> PlanNoun:
    """The plan of a script. Its notes go to stderr where a launch file goes to stdout."""
    from moewright.cli.launch_script import print_better_layouts, read_plan_from_script
    from moewright.report.console import make_console, print_estimate

    given, found = read_plan_from_script(script, arguments=arguments, model=model, on=on)
    console = make_console(sys.stdout if shown else sys.stderr)
    for line in found.notes:
        console.print(line, soft_wrap=True)
    if shown:
        print_estimate(console, given)
        print_better_layouts(console, given)
    return given


def _written(plan: PlanNoun, to: Target, *, job: str, image: str, run_dir: str) -> str:
    from moewright.exporters.bridge import render_bridge_recipe
    from moewright.exporters.kubernetes import render_train_job
    from moewright.exporters.megatron.script import render_megatron_script
    from moewright.exporters.slurm import render_slurm_script
    from moewright.exporters.torchrun import render_engine_command
    from moewright.exporters.torchtitan import render_torchtitan_config

    if job and to in ("megatron", "bridge", "torchtitan"):
        raise BadInput(
            Reason(field="--job", value=job, rule=f"says nothing to {to}", nearest="leave it out")
        )
    if to == "megatron":
        return render_megatron_script(plan)
    if to == "bridge":
        return render_bridge_recipe(plan)
    if to == "torchtitan":
        return render_torchtitan_config(plan)
    if to == "slurm":
        return render_slurm_script(plan, job=job, run_dir=run_dir)
    if to == "k8s":
        return render_train_job(plan, job=job, run_dir=run_dir, image=image)
    if not job:
        raise BadInput(
            Reason(field="--job", rule="is needed for torchrun: the job file of the plan")
        )
    return render_engine_command(plan, job=job, run_dir=run_dir) + "\n"
