"""A plan as a launch script of Megatron-LM.

The flags are those of its own parser at d98e8a64 (2026-08-22).
"""

from __future__ import annotations

from collections.abc import Iterator
from shlex import quote

from moewright.codec import format_layout
from moewright.exporters.megatron.layout import layout_flags, training_steps, workload_flags
from moewright.exporters.megatron.model import Flag, model_flags
from moewright.exporters.torchrun import torchrun_command
from moewright.rules.delayed_scaling import is_delayed
from moewright.rules.job import plan_job
from moewright.rules.limits.megatron_limits import megatron_refusals
from moewright.spec.errors import BadInput
from moewright.spec.layout import Layout, Offload, Overlap
from moewright.spec.plan import Plan

TRAINER = "pretrain_gpt.py"


def render_megatron_script(plan: Plan) -> str:
    """Return a shell script that starts pretrain_gpt.py on every node.

    Raises:
        BadInput: one Reason for each thing that Megatron-LM cannot say.
    """
    lines = flag_lines(megatron_flags(plan))
    exports = (f"export {name}={value}" for name, value in environment_variables(plan.layout))
    command = " \\\n  ".join((f"{torchrun_command(plan)} {TRAINER}", *lines))
    return "\n".join(("#!/bin/sh", *comment_lines(plan), *exports, command)) + "\n"


def comment_lines(plan: Plan) -> Iterator[str]:
    """Yield comments that say where a script comes from, and where it differs from the plan."""
    name = plan.model.name or "model"
    title = f"# {name}, {format_layout(plan.layout)}, plan {plan.fingerprint}"
    yield title.replace("\n", " ")
    if not plan.workload.steps:
        steps = training_steps(plan.workload)
        yield f"# The plan has no length: {steps} steps are written (plan --steps or --tokens)."
    if plan.layout.vpp > 1 and Overlap.P2P not in plan.layout.overlap:
        yield "# Point-to-point transfers overlap, as virtual stages do by themselves."
    if plan.workload.ramp.ramp_start:
        yield (
            "# While the batch grows Megatron-LM moves the learning rate by sequences, "
            "the plan by steps; they agree"
        )
        yield "# where warm-up and decay end."
    if is_delayed(plan.workload):
        count = plan_job(plan).micro_batches
        yield (
            "# Histories of FP8's amaxes move on with every micro-batch there, with every step in "
            "Moewright:"
        )
        yield (
            f"# of {plan.workload.delayed.amax_history_len} amaxes there are {count} a step, so "
            "that scales and losses differ."
        )


def flag_lines(flags: tuple[Flag, ...]) -> tuple[str, ...]:
    """Return one flag a line, quoted for a shell."""
    return tuple(f"{name} {' '.join(map(quote, values))}".rstrip() for name, *values in flags)


def megatron_flags(plan: Plan) -> tuple[Flag, ...]:
    """Return the flags of pretrain_gpt.py for this plan.

    Nothing is left to a default that depends on another flag. A value that only predictions read
    (the expert load, the step that is counted) has no flag.

    Raises:
        BadInput: one Reason for each thing that Megatron-LM cannot say.
    """
    reasons = megatron_refusals(plan_job(plan), plan.hardware)
    if reasons:
        raise BadInput(*reasons)
    return all_flags(plan)


def all_flags(plan: Plan) -> tuple[Flag, ...]:
    """Return the flags of a plan, also where Megatron-LM would stop at them."""
    return (
        *model_flags(plan.model, plan.workload),
        *layout_flags(plan_job(plan)),
        *workload_flags(plan.workload, plan.layout, plan.hardware),
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
    return 32 if layout.zero >= 2 or Overlap.EP in layout.overlap else 1
