"""Choices of precision, optimizer state and batch sizes.

They compute the same in every layout, resume exactly, and their ledgers are exact.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import tiny_jobs
from moewright.codec import read_json
from moewright.cost.ledger import predict_ledger
from moewright.diagnosis.compare_ledgers import compare_ledgers
from moewright.engine.optim.distributed_optimizer import DistributedOptimizer
from moewright.engine.run.train import train
from moewright.engine.run.worker import ExitCode
from moewright.spec.ledger import Component, Ledger, Selection
from moewright.spec.plan import Plan
from moewright.spec.workload import (
    BatchRampSpec,
    DataSpec,
    Dtype,
    LossScalingSpec,
    MatrixUpdate,
    RouterForce,
    RouterTraining,
    Workload,
)
from selection import thorough
from tiny_jobs import read_state, read_steps

pytestmark = pytest.mark.spawn


def make_plan(workload: Workload, layout: str, world_size: int) -> Plan:
    """Build a plan with several buckets and a checkpoint of every step."""
    optimizer = replace(workload.optimizer, bucket_elements=4000, decay_steps=6)
    workload = replace(
        workload,
        optimizer=optimizer,
        checkpoint=replace(workload.checkpoint, every_steps=1, keep=9),
    )
    return tiny_jobs.build_plan(workload, layout, world_size=world_size)


def train_layout(workload: Workload, layout: str, world_size: int, run_dir: Path) -> Plan:
    plan = make_plan(workload, layout, world_size)
    assert train(plan, run_dir) is ExitCode.DONE
    return plan


def same_bits(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


def read_exact_ledgers(plan: Plan, run_dir: Path) -> list[Ledger]:
    """Assert that every rank's ledger equals its prediction, and return the ledgers."""
    selection = read_json(Selection, run_dir / "ledger" / "selection.json")
    ledgers = [
        read_json(Ledger, run_dir / "ledger" / f"rank{rank:05d}.json")
        for rank in range(plan.layout.world_size)
    ]
    for rank, counted in enumerate(ledgers):
        assert compare_ledgers(
            predict_ledger(plan, rank=rank, selection=selection), counted
        ).is_exact
    return ledgers


@pytest.mark.parametrize(
    ("layout", "world_size", "matrix_update", "fraction"),
    [
        ("ep2,mbs2", 2, MatrixUpdate.ADAMW, 0.3),
        thorough("ep2,mbs2", 2, MatrixUpdate.ADAMW, 1.0),
        thorough("zero0,mbs2", 2, MatrixUpdate.ADAMW, 0.5),
        thorough("tp2,ep2,mbs2,overlap=grad+param", 4, MatrixUpdate.ADAMW, 0.07),
        thorough("pp2,ep2,mbs2,layout='Et|ttL'", 4, MatrixUpdate.ADAMW, 0.9),
        thorough("tp2,ep2,mbs2", 4, MatrixUpdate.MUON, 0.4),
    ],
)
def test_what_fraction_of_the_optimizer_is_on_the_host_changes_no_bit(
    layout: str,
    world_size: int,
    matrix_update: MatrixUpdate,
    fraction: float,
    data: DataSpec,
    tmp_path: Path,
) -> None:
    workload = tiny_jobs.build_workload(data, steps=2, precision=Dtype.BF16)
    optimizer = replace(workload.optimizer, matrix_update=matrix_update, bucket_elements=20_000)
    workload = replace(workload, optimizer=optimizer)
    train_layout(workload, layout, world_size, tmp_path / "device")
    text = f"{layout},offload=optimizer{fraction:g}"
    plan = train_layout(workload, text, world_size, tmp_path / "host")
    assert same_bits(read_state(tmp_path / "device", 2), read_state(tmp_path / "host", 2))
    states = {Component.MASTER, Component.MOMENTS, Component.HOST}
    for ledger in read_exact_ledgers(plan, tmp_path / "host"):
        total, hosted = (
            sum(row.bytes for row in ledger.memory if row.component in components)
            for components in (states, {Component.HOST})
        )
        # A 64th of the owned elements at most is more than was asked for.
        assert 0 <= hosted - fraction * total <= 0.05 * total


