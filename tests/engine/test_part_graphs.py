"""Parts of layers that are captured: what is in their graphs, and how many slots there are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from layout_proof import BATCH, LENGTH, WORKLOAD, draw_batches, draw_test_weight
from layout_space import SHAPES
from moewright.codec import parse_layout
from moewright.engine.comm import collectives
from moewright.engine.kernels.fused.table import torch_kernels
from moewright.engine.memory.graph_capture import WARMUP_STEPS, OperationList
from moewright.engine.model.layers import NamedParameter
from moewright.engine.model.micro_batch import MicroBatch, build_micro_batch
from moewright.engine.observe.storage_census import freeze_older_objects
from moewright.engine.run.build_state import build_train_state
from moewright.engine.run.dry_run import HostAnswers
from moewright.engine.run.step import BackwardResult, train_step
from moewright.engine.run.train_state import TrainState
from moewright.engine.runtime import Runtime
from moewright.rules.job import Job
from moewright.rules.timetable.schedule import timetable
from moewright.rules.timetable.timetable_row import RowKind
from moewright.spec.workload import RouterForce
from selection import thorough


class BlankBatches:
    """A source of micro-batches without content."""

    def micro_batch(self, runtime: Runtime, step: int, micro_batch: int) -> MicroBatch:
        tokens = torch.zeros((runtime.mesh.layout.mbs, LENGTH), dtype=torch.int64)
        return build_micro_batch(runtime, tokens, tokens, None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """What some steps came to: curves, every gradient of every step, and weights and moments."""

    curve: tuple[tuple[float, float, float], ...]
    gradients: tuple[Mapping[str, torch.Tensor], ...]
    states: Mapping[str, torch.Tensor]
    replays: int
    slots: Mapping[int, int]


def build_state(shape: str, layout: str, world_size: int = 1, rank: int = 0) -> TrainState:
    loss = replace(WORKLOAD.loss, global_aux_coeff=0.01)
    workload = replace(WORKLOAD, loss=loss)
    if world_size > 1:  # without data the host cannot be told how many rows there are
        workload = replace(workload, router=replace(workload.router, force=RouterForce.BALANCED))
    model = SHAPES[shape]
    return build_train_state(
        Job(model=model, workload=workload, layout=parse_layout(layout, world_size=world_size)),
        draw_batches(model) if world_size == 1 else BlankBatches(),
        rank=rank,
        device=torch.device("cpu"),
        initial_value=draw_test_weight if world_size == 1 else draw_blank,
        kernels=torch_kernels(),
    )


def draw_blank(parameter: NamedParameter, runtime: Runtime) -> torch.Tensor:
    return torch.empty(parameter.placement.local_shape)


def run_steps(shape: str, layout: str, *, counted: int = 2) -> Trained:
    state = build_state(shape, layout)
    curve = []
    gradients: list[Mapping[str, torch.Tensor]] = []

    def keep_gradients(backward: BackwardResult) -> None:
        shards = state.optimizer.gradient_shards()
        gradients.append({shard.name: shard.tensor.clone() for shard in shards})

    for step in range(1, WARMUP_STEPS + 4):
        result = train_step(
            state,
            step=step,
            lr=1e-3,
            stop_requested=False,
            count_ledger=step == counted,
            before_update=keep_gradients,
        )
        curve.append((result.backward.loss, result.backward.aux_loss, result.backward.grad_norm))
    state.optimizer.finish_pending()
    graphs = state.runtime.part_graphs
    return Trained(
        curve=tuple(curve),
        gradients=tuple(gradients),
        states={shard.name: shard.tensor.clone() for shard in state.local_shards()},
        replays=graphs.replays,
        slots=graphs.slot_counts,
    )


@pytest.mark.parametrize(
    ("shape", "layout", "parts"),
    [
        ("qwen", "mbs4,overlap=grad+param,graphs=attn+moe_router", 7),
        thorough("qwen", "mbs4,graphs=moe_router+moe_preprocess", 3),
        thorough(
            "deepseek",
            "mbs4,capacity=1,capacity_fill=padded,graphs=attn+moe_router+moe_preprocess",
            7,
        ),
        thorough("hybrid", "mbs4,graphs=attn+mamba+moe_router", 5),
        thorough("delta", "mbs4,recompute=core_attn+layernorm,graphs=attn+mamba", 5),
        thorough("deepseek", "mbs4,recompute=mla_up_proj+moe_act,graphs=attn+moe_router", 7),
        thorough("oss", "mbs4,offload=expert_fc1+moe_act,graphs=attn+moe_router", 8),
        thorough("olmoe", "mbs4,recompute=core_attn,graphs=moe_router", 4),
        thorough("deep", "mbs4,capacity=1,overlap=shared,graphs=attn+moe_router", 12),
        thorough("ahead", "mbs4,recompute=layernorm+moe,graphs=attn", 6),
        thorough("dense", "mbs4,recompute=core_attn,graphs=attn", 5),
        thorough("latent", "mbs4,recompute=mla_up_proj+core_attn+layernorm,graphs=attn", 5),
        thorough("biased", "mbs4,graphs=attn+moe_router", 7),
    ],
)
def test_replayed_parts_give_every_gradient_the_same_bits(
    shape: str, layout: str, parts: int
) -> None:
    plain = run_steps(shape, layout.partition(",graphs")[0])
    captured = run_steps(shape, layout)
    assert captured.curve == plain.curve
    for actual, expected in zip(captured.gradients, plain.gradients, strict=True):
        for name, value in expected.items():
            assert torch.equal(actual[name], value), name
    for name, value in plain.states.items():
        assert torch.equal(captured.states[name], value), name
    # Three steps of two micro-batches, forward and backward; the first of all records.
    assert captured.replays == 2 * parts * (3 * 2 - 1)
    assert captured.slots == {0: 1}


def test_a_step_is_counted_as_it_is_when_graphs_are_there_already() -> None:
    counted = WARMUP_STEPS + 2
    assert run_steps("qwen", "mbs4,graphs=attn", counted=counted).replays == 2 * 4 * (2 * 2 - 1)


def test_a_replayed_part_waits_for_weights_that_are_on_their_way() -> None:
    """A replay reads no weight by itself: each of its two micro-batches waits once."""
    state = build_state("qwen", "mbs4,overlap=param,graphs=attn")
    steps: list[int] = []
    waits: list[int] = []
    state.model.layers["1"].attention.q.ensure_ready = lambda: waits.append(steps[-1])
    for step in range(1, WARMUP_STEPS + 3):
        steps.append(step)
        train_step(state, step=step, lr=0.0, stop_requested=False, count_ledger=False)
    assert waits.count(WARMUP_STEPS + 2) == 2


def list_operations(state: TrainState) -> dict[int, list[list[object]]]:
    """List the operations of each slot's graphs with their shapes, by chunk."""
    lists: dict[int, list[list[object]]] = {}
    for chunk, slots in state.runtime.part_graphs._slots.items():
        for slot in slots:
            captures = [
                x for graph in slot.graphs.values() for x in (graph._forward, graph._backward)
            ]
            operations = [
                operation.shapes
                for capture in captures
                if isinstance(capture, OperationList)
                for operation in capture.operations
            ]
            lists.setdefault(chunk, []).append(operations)
    return lists


