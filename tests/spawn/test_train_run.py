"""A run as a user lives it: stopped, resumed exactly, extended, killed, damaged, refused."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tiny_jobs
from moewright.codec import STEPS_FILE, read_json, write_json
from moewright.engine.checkpoint import find_latest, read_index
from moewright.engine.data import corpus_rows
from moewright.engine.data.indexed import IndexedDataset, open_indexed
from moewright.engine.data.sampler import Int64s, Sampler, read_samples, sample_count
from moewright.engine.model import transformer
from moewright.engine.model.layers import compute_token_loss
from moewright.engine.model.micro_batch import MicroBatch
from moewright.engine.optim.distributed_optimizer import DistributedOptimizer
from moewright.engine.run import corpus_loader
from moewright.engine.run.train import train
from moewright.engine.run.worker import ExitCode
from moewright.engine.runtime import Runtime
from moewright.rules.shapes.parameters import count_parameters
from moewright.spec.errors import BadInput
from moewright.spec.hardware import DeviceKind
from moewright.spec.plan import Plan
from moewright.spec.workload import DataSpec, SaveMode
from tiny_jobs import read_state, read_steps

pytestmark = pytest.mark.spawn


def make_plan(data: DataSpec, *, steps: int = 6, world_size: int = 2) -> Plan:
    return tiny_jobs.build_plan(
        tiny_jobs.build_workload(data, steps=steps), "ep2,mbs2", world_size=world_size
    )


def losses(run_dir: Path) -> list[tuple[int, float, float]]:
    return [(int(step["step"]), step["loss"], step["grad_norm"]) for step in read_steps(run_dir)]


def start_job(plan: Plan, run_dir: Path, log: Path) -> multiprocessing.Process:
    """Start the job in a process of its own, as the command line would; output goes to `log`."""

    def run_job() -> None:
        with log.open("w") as stream:
            sys.stdout = sys.stderr = stream
            code = train(plan, run_dir)
            stream.flush()
            os._exit(code)

    process = multiprocessing.get_context("fork").Process(target=run_job)
    process.start()
    return process


def wait_for_step(run_dir: Path, step: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with suppress(FileNotFoundError, json.JSONDecodeError):
            if len(read_steps(run_dir)) >= step:
                return
        time.sleep(0.02)
    raise AssertionError(f"step {step} was not reached")


def child_processes(pid: int) -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == pid and fields[0] != "Z":
                    yield int(entry.name)


@pytest.fixture(scope="module")
def uninterrupted(data: DataSpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("uninterrupted")
    assert train(make_plan(data, steps=40), run_dir) is ExitCode.DONE
    return run_dir


def test_sigterm_saves_and_resume_is_exact(
    data: DataSpec, uninterrupted: Path, tmp_path: Path
) -> None:
    plan = make_plan(data, steps=40)
    process = start_job(plan, tmp_path, tmp_path.with_suffix(".log"))
    wait_for_step(tmp_path, 5)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGTERM)
    process.join(30)
    assert process.exitcode == ExitCode.STOPPED
    done = len(read_steps(tmp_path))
    assert 5 <= done < 40
    moved = replace(plan, model=replace(plan.model, name="/of/a/folder/that/moved"))
    assert train(moved, tmp_path) is ExitCode.DONE
    assert losses(tmp_path) == losses(uninterrupted)
    expected = read_state(uninterrupted, 40)
    actual = read_state(tmp_path, 40)
    assert all(torch.equal(expected[name], actual[name]) for name in expected)


def test_a_power_loss_takes_no_record_of_a_step_that_a_checkpoint_holds(
    data: DataSpec,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """What a disk holds for certain is what was synced: the lines at each commit are kept aside."""
    synced = tmp_path / "synced"
    commits = tmp_path / "commits"
    run_dir = tmp_path / "run"

    def fsync(handle: int, sync: Callable[[int], None] = os.fsync) -> None:
        sync(handle)
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        if path.name == STEPS_FILE:
            shutil.copy(path, synced)
        if path.name == "checkpoints" and (newest := find_latest(path)) is not None:
            with commits.open("a") as file:
                file.write(f"{newest.name} {synced.read_text().count('lr')}\n")

    plan = make_plan(data, steps=6)
    spec = replace(plan.workload.checkpoint, every_steps=2, mode=SaveMode.ASYNC)
    plan = replace(plan, workload=replace(plan.workload, checkpoint=spec))
    with monkeypatch.context() as patches:
        patches.setattr(os, "fsync", fsync)
        assert train(plan, run_dir) is ExitCode.DONE
    certain = [line.split() for line in commits.read_text().splitlines()]
    assert [name for name, _ in certain] == [f"step-{step:08d}" for step in (2, 4, 6)]
    assert all(int(count) >= step for (_, count), step in zip(certain, (2, 4, 6), strict=True))
    (run_dir / STEPS_FILE).write_text("")  # a disk that had lied
    assert train(plan, run_dir, extend=True) is ExitCode.DONE
    assert "has no record of steps 1-6, which the checkpoint holds" in capfd.readouterr().err


def test_any_number_of_signals_at_any_moment_end_the_program_with_one_code(
    data: DataSpec, tmp_path: Path
) -> None:
    plan_path = tmp_path / "plan.json"
    write_json(plan_path, make_plan(data, steps=400))
    run_dir = tmp_path / "run"
    command = [sys.executable, "-m", "moewright", "train", plan_path, "--out", run_dir]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        wait_for_step(run_dir, 3)
        while process.poll() is None:
            process.terminate()
            time.sleep(0.002)
    assert process.returncode == ExitCode.STOPPED
    newest = find_latest(run_dir / "checkpoints")
    assert newest is not None
    assert read_steps(run_dir)[-1]["step"] == read_index(newest).step


@pytest.mark.core
def test_a_killed_rank_ends_the_job_and_resume_equals_uninterrupted(
    data: DataSpec, uninterrupted: Path, tmp_path: Path
) -> None:
    plan = make_plan(data, steps=40)
    workload = replace(plan.workload, checkpoint=replace(plan.workload.checkpoint, every_steps=4))
    plan = replace(plan, workload=workload)
    log = tmp_path.with_suffix(".log")
    process = start_job(plan, tmp_path, log)
    wait_for_step(tmp_path, 6)
    assert process.pid is not None
    ranks = sorted(child_processes(process.pid))
    killed_at = time.monotonic()
    os.kill(ranks[1], signal.SIGKILL)
    process.join(10)
    assert process.exitcode == ExitCode.RANK_FAILED
    assert time.monotonic() - killed_at < 5
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    text = log.read_text()
    assert "rank 1" in text
    assert "SIGKILL" in text
    assert "Traceback" not in text
    assert train(plan, tmp_path) is ExitCode.DONE
    assert losses(tmp_path) == losses(uninterrupted)


def test_sigterm_at_the_start_saves_after_the_step_at_hand(data: DataSpec, tmp_path: Path) -> None:
    plan = make_plan(data, steps=40)
    process = start_job(plan, tmp_path, tmp_path.with_suffix(".log"))
    deadline = time.monotonic() + 60
    assert process.pid is not None
    while len(list(child_processes(process.pid))) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGTERM)
    process.join(60)
    assert process.exitcode == ExitCode.STOPPED
    last = find_latest(tmp_path / "checkpoints")
    assert last is not None
    # A step takes milliseconds: several may pass before the launcher has passed the signal on.
    assert 1 <= int(last.name.removeprefix("step-")) < 20


@pytest.mark.thorough
def test_the_order_of_data_goes_on_over_epochs_in_any_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ends of epochs lie inside steps, and three sessions have different layouts.

    Every sample comes once an epoch, in the same order.
    """
    data = tiny_jobs.write_corpus(tmp_path / "corpus", documents=8, words=60)
    samples = sample_count(open_indexed(Path(data.train)), 32)
    assert 24 < samples < 32
    micro_batch = corpus_loader.CorpusLoader.micro_batch
    reading = threading.local()  # a step is read while another thread trains

    def note_position(
        loader: corpus_loader.CorpusLoader, runtime: Runtime, step: int, number: int
    ) -> MicroBatch:
        # Rank, step, DP rank and micro-batch of the training batch being read.
        reading.position = None
        if loader.follows_rampup:
            reading.position = runtime.mesh.rank, step, runtime.mesh.coordinate("dp"), number
        return micro_batch(loader, runtime, step, number)

    def note_samples(dataset: IndexedDataset, ids: Int64s, **more: int) -> Int64s:
        if reading.position is not None:
            rank, *position = reading.position
            with (tmp_path / f"rank{rank}").open("a") as file:
                file.write(json.dumps([*position, ids.tolist()]) + "\n")
        return read_samples(dataset, ids, **more)

    monkeypatch.setattr(corpus_loader.CorpusLoader, "micro_batch", note_position)
    monkeypatch.setattr(corpus_rows, "read_samples", note_samples)
    for steps, layout in ((3, "ep2,mbs2"), (5, "cp2,mbs4"), (9, "tp2,ep2,mbs1")):
        workload = tiny_jobs.build_workload(data, steps=steps)
        workload = replace(workload, optimizer=replace(workload.optimizer, decay_steps=9))
        assert (
            train(tiny_jobs.build_plan(workload, layout, world_size=2), tmp_path / "run")
            is ExitCode.DONE
        )
    lines = [
        json.loads(line)
        for rank in (0, 1)
        for line in (tmp_path / f"rank{rank}").read_text().splitlines()
    ]
    samples_read = {(step, dp_rank, number): ids for step, dp_rank, number, ids in lines}
    # Ranks that share rows read the same samples.
    assert all(samples_read[step, dp_rank, number] == ids for step, dp_rank, number, ids in lines)
    stream = [sample for key in sorted(samples_read) for sample in samples_read[key]]
    assert len(stream) == 9 * 8
    for first in (0, samples):
        assert sorted(stream[first : first + samples]) == list(range(samples))
    assert (
        stream == Sampler(samples=samples, seed=workload.seed).sample_ids(0, len(stream)).tolist()
    )
    assert [line["tokens"] for line in read_steps(tmp_path / "run")] == 9 * [8 * 32]


