"""What a run meets from outside while it goes on.

That is a signal at a bad time, a reader who is gone, a clock that jumps, a spike in the loss, or
ranks of another plan.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_jobs
from moewright.engine.checkpoint import Coordinator, find_latest
from moewright.engine.model import transformer
from moewright.engine.model.layers import compute_token_loss
from moewright.engine.optim.distributed_optimizer import DistributedOptimizer
from moewright.engine.run import train as train_module
from moewright.engine.run import training_loop
from moewright.engine.run.rank_checks import refuse_different_ranks
from moewright.engine.run.train import train
from moewright.engine.run.worker import ExitCode
from moewright.engine.runtime import Runtime
from moewright.spec.errors import BadInput
from moewright.spec.plan import Plan
from moewright.spec.workload import DataSpec
from tiny_jobs import read_steps

pytestmark = pytest.mark.spawn


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataSpec:
    return tiny_jobs.write_corpus(tmp_path_factory.mktemp("corpus"))


def make_plan(data: DataSpec, *, steps: int, **changes: object) -> Plan:
    return tiny_jobs.build_plan(
        tiny_jobs.build_workload(data, steps=steps, **changes), "ep2,mbs2", world_size=2
    )


@pytest.mark.parametrize(("during", "saved_at"), [("restore", 1), ("compute_heldout_loss", 3)])
def test_a_stop_signal_while_a_rank_does_not_train_saves_after_the_next_step(
    during: str, saved_at: int, data: DataSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Signal rank 1 alone, while it loads or in the evaluation after step 2."""
    original: Callable[..., Any] = getattr(training_loop, during)

    def interrupted(first: Any, *more: Any, **options: Any) -> Any:
        if first.runtime.mesh.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(first, *more, **options)

    monkeypatch.setattr(training_loop, during, interrupted)
    assert train(make_plan(data, steps=8, eval_every_steps=2), tmp_path) is ExitCode.STOPPED
    assert [step["step"] for step in read_steps(tmp_path)] == list(range(1, saved_at + 1))
    last = find_latest(tmp_path / "checkpoints")
    assert last is not None
    assert last.name == f"step-{saved_at:08d}"


def test_a_stop_signal_before_there_are_ranks_leaves_nothing(
    data: DataSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is nothing to save yet: the process ends by the signal."""
    monkeypatch.setattr(
        train_module, "require_space", lambda *_: os.kill(os.getpid(), signal.SIGTERM)
    )
    process = multiprocessing.get_context("fork").Process(
        target=train, args=(make_plan(data, steps=3), tmp_path / "run")
    )
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGTERM
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("output", ["a pipe that nobody reads", "a full disk"])
def test_lines_that_cannot_be_written_do_not_end_a_run(
    output: str, data: DataSpec, tmp_path: Path
) -> None:
    def run_job() -> None:
        if output == "a full disk":
            write_end = os.open("/dev/full", os.O_WRONLY)
        else:
            reader, write_end = os.pipe()
            os.close(reader)
        sys.stdout = os.fdopen(write_end, "w", buffering=1)
        os._exit(train(make_plan(data, steps=3), tmp_path))

    process = multiprocessing.get_context("fork").Process(target=run_job)
    process.start()
    process.join(120)
    assert process.exitcode == ExitCode.DONE
    assert len(read_steps(tmp_path)) == 3


def test_a_clock_that_jumps_changes_nothing(
    data: DataSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock is a day back or forth whenever someone looks."""
    real_time = time.time
    looks = iter(range(10**9))
    monkeypatch.setattr(time, "time", lambda: real_time() + 86400.0 * (-1) ** next(looks))
    assert train(make_plan(data, steps=3), tmp_path) is ExitCode.DONE
    assert all(0 < step["step_s"] < 3600 for step in read_steps(tmp_path))


def test_a_spike_in_the_loss_is_clipped_and_logged(
    data: DataSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Multiply the loss of step 2 by a million.

    The update is no larger than any other, and the next step goes on.
    """
    begin = DistributedOptimizer.begin_step
    token_loss = compute_token_loss
    begun = {"steps": 0}

    def begin_and_count(self: DistributedOptimizer, *more: int) -> None:
        begun["steps"] += 1
        begin(self, *more)

    def spike_loss(runtime: Runtime, *more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        nll, logits = token_loss(runtime, *more)
        if begun["steps"] == 2:
            nll = nll * 1e6
        return nll, logits

    monkeypatch.setattr(DistributedOptimizer, "begin_step", begin_and_count)
    monkeypatch.setattr(transformer, "compute_token_loss", spike_loss)
    plan = make_plan(data, steps=3)
    clipped = replace(plan.workload.optimizer, clip_norm=1.0)
    assert (
        train(replace(plan, workload=replace(plan.workload, optimizer=clipped)), tmp_path)
        is ExitCode.DONE
    )
    first, spike, after = read_steps(tmp_path)
    assert not any(step["skipped"] for step in (first, spike, after))
    assert spike["loss"] > 1e5 * first["loss"]
    assert spike["grad_norm"] > 1e5 * first["grad_norm"]
    assert after["loss"] < first["loss"]  # learning goes on


@pytest.mark.parametrize("field", ["plan", "moewright", "torch", "NVIDIA_TF32_OVERRIDE"])
def test_ranks_of_another_plan_code_or_setting_are_refused(field: str, data: DataSpec) -> None:
    """Rank 1 tells what differs; rank 0 would say the same."""
    plan = make_plan(data, steps=3)

    def gather(own: dict[str, str]) -> list[dict[str, str]]:
        return [own | {field: "another"}, own]

    comm = Coordinator(rank=1, world_size=2, gather=gather)
    with pytest.raises(
        BadInput, match=f"{field}: rank 0 has another, rank 1 has .*all ranks need the same"
    ):
        refuse_different_ranks(plan, comm)