@pytest.mark.parametrize(
    ("layout", "rank"),
    [
        ("pp2,vpp2,ep2,mbs1,overlap=grad,graphs=attn+moe_router+moe_preprocess", 2),
        thorough("pp2,ep2,mbs2,graphs=attn+moe_router", 0),
    ],
)
def test_a_chunk_has_a_slot_for_each_micro_batch_in_flight(layout: str, rank: int) -> None:
    """Every slot's graphs are the same operations, on tensors without data."""
    collectives.join_fake_world(rank=rank, world_size=4)
    try:
        mode = FakeTensorMode()
        mode.cache_enabled = False  # its keys compare process groups, which cannot be compared
        with freeze_older_objects(), mode, HostAnswers():
            state = build_state("qwen", layout, world_size=4, rank=rank)
            for _ in range(WARMUP_STEPS):
                state.runtime.part_graphs.begin_step(is_counting=False)
            train_step(state, step=1, lr=0.0, stop_requested=False, count_ledger=False)
    finally:
        collectives.leave_world()
    plain = state.runtime.mesh.layout
    rows = timetable(plain, BATCH // (plain.mbs * plain.dp))[state.runtime.mesh.coordinate("pp")]
    live = dict.fromkeys(range(plain.vpp), 0)
    most = dict(live)
    for row in rows:
        live[row.chunk] += 1 if row.kind is RowKind.F else -1
        most[row.chunk] = max(most[row.chunk], live[row.chunk])
    assert state.runtime.part_graphs.slot_counts == most
    assert max(most.values()) > 1
    for first, *others in list_operations(state).values():
        assert len(first) > 100
        assert all(other == first for other in others)
