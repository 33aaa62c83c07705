"""Choices of precision, optimizer state and batch sizes: the same in every layout, resumed exactly,
booked exactly."""

from __future__ import annotations

from dataclasses import replace
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
    RouterForce,
    RouterTraining,
    Workload,
)
from tiny_jobs import read_state, read_steps

pytestmark = pytest.mark.spawn


def plan(work: Workload, layout: str, world_size: int) -> Plan:
    """Several buckets, a checkpoint of every step."""
    optimizer = replace(work.optimizer, bucket_elements=4000, decay_steps=6)
    work = replace(
        work, optimizer=optimizer, checkpoint=replace(work.checkpoint, every_steps=1, keep=9)
    )
    return tiny_jobs.build_plan(work, layout, world_size=world_size)


def train_layout(work: Workload, layout: str, world_size: int, run_dir: Path) -> Plan:
    made = plan(work, layout, world_size)
    assert train(made, run_dir) is ExitCode.DONE
    return made


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def refuse_difference(made: Plan, run_dir: Path) -> list[Ledger]:
    """Hold every rank's books against the prediction; returns them."""
    selection = read_json(Selection, run_dir / "ledger" / "selection.json")
    found = [
        read_json(Ledger, run_dir / "ledger" / f"rank{r:05d}.json")
        for r in range(made.layout.world_size)
    ]
    for rank, counted in enumerate(found):
        assert compare_ledgers(
            predict_ledger(made, rank=rank, selection=selection), counted
        ).is_exact
    return found


def test_an_offloaded_optimizer_is_on_the_host_and_changes_no_bit(
    data: DataSpec, tmp_path: Path
) -> None:
    work = tiny_jobs.build_workload(data, steps=2, precision=Dtype.BF16)
    train_layout(work, "ep2,mbs2", 2, tmp_path / "device")
    made = train_layout(work, "ep2,mbs2,offload=optimizer", 2, tmp_path / "host")
    assert same(read_state(tmp_path / "device", 2), read_state(tmp_path / "host", 2))
    for ledger in refuse_difference(made, tmp_path / "host"):
        held = {row.component for row in ledger.memory}
        assert Component.HOST in held
        assert held.isdisjoint({Component.MASTER, Component.MOMENTS})


def test_bf16_moments_halve_their_bytes_and_follow_fp32(data: DataSpec, tmp_path: Path) -> None:
    """The update is made in fp32: the first step's weights are those of fp32 moments to the bit."""
    work = tiny_jobs.build_workload(data, steps=3)
    narrow = replace(work, optimizer=replace(work.optimizer, moment_dtype=Dtype.BF16))
    train_layout(work, "mbs2", 1, tmp_path / "wide")
    train_layout(narrow, "mbs2", 1, tmp_path / "one")
    made = train_layout(narrow, "tp2,ep2,mbs2", 4, tmp_path / "four")
    first = {
        name: value
        for name, value in read_state(tmp_path / "wide", 1).items()
        if not name.startswith("optim/")
    }
    assert same(first, {name: read_state(tmp_path / "one", 1)[name] for name in first})
    stored = read_state(tmp_path / "four", 3)
    assert {value.dtype for name, value in stored.items() if name.startswith("optim/exp_avg")} == {
        torch.bfloat16
    }
    moments = [
        sum(row.bytes for row in ledger.memory if row.component is Component.MOMENTS)
        for ledger in refuse_difference(made, tmp_path / "four")
    ]
    masters = [
        sum(row.bytes for row in ledger.memory if row.component is Component.MASTER)
        for ledger in refuse_difference(made, tmp_path / "four")
    ]
    assert moments == masters  # two of two bytes beside one of four
    for ours, theirs in zip(read_steps(tmp_path / "four"), read_steps(tmp_path / "one"), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)


