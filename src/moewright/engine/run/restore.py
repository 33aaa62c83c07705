"""What a run starts from: its own last checkpoint, the weights of another, or fresh ones."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moewright.codec import to_data, unsaid
from moewright.engine.checkpoint import (
    Coordinator,
    Piece,
    agree,
    checkpoint_at,
    latest,
    load,
    read_index,
    refuse_mismatch,
    resume_from,
)
from moewright.engine.hf.folder import HfReader, is_folder, open_folder
from moewright.engine.hf.names import read_box, table_of
from moewright.engine.run.step import Trainee
from moewright.spec.model import ModelSpec
from moewright.spec.plan import Plan
from moewright.spec.workload import Documents, Dtype, Workload


def identity_of(plan: Plan, data_fingerprint: str) -> Mapping[str, Any]:
    """What a checkpoint and the job that continues it must share: everything that decides the next
    update.

    The layout is not part of it: any layout continues any other.
    """
    work = plan.workload
    return {
        "model": to_data(plan.model),
        "train": {
            "seq_len": work.seq_len,
            "global_batch": work.global_batch,
            "seed": work.seed,
            "precision": to_data(work.precision),
            "decay_steps": work.optimizer.decay_steps or work.steps,
            "optimizer": {
                k: v
                for k, v in to_data(work.optimizer).items()
                if k not in ("decay_steps", "bucket_elements")
            },
            "loss": to_data(work.loss),
            "router": to_data(work.router),
            **({"scaling": to_data(work.scaling)} if work.precision is Dtype.FP16 else {}),
            **({"ramp": to_data(work.ramp)} if work.ramp.ramp_start else {}),
        },
        "data": {
            "fingerprint": data_fingerprint,
            **(
                {}
                if work.data.documents is Documents.JOINED
                else {"documents": to_data(work.data.documents)}
            ),
        },
    }


def _unsaid(model: ModelSpec, work: Workload) -> Mapping[str, Any]:
    """What a field of the identity means in a checkpoint older than the field."""
    parts = {"optimizer": work.optimizer, "loss": work.loss, "router": work.router}
    parts |= {"scaling": work.scaling, "ramp": work.ramp}
    return {
        "model": unsaid(model),
        "train": {name: unsaid(part) for name, part in parts.items()},
        "data": {"documents": to_data(Documents.JOINED)},
    }


def steps_done(plan: Plan, run_dir: Path, identity: Mapping[str, Any]) -> int:
    """Updates that the last checkpoint stands for, once it is known to be of this very job.

    Where there is none, the weights to start from are known to be of this model. Raises BadInput.
    """
    checkpoint, passed_over = resume_from(run_dir / "checkpoints")
    if checkpoint is None:
        if plan.workload.weights:
            _refuse_other_model(plan.model, Path(plan.workload.weights))
        return 0
    index = read_index(checkpoint)
    refuse_mismatch(index.extra, identity, unsaid=_unsaid(plan.model, plan.workload))
    for path in passed_over:
        print(
            f"{path} is not a committed checkpoint: going on from {checkpoint.name}",
            file=sys.stderr,
        )
    return index.step


def _refuse_other_model(model: ModelSpec, weights: Path) -> None:
    """Raise BadInput unless the weights to start from are of this model, whatever its name."""
    if is_folder(weights):
        table_of(model, open_folder(weights))
        return
    found = read_index(checkpoint_at(weights)).extra.get("model", {})
    theirs, ours = (
        {k: v for k, v in data.items() if k != "name"} for data in (found, to_data(model))
    )
    refuse_mismatch(
        {"model": theirs}, {"model": ours}, field="model.weights", unsaid={"model": unsaid(model)}
    )


def restore(job: Trainee, run_dir: Path, identity: Mapping[str, Any], comm: Coordinator) -> int:
    """Load the last checkpoint, or the weights to start from, if any; returns the number of updates
    made so far."""
    checkpoint, weights = latest(run_dir / "checkpoints"), job.run.workload.weights
    if checkpoint is None:
        if weights:
            _begin(job, Path(weights), comm)
        return 0
    index = read_index(checkpoint)
    refuse_mismatch(index.extra, identity, unsaid=_unsaid(job.run.model, job.run.workload))
    load(checkpoint, pieces=job.pieces(), comm=comm)
    job.optimizer.publish()
    return index.step


def _begin(job: Trainee, weights: Path, comm: Coordinator) -> None:
    """Take up weights: of a Hugging Face folder, of which each rank reads its part, or of a
    checkpoint of ours."""
    if is_folder(weights):
        agree(comm, lambda: _fill(job.weights(), weights, job.run.model))
    else:
        load(checkpoint_at(weights), pieces=job.weights(), comm=comm)
    job.optimizer.publish()


def _fill(pieces: Sequence[Piece], weights: Path, model: ModelSpec) -> None:
    folder = open_folder(weights)
    table = table_of(model, folder)
    with HfReader(folder) as reader:
        for piece in pieces:
            if piece.tensor.numel():
                piece.tensor.copy_(read_box(reader, table[piece.name], *piece.box))
