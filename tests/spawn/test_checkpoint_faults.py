"""What happens to a run whose saves are killed, fail or are damaged.

Training waits for its saves in some cases and goes on beside them in others.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from test_train_run import losses, start_job

import tiny_jobs
from moewright.engine.checkpoint import commit, find_latest, list_checkpoints
from moewright.engine.checkpoint.files import write_payload
from moewright.engine.run.train import train
from moewright.engine.run.worker import ExitCode
from moewright.spec.errors import BadInput
from moewright.spec.model import ModelSpec
from moewright.spec.plan import Plan
from moewright.spec.workload import DataSpec, Dtype, SaveMode
from tiny_jobs import read_checkpoint

pytestmark = pytest.mark.spawn

PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataSpec:
    return tiny_jobs.write_corpus(tmp_path_factory.mktemp("corpus"))


def make_plan(data: DataSpec, mode: SaveMode, *, steps: int = 12, keep: int = 2) -> Plan:
    """Build a plan of two ranks that save after every step."""
    workload = tiny_jobs.build_workload(data, steps=steps)
    workload = replace(
        workload, checkpoint=replace(workload.checkpoint, every_steps=1, keep=keep, mode=mode)
    )
    return tiny_jobs.build_plan(workload, "ep2,mbs2", world_size=2)


@pytest.fixture(scope="module")
def uninterrupted(data: DataSpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("uninterrupted")
    assert train(make_plan(data, SaveMode.SYNC, keep=12), run_dir) is ExitCode.DONE
    return run_dir


@pytest.mark.turns
def test_saves_beside_training_store_what_saves_in_line_do(
    data: DataSpec, uninterrupted: Path, tmp_path: Path
) -> None:
    """Compare all twelve checkpoints; meanwhile the next steps change the state under each save."""
    assert train(make_plan(data, SaveMode.ASYNC, keep=12), tmp_path) is ExitCode.DONE
    assert losses(tmp_path) == losses(uninterrupted)
    pairs = zip(
        list_checkpoints(tmp_path / "checkpoints"),
        list_checkpoints(uninterrupted / "checkpoints"),
        strict=True,
    )
    previous = None
    for path, expected_path in pairs:
        assert path.name == expected_path.name
        actual = read_checkpoint(path)
        expected = read_checkpoint(expected_path)
        assert all(actual[name].equal(expected[name]) for name in expected)
        assert previous is None or not actual["head.weight"].equal(previous)
        previous = actual["head.weight"]


def kill_and_resume(plan: Plan, run_dir: Path, kills: int, rng: random.Random) -> None:
    """Kill the whole job `kills` times and then let it finish.

    Each kill comes a moment after the job has committed something new.
    """
    checkpoints = run_dir / "checkpoints"
    done = -1
    for kill in range(kills):
        process = start_job(plan, run_dir, run_dir.with_suffix(f".{kill}.log"))
        deadline = time.monotonic() + PATIENCE_S
        while (
            latest_step(checkpoints) <= done and process.is_alive() and time.monotonic() < deadline
        ):
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.06))
        assert process.pid is not None
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)  # the ranks go with it
        process.join()
        newest_step = latest_step(checkpoints)
        assert newest_step > done
        newest = find_latest(checkpoints)
        assert newest is not None
        assert int(read_checkpoint(newest)["optim/updates"]) == newest_step  # every checksum holds
        done = newest_step
    assert train(plan, run_dir) is ExitCode.DONE
    assert not [path.name for path in checkpoints.iterdir() if path.name.startswith(".")]


def without_saves(plan: Plan) -> Plan:
    workload = plan.workload
    return replace(
        plan, workload=replace(workload, checkpoint=replace(workload.checkpoint, every_steps=0))
    )


def latest_step(checkpoints: Path) -> int:
    with suppress(FileNotFoundError):  # it was purged during the search
        newest = find_latest(checkpoints)
        return -1 if newest is None else int(newest.name.removeprefix("step-"))
    return -1


@pytest.mark.thorough
@pytest.mark.parametrize("mode", list(SaveMode))
def test_a_run_killed_in_the_midst_of_a_save_goes_on_from_the_last_good_one(
    mode: SaveMode, data: DataSpec, tmp_path: Path
) -> None:
    plan = make_plan(data, mode, steps=30)
    whole = tmp_path / "whole"
    assert train(without_saves(plan), whole) is ExitCode.DONE
    kill_and_resume(plan, tmp_path / "killed", 2, random.Random(5))
    assert losses(tmp_path / "killed") == losses(whole)


@pytest.mark.thorough
@pytest.mark.parametrize("mode", list(SaveMode))
def test_a_run_survives_fifty_kills(mode: SaveMode, data: DataSpec, tmp_path: Path) -> None:
    plan = make_plan(data, mode, steps=200)
    whole = tmp_path / "whole"
    assert train(without_saves(plan), whole) is ExitCode.DONE
    kill_and_resume(plan, tmp_path / "killed", 50, random.Random(6))
    assert losses(tmp_path / "killed") == losses(whole)


@pytest.mark.turns
@pytest.mark.parametrize("mode", list(SaveMode))
def test_a_full_disk_ends_the_run_with_its_cause_and_costs_one_save(
    mode: SaveMode,
    data: DataSpec,
    uninterrupted: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 1 has no room for its part of the fourth checkpoint, so that nobody commits it."""
    plan = make_plan(data, mode)
    write = write_payload

    def write_until_full(path: Path, *arguments: object) -> object:
        if "step-00000004" in str(path) and path.name == "rank-00001.safetensors":
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, *arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(commit, "write_payload", write_until_full)
        with pytest.raises(BadInput, match="checkpoints: no room: a checkpoint needs"):
            train(plan, tmp_path)
    assert 4 <= len(losses(tmp_path)) < 12
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == [
        "step-00000002",
        "step-00000003",
    ]
    assert train(plan, tmp_path) is ExitCode.DONE
    assert losses(tmp_path) == losses(uninterrupted)


