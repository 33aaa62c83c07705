"""Judgements: whether a plan is good, and what would make a job fit that fits in no layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from moewright.api.planning import Plans, build_objections
from moewright.api.requests import PlanRequest, change_training
from moewright.diagnosis.judgement import Judgement, judge_plan
from moewright.search.misfit import JobVariant, Misfit, explain_misfit
from moewright.search.search import find_best_plan
from moewright.spec.errors import BadInput
from moewright.spec.options import WorkloadOptions
from moewright.spec.plan import Plan
from moewright.spec.workload import BaseQuantization, Dtype, Task, Workload


def judge(plan: Plan) -> Judgement:
    """Say whether a plan fits, how far it is from the best that fits, and from measured runs.

    The best is that of a whole search of the plan's job on its hardware, which takes seconds.

    Args:
        plan: what `estimate`, `plan` or `read_flags` returns.

    Example:
        >>> import moewright as mw
        >>> judged = mw.judge(mw.estimate("Qwen3-30B-A3B", "tp8,ep8,mbs1", on="16xH100"))
        >>> judged.quality.value, judged.times_best > 5, "tp1" in judged.change
        ('slow', True, True)
    """
    return judge_plan(plan, find_best_plan(plan.model, plan.workload, plan.hardware))


_RANK = 16  # of the adapters that are tried


def view_misfit(plans: Plans, layout: str = "") -> Iterator[Misfit]:
    """Yield why a search came back empty and what would fit, more each time.

    Nothing is yielded where no layout is legal. `layout` is layout text whose keys are pinned.
    """
    nearest = plans.search.nearest_miss
    if nearest is None:
        return
    request = plans.request
    yield from explain_misfit(
        nearest,
        tuple(_list_variants(request)),
        lambda workload: build_objections(replace(request, workload=workload)),
        layout,
    )


def _list_variants(request: PlanRequest) -> Iterator[JobVariant]:
    """Yield the changes of a job that save memory, those that change least of it first."""
    workload = request.workload
    optimizer = workload.optimizer
    if optimizer.moment_dtypes == (Dtype.FP32, Dtype.FP32):
        narrow = replace(workload, optimizer=replace(optimizer, moment_dtype=Dtype.FP8))
        yield JobVariant(
            change="8-bit moments", setting='moment_dtype = "fp8" in [train]', workload=narrow
        )
        if workload.grad_dtype is Dtype.FP32:
            yield JobVariant(
                change="8-bit moments and bf16 gradients",
                setting='moment_dtype = "fp8" and grad_dtype = "bf16" in [train]',
                workload=replace(narrow, grad_dtype=Dtype.BF16),
            )
    if workload.fine_tuning.task is Task.PRETRAIN:
        yield from _list_adapters(workload)


def _list_adapters(workload: Workload) -> Iterator[JobVariant]:
    """Yield LoRA, and LoRA beside frozen weights of 4 bits."""
    adapters = WorkloadOptions(lora_rank=_RANK)
    quantised = replace(adapters, quantize_base=BaseQuantization.NF4)
    for change, setting, options in (
        ("LoRA, which trains adapters alone", f"--lora r={_RANK}", adapters),
        ("QLoRA", f"--lora r={_RANK} --quantize-base nf4", quantised),
    ):
        try:
            changed = change_training(workload, options)
        except BadInput:
            continue
        yield JobVariant(change=change, setting=setting, workload=changed)
