"""Scalars of a run for those who follow it elsewhere: TensorBoard, Weights & Biases, MLflow.

One writer makes scalars of the records, and hands them to every tracker alike.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from moewright.codec import read_text, to_data, write_text
from moewright.spec.extensions import ExtensionPoint, load_extension
from moewright.spec.plan import Plan
from moewright.spec.run import (
    CopyRecord,
    DeviceSample,
    EvalRecord,
    LayerLoad,
    PairRewards,
    RankTiming,
    Session,
    StepRecord,
)
from moewright.spec.workload import Tracker

# Where a run folder keeps the id that its run has with a tracker.
_ID_FILE = "tracker_{}.txt"


class ScalarTracker(Protocol):
    """A place that takes scalars by name and step."""

    def log(self, scalars: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None: ...


class ScalarWriter:
    """A writer of records that makes scalars of them, for one tracker or several.

    A tracker that fails is told of once and left alone: it must not end a run.
    """

    def __init__(self, trackers: Mapping[str, ScalarTracker]) -> None:
        self._trackers = dict(trackers)

    def write_session(self, record: Session) -> None:
        pass

    def write_step(self, record: StepRecord) -> None:
        scalars = {
            "train/loss": record.loss,
            "train/aux_loss": record.aux_loss,
            "train/lr": record.lr,
            "train/grad_norm": record.grad_norm,
            "speed/tokens_per_s_per_rank": record.tokens_per_s_per_rank,
            "speed/mfu": record.mfu,
        }
        if record.rewards.pairs:
            scalars |= _reward_scalars(record.rewards)
        if record.device is not None:
            scalars |= _device_scalars(0, record.device)
        for load in record.loads:
            for name, value in _load_scalars(load):
                scalars[f"moe/{name}_layer_{load.layer}"] = value
        self._log(scalars, record.step)

    def write_evaluation(self, record: EvalRecord) -> None:
        scalars = {"eval/heldout_loss": record.heldout_loss}
        if record.rewards.pairs:
            scalars |= {f"eval/{name}": v for name, v in _reward_scalars(record.rewards).items()}
        self._log(scalars, record.step)

    def write_copy(self, record: CopyRecord) -> None:
        """Do nothing: each step has the age of the newest copy."""

    def sync(self) -> None:
        """Do nothing: trackers write when they like, and steps.jsonl has all of it."""

    def write_timings(self, step: int, timings: Sequence[RankTiming]) -> None:
        """Log the use of every rank's device over the session; each step has that of rank 0."""
        scalars: dict[str, float] = {}
        for timing in timings:
            if timing.device is not None:
                scalars |= _device_scalars(timing.rank, timing.device)
        if scalars:
            self._log(scalars, step)

    def close(self) -> None:
        # A list, because one that fails is taken out.
        for name, tracker in list(self._trackers.items()):
            try:
                tracker.close()
            except Exception as error:
                self._leave(name, error)

    def _log(self, scalars: Mapping[str, float], step: int) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                tracker.log(scalars, step)
            except Exception as error:  # whatever a service of somebody else raises
                self._leave(name, error)

    def _leave(self, name: str, error: Exception) -> None:
        del self._trackers[name]
        print(f"{name} takes no more of this run: {error}", file=sys.stderr)


def _device_scalars(rank: int, sample: DeviceSample) -> dict[str, float]:
    return {
        f"device/utilisation_rank_{rank}": sample.resident_share,
        f"device/used_bytes_rank_{rank}": float(sample.used_bytes),
    }


def _reward_scalars(rewards: PairRewards) -> dict[str, float]:
    return {"rewards/accuracies": rewards.accuracy, "rewards/margins": rewards.margin}


def open_trackers(plan: Plan, run_dir: Path, *, first_step: int) -> ScalarWriter:
    """Open TensorBoard, where it is installed, and the trackers that a plan names."""
    trackers: dict[str, ScalarTracker] = {}
    with suppress(ImportError):  # TensorBoard is optional
        trackers["tensorboard"] = TensorBoardTracker(run_dir, first_step=first_step)
    config = {
        "model": plan.model.name,
        "layout": to_data(plan.layout),
        "workload": to_data(plan.workload),
        "hardware": plan.hardware.device.name,
    }
    for kind in plan.workload.trackers:
        try:
            trackers[kind] = _find_tracker(kind)(run_dir, config)
        except Exception as error:  # no network, no login: whatever it is, the run goes on
            print(f"{kind} does not follow this run: {error}", file=sys.stderr)
    return ScalarWriter(trackers)


