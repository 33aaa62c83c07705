"""A plan as a launch script of Megatron-LM.

The flags are those of its own parser at d98e8a64 (2026-08-22).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from moewright.codec import format_layout
from moewright.exporters.megatron.layout import layout_flags, training_steps, workload_flags
from moewright.exporters.megatron.model import Flag, balance_losses, model_flags
from moewright.exporters.recipes import find_recipe
from moewright.exporters.torchrun import (
    NO_FILES,
    RunFiles,
    TransportSetting,
    trainer_command,
    transport_settings,
)
from moewright.rules.delayed_scaling import is_delayed
from moewright.rules.job import plan_job
from moewright.rules.limits.megatron_limits import megatron_refusals
from moewright.spec.errors import BadInput
from moewright.spec.layout import Layout, Offload, Overlap
from moewright.spec.plan import Plan
from moewright.spec.quoting import Script, Shell
from moewright.spec.workload import OptimizerSpec, RouterAssignment, RouterForce

TRAINER = "pretrain_gpt.py"

S = TypeVar("S", bound=Script)


def render_megatron_script(plan: Plan, files: RunFiles = NO_FILES) -> Shell:
    """Return a shell script that starts pretrain_gpt.py on every node.

    Raises:
        BadInput: one Reason for each thing that Megatron-LM cannot say.
    """
    lines = flag_lines(megatron_flags(plan, files))
    start = Shell.write("{} {}", trainer_command(plan), TRAINER)
    script = (
        Shell.write("#!/bin/sh"),
        *comment_lines(plan, Shell, files),
        *export_lines(environment_variables(plan.layout)),
        *transport_lines(transport_settings(plan.layout, plan.hardware)),
        join_words((start, *lines)),
    )
    return Shell.lines(script)


def export_lines(variables: Iterable[tuple[str, str]]) -> Iterator[Shell]:
    """Yield a line for each variable of the environment."""
    yield from (Shell.write("export {}={}", name, value) for name, value in variables)


def join_words(parts: Iterable[Shell]) -> Shell:
    """Return one command on several lines, a part on each."""
    return Shell.concat(parts, " \\\n  ")


def transport_lines(settings: Iterable[TransportSetting]) -> Iterator[Shell]:
    """Yield variables of the network's libraries, each below the reason for it."""
    for setting in settings:
        yield Shell.comment("{}", setting.reason)
        yield from export_lines(((setting.name, setting.value),))


def comment_lines(plan: Plan, target: type[S], files: RunFiles = NO_FILES) -> Iterator[S]:
    """Yield comments that say where a script comes from, and where it differs from the plan."""
    name = plan.model.name or "model"
    yield target.comment("{}, {}, plan {}", name, format_layout(plan.layout), plan.fingerprint)
    todos = tuple(_list_todos(plan))
    if todos:
        yield target.comment("TODO before it trains a model:")
        yield from (target.comment("- {}", todo) for todo in todos)
    yield from (target.comment("{}", remark) for remark in files.remarks)
    if plan.layout.vpp > 1 and Overlap.P2P not in plan.layout.overlap:
        yield target.comment(
            "Point-to-point transfers overlap, as virtual stages do by themselves."
        )
    if plan.workload.ramp.ramp_start:
        yield target.comment(
            "While the batch grows Megatron-LM moves the learning rate by sequences, "
            "the plan by steps; they agree"
        )
        yield target.comment("where warm-up and decay end.")
    if is_delayed(plan.workload):
        yield target.comment(
            "Histories of FP8's amaxes move on with every micro-batch there, with every step in "
            "Moewright:"
        )
        yield target.comment(
            "of {} amaxes there are {} a step, so that scales and losses differ.",
            plan.workload.delayed.amax_history_len,
            plan_job(plan).micro_batches,
        )


def _list_todos(plan: Plan) -> Iterator[str]:
    """Yield what a run needs that the plan does not say, and what stands in for it."""
    workload = plan.workload
    if not workload.steps:
        steps = training_steps(workload)
        yield f"length: the plan has none, {steps} steps are written (plan --steps or --tokens)"
    if not workload.data.train:
        yield "data: the plan names none, --mock-data makes tokens up (export --data)"
    if not workload.checkpoint.every_steps:
        yield "checkpoints: the plan saves none (export --save)"
    if workload.optimizer == OptimizerSpec():
        yield (
            f"recipe: the learning rate {workload.optimizer.lr:g} and its schedule are defaults; "
            f"export --recipe writes those of {find_recipe(plan.model).source}"
        )
    dispatcher = plan.layout.dispatcher.facts
    if plan.layout.ep > 1 and dispatcher.packages:
        names = ", ".join(dispatcher.packages)
        yield f"packages: {names} ({dispatcher.home}) move tokens, and are not Megatron-LM's"
    moe = plan.model.moe
    if moe is None or moe.router.selection_bias or balance_losses(workload.loss):
        return
    is_sinkhorn = workload.router.assignment is RouterAssignment.SINKHORN
    if not is_sinkhorn and workload.router.force is not RouterForce.BALANCED:
        yield (
            "balance: the plan has no loss that balances the experts, and without one few of them "
            "learn (export --recipe, or train.aux_coeff of a job)"
        )


def flag_lines(flags: tuple[Flag, ...]) -> tuple[Shell, ...]:
    """Return one flag a line, quoted for a shell."""
    return tuple(map(Shell.words, flags))


def megatron_flags(plan: Plan, files: RunFiles = NO_FILES) -> tuple[Flag, ...]:
    """Return the flags of pretrain_gpt.py for this plan.

    Nothing is left to a default that depends on another flag. A value that only predictions read
    (the expert load, the step that is counted) has no flag.

    Raises:
        BadInput: one Reason for each thing that Megatron-LM cannot say.
    """
    reasons = megatron_refusals(plan_job(plan), plan.hardware)
    if reasons:
        raise BadInput(*reasons)
    return all_flags(plan, files)


def all_flags(plan: Plan, files: RunFiles = NO_FILES) -> tuple[Flag, ...]:
    """Return the flags of a plan, also where Megatron-LM would stop at them."""
    return (
        *model_flags(plan.model, plan.workload, files),
        *layout_flags(plan_job(plan)),
        *workload_flags(plan.workload, plan.layout, plan.hardware, files),
    )


def environment_variables(layout: Layout) -> tuple[tuple[str, str], ...]:
    """Return the variables that Megatron-LM reads or asserts."""
    variables = [("CUDA_DEVICE_MAX_CONNECTIONS", str(_max_connections(layout)))]
    # Captured graphs may be replayed at addresses that growing segments have moved.
    if not layout.graphs:
        variables.append(("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"))
    # Without it Transformer Engine would move weights too.
    if any(module is not Offload.OPTIMIZER for module in layout.offload):
        variables.append(("NVTE_CPU_OFFLOAD_V1", "1"))
    return tuple(variables)


def _max_connections(layout: Layout) -> int:
    """Return the number of hardware queues.

    Sequence-parallel overlap relies on 1 up to Hopper; FSDP and expert overlap need more.
    """
    if layout.zero >= 2 or Overlap.EP in layout.overlap:
        return 32
    return 1