def test_extend_goes_on_by_another_recipe(data: DataSpec, tmp_path: Path) -> None:
    plan = make_plan(data, steps=3)
    assert train(plan, tmp_path) is ExitCode.DONE
    assert train(plan, tmp_path) is ExitCode.DONE  # nothing left to do
    assert [step for step, _, _ in losses(tmp_path)] == [1, 2, 3]
    assert train(plan, tmp_path, extend=True) is ExitCode.DONE
    assert [step for step, _, _ in losses(tmp_path)] == [1, 2, 3, 4, 5, 6]
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [line["first_step"] for line in lines if line["kind"] == "session"] == [1, 4]
    assert [line["step"] for line in lines if line["kind"] == "eval"] == [3, 6]


def test_a_gradient_that_is_not_finite_skips_the_step_on_every_rank(
    data: DataSpec,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The last rank's gradient turns NaN on the second step.

    No rank updates, and training goes on.
    """
    reduce = DistributedOptimizer.reduce_gradients
    begin = DistributedOptimizer.begin_step
    begun = {"steps": 0}

    def begin_and_count(self: DistributedOptimizer, *arguments: int) -> None:
        begun["steps"] += 1
        begin(self, *arguments)

    def reduce_with_nan(self: DistributedOptimizer) -> float:
        if begun["steps"] == 2 and self._runtime.mesh.rank == 1:
            self.buckets[-1].grads[0] = float("nan")
        return reduce(self)

    monkeypatch.setattr(DistributedOptimizer, "begin_step", begin_and_count)
    monkeypatch.setattr(DistributedOptimizer, "reduce_gradients", reduce_with_nan)
    plan = make_plan(data, steps=3)
    plan = replace(
        plan,
        workload=replace(
            plan.workload, checkpoint=replace(plan.workload.checkpoint, every_steps=1, keep=3)
        ),
    )
    assert train(plan, tmp_path) is ExitCode.DONE
    assert [step["skipped"] for step in read_steps(tmp_path)] == [False, True, False]
    before, after, last = (read_state(tmp_path, step) for step in (1, 2, 3))
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert int(last["optim/updates"]) == 2
    assert re.search(
        "step 2 is skipped: gradient of [a-z0-9_.]+ of rank 1 is not finite\n",
        capfd.readouterr().err,
    )


@pytest.mark.parametrize("spoiled", ["weight", "loss"])
def test_a_weight_or_loss_that_is_not_finite_ends_the_job_and_is_named(
    spoiled: str,
    data: DataSpec,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The last rank goes wrong in the third step, or with the weights after the second.

    What was saved before stays the last checkpoint.
    """
    begin = DistributedOptimizer.begin_step
    begun = {"steps": 0}

    def begin_with_nan(self: DistributedOptimizer, *arguments: int) -> None:
        begun["steps"] += 1
        if begun["steps"] == 2 and self._runtime.mesh.rank == 1:
            # An expert of this rank alone: all ranks get what they share.
            segment = next(
                segment
                for bucket in self.buckets
                for segment in bucket.segments
                if ".experts." in segment.owned[0].parameter.name
            )
            segment.master[segment.owned[0].shard_slice][0] = float("nan")
        begin(self, *arguments)

    def begin_and_count(self: DistributedOptimizer, *arguments: int) -> None:
        begun["steps"] += 1
        begin(self, *arguments)

    def infinite_loss(runtime: Runtime, *arguments: object) -> tuple[torch.Tensor, torch.Tensor]:
        nll, logits = token_loss(runtime, *arguments)
        if begun["steps"] == 3 and runtime.mesh.rank == 1:
            nll = nll * float("inf")
        return nll, logits

    token_loss = compute_token_loss
    if spoiled == "loss":
        monkeypatch.setattr(transformer, "compute_token_loss", infinite_loss)
        monkeypatch.setattr(DistributedOptimizer, "begin_step", begin_and_count)
    else:
        monkeypatch.setattr(DistributedOptimizer, "begin_step", begin_with_nan)
    plan = make_plan(data)
    plan = replace(
        plan,
        workload=replace(
            plan.workload, checkpoint=replace(plan.workload.checkpoint, every_steps=1)
        ),
    )
    began_s = time.monotonic()
    assert train(plan, tmp_path) is ExitCode.RANK_FAILED
    assert time.monotonic() - began_s < 30
    message = capfd.readouterr().err.splitlines()[0]
    expected = "rank 1 failed at step 3: FloatingPointError: the loss is not finite;"
    last_saved = "step-00000002"
    if spoiled == "weight":
        expected = (  # whichever rank is first to say it
            "rank [01] failed at step 2: FloatingPointError: "
            "layers.[0-9].moe.experts.[a-z_]+.weight "
            "of rank 1 is not finite: the checkpoint of step 2 is not committed"
        )
        last_saved = "step-00000001"
    assert re.match(expected, message), message
    last = find_latest(tmp_path / "checkpoints")
    assert last is not None
    assert last.name == last_saved


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"seed": 99}, "train.seed"),
        ({"global_batch": 16}, "train.global_batch"),
    ],
)
def test_a_checkpoint_of_another_job_is_refused(
    change: dict[str, int], field: str, data: DataSpec, tmp_path: Path
) -> None:
    plan = make_plan(data, steps=2)
    assert train(plan, tmp_path) is ExitCode.DONE
    with pytest.raises(BadInput) as refused:
        train(replace(plan, workload=replace(plan.workload, steps=4, **change)), tmp_path)
    assert field in str(refused.value)
    assert read_json(Plan, tmp_path / "plan.json") == plan  # the plan is still that of the run