@pytest.mark.parametrize("layout", ["ep2,mbs2,overlap=grad+param", "mbs2,zero0"])
def test_an_infinite_gradient_on_one_rank_skips_the_step_on_all(
    layout: str, data: DataSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = DistributedOptimizer.begin_step

    def spoiled(optimizer: DistributedOptimizer, micro_batches: int) -> None:
        begin(optimizer, micro_batches)
        step = int(optimizer._updates) + 1
        if optimizer._runtime.mesh.rank == 1 and step == 2 and not hasattr(optimizer, "spoiled"):
            optimizer.spoiled = True  # type: ignore[attr-defined]
            slot, view = optimizer.buckets[-1].grad_views[0]
            optimizer._stale.discard(
                slot.name
            )  # the first gradient is added to this, not written over it
            view.fill_(0.0)
            view.view(-1)[0] = torch.inf

    monkeypatch.setattr(DistributedOptimizer, "begin_step", spoiled)
    train_layout(tiny_jobs.build_workload(data, steps=3), layout, 2, tmp_path)
    assert [line["skipped"] for line in read_steps(tmp_path)] == [False, True, False]
    assert same(read_state(tmp_path, 1), read_state(tmp_path, 2))
    assert int(read_state(tmp_path, 3)["optim/updates"]) == 2
    assert all(value.isfinite().all() for value in read_state(tmp_path, 3).values())


def test_fp16_follows_fp32_with_a_scale_that_falls_grows_and_is_resumed(
    data: DataSpec, tmp_path: Path
) -> None:
    """2**24 overflows fp16 at once: the scale falls until the gradients are finite, then doubles
    every two steps."""
    scaling = LossScalingSpec(initial_loss_scale=2.0**24, loss_scale_window=2)
    work = tiny_jobs.build_workload(data, precision=Dtype.FP16, scaling=scaling)
    made = train_layout(replace(work, steps=12), "tp2,ep2,mbs2", 4, tmp_path / "whole")
    refuse_difference(made, tmp_path / "whole")
    lines = read_steps(tmp_path / "whole")
    skipped = [line["skipped"] for line in lines]
    assert skipped[0]
    assert not all(skipped)
    scale, good = 2.0**24, 0
    for number, line in enumerate(lines, start=1):
        good = 0 if line["skipped"] else good + 1
        scale *= 0.5 if line["skipped"] else 2.0 if good == 2 else 1.0
        good %= 2
        if number >= 4:  # the checkpoints that are kept
            assert read_state(tmp_path / "whole", number)["optim/loss_scale"].tolist() == [scale, good]
    for steps in (5, 12):
        train_layout(replace(work, steps=steps), "tp2,ep2,mbs2", 4, tmp_path / "parts")
    assert same(read_state(tmp_path / "whole", 12), read_state(tmp_path / "parts", 12))
    # Rounding sends a token to another expert now and then, so experts are given here.
    given = RouterTraining(force=RouterForce.BALANCED)
    one = replace(work, steps=1, scaling=LossScalingSpec(initial_loss_scale=256.0), router=given)
    train_layout(one, "mbs2", 1, tmp_path / "fp16")
    train_layout(replace(one, precision=Dtype.FP32), "mbs2", 1, tmp_path / "fp32")
    narrow, wide = read_state(tmp_path / "fp16", 1), read_state(tmp_path / "fp32", 1)
    assert read_steps(tmp_path / "fp16")[0]["grad_norm"] == pytest.approx(
        read_steps(tmp_path / "fp32")[0]["grad_norm"], rel=5e-3
    )
    for name, value in wide.items():
        if name.startswith("optim/exp_avg/"):
            assert (narrow[name] - value).norm() <= 16 * 2**-11 * value.norm(), name


def test_growing_batches_are_the_same_in_every_layout_and_resumed(
    data: DataSpec, tmp_path: Path
) -> None:
    ramp = BatchRampSpec(ramp_start=2, ramp_increment=2, ramp_samples=12)
    work = tiny_jobs.build_workload(data, steps=6, ramp=ramp)
    train_layout(work, "", 1, tmp_path / "one")
    train_layout(replace(work, steps=2), "ep2,overlap=grad+param", 2, tmp_path / "parts")
    made = train_layout(work, "tp2", 2, tmp_path / "parts")
    refuse_difference(made, tmp_path / "parts")
    lines = read_steps(tmp_path / "parts")
    assert [line["tokens"] // 32 for line in lines] == [2, 2, 4, 6, 8, 8]
    for ours, theirs in zip(lines, read_steps(tmp_path / "one"), strict=True):
        assert ours["tokens"] == theirs["tokens"]
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