@pytest.mark.thorough
def test_bf16_moments_halve_their_bytes_and_follow_fp32(data: DataSpec, tmp_path: Path) -> None:
    """The update is made in fp32: the first weights equal those of fp32 moments to the bit."""
    workload = tiny_jobs.build_workload(data, steps=3)
    narrow = replace(workload, optimizer=replace(workload.optimizer, moment_dtype=Dtype.BF16))
    train_layout(workload, "mbs2", 1, tmp_path / "wide")
    train_layout(narrow, "mbs2", 1, tmp_path / "one")
    plan = train_layout(narrow, "tp2,ep2,mbs2", 4, tmp_path / "four")
    first = {
        name: value
        for name, value in read_state(tmp_path / "wide", 1).items()
        if not name.startswith("optim/")
    }
    assert same_bits(first, {name: read_state(tmp_path / "one", 1)[name] for name in first})
    stored = read_state(tmp_path / "four", 3)
    assert {value.dtype for name, value in stored.items() if name.startswith("optim/exp_avg")} == {
        torch.bfloat16
    }
    moments = [
        sum(row.bytes for row in ledger.memory if row.component is Component.MOMENTS)
        for ledger in read_exact_ledgers(plan, tmp_path / "four")
    ]
    masters = [
        sum(row.bytes for row in ledger.memory if row.component is Component.MASTER)
        for ledger in read_exact_ledgers(plan, tmp_path / "four")
    ]
    assert moments == masters  # two moments of two bytes, a master of four
    for actual, expected in zip(
        read_steps(tmp_path / "four"), read_steps(tmp_path / "one"), strict=True
    ):
        assert actual["loss"] == pytest.approx(expected["loss"], rel=1e-4)


@pytest.mark.parametrize(
    ("first", "second", "whole", "resumed"),
    [
        (Dtype.FP8, None, "ep2,mbs2,zero0", "ep2,mbs2,offload=optimizer0.3"),
        thorough(Dtype.FP8, Dtype.BF16, "ep2,mbs2,zero0", "ep2,mbs2,overlap=grad+param"),
        thorough(Dtype.FP8, Dtype.FP32, "ep2,mbs2,zero3", "ep2,mbs2,zero3"),
        thorough(Dtype.BF16, Dtype.FP8, "ep2,mbs2,zero2", "ep2,mbs2,zero2,offload=optimizer"),
    ],
)
def test_8_bit_moments_have_the_same_bits_however_they_are_sharded_and_resumed(
    first: Dtype, second: Dtype | None, whole: str, resumed: str, data: DataSpec, tmp_path: Path
) -> None:
    """Blocks begin with parameters and shards; a checkpoint in bf16 makes the same blocks again."""
    workload = tiny_jobs.build_workload(data, steps=3)
    optimizer = replace(workload.optimizer, moment_dtype=first, second_moment_dtype=second)
    workload = replace(workload, optimizer=optimizer)
    train_layout(workload, whole, 2, tmp_path / "whole")
    expected = read_state(tmp_path / "whole", 3)
    stored = {Dtype.FP8: torch.bfloat16, Dtype.BF16: torch.bfloat16, Dtype.FP32: torch.float32}
    for prefix, dtype in (("exp_avg", first), ("exp_avg_sq", second or first)):
        moments = [x for name, x in expected.items() if name.startswith(f"optim/{prefix}/")]
        assert {x.dtype for x in moments} == {stored[dtype]}
    train_layout(replace(workload, steps=1), resumed, 2, tmp_path / "parts")
    plan = train_layout(workload, resumed, 2, tmp_path / "parts")
    assert same_bits(expected, read_state(tmp_path / "parts", 3))
    read_exact_ledgers(plan, tmp_path / "parts")


@pytest.mark.thorough
def test_8_bit_moments_follow_fp32(data: DataSpec, tmp_path: Path) -> None:
    workload = tiny_jobs.build_workload(data, steps=3)
    train_layout(workload, "mbs2", 1, tmp_path / "wide")
    optimizer = replace(workload.optimizer, moment_dtype=Dtype.FP8)
    train_layout(replace(workload, optimizer=optimizer), "tp2,ep2,mbs2", 4, tmp_path / "narrow")
    wide, narrow = (read_state(tmp_path / run, 1) for run in ("wide", "narrow"))
    for name, value in wide.items():
        # E4M3 has three bits behind its first one: half of the last is a 16th of a number at most.
        tolerance = 1 / 16 if name.startswith("optim/exp") else 1e-4
        assert (narrow[name].float() - value).norm() <= tolerance * value.norm() + 1e-12, name
    losses = [[step["loss"] for step in read_steps(tmp_path / run)] for run in ("wide", "narrow")]
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)