def _find_tracker(name: str) -> Callable[[Path, Mapping[str, Any]], ScalarTracker]:
    """Return what opens a tracker for a run folder and its configuration."""
    if name == Tracker.WANDB:
        return WandbTracker
    if name == Tracker.MLFLOW:
        return MlflowTracker
    opener: Callable[[Path, Mapping[str, Any]], ScalarTracker]
    opener = load_extension(ExtensionPoint.TRACKERS, name)
    return opener


class TensorBoardTracker:
    """A tracker that writes a TensorBoard event file into the run folder.

    It writes in line: the thread of TensorBoard's own writer dies of a full disk with a traceback.
    """

    def __init__(self, run_dir: Path, *, first_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder = run_dir / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        host = socket.gethostname()
        path = folder / f"events.out.tfevents.{time.time_ns()}.{host}.{os.getpid()}"
        self._records = RecordWriter(path.open("wb"))
        self._write(Event(file_version="brain.Event:2"))
        # A start hides what an interrupted session logged past its last checkpoint.
        self._write(Event(step=first_step, session_log=SessionLog(status=SessionLog.START)))

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._write(Event(step=step, summary=Summary(value=values)))

    def close(self) -> None:
        self._records.close()

    def _write(self, event: Any) -> None:
        event.wall_time = time.time()
        self._records.write(event.SerializeToString())
        self._records.flush()


class WandbTracker:
    """A tracker of Weights & Biases; project, login and WANDB_MODE=offline are its environment's.

    A run folder is one run there. Its steps are a metric of their own, for those after the last
    checkpoint come once more when a run goes on.
    """

    def __init__(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        import wandb

        stored_id = _read_id(run_dir, Tracker.WANDB)
        self._run = wandb.init(
            dir=str(run_dir),
            name=run_dir.resolve().name,
            id=stored_id or None,
            resume="allow",
            config=dict(config),
        )
        _write_id(run_dir, Tracker.WANDB, str(self._run.id))
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        self._run.log({**scalars, "step": step})

    def close(self) -> None:
        self._run.finish()


class MlflowTracker:
    """A tracker of MLflow; where it keeps runs is its environment's, as MLFLOW_TRACKING_URI.

    A run folder is one run there.
    """

    def __init__(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        import mlflow

        self._mlflow = mlflow
        stored_id = _read_id(run_dir, Tracker.MLFLOW)
        if stored_id:
            run = mlflow.start_run(run_id=stored_id)
        else:
            run = mlflow.start_run(run_name=run_dir.resolve().name)
            mlflow.log_params(dict(_flatten(config)))
        _write_id(run_dir, Tracker.MLFLOW, str(run.info.run_id))

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        self._mlflow.log_metrics(dict(scalars), step=step)

    def close(self) -> None:
        self._mlflow.end_run()


def _read_id(run_dir: Path, kind: Tracker) -> str:
    path = run_dir / _ID_FILE.format(kind)
    return read_text(path).strip() if path.is_file() else ""


def _write_id(run_dir: Path, kind: Tracker, run_id: str) -> None:
    write_text(run_dir / _ID_FILE.format(kind), f"{run_id}\n")


def _flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the values of nested tables by their joined names, as text of at most 500 letters."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", str(value)[:500]


def _load_scalars(load: LayerLoad) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a layer, and the tokens of each EP rank over the mean."""
    counts: Sequence[int] = load.counts
    yield from (
        ("load_max_over_mean", load.max_over_mean),
        ("load_p95_over_mean", load.p95_over_mean),
        ("load_mean", sum(counts) / len(counts)),
        ("dead_experts", load.dead_experts),
        ("load_entropy", load.entropy),
        ("dropped_share", load.dropped_share),
        ("aux_loss", load.aux_loss),
        ("seq_aux_loss", load.seq_aux_loss),
        ("global_aux_loss", load.global_aux_loss),
        ("z_loss", load.z_loss),
    )
    # Nothing may have been routed.
    rank_mean = sum(counts) / len(load.rank_counts) or 1.0
    yield from (
        (f"load_over_mean_rank_{rank}", count / rank_mean)
        for rank, count in enumerate(load.rank_counts)
    )