def test_another_layout_leaves_no_ledger_of_the_last_one(data: DataSpec, tmp_path: Path) -> None:
    assert train(make_plan(data, steps=2), tmp_path) is ExitCode.DONE
    assert len(list((tmp_path / "ledger").glob("rank*.json"))) == 2
    single_rank = tiny_jobs.build_plan(
        tiny_jobs.build_workload(data, steps=2), "mbs2", world_size=1
    )
    assert train(single_rank, tmp_path, extend=True) is ExitCode.DONE
    assert [path.name for path in (tmp_path / "ledger").glob("rank*.json")] == ["rank00000.json"]
    assert read_json(Plan, tmp_path / "plan.json") == single_rank


@pytest.mark.parametrize(
    ("line", "message"),
    [("[]", "is not a record"), ('{"kind": "x"}', "is not a record"), ("{", "is not JSON")],
)
def test_a_damaged_record_is_refused_before_the_first_step(
    line: str, message: str, data: DataSpec, tmp_path: Path
) -> None:
    (tmp_path / "steps.jsonl").write_text(f"{line}\n")
    with pytest.raises(BadInput) as refused:
        train(make_plan(data, steps=2), tmp_path)
    assert f"{tmp_path}/steps.jsonl:1: {message}" in str(refused.value)
    assert not (tmp_path / "checkpoints").exists()