@pytest.mark.parametrize("layout", ["ep2,mbs2,overlap=grad+param", "mbs2,zero0"])
def test_an_infinite_gradient_on_one_rank_skips_the_step_on_all(
    layout: str, data: DataSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = DistributedOptimizer.begin_step

    def begin_with_infinity(optimizer: DistributedOptimizer, micro_batches: int) -> None:
        begin(optimizer, micro_batches)
        step = int(optimizer._updates) + 1
        if optimizer._runtime.mesh.rank == 1 and step == 2 and not hasattr(optimizer, "spoiled"):
            optimizer.spoiled = True  # type: ignore[attr-defined]
            slot, view = optimizer.buckets[-1].grad_views[0]
            # Not stale: the first gradient is added to this, not written over it.
            optimizer._stale.discard(slot.name)
            view.fill_(0.0)
            view.view(-1)[0] = torch.inf

    monkeypatch.setattr(DistributedOptimizer, "begin_step", begin_with_infinity)
    train_layout(tiny_jobs.build_workload(data, steps=3), layout, 2, tmp_path)
    assert [line["skipped"] for line in read_steps(tmp_path)] == [False, True, False]
    assert same_bits(read_state(tmp_path, 1), read_state(tmp_path, 2))
    assert int(read_state(tmp_path, 3)["optim/updates"]) == 2
    assert all(value.isfinite().all() for value in read_state(tmp_path, 3).values())


def test_fp16_follows_fp32_with_a_scale_that_falls_grows_and_is_resumed(
    data: DataSpec, tmp_path: Path
) -> None:
    """2**20 overflows fp16 at once.

    The scale falls until the gradients are finite, then doubles every two steps.
    """
    scaling = LossScalingSpec(initial_loss_scale=2.0**20, loss_scale_window=2)
    workload = tiny_jobs.build_workload(data, precision=Dtype.FP16, scaling=scaling)
    plan = train_layout(replace(workload, steps=8), "tp2,ep2,mbs2", 2, tmp_path / "whole")
    read_exact_ledgers(plan, tmp_path / "whole")
    lines = read_steps(tmp_path / "whole")
    skipped = [line["skipped"] for line in lines]
    assert skipped[0]
    assert (False, False) in set(pairwise(skipped))  # it has grown after these
    scale = 2.0**20
    steps_since_change = 0
    for number, line in enumerate(lines, start=1):
        if line["skipped"]:
            scale *= 0.5
            steps_since_change = 0
        else:
            steps_since_change += 1
            if steps_since_change == 2:
                scale *= 2.0
                steps_since_change = 0
        state = read_state(tmp_path / "whole", number)
        assert state["optim/loss_scale"].tolist() == [scale, steps_since_change]
    for steps in (3, 8):
        train_layout(replace(workload, steps=steps), "tp2,ep2,mbs2", 2, tmp_path / "parts")
    assert same_bits(read_state(tmp_path / "whole", 8), read_state(tmp_path / "parts", 8))
    # Rounding sends a token to another expert now and then, so the choice of experts is forced.
    forced = RouterTraining(force=RouterForce.BALANCED)
    single_step = replace(
        workload, steps=1, scaling=LossScalingSpec(initial_loss_scale=256.0), router=forced
    )
    train_layout(single_step, "mbs2", 1, tmp_path / "fp16")
    train_layout(replace(single_step, precision=Dtype.FP32), "mbs2", 1, tmp_path / "fp32")
    narrow = read_state(tmp_path / "fp16", 1)
    wide = read_state(tmp_path / "fp32", 1)
    assert read_steps(tmp_path / "fp16")[0]["grad_norm"] == pytest.approx(
        read_steps(tmp_path / "fp32")[0]["grad_norm"], rel=5e-3
    )
    for name, value in wide.items():
        if name.startswith("optim/exp_avg/"):
            assert (narrow[name] - value).norm() <= 16 * 2**-11 * value.norm(), name


@pytest.mark.thorough
@pytest.mark.turns
def test_growing_batches_are_the_same_in_every_layout_and_resumed(
    data: DataSpec, tmp_path: Path
) -> None:
    ramp = BatchRampSpec(ramp_start=2, ramp_increment=2, ramp_samples=12)
    workload = tiny_jobs.build_workload(data, steps=6, ramp=ramp)
    train_layout(workload, "", 1, tmp_path / "one")
    train_layout(replace(workload, steps=2), "ep2,overlap=grad+param", 2, tmp_path / "parts")
    plan = train_layout(workload, "tp2", 2, tmp_path / "parts")
    read_exact_ledgers(plan, tmp_path / "parts")
    lines = read_steps(tmp_path / "parts")
    assert [line["tokens"] // 32 for line in lines] == [2, 2, 4, 6, 8, 8]
    for actual, expected in zip(lines, read_steps(tmp_path / "one"), strict=True):
        assert actual["tokens"] == expected["tokens"]
        assert actual["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert actual["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
