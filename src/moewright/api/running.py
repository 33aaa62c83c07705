"""What plans are turned into: launch files of other trainers, and runs of this engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

from moewright.codec import read_run
from moewright.codec.data_paths import parse_data_paths
from moewright.codec.files import name_shards
from moewright.cost.constants import Constants
from moewright.exporters.bridge import bridge_refusals, render_bridge_recipe
from moewright.exporters.chakra import write_traces
from moewright.exporters.kubernetes import render_train_job
from moewright.exporters.megatron.script import render_megatron_script
from moewright.exporters.recipes import apply_recipe, find_recipe
from moewright.exporters.slurm import render_slurm_script
from moewright.exporters.torchrun import SAVE_FOLDER, RunFiles, render_engine_command
from moewright.exporters.torchtitan import render_torchtitan_config
from moewright.rules.goodput import optimum_interval_s
from moewright.rules.job import plan_job
from moewright.rules.limits.engine_limits import unsupported_device
from moewright.rules.limits.megatron_limits import megatron_refusals
from moewright.rules.limits.torchtitan_limits import torchtitan_refusals
from moewright.rules.limits.trainers import TargetTrainer, job_refusals, trainer_refusals
from moewright.spec.errors import BadInput, Reason
from moewright.spec.extensions import ExtensionPoint, call_extension, list_extensions
from moewright.spec.ledger import Component
from moewright.spec.names import closest_match
from moewright.spec.options import ExportTarget, RunOptions
from moewright.spec.plan import Plan
from moewright.spec.run import RunRecord
from moewright.spec.units import HOUR_S
from moewright.spec.workload import SaveMode, Workload

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
    """Say what stops Megatron-LM, and which trainers start other layouts of the job."""
    reasons = megatron_refusals(plan_job(plan), plan.hardware)
    # Devices first: no layout changes them.
    reason = min(reasons, key=lambda reason: not reason.field.startswith("hardware"))
    text = f"{reason.rule} ({reason.field}={reason.value})."
    nouns = (plan.model, plan.workload, plan.hardware)
    if not job_refusals(TargetTrainer.MEGATRON, *nouns):
        text += f" --runs-on {TargetTrainer.MEGATRON} plans what it starts."
    if not job_refusals(TargetTrainer.ENGINE, *nouns):
        text += f" --runs-on {TargetTrainer.ENGINE} plans what moewright itself trains."
    return text


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
                raise BadInput(Reason(field="--job", rule=rule, nearest="--job job.toml"))
            return render_engine_command(plan, job=job, run_dir=run_dir) + "\n"
        case _:
            return str(call_extension(ExtensionPoint.EXPORTERS, to, plan))


def export_traces(plan: Plan, folder: Path | str) -> int:
    """Write the predicted step of a plan as Chakra execution traces, and return how many ranks.

    `step.<rank>.et` are the traces; `groups.json`, `network.yml`, `system.json` and `memory.json`
    are what ASTRA-sim reads beside them.

    Raises:
        BadInput: the layout has no timetable, or a file cannot be written.

    Example:
        >>> import moewright as mw, tempfile
        >>> plan = mw.estimate("Qwen3-30B-A3B", "ep8,recompute=full", on="8xH100")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     mw.export_traces(plan, folder)
        8
    """
    return write_traces(plan, Path(folder))


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


# Llama 3, arXiv 2407.21783, section 3.3.4: 419 unexpected interruptions of 16,384 H100 in 54 days.
_DEVICE_MTBF_S = 54 * 24 * HOUR_S * 16384 / 419
_MTBF_SOURCE = "Llama 3's 419 failures of 16,384 GPUs in 54 days"
_EVAL_STEPS = 500  # between evaluations: Megatron Bridge 067f987d, recipes/common.py
_LEAST_INTERVAL_STEPS = 10
_SAVED = (Component.WEIGHTS, Component.MASTER, Component.MOMENTS)


def settle_run(plan: Plan, options: RunOptions) -> tuple[Plan, RunFiles]:
    """Return the plan with what the options say of its workload, and the files of its run.

    Raises:
        BadInput: an interval without a folder or below 1, or a blend that cannot be read.
    """
    parse_data_paths(options.data, "--data")
    parse_data_paths(options.eval_data, "--eval")
    remarks: list[str] = []
    workload = plan.workload
    if options.recipe:
        workload = apply_recipe(workload, plan.model)
        recipe = find_recipe(plan.model)
        remarks.append(f"Recipe: {recipe.source}.")
        if recipe.batch:
            remarks.append(
                f"Its learning rate is for a batch of {recipe.batch}; this plan has "
                f"{workload.global_batch:,} sequences of {workload.seq_len:,} tokens."
            )
    workload = _with_data(workload, options)
    workload, remark = _with_checkpoints(replace(plan, workload=workload), options)
    remarks += remark
    files = RunFiles(
        save=options.save or SAVE_FOLDER,
        weights=options.load,
        tokenizer=options.tokenizer,
        tracker=options.wandb,
        remarks=tuple(remarks),
    )
    return replace(plan, workload=workload), files


def _with_data(workload: Workload, options: RunOptions) -> Workload:
    data = replace(
        workload.data,
        train=options.data or workload.data.train,
        heldout=options.eval_data or workload.data.heldout,
    )
    if options.eval_data and not data.train:
        rule = "needs data to train on beside it"
        raise BadInput(Reason(field="--eval", value=options.eval_data[:60], rule=rule))
    every = workload.eval_every_steps
    if options.eval_data and not every:
        every = min(_EVAL_STEPS, workload.steps or _EVAL_STEPS)
    return replace(workload, data=data, eval_every_steps=every)


def _with_checkpoints(plan: Plan, options: RunOptions) -> tuple[Workload, list[str]]:
    """Return the workload with its checkpoints, and remarks on how far apart they are.

    Only writers in the background are chosen here: training waits for the copy to the host.
    """
    checkpoint = plan.workload.checkpoint
    if options.save_interval is not None:
        if options.save_interval < 1:
            value = str(options.save_interval)
            rule = "must be at least 1 step"
            raise BadInput(Reason(field="--save-interval", value=value, rule=rule, nearest="1"))
        checkpoint = replace(checkpoint, every_steps=options.save_interval)
        return replace(plan.workload, checkpoint=checkpoint), []
    if not options.save or checkpoint.every_steps:
        return plan.workload, []
    checkpoint = replace(checkpoint, mode=SaveMode.ASYNC)
    mtbf_s = _DEVICE_MTBF_S / plan.hardware.count
    step_s = plan.estimate.step_s
    interval_s = optimum_interval_s(mtbf_s, _save_s(plan))
    # Layouts that nobody timed have no step to count by.
    steps = max(_LEAST_INTERVAL_STEPS, round(interval_s / step_s)) if step_s else _EVAL_STEPS
    # One save at least, at the end.
    steps = min(steps, plan.workload.steps or steps)
    remark = (
        f"A checkpoint every {steps:,} steps ({steps * step_s / 60:.0f} min) loses the least time: "
        f"a save stops training for {_save_s(plan):.1f} s, and {plan.hardware.count:,} devices "
        f"fail every {mtbf_s / HOUR_S:,.0f} h at the rate of {_MTBF_SOURCE}."
    )
    checkpoint = replace(checkpoint, every_steps=steps)
    return replace(plan.workload, checkpoint=checkpoint), [remark]


def _save_s(plan: Plan) -> float:
    """Return the seconds in which a save stops training: states are copied to host memory."""
    constants = Constants(plan.hardware)
    rate_Bps = constants["host_link_Bps"] * constants["host_link_efficiency"]
    states = max(
        (
            sum(row.bytes for row in ledger.memory if row.component in _SAVED)
            for ledger in plan.estimate.ledgers
        ),
        default=0,
    )
    return max(1.0, states / rate_Bps)
