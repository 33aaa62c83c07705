"""Dry run: become one rank of a job of any size in this process, and count a step of it.

It is the trainer's model, step and optimizer on tensors without data, in a process group whose
other ranks do not exist. Routing is even, and every number that the host reads from the device is
1, so losses and norms mean nothing; shapes, and so bytes, calls and FLOPs, are those of the real
rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from moewright.engine.comm import collectives
from moewright.engine.kernels.fused.table import torch_kernels
from moewright.engine.kernels.matmul import has_native_bf16
from moewright.engine.model.layers import NamedParameter
from moewright.engine.model.micro_batch import MicroBatch, build_micro_batch
from moewright.engine.model.preferences import build_answers
from moewright.engine.observe.counters import NoteActivity, ignore_activity
from moewright.engine.observe.storage_census import freeze_older_objects
from moewright.engine.run.build_state import build_train_state
from moewright.engine.run.step import train_step
from moewright.engine.runtime import Runtime
from moewright.engine.torch_private import (
    DEVICE_QUESTION,
    HOST_READ,
    FakeTensorMode,
    TorchDispatchMode,
)
from moewright.rules import grid
from moewright.rules.job import Job
from moewright.rules.limits.engine_limits import require_runnable
from moewright.rules.routing import drops_by_probability
from moewright.spec.errors import BadInput, Reason
from moewright.spec.layout import ExpertPlacement
from moewright.spec.ledger import Component, Ledger, Module
from moewright.spec.workload import DropPolicy, Dtype, Objective, RouterForce, Workload

# What the host is told of tensors that have no data.


class HostAnswers(TorchDispatchMode):
    """A dispatch mode of a dry run, in which every number that the host reads is 1."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as of ObservingMode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE_QUESTION:
            return args[0].device  # the property of a tensor without data asks no mode
        if func.overloadpacket is HOST_READ:
            return 1
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True, kw_only=True, slots=True)
class DryRun:
    """The counts of one step: what a rank held, sent and computed.

    `states_bytes` of weights, gradients and optimizer state live all through it. `peak_by_module`
    are the bytes of the other tensors that lived at the fullest moment, by the module that made
    them: with zero=3 also gathered weights, and the gradients, which are made in the step.
    """

    ledger: Ledger
    states_bytes: int
    peak_by_module: tuple[tuple[Module, int], ...]


def dry_run(job: Job, *, rank: int, note: NoteActivity = ignore_activity) -> DryRun:
    """Run one step of `rank`; `note` is called with what it begins to do.

    Raises:
        BadInput: for a rank outside the world, and for what the engine or a dry run cannot do.
    """
    pp_rank = grid.coordinate(job.layout, rank, "pp")
    require_runnable(job)
    _require_countable(job)
    world_size = job.layout.world_size
    if world_size > 1:
        collectives.join_fake_world(rank=rank, world_size=world_size)
    try:
        # The last mode entered is asked first: a read is answered before it is refused.
        with freeze_older_objects(), FakeTensorMode(), HostAnswers():
            state = build_train_state(
                replace(job, workload=_balance_routing(job.workload)),
                _BlankBatches(),
                rank=rank,
                device=torch.device("cpu"),
                initial_value=lambda parameter, runtime: _uninitialized(parameter),
                kernels=torch_kernels(),  # they save the same tensors, and run without data
            )
            # With zero=3 there is no gradient among them: gradients are made in the step.
            states = state.memory_rows()
            counters = state.runtime.counters
            counters.note = note
            train_step(state, step=1, lr=0.0, stop_requested=False, count_ledger=True)
            ledger = counters.build_ledger(
                rank=rank,
                pp_rank=pp_rank,
                state=state.memory_rows(),
                time=(),
                notes=_describe_differences(job.workload),
            )
    finally:
        collectives.leave_world()
    return DryRun(
        ledger=ledger,
        states_bytes=sum(row.bytes for row in states if row.component is not Component.HOST),
        peak_by_module=tuple(
            sorted((module, nbytes) for module, nbytes in counters.census.peak_by_module.items())
        ),
    )


def _require_countable(job: Job) -> None:
    """Raise BadInput for what depends on numbers, devices or loads that a dry run does not have."""
    layout = job.layout
    if job.model.moe is not None and drops_by_probability(layout, job.workload.router):
        rule = (
            "a dry run knows no probabilities, by which capacity drops rows and dedup finds "
            "none to copy"
        )
        raise BadInput(
            Reason(
                field="train.drop_policy",
                value=DropPolicy.PROBS,
                rule=rule,
                nearest=DropPolicy.POSITION,
            )
        )
    if layout.dispatcher.facts.is_library:
        raise BadInput(
            Reason(
                field="layout.dispatcher",
                value=layout.dispatcher,
                rule="a dry run has no devices for a library to move rows between",
                nearest=layout.dispatcher.stand_in,
            )
        )
    if layout.expert_placement is not ExpertPlacement.CONTIGUOUS:
        raise BadInput(
            Reason(
                field="layout.expert_placement",
                value=layout.expert_placement,
                rule="a dry run takes experts in turn, whose load no placement evens",
                nearest=ExpertPlacement.CONTIGUOUS,
            )
        )


def _balance_routing(workload: Workload) -> Workload:
    return replace(workload, router=replace(workload.router, force=RouterForce.BALANCED))


def _uninitialized(parameter: NamedParameter) -> torch.Tensor:
    return torch.empty(parameter.placement.local_shape)


def _describe_differences(workload: Workload) -> tuple[str, ...]:
    """Describe where a CUDA device keeps or holds something else than is counted here."""
    notes = [
        "flash attention on CUDA keeps two 8-byte numbers of its random state a layer and "
        "micro-batch; here none",
    ]
    if workload.precision is not Dtype.FP32 and not has_native_bf16():
        notes.append(
            f"this CPU multiplies {workload.precision} in fp32: the peak holds widened copies of a "
            "product's operands that CUDA does not make; saved tensors are as on CUDA"
        )
    return tuple(notes)


class _BlankBatches:
    """A source of micro-batches without content."""

    def micro_batch(self, runtime: Runtime, step: int, micro_batch: int) -> MicroBatch:
        shape = (runtime.mesh.layout.mbs, runtime.workload.seq_len)
        tokens = torch.zeros(shape, dtype=torch.int64)
        batch = build_micro_batch(runtime, tokens, tokens, None)
        if runtime.workload.loss.objective is not Objective.DPO:
            return batch
        half = shape[1] // 2  # a pair of answers in every sequence
        lengths = [(half, shape[1] - half)] * shape[0]
        return replace(batch, answers=build_answers(lengths, [(0.0, 0.0)] * shape[0]))
