"""The executor over real messages gives each row of a timetable its input, and ends."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

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
from moewright.spec.layout import Layout
from pipeline_tables import legal_layouts

pytestmark = pytest.mark.spawn


def run_timetables(pp: int, max_micro_batches: int, context: RankContext) -> RankOutcome:
    """Run every legal timetable.

    A stage adds its number to a micro-batch and the last stage squares it: the gradient that comes
    back is twice the sum of all.
    """
    init_distributed(context)
    counters = Counters()
    mesh = build_mesh(Layout(world_size=pp, pp=pp), context.rank, counters)
    for number, (layout, count) in enumerate(legal_layouts(pp, max_micro_batches)):
        context.beat(number)
        run_timetable(layout, count, mesh.group("pp"), mesh.upstream)
    collectives.leave_world()
    return RankOutcome.DONE


def run_timetable(
    layout: Layout, count: int, group: collectives.Group, upstream: collectives.Group
) -> None:
    actions = pipeline_actions(layout, timetable(layout, count), group.index)
    last = layout.pp * layout.vpp - 1
    first_stage_grads: list[tuple[int, float]] = []
    weights: list[Key] = []
    split_keys: list[Key] = []

    def forward(key: Key, hidden: torch.Tensor | None) -> ChunkResult:
        stage = virtual_stage(layout, group.index, key[1])
        entry = hidden
        if entry is None:
            entry = torch.full((2, 3), float(key[0]), requires_grad=True)
        assert entry.shape == (2, 3)
        assert torch.equal(entry, torch.full((2, 3), float(key[0] + sum(range(stage)))))
        if stage == 0:
            entry.register_hook(lambda grad: first_stage_grads.append((key[0], float(grad[0, 0]))))
        out = entry + stage
        if stage == last:
            return ChunkResult(hidden=None, loss=out.square().sum())
        return ChunkResult(hidden=out, loss=None)

    def backward(key: Key, roots: object, grads: object, keeps_weight_grad: bool) -> None:
        torch.autograd.backward(roots, grads)  # type: ignore[arg-type]
        if keeps_weight_grad:
            split_keys.append(key)

    channel = P2PChannel(layout, actions, group, upstream, lambda micro_batch: torch.empty(2, 3))
    execute_timetable(
        actions, channel, forward=forward, backward=backward, weight_grad=weights.append
    )
    assert weights == split_keys or sorted(weights) == sorted(split_keys)
    if group.index == 0:
        assert sorted(first_stage_grads) == [
            (m, 2.0 * (m + sum(range(last + 1)))) for m in range(count)
        ]


@pytest.mark.turns
@pytest.mark.parametrize(("pp", "max_micro_batches"), [(2, 8), (3, 7), (4, 8)])
def test_every_timetable_comes_to_its_end(pp: int, max_micro_batches: int, tmp_path: Path) -> None:
    assert (
        launch(partial(run_timetables, pp, max_micro_batches), nproc=pp, run_dir=tmp_path)
        is ExitCode.DONE
    )
