"""Trackers: TensorBoard, Weights & Biases and MLflow take the same scalars through one writer."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tiny_jobs
from moewright.engine.observe.trackers import open_trackers
from moewright.rules.limits.engine_limits import unsupported_model
from moewright.spec.extensions import list_extensions
from moewright.spec.run import DeviceSample, EvalRecord, HostTime, RankTiming, StepRecord
from moewright.spec.workload import DataSpec, Tracker

STEP = StepRecord(
    step=3,
    loss=2.5,
    aux_loss=0.1,
    lr=1e-3,
    grad_norm=0.7,
    tokens=256,
    step_s=0.5,
    tokens_per_s_per_rank=512.0,
    tflops_per_rank=0.01,
    mfu=0.2,
    hfu=0.2,
    skipped=False,
    phases=(),
    loads=(),
    device=DeviceSample(resident_share=0.75, used_bytes=1 << 30, peak_allocated_bytes=0),
)
TIMINGS = tuple(
    RankTiming(rank=rank, steps=2, phases=(), waits=(), host=HostTime(), device=STEP.device)
    for rank in (0, 1)
)
EVALUATION = EvalRecord(step=3, heldout_loss=2.4, unigram_entropy=4.0, tokens=64)


def write_records(run_dir: Path, *trackers: str) -> None:
    run_dir.mkdir(exist_ok=True)
    workload = replace(tiny_jobs.build_workload(DataSpec()), trackers=trackers)
    plan = tiny_jobs.build_plan(workload, "", world_size=1)
    writer = open_trackers(plan, run_dir, first_step=1)
    writer.write_step(STEP)
    writer.write_evaluation(EVALUATION)
    writer.write_timings(3, TIMINGS)
    writer.close()


def test_tensorboard_reads_what_is_written_and_hides_what_was_taken_back(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for _ in range(2):  # the second begins anew at step 1
        write_records(tmp_path / "run")
    files = tmp_path / "run" / "tensorboard"
    assert len(list(files.iterdir())) == 2
    events = accumulator.EventAccumulator(str(files))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(3, 2.5)]
    assert events.Scalars("eval/heldout_loss")[0].value == pytest.approx(2.4)
    assert events.Scalars("device/utilisation_rank_0")[0].value == pytest.approx(0.75)
    assert events.Scalars("device/used_bytes_rank_1")[0].value == 1 << 30


def test_a_full_disk_ends_tensorboard_in_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorboard")
    workload = tiny_jobs.build_workload(DataSpec())
    plan = tiny_jobs.build_plan(workload, "", world_size=1)
    writer = open_trackers(plan, tmp_path, first_step=1)
    (path,) = (tmp_path / "tensorboard").iterdir()
    with Path("/dev/full").open("wb") as full:
        writer._trackers["tensorboard"]._records._writer = full  # type: ignore[attr-defined]
        for _ in range(2):
            writer.write_step(STEP)
        writer.close()
        with suppress(OSError):
            full.close()
    (line,) = capfd.readouterr().err.splitlines()
    assert line == "tensorboard takes no more of this run: [Errno 28] No space left on device"
    assert path.stat().st_size > 0


class StandInWandb:
    """The part of wandb's public interface that a run uses, which remembers its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def init(self, **options: Any) -> Any:
        self.calls.append(("init", options))
        return SimpleNamespace(
            id=options["id"] or "made-here",
            define_metric=lambda *names, **more: self.calls.append(("metric", (names, more))),
            log=lambda scalars: self.calls.append(("log", scalars)),
            finish=lambda: self.calls.append(("finish", None)),
        )


