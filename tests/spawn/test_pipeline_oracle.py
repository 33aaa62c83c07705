"""The pipeline equals torch's schedules.

The gradients are the same bit for bit, and interleaved schedules run their rows in the same order.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from moewright.engine.comm import collectives
from moewright.engine.comm.mesh import build_mesh
from moewright.engine.observe.counters import Counters
from moewright.engine.pipeline.executor import ChunkResult, Key, P2PChannel, execute_timetable
from moewright.engine.run.build_state import init_distributed
from moewright.engine.run.launch import launch
from moewright.engine.run.worker import ExitCode, RankContext, RankOutcome
from moewright.rules.timetable.p2p import pipeline_actions
from moewright.rules.timetable.schedule import timetable
from moewright.rules.timetable.stages import virtual_stage
from moewright.rules.timetable.timetable_row import RowKind
from moewright.spec.layout import Layout, Schedule

pytestmark = pytest.mark.spawn

_ROWS = 4
_WIDTH = 6


def build_stage_module(stage: int) -> nn.Module:
    torch.manual_seed(stage)
    return nn.Sequential(nn.Linear(_WIDTH, 2 * _WIDTH), nn.GELU(), nn.Linear(2 * _WIDTH, _WIDTH))


def squared_error(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (out - target).square().sum()


def run_engine(
    layout: Layout, count: int, mesh: Any, x: torch.Tensor, y: torch.Tensor
) -> list[torch.Tensor]:
    rank = mesh.rank
    last = layout.pp * layout.vpp - 1
    stages = [virtual_stage(layout, rank, chunk) for chunk in range(layout.vpp)]
    modules = [build_stage_module(stage) for stage in stages]
    inputs = x.chunk(count)
    targets = y.chunk(count)

    def forward(key: Key, hidden: torch.Tensor | None) -> ChunkResult:
        micro_batch, chunk = key
        if hidden is None:
            hidden = inputs[micro_batch]
        out = modules[chunk](hidden)
        if stages[chunk] == last:
            return ChunkResult(hidden=None, loss=squared_error(out, targets[micro_batch]))
        return ChunkResult(hidden=out, loss=None)

    def backward(key: Key, roots: Any, grads: Any, split: bool) -> None:
        torch.autograd.backward(roots, grads)

    actions = pipeline_actions(layout, timetable(layout, count), rank)
    channel = P2PChannel(
        layout, actions, mesh.group("pp"), mesh.upstream, lambda _: torch.empty(_ROWS, _WIDTH)
    )
    execute_timetable(
        actions, channel, forward=forward, backward=backward, weight_grad=lambda key: None
    )
    return [p.grad for module in modules for p in module.parameters() if p.grad is not None]


def run_torch(
    layout: Layout, count: int, mesh: Any, x: torch.Tensor, y: torch.Tensor
) -> list[torch.Tensor]:
    rank = mesh.rank
    total = layout.pp * layout.vpp
    numbers = [virtual_stage(layout, rank, chunk) for chunk in range(layout.vpp)]
    modules = [build_stage_module(number) for number in numbers]
    stages = [
        PipelineStage(module, number, total, torch.device("cpu"), group=mesh.group("pp").handle)
        for module, number in zip(modules, numbers, strict=True)
    ]
    if layout.vpp == 1:
        schedule: Any = Schedule1F1B(stages[0], count, loss_fn=squared_error, scale_grads=False)
    else:
        schedule = ScheduleInterleaved1F1B(stages, count, loss_fn=squared_error, scale_grads=False)
        kinds = {True: RowKind.F, False: RowKind.B}
        order = [
            (
                kinds[action.computation_type.name == "FORWARD"],
                action.microbatch_index,
                action.stage_index,
            )
            for action in schedule.pipeline_order[rank]
            if action is not None
        ]
        rows = timetable(layout, count)[rank]
        assert order == [
            (row.kind, row.micro_batch, virtual_stage(layout, rank, row.chunk)) for row in rows
        ]
    inputs = (x,) if rank == 0 else ()
    targets = {"target": y} if rank == layout.pp - 1 else {}
    schedule.step(*inputs, **targets)
    return [p.grad for module in modules for p in module.parameters() if p.grad is not None]


def compare_gradients(layout: Layout, count: int, context: RankContext) -> RankOutcome:
    init_distributed(context)
    mesh = build_mesh(layout, context.rank, Counters())
    generator = torch.Generator().manual_seed(5)
    x, y = (torch.randn(count * _ROWS, _WIDTH, generator=generator) for _ in range(2))
    engine_grads, torch_grads = (run(layout, count, mesh, x, y) for run in (run_engine, run_torch))
    assert len(engine_grads) == len(torch_grads) == 4 * layout.vpp
    assert all(
        torch.equal(actual, expected)
        for actual, expected in zip(engine_grads, torch_grads, strict=True)
    )
    collectives.leave_world()
    return RankOutcome.DONE


@pytest.mark.parametrize(
    ("pp", "vpp", "count"), [(2, 1, 5), (4, 1, 6), (2, 2, 4), (2, 3, 6), (4, 2, 8)]
)
def test_gradients_and_the_order_of_rows_equal_those_of_torch(
    pp: int, vpp: int, count: int, tmp_path: Path
) -> None:
    schedule = Schedule.INTERLEAVED if vpp > 1 else Schedule.ONE_F_ONE_B
    layout = Layout(world_size=pp, pp=pp, vpp=vpp, schedule=schedule)
    assert (
        launch(partial(compare_gradients, layout, count), nproc=pp, run_dir=tmp_path)
        is ExitCode.DONE
    )
