"""Bits that flip in the state of one rank: found before the next update, and the rank named."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_jobs
from moewright.codec import read_incidents
from moewright.engine.checkpoint import CheckpointSaver, LocalShard
from moewright.engine.model.layers import list_parameters
from moewright.engine.optim.distributed_optimizer import DistributedOptimizer
from moewright.engine.run.corruption import checksum, find_culprits, find_odd_replicas
from moewright.engine.run.train import train
from moewright.engine.run.worker import ExitCode
from moewright.spec.run import IncidentKind
from moewright.spec.workload import DataSpec, SaveMode

pytestmark = pytest.mark.spawn


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataSpec:
    return tiny_jobs.write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.uint8])
def test_any_flipped_bit_changes_the_checksum(dtype: torch.dtype) -> None:
    tensor = torch.arange(24.0).view(4, 6).to(dtype)
    before = checksum(tensor)
    bits = tensor.view(torch.uint8).view(-1)
    for index in range(0, bits.numel(), 5):
        for bit in range(8):
            bits[index] ^= 1 << bit
            assert checksum(tensor) != before
            bits[index] ^= 1 << bit
    assert checksum(tensor) == before


def test_the_replica_unlike_most_is_named_and_both_of_two() -> None:
    alike = {"a (0, 0)": 5, "b (0, 0)": 7}
    assert find_odd_replicas([alike, alike, alike]) == {}
    assert find_odd_replicas([alike, alike | {"b (0, 0)": 8}, alike]) == {1: "weight b"}
    assert find_odd_replicas([{"a (0, 0)": 5}, {"a (0, 0)": 6}]) == {0: "weight a", 1: "weight a"}
    assert find_odd_replicas([{"a (0, 0)": 5}, {"a (2, 0)": 6}]) == {}


@pytest.mark.parametrize(
    "part",
    [
        pytest.param("master", marks=pytest.mark.thorough),
        pytest.param("exp_avg_sq", marks=pytest.mark.thorough),
        "weight",
    ],
)
def test_a_flipped_bit_is_found_before_the_next_update(
    part: str,
    data: DataSpec,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Rank 1 loses a bit of its state after step 2, in the middle of its gradients of step 3."""
    reduce = DistributedOptimizer.reduce_gradients
    begun = {"steps": 0}

    def reduce_and_flip(self: DistributedOptimizer) -> torch.Tensor:
        begun["steps"] += 1
        if begun["steps"] == 3 and self._runtime.mesh.rank == 1:
            bucket = self.buckets[0]
            tensor = bucket.segments[0].owned[0].parameter.owner.weight.detach()
            if part != "weight":
                tensor = getattr(bucket, part)
            tensor.view(-1).view(torch.int32)[3] ^= 1 << 7
        return reduce(self)

    monkeypatch.setattr(DistributedOptimizer, "reduce_gradients", reduce_and_flip)
    workload = tiny_jobs.build_workload(data, steps=4, check_every=1)
    plan = tiny_jobs.build_plan(workload, "ep2,mbs1", world_size=2)
    assert train(plan, tmp_path) is ExitCode.RANK_FAILED
    message = capfd.readouterr().err.splitlines()[0]
    name = "weight" if part == "weight" else "[a-z_/]*"
    expected = f"CorruptionError: {name}.* has changed since step 2, by no update"
    assert re.match(f"rank 1 failed at step 3: {expected}", message), message
    (incident,) = read_incidents(tmp_path)
    assert (incident.kind, incident.rank) == (IncidentKind.CORRUPTION, 1)


def test_the_rank_whose_own_figures_differ_is_named_before_those_that_share_sums() -> None:
    reduced = "the reduced gradient of a (0)"
    assert find_culprits(["", ""]) == {}
    assert find_culprits([reduced, "the loss"]) == {1: "the loss"}
    assert find_culprits([reduced, ""]) == {0: reduced}


