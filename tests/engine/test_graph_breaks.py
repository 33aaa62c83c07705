"""Passes of layers in which the host waits for the device: as many as the rule says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from layout_proof import WORKLOAD, draw_batches, draw_test_weight
from layout_space import SHAPES
from moewright.codec import parse_layout
from moewright.engine.dispatch import allgather, alltoall, alltoall_padded, dedup
from moewright.engine.kernels.fused.table import torch_kernels
from moewright.engine.model import router
from moewright.engine.run.build_state import build_train_state
from moewright.engine.run.dry_run import dry_run
from moewright.engine.run.step import train_step
from moewright.rules.graph_breaks import count_graph_breaks
from moewright.rules.job import Job
from moewright.spec.workload import RouterAssignment, RouterForce

FREE = WORKLOAD.router
FORCED = replace(FREE, force=RouterForce.BALANCED)
SINKHORN = replace(FREE, assignment=RouterAssignment.SINKHORN)
FEW_TURNS = replace(SINKHORN, sinkhorn_iterations=3)
PADDED = "mbs4,capacity=1,capacity_fill=padded"


def build_job(shape: str, layout: str, routing: Any = FREE, world_size: int = 1) -> Job:
    return Job(
        model=SHAPES[shape],
        workload=replace(WORKLOAD, router=routing),
        layout=parse_layout(layout, world_size=world_size),
    )


def wrap(
    monkeypatch: pytest.MonkeyPatch, owners: Sequence[Any], name: str, calls: list[str]
) -> None:
    """Note each call of a function by its name, wherever it was imported to."""
    for owner in owners:
        inner = getattr(owner, name)

        def note(*args: Any, inner: Any = inner, **kwargs: Any) -> Any:
            calls.append(name)
            return inner(*args, **kwargs)

        monkeypatch.setattr(owner, name, note)


@pytest.mark.parametrize(
    ("shape", "layout", "routing"),
    [
        ("qwen", "mbs4", FREE),
        ("ahead", "mbs2,recompute=moe", FREE),
        ("deepseek", "mbs4,dispatcher=allgather,recompute=block2", FREE),
        ("deep", "mbs4,dispatcher=dedup,capacity=1", FREE),
        ("qwen", "mbs4", FORCED),
        ("qwen", "mbs4,graphs=attn+moe_router+moe_preprocess", FREE),
        ("qwen", PADDED, FREE),
        ("ahead", "mbs4,rank_capacity=1", FREE),
        ("dense", "mbs4", FREE),
        ("qwen", f"{PADDED},recompute=moe", SINKHORN),
        ("qwen", PADDED, FEW_TURNS),
        ("qwen", "mbs4,recompute=moe", SINKHORN),
    ],
)
def test_a_step_reads_as_often_as_the_rule_counts(
    monkeypatch: pytest.MonkeyPatch, shape: str, layout: str, routing: Any
) -> None:
    job = build_job(shape, layout, routing)
    reads: list[str] = []
    wrap(monkeypatch, (allgather, alltoall, dedup), "copy_to_host", reads)
    if routing is SINKHORN and job.layout.has_fixed_rows:
        wrap(monkeypatch, (router,), "sinkhorn", reads)
    state = build_train_state(
        job,
        draw_batches(job.model),
        rank=0,
        device=torch.device("cpu"),
        initial_value=draw_test_weight,
        kernels=torch_kernels(),
    )
    train_step(state, step=1, lr=1e-3, stop_requested=False, count_ledger=False)
    assert len(reads) == count_graph_breaks(job, 0)
    assert bool(reads) == (
        job.model.moe is not None
        and routing is not FORCED
        and not (job.layout.has_fixed_rows and routing is not SINKHORN)
    )


@pytest.mark.turns
@pytest.mark.parametrize(
    ("shape", "layout", "world_size", "rank"),
    [
        ("deep", "pp2,ep2,mbs1,recompute=block1", 4, 3),
        ("qwen", "pp2,vpp2,ep2,mbs1,recompute=moe", 4, 0),
        ("ahead", "pp2,ep2,etp2,tp2,mbs2", 8, 6),
        ("olmoe", "ep2,mbs1,overlap=ep", 2, 1),
    ],
)
def test_every_rank_passes_its_layers_as_often_as_the_rule_counts(
    monkeypatch: pytest.MonkeyPatch, shape: str, layout: str, world_size: int, rank: int
) -> None:
    """A dry run knows its sizes: where each pass begins, a run with a router would read them."""
    job = build_job(shape, layout, world_size=world_size)
    passes: list[str] = []
    wrap(
        monkeypatch,
        (
            allgather.AllGatherDispatcher,
            alltoall.AllToAllDispatcher,
            alltoall_padded.PaddedAllToAllDispatcher,
            dedup.DedupDispatcher,
        ),
        "preprocess",
        passes,
    )
    pp_rank = dry_run(job, rank=rank).ledger.pp_rank
    assert len(passes) == count_graph_breaks(job, pp_rank)
