"""A job with Triton kernels equals one process without them, and its ledger stays exact."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path

import pytest

from layout_proof import WORKLOAD, prove_layout
from layout_space import SHAPES
from moewright.engine.observe.storage_census import StorageCensus
from moewright.spec.workload import FusedKernels
from tiny_jobs import build_plan

pytest.importorskip(
    "triton", reason="the Triton kernels need the package triton, which torch brings on CUDA alone"
)
pytestmark = pytest.mark.spawn


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("shape", "layout", "world"),
    [
        ("qwen", "ep2,mbs4,recompute=moe_act", 2),
        pytest.param("deepseek", "tp2,etp2,ep2,mbs2,recompute=moe", 4, marks=pytest.mark.thorough),
        pytest.param("deep", "tp2,ep4,dispatcher=dedup,mbs2", 4, marks=pytest.mark.thorough),
    ],
)
def test_kernels_change_neither_the_curve_nor_the_ledger(
    shape: str, layout: str, world: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note_rest = StorageCensus.note_rest

    def collect_and_note(census: StorageCensus) -> None:
        gc.collect()  # arguments of Triton's interpreter, which refers to itself
        note_rest(census)

    monkeypatch.setattr(StorageCensus, "note_rest", collect_and_note)
    workload = replace(WORKLOAD, fused_kernels=FusedKernels.TRITON)
    prove_layout(build_plan(workload, layout, world_size=world, model=SHAPES[shape]), tmp_path)