class StandInMlflow:
    """The part of mlflow's public interface that a run uses."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def start_run(self, *, run_id: str = "", run_name: str = "") -> Any:
        self.calls.append(("start", run_id or run_name))
        return SimpleNamespace(info=SimpleNamespace(run_id="there"))

    def log_params(self, params: dict[str, str]) -> None:
        self.calls.append(("params", params))

    def log_metrics(self, scalars: dict[str, float], *, step: int) -> None:
        self.calls.append(("metrics", (scalars, step)))

    def end_run(self) -> None:
        self.calls.append(("end", None))


def test_wandb_takes_scalars_and_goes_on_with_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in = StandInWandb()
    monkeypatch.setitem(sys.modules, "wandb", stand_in)  # type: ignore[arg-type]
    write_records(tmp_path / "run", Tracker.WANDB)
    write_records(tmp_path / "run", Tracker.WANDB)
    inits = [options for name, options in stand_in.calls if name == "init"]
    assert [options["id"] for options in inits] == [None, "made-here"]
    assert inits[0]["name"] == "run"
    assert inits[0]["resume"] == "allow"
    assert inits[0]["config"]["workload"]["seq_len"] == 32
    logs = [scalars for name, scalars in stand_in.calls if name == "log"]
    assert logs[0]["train/loss"] == 2.5
    assert logs[0]["step"] == 3
    assert logs[1] == {"eval/heldout_loss": 2.4, "step": 3}
    assert [name for name, _ in stand_in.calls].count("finish") == 2


def test_mlflow_takes_scalars_and_the_job_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in = StandInMlflow()
    monkeypatch.setitem(sys.modules, "mlflow", stand_in)  # type: ignore[arg-type]
    write_records(tmp_path / "run", Tracker.MLFLOW)
    write_records(tmp_path / "run", Tracker.MLFLOW)
    names = [name for name, _ in stand_in.calls]
    logged = ["metrics"] * 3  # a step, an evaluation, the ranks' devices
    assert names == ["start", "params", *logged, "end", "start", *logged, "end"]
    assert stand_in.calls[6] == ("start", "there")
    scalars, step = stand_in.calls[2][1]
    assert (scalars["train/grad_norm"], step) == (0.7, 3)
    assert stand_in.calls[1][1]["workload.seq_len"] == "32"


def test_a_tracker_that_fails_is_told_of_once_and_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in = StandInWandb()
    monkeypatch.setitem(sys.modules, "wandb", stand_in)  # type: ignore[arg-type]
    broken = StandInMlflow()
    monkeypatch.setitem(sys.modules, "mlflow", broken)  # type: ignore[arg-type]
    monkeypatch.setattr(broken, "log_metrics", None)
    monkeypatch.setattr(stand_in, "init", None)
    write_records(tmp_path / "run", Tracker.WANDB, Tracker.MLFLOW)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "wandb does not follow this run",
        "mlflow takes no more of this run",
    ]


def test_a_tracker_that_is_not_installed_is_refused_before_a_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("moewright.rules.limits.engine_limits.find_spec", lambda _name: None)
    workload = replace(tiny_jobs.build_workload(DataSpec()), trackers=(Tracker.WANDB,))
    (reason,) = unsupported_model(tiny_jobs.MODEL, workload)
    assert (reason.field, reason.value) == ("train.trackers", "wandb")
    assert "pip install wandb" in reason.rule


def test_wandb_itself_keeps_a_run_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    write_records(tmp_path / "run", Tracker.WANDB)
    (folder,) = (tmp_path / "run" / "wandb").glob("offline-run-*")
    assert list(folder.glob("*.wandb"))
    assert (tmp_path / "run" / "tracker_wandb.txt").read_text().strip() in folder.name


def test_a_tracker_of_an_installed_package_follows_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    info = site / "acme-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[moewright.trackers]\nacme = acme_lines:open_lines\nbroken = acme_nowhere:nothing\n"
    )
    (site / "acme_lines.py").write_text(
        "class Lines:\n"
        "    def __init__(self, path):\n"
        "        self.path = path\n"
        "    def log(self, scalars, step):\n"
        "        self.path.write_text(f\"{step} {scalars.get('train/loss')}\")\n"
        "    def close(self):\n"
        "        pass\n"
        "def open_lines(run_dir, config):\n"
        "    assert config['layout']['tp'] == 1\n"
        "    return Lines(run_dir / 'acme.txt')\n"
    )
    monkeypatch.syspath_prepend(str(site))
    list_extensions.cache_clear()
    monkeypatch.setattr("sys.path", list(sys.path))
    try:
        workload = replace(tiny_jobs.build_workload(DataSpec()), trackers=("acme", "acne"))
        (refusal,) = unsupported_model(tiny_jobs.MODEL, workload)
        assert (refusal.value, refusal.nearest) == ("acne", "acme")
        write_records(tmp_path / "run", "acme", "broken")
        assert (tmp_path / "run" / "acme.txt").read_text().startswith("3 ")
    finally:
        list_extensions.cache_clear()
