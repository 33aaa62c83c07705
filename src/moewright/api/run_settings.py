"""What a launch file says of a run beyond its plan: data, checkpoints, a recipe."""

from __future__ import annotations

from dataclasses import replace

from moewright.codec.data_paths import parse_data_paths
from moewright.cost.constants import Constants
from moewright.exporters.recipes import apply_recipe, find_recipe
from moewright.exporters.run_files import SAVE_FOLDER, RunFiles
from moewright.rules.checkpoint_interval import optimum_interval_s
from moewright.spec.errors import BadInput, Reason
from moewright.spec.ledger import Component
from moewright.spec.options import RunOptions
from moewright.spec.plan import Plan
from moewright.spec.workload import SaveMode, Workload

_HOUR_S = 3600.0
# Llama 3, arXiv 2407.21783, section 3.3.4: 419 unexpected interruptions of 16,384 H100 in 54 days.
_DEVICE_MTBF_S = 54 * 24 * _HOUR_S * 16384 / 419
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
    steps = max(_LEAST_INTERVAL_STEPS, round(interval_s / step_s)) if step_s else _EVAL_STEPS
    steps = min(steps, plan.workload.steps or steps)
    remark = (
        f"A checkpoint every {steps:,} steps ({steps * step_s / 60:.0f} min) loses the least time: "
        f"a save stops training for {_save_s(plan):.1f} s, and {plan.hardware.count:,} devices "
        f"fail every {mtbf_s / _HOUR_S:,.0f} h at the rate of {_MTBF_SOURCE}."
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
