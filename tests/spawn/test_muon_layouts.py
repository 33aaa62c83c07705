"""Muon over layouts equals Muon in one process, and its ledger the prediction."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import tiny_jobs
from layout_proof import WORKLOAD, prove_layout
from moewright.spec.workload import MatrixUpdate, MuonSpec
from selection import thorough

pytestmark = pytest.mark.spawn

MUON = replace(
    WORKLOAD,
    optimizer=replace(WORKLOAD.optimizer, matrix_update=MatrixUpdate.MUON),
    # Small updates keep the choices of the routers clear.
    muon=MuonSpec(muon_extra_scale_factor=0.02, muon_nesterov=True),
)


@pytest.mark.turns
@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        thorough(2, "zero0,ep2"),
        (2, "zero1,mbs2"),
        thorough(4, "zero0,tp2,ep2,etp2"),
        (4, "zero1,tp2,ep2"),
        thorough(4, "zero1,ep2,etp2"),
        thorough(4, "zero1,pp2,ep2,layout='Et|ttL',overlap=grad+param"),
        thorough(4, "zero3,ep2"),
        (4, "zero3,tp2,etp2"),
        thorough(4, "zero3,shard2,mbs2"),
        thorough(2, "zero1,offload=optimizer"),
        thorough(4, "zero1,cp2,ep4"),
    ],
)
def test_a_layout_with_muon_equals_one_process(
    world_size: int, layout: str, tmp_path: Path
) -> None:
    prove_layout(tiny_jobs.build_plan(MUON, layout, world_size=world_size), tmp_path)