def test_a_flipped_byte_is_refused_by_the_name_of_its_file(
    data: DataSpec, uninterrupted: Path, tmp_path: Path
) -> None:
    plan = make_plan(data, SaveMode.SYNC, steps=14)
    optimizer = replace(plan.workload.optimizer, decay_steps=12)
    plan = replace(plan, workload=replace(plan.workload, optimizer=optimizer))
    newest = find_latest(uninterrupted / "checkpoints")
    assert newest is not None
    files = sorted(path.name for path in newest.iterdir())
    assert files == ["index.json", "rank-00000.safetensors", "rank-00001.safetensors"]
    for number, name in enumerate(files):
        copy = tmp_path / str(number) / "checkpoints" / newest.name
        copy.mkdir(parents=True)
        for path in newest.iterdir():
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 1 if path.name == name else 0
            (copy / path.name).write_bytes(content)
        with pytest.raises(
            BadInput, match=f"{newest.name}/{name}: .*nearest legal value: an older checkpoint"
        ):
            train(plan, tmp_path / str(number))


def test_a_damaged_newest_checkpoint_is_left_for_the_one_before(
    data: DataSpec, uninterrupted: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plan = make_plan(data, SaveMode.SYNC, keep=12)
    for step in range(1, 12):
        name = f"checkpoints/step-{step:08d}"
        shutil.copytree(uninterrupted / name, tmp_path / name)
    payload = tmp_path / "checkpoints/step-00000011/rank-00001.safetensors"
    content = bytearray(payload.read_bytes())
    content[-1] ^= 1
    payload.write_bytes(content)
    offer = "nearest legal value: --fall-back, which goes on from step-00000010"
    with pytest.raises(BadInput, match=f"step-00000011/{payload.name}: is damaged.*{offer}"):
        train(plan, tmp_path)
    assert train(plan, tmp_path, falls_back=True) is ExitCode.DONE
    assert "going on from step-00000010" in capfd.readouterr().err
    assert losses(tmp_path) == losses(uninterrupted)[10:]
    assert (tmp_path / "checkpoints/.damaged-step-00000011").is_dir()


def with_wider_experts(model: ModelSpec) -> ModelSpec:
    assert model.moe is not None
    return replace(model, moe=replace(model.moe, ffn_size=32))


@pytest.mark.parametrize(
    ("field", "stored_value", "job_value"),
    [
        ("model.moe.ffn_size", "16", "32"),
        ("data.fingerprint", "", ""),
        ("train.precision", "fp32", "bf16"),
        ("train.decay_steps", "12", "20"),
        ("train.optimizer.warmup_steps", "2", "3"),
        ("train.seed", "1234", "99"),
    ],
)
def test_what_decides_the_next_update_must_be_the_same(
    field: str,
    stored_value: str,
    job_value: str,
    data: DataSpec,
    uninterrupted: Path,
    tmp_path: Path,
) -> None:
    plan = make_plan(data, SaveMode.SYNC)
    workload = plan.workload
    other_data = data
    if field == "data.fingerprint":
        other_data = tiny_jobs.write_corpus(tmp_path / "other", words=50)
    changed = {
        "model.moe.ffn_size": replace(plan, model=with_wider_experts(plan.model)),
        "data.fingerprint": replace(plan, workload=replace(workload, data=other_data)),
        "train.precision": replace(plan, workload=replace(workload, precision=Dtype.BF16)),
        "train.decay_steps": replace(plan, workload=replace(workload, steps=20)),
        "train.optimizer.warmup_steps": replace(
            plan, workload=replace(workload, optimizer=replace(workload.optimizer, warmup_steps=3))
        ),
        "train.seed": replace(plan, workload=replace(workload, seed=99)),
    }[field]
    run_dir = tmp_path / "run"
    (run_dir / "checkpoints").mkdir(parents=True)
    newest = find_latest(uninterrupted / "checkpoints")
    assert newest is not None
    (run_dir / "checkpoints" / newest.name).symlink_to(newest)
    with pytest.raises(
        BadInput,
        match=f"resume: {field} is {stored_value}.* in the checkpoint and {job_value}.* in the job",
    ):
        train(changed, run_dir)