def test_a_foreign_pickle_is_refused_before_anything_is_written(
    data: DataSpec, tmp_path: Path
) -> None:
    (tmp_path / "checkpoints" / "step-00000002").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-00000002" / ".metadata").write_bytes(
        b"cos\nsystem\n(S'exit 1'\ntR."
    )
    with pytest.raises(BadInput) as refused:
        train(make_plan(data, steps=4), tmp_path)
    assert "is not a checkpoint: it has no index.json but .metadata" in str(refused.value)
    assert not (tmp_path / "plan.json").exists()


def test_a_disk_without_room_for_a_checkpoint_is_refused_before_anything_is_written(
    data: DataSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed_bytes = 12 * count_parameters(tiny_jobs.MODEL).total
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed_bytes - 1))
    with pytest.raises(BadInput) as refused:
        train(make_plan(data), tmp_path / "deep" / "run")
    assert f"({needed_bytes} bytes), {needed_bytes - 1} bytes are free" in str(refused.value)
    assert not (tmp_path / "deep").exists()


def test_a_plan_for_gpus_is_refused_where_there_are_too_few(
    data: DataSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(data)
    device = replace(plan.hardware.device, kind=DeviceKind.CUDA)
    plan = replace(plan, hardware=replace(plan.hardware, name="2x H100", device=device))
    for devices, message in (
        (0, "train.hardware=2x H100: needs 2 CUDA devices"),
        (1, "nearest legal value: 1"),
    ):
        monkeypatch.setattr(torch.cuda, "device_count", lambda devices=devices: devices)
        with pytest.raises(BadInput) as refused:
            train(plan, tmp_path / "run")
        assert message in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_what_the_engine_cannot_run_is_refused_before_anything_starts(
    data: DataSpec, tmp_path: Path
) -> None:
    layout = "ep2,rank_capacity=2,graphs=moe_router+moe_preprocess"
    plan = tiny_jobs.build_plan(tiny_jobs.build_workload(data), layout, world_size=2)
    with pytest.raises(BadInput) as refused:
        train(plan, tmp_path / "run")
    assert "layout.graphs=moe_preprocess+moe_router" in str(refused.value)
    assert not (tmp_path / "run").exists()