@pytest.mark.parametrize(
    "layout",
    [
        "dp2,mbs1,overlap=grad",
        pytest.param("dp2,mbs1,zero1", marks=pytest.mark.thorough),
        pytest.param("pp2,mbs1,layout='Et*2|tL'", marks=pytest.mark.thorough),
    ],
)
def test_a_flipped_bit_of_a_gradient_is_found(
    layout: str,
    data: DataSpec,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Rank 1 loses a bit of a gradient of step 3, while it is added up."""
    begin = DistributedOptimizer.begin_step
    begun = {"steps": 0}

    def begin_and_flip(self: DistributedOptimizer, micro_batches: int) -> None:
        begin(self, micro_batches)
        begun["steps"] += 1
        if begun["steps"] == 3 and self._runtime.mesh.rank == 1:
            weight = list_parameters(models[-1])[0].parameter
            weight.register_hook(flip_bit)

    def flip_bit(gradient: torch.Tensor) -> torch.Tensor:
        if begun["steps"] != 3:
            return gradient
        flipped = gradient.clone()
        flipped.view(-1).view(torch.int32)[3] ^= 1 << 7
        return flipped

    monkeypatch.setattr(DistributedOptimizer, "begin_step", begin_and_flip)
    original = DistributedOptimizer.__init__
    models: list[torch.nn.Module] = []

    def remember_model(self: DistributedOptimizer, runtime: Any, model: Any, *rest: Any) -> None:
        models.append(model)
        original(self, runtime, model, *rest)

    monkeypatch.setattr(DistributedOptimizer, "__init__", remember_model)
    workload = tiny_jobs.build_workload(data, steps=4, check_every=1)
    assert train(tiny_jobs.build_plan(workload, layout, world_size=2), tmp_path) == 3
    message = capfd.readouterr().err.splitlines()[0]
    assert "of step 3 came out otherwise when repeated" in message
    assert re.match("rank 1 failed at step 3: CorruptionError: the gradient of ", message)


@pytest.mark.turns
@pytest.mark.parametrize(
    "layout",
    [
        "tp2,mbs1",
        pytest.param("ep2,mbs1,overlap=grad+param", marks=pytest.mark.thorough),
        pytest.param("pp2,mbs1,layout='Et*2|tL'", marks=pytest.mark.thorough),
        pytest.param("dp2,mbs1,zero3", marks=pytest.mark.thorough),
    ],
)
def test_checks_find_nothing_in_a_sound_run_and_change_nothing(
    layout: str, data: DataSpec, tmp_path: Path
) -> None:
    curves = []
    for every in (0, 1):
        workload = tiny_jobs.build_workload(data, steps=3, check_every=every, eval_batches=1)
        folder = tmp_path / str(every)
        plan = tiny_jobs.build_plan(workload, layout, world_size=2)
        assert train(plan, folder) is ExitCode.DONE
        rows = tiny_jobs.read_steps(folder)
        curves.append([(row["loss"], row["grad_norm"]) for row in rows])
    assert curves[0] == curves[1]


@pytest.mark.parametrize(
    "mode", [SaveMode.SYNC, pytest.param(SaveMode.ASYNC, marks=pytest.mark.thorough)]
)
def test_a_bit_that_flips_before_a_save_is_not_committed(
    mode: SaveMode, data: DataSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 loses a bit between the notes after step 2 and the checkpoint of step 2."""
    save = CheckpointSaver.save

    def flip_and_save(
        self: CheckpointSaver, step: int, shards: list[LocalShard], **options: Any
    ) -> Path:
        if self._comm.rank == 1:
            shards[-1].tensor.view(-1).view(torch.int32)[0] ^= 1 << 7
        return save(self, step, shards, **options)

    monkeypatch.setattr(CheckpointSaver, "save", flip_and_save)
    workload = tiny_jobs.build_workload(data, steps=4, check_every=1)
    checkpoint = replace(workload.checkpoint, every_steps=2, mode=mode)
    plan = tiny_jobs.build_plan(replace(workload, checkpoint=checkpoint), "ep2,mbs1", world_size=2)
    assert train(plan, tmp_path) is ExitCode.RANK_FAILED
    (incident,) = read_incidents(tmp_path)
    assert (incident.kind, incident.rank, incident.step) == (IncidentKind.CORRUPTION, 1, 2)
    assert not list((tmp_path / "checkpoints").glob("step-*"))
