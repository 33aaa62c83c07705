"""What plans are turned into: launch files of other trainers, and runs of this engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

from moewright.api.run_settings import settle_run
from moewright.codec import read_run
from moewright.codec.files import name_shards
from moewright.exporters.bridge import bridge_refusals, render_bridge_recipe
from moewright.exporters.kubernetes import render_train_job
from moewright.exporters.megatron.script import render_megatron_script
from moewright.exporters.slurm import render_slurm_script
from moewright.exporters.torchrun import render_engine_command
from moewright.exporters.torchtitan import render_torchtitan_config
from moewright.rules.job import plan_job
from moewright.rules.limits.engine_limits import unsupported_device
from moewright.rules.limits.megatron_limits import megatron_refusals
from moewright.rules.limits.torchtitan_limits import torchtitan_refusals
from moewright.rules.limits.trainers import TargetTrainer, job_refusals, trainer_refusals
from moewright.spec.errors import BadInput, Reason
from moewright.spec.extensions import ExtensionPoint, call_extension, list_extensions
from moewright.spec.names import closest_match
from moewright.spec.options import ExportTarget, RunOptions
from moewright.spec.plan import Plan
from moewright.spec.run import RunRecord

_TRAINERS = ("megatron", "bridge", "torchtitan", "slurm", "k8s")  # others than our engine
_IN_CONTAINERS = ("slurm", "k8s")
NO_RUN_OPTIONS = RunOptions()
_STARTERS = ("slurm", "k8s", "torchrun")  # of our own engine, from a job file


def list_trainers(plan: Plan) -> tuple[str, ...]:
    """Return which trainers start a plan: targets of `export`, and this engine as "moewright"."""
    job = plan_job(plan)
    starts = {
        "megatron": not megatron_refusals(job, plan.hardware),
        "bridge": not any(bridge_refusals(plan)),
        "torchtitan": not any(torchtitan_refusals(job, plan.hardware)),
        "moewright": not engine_refusals(plan),
    }
    return tuple(name for name, can_start in starts.items() if can_start)


def describe_trainers(plans: Sequence[Plan]) -> Iterator[str]:
    """Yield lines on the trainers that start plans, by their ranks; what is in the way of none."""
    ranks: dict[tuple[str, ...], list[int]] = {}
    for rank, plan in enumerate(plans, 1):
        ranks.setdefault(list_trainers(plan), []).append(rank)
    for trainers, numbers in ranks.items():
        noun = "Plan" if len(numbers) == 1 else "Plans"
        subject = f"{noun} {', '.join(map(str, numbers))}"
        if trainers:
            yield f"{subject}: can be started in {', '.join(trainers)}."
        else:
            first = plans[numbers[0] - 1]
            yield f"{subject}: no trainer known here can start it. {_explain_refusals(first)}"


def _explain_refusals(plan: Plan) -> str:
    """Say what stops Megatron-LM, and whether other layouts of the job start in this engine."""
    reasons = megatron_refusals(plan_job(plan), plan.hardware)
    reason = min(reasons, key=lambda reason: not reason.field.startswith("hardware"))
    text = f"{reason.rule} ({reason.field}={reason.value})."
    nouns = (plan.model, plan.workload, plan.hardware)
    if job_refusals(TargetTrainer.ENGINE, *nouns):
        return text
    return f"{text} --runs-on engine plans what moewright itself trains."


def engine_refusals(plan: Plan) -> tuple[Reason, ...]:
    """Return why this engine does not train a plan; () where it does."""
    return trainer_refusals(TargetTrainer.ENGINE, plan_job(plan), plan.hardware)


def check_target(to: str) -> None:
    """Refuse what no plan can be written for, with the nearest target.

    Raises:
        BadInput: neither moewright nor an installed package writes it.
    """
    names = (*get_args(ExportTarget), *list_extensions(ExtensionPoint.EXPORTERS))
    if to not in names:
        rule = f"must be one of {', '.join(names)}"
        nearest = closest_match(to[:60], names) or "megatron"
        raise BadInput(Reason(field="--to", value=to[:60], rule=rule, nearest=nearest))


def export(
    plan: Plan,
    *,
    to: str,
    job: str = "",
    image: str = "",
    run_dir: str = ".",
    run: RunOptions = NO_RUN_OPTIONS,
) -> str:
    """Render a plan as the launch file of a trainer; what the target cannot say is refused.

    Args:
        plan: what is to run.
        to: megatron: a Megatron-LM launch script; bridge: a Megatron Bridge recipe; torchtitan:
            its configuration; slurm: a batch script; k8s: a TrainJob of Kubeflow Trainer;
            torchrun: the line that starts our own engine; or the name of an exporter that an
            installed package adds.
        job: the job file of the plan; torchrun needs it, slurm and k8s start our engine with it
            and Megatron-LM without.
        image: the container image of k8s, and of slurm, which starts it by Pyxis.
        run_dir: the folder of the run of our engine.
        run: data, checkpoints and a recipe of other trainers' runs.

    Raises:
        BadInput: the target is unknown, or cannot say the plan, or a shard of its data is missing.

    Example:
        >>> import moewright as mw
        >>> plan = mw.estimate("Qwen3-30B-A3B", "ep8,recompute=full", on="8xH100")
        >>> "--expert-model-parallel-size 8" in mw.export(plan, to="megatron")
        True
    """
    check_target(to)
    if job and to not in _STARTERS:
        rule = f"says nothing to {to}"
        raise BadInput(Reason(field="--job", value=job, rule=rule, nearest="leave it out"))
    if job and (reasons := unsupported_device(plan.hardware)):
        raise BadInput(*reasons)
    if image and to not in _IN_CONTAINERS:
        rule = f"says nothing to {to}, which starts in no container by itself"
        raise BadInput(Reason(field="--image", value=image[:60], rule=rule, nearest="--to slurm"))
    if run != NO_RUN_OPTIONS and (job or to not in _TRAINERS):
        rule = "data, checkpoints and recipes of our own engine stand in its job file"
        raise BadInput(Reason(field="--data, --save, --recipe", rule=rule, nearest="--job alone"))
    plan, files = settle_run(plan, run)
    if not job:  # our engine reads shards under their common name
        plan = name_shards(plan)
    match to:
        case "megatron":
            return render_megatron_script(plan, files)
        case "bridge":
            return render_bridge_recipe(plan, files)
        case "torchtitan":
            return render_torchtitan_config(plan, files)
        case "slurm":
            return render_slurm_script(plan, job=job, run_dir=run_dir, image=image, files=files)
        case "k8s":
            return render_train_job(plan, job=job, run_dir=run_dir, image=image, files=files)
        case "torchrun":
            if not job:
                rule = "is needed for torchrun: the job file of the plan"
                raise BadInput(Reason(field="--job", rule=rule))
            return render_engine_command(plan, job=job, run_dir=run_dir) + "\n"
        case _:
            return str(call_extension(ExtensionPoint.EXPORTERS, to, plan))


def train(plan: Plan, out: Path | str, *, extend: bool = False) -> RunRecord:
    """Train a plan on this machine and return what the run recorded.

    A run goes on where its folder stands. The engine extra is needed (torch).

    Args:
        plan: the job; `moewright.plan` of a job file makes one that this engine runs.
        out: the folder of the run.
        extend: do as many steps again when all are done.

    Raises:
        BadInput: the plan cannot be run here.
        RuntimeError: a rank failed, or the run was stopped.

    Example:
        >>> import moewright as mw
        >>> mw.train.__name__  # examples/train_and_change_layout.py runs one
        'train'
    """
    from moewright.engine.run.train import train as train_plan

    folder = Path(out)
    code = int(train_plan(plan, folder, extend=extend))
    if code != 0:
        raise RuntimeError(f"the run in {folder} ended with exit code {code}")
    return read_run(folder)
