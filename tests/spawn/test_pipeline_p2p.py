"""The executor over real messages: every table gives each row the input that the table says, and
comes to an end."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

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
from moewright.spec.layout import Layout
from pipeline_tables import legal_layouts

pytestmark = pytest.mark.spawn


def run_tables(pp: int, most: int, seat: RankContext) -> RankOutcome:
    """A stage adds its number to a micro-batch; the last squares it: what comes back is twice the
    sum of all."""
    init_distributed(seat)
    books = Counters()
    mesh = build_mesh(Layout(world_size=pp, pp=pp), seat.rank, books)
    for number, (layout, count) in enumerate(legal_layouts(pp, most)):
        seat.beat(number)
        one_table(layout, count, mesh.group("pp"), mesh.upstream)
    collectives.leave_world()
    return RankOutcome.DONE


def one_table(
    layout: Layout, count: int, group: collectives.Group, upstream: collectives.Group
) -> None:
    stops = pipeline_actions(layout, timetable(layout, count), group.index)
    last = layout.pp * layout.vpp - 1
    back: list[tuple[int, float]] = []
    weights: list[Key] = []
    split: list[Key] = []

    def forward(key: Key, hidden: torch.Tensor | None) -> ChunkResult:
        stage = virtual_stage(layout, group.index, key[1])
        entry = torch.full((2, 3), float(key[0]), requires_grad=True) if hidden is None else hidden
        assert entry.shape == (2, 3)
        assert torch.equal(entry, torch.full((2, 3), float(key[0] + sum(range(stage)))))
        if stage == 0:
            entry.register_hook(lambda grad: back.append((key[0], float(grad[0, 0]))))
        made = entry + stage
        return (
            ChunkResult(hidden=None, loss=made.square().sum())
            if stage == last
            else ChunkResult(hidden=made, loss=None)
        )

    def backward(key: Key, roots: object, grads: object, left: bool) -> None:
        torch.autograd.backward(roots, grads)  # type: ignore[arg-type]
        if left:
            split.append(key)

    wires = P2PChannel(layout, stops, group, upstream, lambda micro_batch: torch.empty(2, 3))
    execute_timetable(stops, wires, forward=forward, backward=backward, weight_grad=weights.append)
    assert weights == split or sorted(weights) == sorted(split)
    if group.index == 0:
        assert sorted(back) == [(m, 2.0 * (m + sum(range(last + 1)))) for m in range(count)]


@pytest.mark.parametrize(("pp", "most"), [(2, 8), (3, 7), (4, 8)])
def test_every_table_comes_to_its_end(pp: int, most: int, tmp_path: Path) -> None:
    assert launch(partial(run_tables, pp, most), nproc=pp, run_dir=tmp_path) is ExitCode.DONE
