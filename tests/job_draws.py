"""Jobs drawn at random: a model shape, a workload and a layout, every choice beside every other.

A draw makes each choice by itself, so that most of what it draws is refused. Each refusal names a
field; the draw takes back the first that it named and asks again, until the rules and the engine
take the rest. So a draw ends with a job that runs, and proves on its way that every refusal names a
choice which can be taken back. The seed alone decides a draw.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from datetime import date
from typing import Any

import pytest

from layout_proof import BATCH, WORKLOAD, is_layout_free
from layout_space import SHAPES
from moewright.codec import format_layout, parse_layout
from moewright.cost.memory.peak import steady_micro_batches
from moewright.rules.job import Job
from moewright.rules.limits.engine_limits import unsupported_layout, unsupported_model
from moewright.rules.limits.legality import check_legality
from moewright.spec.errors import Reason
from moewright.spec.layout import (
    CapacityFill,
    CpComm,
    CudaGraphScope,
    DispatcherKind,
    ExpertPlacement,
    Layout,
    Offload,
    Overlap,
    RankOrder,
    Recompute,
    Schedule,
)
from moewright.spec.model import ModelSpec
from moewright.spec.plan import Plan
from moewright.spec.workload import (
    AdapterTarget,
    BaseQuantization,
    DataSpec,
    DocumentMasking,
    DropPolicy,
    Dtype,
    FineTuningSpec,
    Fp8Format,
    FrozenPart,
    LossScalingSpec,
    LossSpec,
    MatrixUpdate,
    OptimizerSpec,
    RouterAssignment,
    RouterDtype,
    RouterForce,
    RouterTraining,
    Task,
    TensorScaling,
    Workload,
)
from tiny_jobs import build_plan

_DRAWS = 300  # in all tests
# Choices that are taken back before a draw begins again.
_ROUNDS = 20
_PLAIN_LAYOUT = Layout(world_size=1)
_PLAIN_WORKLOAD = replace(WORKLOAD, loss=LossSpec())
# Formats of products with what gives their scales, and how often each is drawn.
_PRECISIONS = (
    *((Dtype.FP32, TensorScaling.CURRENT),) * 6,
    *((Dtype.BF16, TensorScaling.CURRENT),) * 4,
    (Dtype.FP16, TensorScaling.CURRENT),
    (Dtype.FP8, TensorScaling.CURRENT),
    (Dtype.FP8, TensorScaling.BLOCKWISE),
    (Dtype.FP8, TensorScaling.DELAYED),
    *((Dtype.MXFP8, TensorScaling.CURRENT),) * 2,
    *((Dtype.NVFP4, TensorScaling.CURRENT),) * 2,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobDraw:
    """A job that was drawn, and what was refused before it: the fields whose choice went."""

    seed: str
    shape: str
    job: Job
    refused: tuple[Reason, ...]

    def __str__(self) -> str:
        changed = ", ".join(_list_changes(self.job.workload, WORKLOAD))
        layout = self.job.layout
        return f"{self.seed}: {self.shape} {layout.world_size}x {format_layout(layout)}; {changed}"


def list_seeds(quick: int, often: int) -> list[object]:
    """Return the seeds of the day's draws: the first `quick` for `make test`, `often` for CI.

    They are others each day. A failure names its seed; DRAWS_OF=<day> in the environment draws the
    same again.
    """
    day = os.environ.get("DRAWS_OF") or date.today().isoformat()
    return [
        pytest.param(
            f"{day} {number}",
            id=f"DRAWS_OF={day} {number}",
            marks=[
                pytest.mark.core if number < quick else pytest.mark.slow,
                *([pytest.mark.thorough] if number >= often else []),
            ],
        )
        for number in range(_DRAWS)
    ]


def draw_job(seed: str, *, worlds: tuple[int, ...], is_counted_dry: bool = False) -> JobDraw:
    """Draw the job of a seed, on as many ranks as one of `worlds`.

    One that `is_counted_dry` has a batch for any world, and nothing that depends on the numbers in
    its tensors.

    Where the model does not go with a choice, or one choice cannot go without another, the draw
    begins again.

    Raises:
        AssertionError: a refusal names no choice of the job.
    """
    rng = random.Random(seed)
    refused: list[Reason] = []
    while True:
        shape = rng.choice(list(SHAPES))
        model = SHAPES[shape]
        job = Job(
            model=model,
            workload=_draw_workload(rng, model),
            layout=_draw_layout(rng, model, rng.choice(worlds)),
        )
        if is_counted_dry:
            job = _leave_out_numbers(rng, job)
        elif not is_layout_free(job):
            job = _leave_out_samples(rng, job)
        for _ in range(_ROUNDS):
            reasons = find_refusals(job)
            if not reasons:
                text = format_layout(job.layout)  # without what is of a choice taken back
                layout = parse_layout(text, world_size=job.layout.world_size)
                job = replace(job, layout=layout)
                return JobDraw(seed=seed, shape=shape, job=job, refused=tuple(refused))
            refused.append(reasons[0])
            if _is_base(reasons[0]):
                break
            job = take_back(job, reasons[0])


def _leave_out_numbers(rng: random.Random, job: Job) -> Job:
    """Return a job that a dry run can count: without documents, chosen experts and placed ones."""
    layout = replace(job.layout, expert_placement=ExpertPlacement.CONTIGUOUS, spare=0)
    router = replace(
        job.workload.router,
        force=RouterForce.BALANCED,
        assignment=RouterAssignment.TOP_K,
        drop_policy=DropPolicy.POSITION,
    )
    # More micro-batches than bring the peak repeat what was counted.
    micro_batches = steady_micro_batches(layout, rng.choice((1, 2, 4)))
    workload = replace(
        job.workload,
        router=router,
        data=DataSpec(),
        global_batch=micro_batches * layout.dp * layout.mbs,
    )
    return replace(job, layout=layout, workload=workload)


def _leave_out_samples(rng: random.Random, job: Job) -> Job:
    """Return a job with few micro-batches, where no process of its own computes the same.

    What a rank takes is as long as its passes are many, and its ledger is counted of any number.
    """
    smallest = job.layout.dp * job.layout.mbs
    counts = [count for count in (1, 2, 2, 3, 4) if count * smallest <= BATCH]
    if not counts:
        return job
    return replace(job, workload=replace(job.workload, global_batch=rng.choice(counts) * smallest))


def plan_draw(draw: JobDraw) -> Plan:
    """Build the plan of a draw."""
    job = draw.job
    base = build_plan(job.workload, "", world_size=job.layout.world_size, model=job.model)
    return replace(base, layout=job.layout)


def find_refusals(job: Job) -> tuple[Reason, ...]:
    """Return why a job is not legal, or not run by the engine."""
    reasons = (*unsupported_model(job.model, job.workload), *check_legality(job))
    # The engine's limits are asked of legal layouts alone.
    return reasons or unsupported_layout(job)


def _is_base(reason: Reason) -> bool:
    """Return whether a refusal is of what no draw chooses: the model, or the batch."""
    return reason.field.startswith("model.") or reason.field == "workload.global_batch"


def take_back(job: Job, reason: Reason) -> Job:
    """Return the job without the choice that a refusal names."""
    group, _, name = reason.field.partition(".")
    if group == "layout":
        changed = replace(job, layout=_reset_choice(job.layout, name, reason))
    else:
        changed = replace(job, workload=_reset_field(job.workload, _PLAIN_WORKLOAD, name))
    unchanged = changed.layout == job.layout and changed.workload == job.workload
    assert not unchanged, f"{reason.field}={reason.value} {reason.rule}: {job.layout}"
    return changed


def _reset_choice(layout: Layout, name: str, reason: Reason) -> Layout:
    """Return a layout without the choice that a refusal names.

    Of options the nearest legal ones stay; else the field gets its default, or the nearest legal
    value where the default is what is refused.
    """
    if name == "tp":
        return replace(layout, tp=1, sp=False)
    usual = getattr(replace(_PLAIN_LAYOUT, sp=layout.tp > 1), name)
    chosen = getattr(layout, name)
    if isinstance(chosen, tuple):
        kept = tuple(option for option in chosen if option in (reason.nearest or "").split("+"))
        usual = () if kept == chosen else kept
    elif usual == chosen:  # what is refused is the default, beside another choice
        usual = type(chosen)(reason.nearest.split(",")[0].split(" or ")[0])
    return replace(layout, **{name: usual})


def _reset_field(record: Any, plain: Any, name: str) -> Any:
    """Return a record with the field of a name as another has it, in whichever part it is."""
    for field in fields(record):
        value = getattr(record, field.name)
        if field.name == name:
            return replace(record, **{name: getattr(plain, name)})
        if is_dataclass(value):
            part = _reset_field(value, getattr(plain, field.name), name)
            if part is not value:
                return replace(record, **{field.name: part})
    return record


def _list_changes(record: Any, plain: Any) -> Iterator[str]:
    for field in fields(record):
        value, usual = getattr(record, field.name), getattr(plain, field.name)
        if is_dataclass(value):
            yield from _list_changes(value, usual)
        elif value != usual:
            yield f"{field.name}={value}"


def _draw_workload(rng: random.Random, model: ModelSpec) -> Workload:
    precision, scaling = rng.choice(_PRECISIONS)
    return replace(
        WORKLOAD,
        precision=precision,
        tensor_scaling=scaling,
        grad_dtype=rng.choice((Dtype.FP32,) * 4 + (Dtype.BF16,)),
        optimizer=_draw_optimizer(rng),
        loss=_draw_losses(rng),
        router=_draw_router(rng),
        fine_tuning=_draw_fine_tuning(rng),
        # The largest scale at which fp16 gradients of these models are finite, or one that is not.
        scaling=LossScalingSpec(initial_loss_scale=rng.choice((64.0, 65536.0))),
        data=DataSpec(documents=rng.choice([DocumentMasking.JOINED] * 3 + [*DocumentMasking])),
        load_histogram=tuple(
            tuple(rng.randrange(1, 100) for _ in range(model.expert_count))
            for _ in range(model.moe_layer_count)
        ),
        fp8_format=rng.choice([*Fp8Format]),
    )


def _draw_optimizer(rng: random.Random) -> OptimizerSpec:
    moments = (Dtype.FP32,) * 4 + (Dtype.BF16, Dtype.FP8)
    return replace(
        WORKLOAD.optimizer,
        matrix_update=rng.choice((MatrixUpdate.ADAMW,) * 4 + (MatrixUpdate.MUON,)),
        moment_dtype=rng.choice(moments),
        second_moment_dtype=rng.choice((None,) * 5 + moments[3:]),
        bucket_elements=rng.choice((1500, 4000, 4000, 40_000_000)),
    )


def _draw_losses(rng: random.Random) -> LossSpec:
    def coefficient(value: float) -> float:
        return rng.choice((0.0, value))

    return LossSpec(
        aux_coeff=coefficient(0.02),
        seq_aux_coeff=coefficient(0.01),
        global_aux_coeff=rng.choice((0.0, 0.0, 0.01)),
        z_coeff=coefficient(0.001),
        mtp_coeff=rng.choice((0.1, 0.1, 0.0)),
        indexer_coeff=coefficient(0.5),
    )


def _draw_router(rng: random.Random) -> RouterTraining:
    forces = [RouterForce.NONE] * 6 + [RouterForce.BALANCED, RouterForce.SKEWED]
    assignments = [RouterAssignment.TOP_K] * 6 + [RouterAssignment.SINKHORN]
    return RouterTraining(
        router_dtype=rng.choice((RouterDtype.FP32, RouterDtype.FP32, RouterDtype.FP64)),
        jitter_eps=rng.choice((0.0, 0.0, 0.0, 0.1)),
        force=rng.choice(forces),
        assignment=rng.choice(assignments),
        drop_policy=rng.choice(list(DropPolicy)),
    )


def _draw_fine_tuning(rng: random.Random) -> FineTuningSpec:
    task = rng.choice((*(Task.PRETRAIN,) * 5, Task.SFT, Task.LORA, Task.LORA))
    if task is Task.LORA:
        return FineTuningSpec(
            task=task,
            lora_rank=rng.choice((4, 8, 8)),
            lora_targets=_draw_options(rng, list(AdapterTarget), 0.8) or (AdapterTarget.QKV,),
            lora_experts=rng.random() < 0.5,
            lora_router=rng.random() < 0.5,
            quantize_base=rng.choice((BaseQuantization.NONE, *BaseQuantization)),
        )
    frozen = _draw_options(rng, list(FrozenPart), 0.15 if task is Task.PRETRAIN else 0.7)
    return FineTuningSpec(task=task, freeze=frozen)


def _draw_layout(rng: random.Random, model: ModelSpec, world: int) -> Layout:
    """Draw a layout whose degrees divide the world, and any other choices."""
    pp = _draw_degree(rng, world)
    schedule = rng.choice(list(Schedule)) if pp > 1 else Schedule.ONE_F_ONE_B
    vpp = 2 if schedule.is_v_shaped else 1
    if schedule in (Schedule.INTERLEAVED, Schedule.GIS):
        vpp = 2
    tp = _draw_degree(rng, world // pp)
    cp = _draw_degree(rng, world // pp // tp)
    ep = _draw_degree(rng, world // pp, often=True) if model.moe else 1
    etp = _draw_degree(rng, world // pp // ep) if model.moe else 1
    dp = world // (pp * tp * cp)
    layout = Layout(
        world_size=world,
        tp=tp,
        sp=tp > 1 and rng.random() < (0.9 if model.moe else 0.5),
        cp=cp,
        pp=pp,
        vpp=vpp,
        ep=ep,
        etp=etp,
        order=rng.choice(list(RankOrder)),
        mbs=rng.choice([size for size in (1, 2, 2, 4) if BATCH % (size * dp) == 0] or [1]),
        zero=rng.choice((0, 1, 1, 1, 2, 3)),
        schedule=schedule,
        vpp_group=rng.choice((0, 0, 3, 4)) if vpp > 1 and not schedule.is_v_shaped else 0,
        cp_comm=rng.choice(list(CpComm)) if cp > 1 else CpComm.P2P,
        recompute=_draw_options(rng, list(Recompute), 0.5),
        offload=_draw_options(rng, list(Offload), 0.4),
        overlap=_draw_options(rng, list(Overlap), 0.5),
        graphs=_draw_options(rng, list(CudaGraphScope), 0.2),
    )
    if model.moe:
        layout = replace(layout, **_draw_expert_choices(rng, layout))
    if layout.offload:
        layout = replace(
            layout,
            offload_fraction=rng.choice((1.0, 0.3)) if Offload.OPTIMIZER in layout.offload else 1.0,
            offload_layers=rng.choice((1.0, 1.0, 0.5)),
            offload_chunks=rng.choice((0, 1)) if vpp > 1 else 0,
        )
    if layout.zero and rng.random() < 0.2:
        layout = replace(layout, shard=2)
    if Recompute.FULL in layout.recompute:
        block, span = rng.choice(((0, 1), (0, 1), (1, 1), (2, 1), (0, 2)))
        layout = replace(layout, recompute_block=block, recompute_span=span)
    if pp > 1 and rng.random() < 0.2 + 0.2 * vpp:
        layout = replace(layout, stages=_draw_stages(rng, model, pp * vpp))
    return layout


def _draw_expert_choices(rng: random.Random, layout: Layout) -> dict[str, Any]:
    """Draw how rows reach their experts."""
    choices: dict[str, Any] = {
        "dispatcher": rng.choice([DispatcherKind.ALL_TO_ALL] * 4 + [*DispatcherKind])
    }
    kind = rng.choice(("", "", "", "capacity", "rank_capacity", "placement"))
    if kind == "capacity":
        choices["capacity"] = rng.choice((0.75, 1.25))
        choices["capacity_fill"] = rng.choice(list(CapacityFill))
    elif kind == "rank_capacity":
        choices["rank_capacity"] = rng.choice((1.0, 1.25, 2.0, 8.0))
    elif kind == "placement":
        choices["expert_placement"] = ExpertPlacement.BALANCED
        choices["spare"] = rng.choice((0, 1))
    if layout.ep > 2:
        choices["ep_node"] = rng.choice((0, 2))
    return choices


def _draw_degree(rng: random.Random, most: int, *, often: bool = False) -> int:
    """Draw a divisor of `most`, 1 in half of the cases unless it is drawn `often`."""
    if rng.random() < (0.2 if often else 0.5):
        return 1
    return rng.choice([degree for degree in range(1, most + 1) if most % degree == 0])


def _draw_options(rng: random.Random, choices: list, chance: float) -> tuple:
    """Draw none, or one to three of the choices, in their order."""
    if rng.random() > chance:
        return ()
    return tuple(sorted(rng.sample(choices, rng.choice((1, 1, 2, 3)))))


def _draw_stages(rng: random.Random, model: ModelSpec, count: int) -> str:
    """Spread the layers over stages at random; some stages are empty."""
    cuts = sorted(rng.choices(range(model.layers + 1), k=count - 1))
    parts = [
        "t" * (high - low) for low, high in zip((0, *cuts), (*cuts, model.layers), strict=True)
    ]
    if model.mtp_layers and rng.random() < 0.5:
        # The depths go to the stage before the loss, which then stands alone.
        parts[-2:] = [parts[-2] + parts[-1] + "m" * model.mtp_layers, ""]
    else:
        parts[-1] += "m" * model.mtp_layers
    return "|".join(("E" + parts[0], *parts[1:-1], parts[-1] + "L"))
