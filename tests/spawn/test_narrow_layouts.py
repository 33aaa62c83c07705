"""Experts in a latent space: layouts over several processes equal one, their ledgers exact."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from layout_proof import WORKLOAD, prove_layout
from tiny_jobs import MODEL, build_plan

assert MODEL.moe is not None
NARROW = replace(
    MODEL, moe=replace(MODEL.moe, latent_size=20, shared_ffn_size=16, shared_gate=True)
)
LAYOUTS = (
    "tp2,ep2,etp2,mbs2",
    "cp2,tp2,ep4,mbs2",
    "ep4,mbs2,dispatcher=dedup,recompute=moe",
    "pp2,etp2,mbs2,dispatcher=allgather,layout='Ett|tL'",
    "dp4,ep2,mbs2,overlap=shared,recompute=layernorm+moe_act,offload=expert_fc1",
    "ep2,zero3,mbs2",
)
_IN_EVERY_TEST = LAYOUTS[:1]


@pytest.mark.turns
@pytest.mark.parametrize(
    "text",
    [
        pytest.param(text, marks=() if text in _IN_EVERY_TEST else (pytest.mark.thorough,))
        for text in LAYOUTS
    ],
)
def test_narrow_experts_compute_the_same_over_any_ranks(text: str, tmp_path: Path) -> None:
    prove_layout(build_plan(WORKLOAD, text, world_size=4, model=NARROW), tmp_path)
