"""Launch scripts drawn at random: the planner's best plan of a job with one fault planted in it.

A draw takes a job, the best plan that Megatron-LM starts for it, and the first fault of a shuffled
table that costs something there. A fault that costs nothing is none, and one that another choice of
the plan makes illegal takes that choice back first; what taking back costs is not the fault's. The
seed alone decides a draw.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache

import moewright as mw
from moewright.rules.job import plan_job
from moewright.rules.limits.legality import check_legality
from moewright.rules.limits.megatron_limits import megatron_refusals
from moewright.search.search import build_plan, find_best_plan
from moewright.spec.errors import BadInput, Reason
from moewright.spec.layout import (
    DispatcherKind,
    Layout,
    Offload,
    Recompute,
    plain_schedule,
)
from moewright.spec.plan import Plan, Verdict
from moewright.spec.stage_string import EVEN_SPLIT
from moewright.spec.workload import AttentionBackend, ExpertKernels, Fusion, TrainerSpec

MODELS = (
    "Qwen3-Coder-30B-A3B",
    "Moonlight-16B-A3B",
    "Qwen2-57B-A14B",
    "Ling-mini-2.0",
    "gpt-oss-20b",
    "Mixtral-8x22B-v0.1",
    "Mixtral-8x7B-v0.1",
    "dots.llm1",
    "DeepSeek-V2-Lite",
    "GLM-4.5-Air",
    "Llama-3.1-8B",
    "Qwen3-32B",
)
DEVICES = ("H100", "H200", "A100", "B200", "H800")
COUNTS = (8, 16, 32)  # a search on more takes minutes
SEQUENCES = ((64, 4096), (256, 4096), (512, 2048), (128, 8192), (32, 32768))
LEAST_LOSS = 0.05  # of the step: a fault costs at least so much
_TRIES = 40  # jobs, before a draw gives up
# Choices that go where a fault is illegal beside them.
_TAKEN_BACK = (
    {},
    {"overlap": ()},
    {"overlap": (), "graphs": (), "offload": ()},
    {"overlap": (), "graphs": (), "offload": (), "dispatcher": DispatcherKind.ALL_TO_ALL},
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """A way to make a good plan slow.

    `plant` yields values of the layout, or of the trainer's kernels under "trainer"; `cures` are
    the fields of which a change takes it away.
    """

    name: str
    plant: Callable[[Plan], Iterator[dict[str, object]]]
    cures: frozenset[str]


def _kernels(**values: object) -> Callable[[Plan], Iterator[dict[str, object]]]:
    return lambda plan: iter([{"trainer": values}])


def _values(**values: object) -> Callable[[Plan], Iterator[dict[str, object]]]:
    return lambda plan: iter([values])


def _scaled(name: str, *factors: float) -> Callable[[Plan], Iterator[dict[str, object]]]:
    """Plant a degree that is several times as large, or as small."""

    def plant(plan: Plan) -> Iterator[dict[str, object]]:
        for factor in factors:
            degree = int(factor * getattr(plan.layout, name))
            if degree < 1:
                continue
            values: dict[str, object] = {name: degree}
            if name == "tp":
                values["sp"] = degree > 1
            if name == "pp":
                values |= {"vpp": 1, "schedule": plain_schedule(1), "stages": EVEN_SPLIT}
            yield values

    return plant


def _experts_as_tensors(plan: Plan) -> Iterator[dict[str, object]]:
    """Cut every expert over a node in place of laying experts out over it."""
    for tp in (8, 4):
        yield {"tp": tp, "sp": True, "etp": tp, "ep": 1}


def _cut_experts(plan: Plan) -> Iterator[dict[str, object]]:
    for etp in (4, 2):
        yield {"etp": etp, "ep": max(1, plan.layout.ep // etp)}


def _smaller_micro_batch(plan: Plan) -> Iterator[dict[str, object]]:
    if plan.layout.mbs > 1:
        yield {"mbs": 1}


def _whole_stages(plan: Plan) -> Iterator[dict[str, object]]:
    if plan.layout.vpp > 1:
        yield {"vpp": 1, "schedule": plain_schedule(1), "stages": EVEN_SPLIT}


def _no_sequence_parallelism(plan: Plan) -> Iterator[dict[str, object]]:
    if plan.layout.tp > 1:
        yield {"sp": False}


def _fields(*names: str) -> frozenset[str]:
    return frozenset(names)


FAULTS = (
    Fault(
        name="experts one by one",
        plant=_kernels(expert_kernels=ExpertKernels.SEQUENTIAL),
        cures=_fields("trainer.expert_kernels"),
    ),
    Fault(
        name="scores of attention in memory",
        plant=_kernels(attention_backend=AttentionBackend.UNFUSED),
        cures=_fields("trainer.attention_backend"),
    ),
    Fault(
        name="rows moved by torch's own operations",
        plant=_kernels(unfused=(Fusion.PERMUTE,)),
        cures=_fields("trainer.unfused"),
    ),
    Fault(
        name="no fused activations and sums of gradients",
        plant=_kernels(unfused=(Fusion.ACTIVATION, Fusion.WEIGHT_GRAD)),
        cures=_fields("trainer.unfused"),
    ),
    Fault(
        name="everything recomputed",
        plant=_values(recompute=(Recompute.FULL,), recompute_block=0, recompute_span=1),
        cures=_fields("recompute"),
    ),
    Fault(
        name="all-gather of tokens",
        plant=_values(dispatcher=DispatcherKind.ALL_GATHER),
        cures=_fields("dispatcher"),
    ),
    Fault(
        name="a plain all-to-all",
        plant=_values(dispatcher=DispatcherKind.ALL_TO_ALL),
        cures=_fields("dispatcher"),
    ),
    Fault(name="nothing overlapped", plant=_values(overlap=()), cures=_fields("overlap")),
    Fault(
        name="one sequence a micro-batch",
        plant=_smaller_micro_batch,
        cures=_fields("mbs"),
    ),
    Fault(name="no virtual stages", plant=_whole_stages, cures=_fields("vpp", "pp", "schedule")),
    Fault(
        name="no sequence parallelism",
        plant=_no_sequence_parallelism,
        cures=_fields("sp", "tp"),
    ),
    Fault(name="sequences cut", plant=_scaled("cp", 4, 2), cures=_fields("cp")),
    Fault(
        name="tensor parallelism in place of expert parallelism",
        plant=_experts_as_tensors,
        cures=_fields("tp", "ep", "etp"),
    ),
    Fault(name="experts cut", plant=_cut_experts, cures=_fields("etp", "ep")),
    Fault(name="experts on few ranks", plant=_scaled("ep", 1 / 8, 1 / 4), cures=_fields("ep")),
    Fault(name="too many stages", plant=_scaled("pp", 4, 8), cures=_fields("pp", "vpp")),
    Fault(name="tensors cut", plant=_scaled("tp", 4, 2), cures=_fields("tp")),
    Fault(
        name="an optimizer in host memory",
        plant=_values(offload=(Offload.OPTIMIZER,), offload_fraction=1.0),
        cures=_fields("offload"),
    ),
    Fault(
        name="activations in host memory",
        plant=_values(
            offload=(Offload.CORE_ATTN, Offload.EXPERT_FC1, Offload.MOE_ACT), recompute=()
        ),
        cures=_fields("offload"),
    ),
    Fault(name="launches without graphs", plant=_values(graphs=()), cures=_fields("graphs")),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultDraw:
    """A slow job, the good plan that it comes from, and the fault."""

    seed: str
    fault: Fault
    good: Plan
    slow: Plan
    on: str

    def __str__(self) -> str:
        workload = self.good.workload
        return (
            f"{self.seed}: {self.good.model.name} on {self.on}, {workload.global_batch} x "
            f"{workload.seq_len}: {self.fault.name}"
        )


@cache
def best_plan(model: str, on: str, global_batch: int, seq_len: int) -> Plan | None:
    """Return the best plan of a job that Megatron-LM starts; None where there is none."""
    try:
        plan = mw.estimate(model, "tp1", on=on, global_batch=global_batch, seq_len=seq_len)
        nouns = (plan.model, plan.workload, plan.hardware)
        best = find_best_plan(*nouns, allowed=lambda layout: _refuse(plan, layout))
    except BadInput:
        return None
    if best is None or megatron_refusals(plan_job(best), best.hardware):
        return None
    return best if best.estimate.verdict is Verdict.FITS else None


def _refuse(plan: Plan, layout: Layout) -> tuple[Reason, ...]:
    reasons = megatron_refusals(replace(plan_job(plan), layout=layout), plan.hardware)
    return tuple(reason for reason in reasons if reason.field.startswith("layout."))


def draw_fault(seed: str) -> FaultDraw:
    """Draw a job and a fault that costs something there.

    Raises:
        AssertionError: no job has such a fault.
    """
    rng = random.Random(seed)
    for _ in range(_TRIES):
        model = rng.choice(MODELS)
        on = f"{rng.choice(COUNTS)}x{rng.choice(DEVICES)}"
        good = best_plan(model, on, *rng.choice(SEQUENCES))
        faults = rng.sample(FAULTS, len(FAULTS))
        if good is None:
            continue
        for fault in faults:
            slow = plant_fault(good, fault)
            if slow is not None:
                return FaultDraw(seed=seed, fault=fault, good=good, slow=slow, on=on)
    raise AssertionError(f"{seed}: no job has a fault that costs something")


def plant_fault(good: Plan, fault: Fault) -> Plan | None:
    """Return a plan with a fault; None where it is illegal, does not fit, or costs nothing."""
    for values in fault.plant(good):
        for taken in _TAKEN_BACK:
            kept = {name: value for name, value in taken.items() if name not in fault.cures}
            plain = _build(good, good.workload.trainer, replace(good.layout, **kept))  # type: ignore[arg-type]
            slow = _build_slow(good, {**kept, **values})
            if plain is None or slow is None:
                continue
            loss_s = slow.estimate.step_s - good.estimate.step_s
            own_s = slow.estimate.step_s - max(plain.estimate.step_s, good.estimate.step_s)
            if own_s >= LEAST_LOSS * good.estimate.step_s and own_s >= 0.7 * loss_s:
                return slow
            break  # it is legal, and costs too little
    return None


def _build_slow(good: Plan, values: dict[str, object]) -> Plan | None:
    kernels = values.pop("trainer", {})
    assert isinstance(kernels, dict)
    trainer = replace(good.workload.trainer, **kernels)
    if trainer == good.workload.trainer and kernels:
        return None
    return _build(good, trainer, replace(good.layout, **values))  # type: ignore[arg-type]


def _build(good: Plan, trainer: TrainerSpec, layout: Layout) -> Plan | None:
    workload = replace(good.workload, trainer=trainer)
    job = replace(plan_job(good), workload=workload, layout=layout)
    if check_legality(job) or megatron_refusals(job, good.hardware):
        return None
    try:
        plan = build_plan(good.model, workload, good.hardware, layout)
    except BadInput:
        return None
    return plan if plan.estimate.verdict is Verdict.FITS else None
