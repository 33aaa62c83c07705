"""Updated weights travel while the next bucket is updated, and change no bit by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_jobs
from moewright.engine.optim import distributed_optimizer
from moewright.engine.optim.flat_buffers import FlatBucket
from moewright.engine.optim.optimizer_states import copy_to_state_device
from moewright.engine.run.train import train
from moewright.engine.run.worker import ExitCode
from moewright.spec.workload import DataSpec, OptimizerSpec

pytestmark = pytest.mark.spawn


def test_a_bucket_is_gathered_before_the_next_is_updated(
    data: DataSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    start_all_gather = FlatBucket.start_all_gather
    take_gradients = copy_to_state_device

    def start_and_note(bucket: FlatBucket) -> Any:
        events.append("gather")
        (tmp_path / "events").write_text(" ".join(events))
        return start_all_gather(bucket)

    def take_and_note(*args: Any) -> torch.Tensor:
        events.append("update")
        return take_gradients(*args)

    monkeypatch.setattr(FlatBucket, "start_all_gather", start_and_note)
    monkeypatch.setattr(distributed_optimizer, "copy_to_state_device", take_and_note)
    optimizer = OptimizerSpec(lr=1e-2, clip_norm=0.5, bucket_elements=20_000)
    workload = tiny_jobs.build_workload(data, steps=2, optimizer=optimizer)
    states = []
    orders = []
    for overlap in ("grad", "grad+param"):
        plan = tiny_jobs.build_plan(workload, f"overlap={overlap},mbs2", world_size=2)
        assert train(plan, tmp_path / overlap) is ExitCode.DONE
        states.append(tiny_jobs.read_state(tmp_path / overlap, 2))
        orders.append((tmp_path / "events").read_text().split())
    buckets = orders[0].count("gather") // 2
    assert buckets > 2
    assert orders[0] == 2 * (buckets * ["update"] + buckets * ["gather"])
    assert orders[1] == 2 * buckets * ["update", "gather"]
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name
