"""torch's pipeline schedules as oracles: the same gradients, bit for bit, and interleaved the same
order of rows."""

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
from moewright.engine.pipeline.executor import ChunkResult, Key, execute_timetable
from moewright.engine.pipeline.p2p import P2PChannel
from moewright.engine.run.build_state import init_distributed
from moewright.engine.run.launch import launch
from moewright.engine.run.worker import ExitCode, RankContext, RankOutcome
from moewright.rules.p2p import pipeline_actions
from moewright.rules.schedule import timetable
from moewright.rules.stages import virtual_stage
from moewright.rules.timetable_row import RowKind
from moewright.spec.layout import Layout, Schedule

pytestmark = pytest.mark.spawn

_ROWS, _WIDTH = 4, 6


def stage_module(stage: int) -> nn.Module:
    torch.manual_seed(stage)
    return nn.Sequential(nn.Linear(_WIDTH, 2 * _WIDTH), nn.GELU(), nn.Linear(2 * _WIDTH, _WIDTH))


def loss_of(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (out - target).square().sum()


def ours(
    layout: Layout, count: int, mesh: Any, x: torch.Tensor, y: torch.Tensor
) -> list[torch.Tensor]:
    rank, last = mesh.rank, layout.pp * layout.vpp - 1
    stages = [virtual_stage(layout, rank, chunk) for chunk in range(layout.vpp)]
    modules = [stage_module(stage) for stage in stages]
    inputs, targets = x.chunk(count), y.chunk(count)

    def forward(key: Key, hidden: torch.Tensor | None) -> ChunkResult:
        micro_batch, chunk = key
        out = modules[chunk](inputs[micro_batch] if hidden is None else hidden)
        if stages[chunk] == last:
            return ChunkResult(hidden=None, loss=loss_of(out, targets[micro_batch]))
        return ChunkResult(hidden=out, loss=None)

    def backward(key: Key, roots: Any, grads: Any, split: bool) -> None:
        torch.autograd.backward(roots, grads)

    stops = pipeline_actions(layout, timetable(layout, count), rank)
    wires = P2PChannel(
        layout, stops, mesh.group("pp"), mesh.upstream, lambda _: torch.empty(_ROWS, _WIDTH)
    )
    execute_timetable(
        stops, wires, forward=forward, backward=backward, weight_grad=lambda key: None
    )
    return [p.grad for module in modules for p in module.parameters() if p.grad is not None]


def theirs(
    layout: Layout, count: int, mesh: Any, x: torch.Tensor, y: torch.Tensor
) -> list[torch.Tensor]:
    rank, total = mesh.rank, layout.pp * layout.vpp
    numbers = [virtual_stage(layout, rank, chunk) for chunk in range(layout.vpp)]
    modules = [stage_module(number) for number in numbers]
    stages = [
        PipelineStage(module, number, total, torch.device("cpu"), group=mesh.group("pp").handle)
        for module, number in zip(modules, numbers, strict=True)
    ]
    if layout.vpp == 1:
        schedule: Any = Schedule1F1B(stages[0], count, loss_fn=loss_of, scale_grads=False)
    else:
        schedule = ScheduleInterleaved1F1B(stages, count, loss_fn=loss_of, scale_grads=False)
        order = [
            (
                RowKind.F if action.computation_type.name == "FORWARD" else RowKind.B,
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
    schedule.step(*((x,) if rank == 0 else ()), **({"target": y} if rank == layout.pp - 1 else {}))
    return [p.grad for module in modules for p in module.parameters() if p.grad is not None]


def compared(layout: Layout, count: int, seat: RankContext) -> RankOutcome:
    init_distributed(seat)
    mesh = build_mesh(layout, seat.rank, Counters())
    dice = torch.Generator().manual_seed(5)
    x, y = (torch.randn(count * _ROWS, _WIDTH, generator=dice) for _ in range(2))
    mine, wanted = (run(layout, count, mesh, x, y) for run in (ours, theirs))
    assert len(mine) == len(wanted) == 4 * layout.vpp
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(mine, wanted, strict=True))
    collectives.leave_world()
    return RankOutcome.DONE


@pytest.mark.parametrize(
    ("pp", "vpp", "count"), [(2, 1, 5), (4, 1, 6), (2, 2, 4), (2, 3, 6), (4, 2, 8)]
)
def test_gradients_and_order_are_those_of_torch(
    pp: int, vpp: int, count: int, tmp_path: Path
) -> None:
    schedule = Schedule.INTERLEAVED if vpp > 1 else Schedule.ONE_F_ONE_B
    layout = Layout(world_size=pp, pp=pp, vpp=vpp, schedule=schedule)
    assert launch(partial(compared, layout, count), nproc=pp, run_dir=tmp_path) is ExitCode.DONE
