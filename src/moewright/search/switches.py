"""Switches of a job beside its layout: what each, and all together, make of a step and a peak.

Vendors' figures are of jobs whose load is forced to be even, whose gradients and moments have 16
bits, whose experts are fused kernels. A plan is of the job as it trains, so that a figure of theirs
above the plan's may be of another job; the layout stays the same here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from moewright.cost.estimate import estimate
from moewright.spec.errors import BadInput
from moewright.spec.model import ModelSpec
from moewright.spec.options import JobSwitchKind
from moewright.spec.plan import Estimate, Plan
from moewright.spec.units import (
    GIB,
    format_bytes,
    format_change,
    format_figures,
    format_seconds,
    mention,
)
from moewright.spec.workload import (
    Dtype,
    ExpertKernels,
    MatrixUpdate,
    NarrowedProducts,
    Routing,
    Workload,
)

_WORTH_SAYING = 0.005  # of the step
_WORTH_SAYING_BYTES = GIB


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSwitch:
    """A switch of a job, with the job as it is with the switch set.

    `kind` is None for one that no job is trained with.
    """

    name: str
    kind: JobSwitchKind | None = None
    workload: Workload


def list_switches(model: ModelSpec, workload: Workload) -> Iterator[JobSwitch]:
    """Yield the switches that benchmarks set and the workload of a model does not."""
    optimizer = workload.optimizer
    has_experts = bool(model.moe_layer_count)
    trainer = workload.trainer
    if has_experts and workload.routing is not Routing.BALANCED:
        yield JobSwitch(name="an even load", workload=replace(workload, routing=Routing.BALANCED))
    if workload.grad_dtype is Dtype.FP32:
        yield JobSwitch(
            name="bf16 gradients",
            kind=JobSwitchKind.BF16_GRADIENTS,
            workload=replace(workload, grad_dtype=Dtype.BF16),
        )
    if optimizer.matrix_update is MatrixUpdate.ADAMW and optimizer.moment_dtypes == (
        Dtype.FP32,
        Dtype.FP32,
    ):
        narrow = replace(optimizer, moment_dtype=Dtype.BF16)
        yield JobSwitch(
            name="bf16 moments",
            kind=JobSwitchKind.BF16_MOMENTS,
            workload=replace(workload, optimizer=narrow),
        )
    if not workload.precision.is_narrow:
        return
    if has_experts and trainer.expert_kernels is ExpertKernels.GROUPED:
        fused = replace(trainer, expert_kernels=ExpertKernels.FUSED)
        yield JobSwitch(
            name="fused experts",
            kind=JobSwitchKind.FUSED_EXPERTS,
            workload=replace(workload, trainer=fused),
        )
    if NarrowedProducts.HEAD not in trainer.narrowed:
        narrowed = replace(trainer, narrowed=(*trainer.narrowed, NarrowedProducts.HEAD))
        head = f"the head in {workload.precision}"
        yield JobSwitch(
            name=head, kind=JobSwitchKind.NARROW_HEAD, workload=replace(workload, trainer=narrowed)
        )


def set_switches(
    model: ModelSpec, workload: Workload, kinds: Collection[JobSwitchKind]
) -> tuple[Workload, tuple[JobSwitchKind, ...]]:
    """Return a workload with the switches of these kinds set, and those that changed it."""
    changed = []
    for kind in kinds:
        switches = list_switches(model, workload)
        switch = next((item for item in switches if item.kind is kind), None)
        if switch is not None:
            workload = switch.workload
            changed.append(kind)
    return workload, tuple(changed)


def explain_switches(plan: Plan) -> tuple[str, ...]:
    """Say what switches of the job make of a plan's step and peak, in the same layout.

    A switch that moves neither is left out. No vendor's figure is of a CPU.
    """
    own = plan.estimate
    if own.untimed or not plan.hardware.device.kind.is_accelerator:
        return ()
    texts: list[str] = []
    kinds: list[JobSwitchKind] = []
    together = plan.workload
    for switch in list_switches(plan.model, plan.workload):
        other = _estimate_under(plan, switch.workload)
        text = _describe_change(other, own) if other else ""
        if text:
            texts.append(f"{switch.name} {text}")
            together = _set_switch(plan, together, switch.name)
            if switch.kind:
                kinds.append(switch.kind)
    if not texts:
        return ()
    line = f"As vendors' benchmarks set the job, in the same layout: {', '.join(texts)}"
    everything = _estimate_under(plan, together) if len(texts) > 1 else None
    if everything:
        speed = format_figures(everything.tokens_per_s_per_device)
        line += (
            f"; together {format_seconds(everything.step_s)} a step, {speed} tokens/s a device, "
            f"a peak of {format_bytes(everything.peak_bytes)}"
        )
    if kinds:
        line += f"; plan --try {' '.join(kinds)} searches with what it may set"
    return (f"{line}.",)


def _set_switch(plan: Plan, workload: Workload, name: str) -> Workload:
    """Return a workload with the switch of that name set."""
    switches = list_switches(plan.model, workload)
    return next(item.workload for item in switches if item.name == name)


def _estimate_under(plan: Plan, workload: Workload) -> Estimate | None:
    """Return the estimate of a plan's layout under a workload; None where it is not legal."""
    try:
        return estimate(plan.model, workload, plan.hardware, plan.layout)
    except BadInput:
        return None


def _describe_change(other: Estimate, own: Estimate) -> str:
    """Say by how much a step and a peak change; "" where neither changes by much."""
    texts = []
    change = other.step_s / own.step_s - 1
    if abs(change) > _WORTH_SAYING:
        texts.append(f"{change:+.1%}")
    more_bytes = other.peak_bytes - own.peak_bytes
    if abs(more_bytes) > _WORTH_SAYING_BYTES:
        texts.append(format_change(more_bytes, format_bytes))
    return mention("({})", ", ".join(texts))
