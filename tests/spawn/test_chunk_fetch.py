"""Under schedule=gis whole chunks come back from the host a row ahead of their backwards."""

from __future__ import annotations

import json
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_jobs
from layout_proof import WORKLOAD, draw_batches
from moewright.engine.comm import collectives
from moewright.engine.memory import saved_tensors
from moewright.engine.memory.host_copies import PlainCopies
from moewright.engine.model.transformer import draw_initial_value
from moewright.engine.run.build_state import build_train_state, init_distributed
from moewright.engine.run.launch import launch
from moewright.engine.run.step import train_step
from moewright.engine.run.worker import ExitCode, RankContext, RankOutcome
from moewright.rules.job import plan_job
from moewright.rules.timetable.schedule import timetable
from moewright.rules.timetable.timetable_row import RowKind, TimetableRow
from moewright.spec.plan import Plan

pytestmark = pytest.mark.spawn

_NAMES = {RowKind.F: "forward", RowKind.B: "backward", RowKind.W: "weight gradients"}
_FETCH = "fetch"


def name_row(row: TimetableRow) -> str:
    return f"{_NAMES[row.kind]} of micro-batch {row.micro_batch}, chunk {row.chunk}"


class NotedCopies(PlainCopies):
    """Copies that note when they come back."""

    def __init__(self, events: list[str]) -> None:
        self._events = events

    def start_fetch(self, copied: torch.Tensor) -> tuple[torch.Tensor, None]:
        self._events.append(_FETCH)
        return super().start_fetch(copied)


def run_step(plan: Plan, folder: Path, events: list[str], context: RankContext) -> RankOutcome:
    """Run a step and write which rows began, and which copies from the host, in their order."""
    device = init_distributed(context)

    def note(activity: str, **_: Any) -> None:
        if " of micro-batch " in activity:
            events.append(activity)

    state = build_train_state(
        plan_job(plan),
        draw_batches(plan.model),
        rank=context.rank,
        device=device,
        initial_value=draw_initial_value,
    )
    state.runtime.counters.note = note
    train_step(state, step=1, lr=0.0, stop_requested=False, count_ledger=False)
    (folder / f"events{context.rank}").write_text(json.dumps(events))
    collectives.leave_world()
    return RankOutcome.DONE


def test_a_chunk_comes_back_beside_the_row_before_its_backward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for a backward that follows its own forward, which has its layers one by one."""
    plan = tiny_jobs.build_plan(
        WORKLOAD,
        "pp2,vpp2,mbs2,schedule=gis,offload=core_attn+moe_act+chunks1,layout='Et|t|t|L'",
        world_size=2,
    )
    events: list[str] = []  # each rank, a fork, has its own
    monkeypatch.setattr(saved_tensors, "build_host_copies", lambda device: NotedCopies(events))
    code = launch(partial(run_step, plan, tmp_path, events), nproc=2, run_dir=tmp_path / "run")
    assert code is ExitCode.DONE
    for rank in range(2):
        noted = json.loads((tmp_path / f"events{rank}").read_text())
        rows = timetable(plan.layout, 4)[rank]
        starts = [place for place, event in enumerate(noted) if event != _FETCH]
        assert [noted[place] for place in starts] == [name_row(row) for row in rows]
        # What was fetched before each row began, and since the row before it had begun.
        fetches = [0, *(after - before - 1 for before, after in pairwise(starts))]
        expected = []
        for index, row in enumerate(rows):
            after = rows[index + 1] if index + 1 < len(rows) else row
            is_offloaded = after.kind is RowKind.B and after.chunk == 0
            is_own = (row.micro_batch, row.chunk) == (after.micro_batch, after.chunk)
            expected.append(is_offloaded and not is_own)
        assert [bool(count) for count in fetches] == expected
        assert sum(expected) == 4  # one for each micro-batch
        assert len(noted) == starts[-1] + 1
