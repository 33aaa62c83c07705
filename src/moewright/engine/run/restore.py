"""What a run starts from: its own last checkpoint, the weights of another, or fresh ones."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moewright.codec import default_values, to_data
from moewright.engine.checkpoint import (
    Coordinator,
    LocalShard,
    find_checkpoint,
    find_latest,
    find_resume_point,
    load_checkpoint,
    read_index,
    refuse_mismatch,
    run_on_all_ranks,
)
from moewright.engine.hf.folder import HfReader, is_hf_folder, open_hf_folder
from moewright.engine.hf.names import build_name_table, read_parameter_box
from moewright.engine.run.step import TrainState
from moewright.spec.model import ModelSpec
from moewright.spec.plan import Plan
from moewright.spec.workload import DocumentMasking, Dtype, Workload


def build_identity(plan: Plan, data_fingerprint: str) -> Mapping[str, Any]:
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
                if work.data.documents is DocumentMasking.JOINED
                else {"documents": to_data(work.data.documents)}
            ),
        },
    }


def _identity_defaults(model: ModelSpec, work: Workload) -> Mapping[str, Any]:
    """What a field of the identity means in a checkpoint older than the field."""
    parts = {"optimizer": work.optimizer, "loss": work.loss, "router": work.router}
    parts |= {"scaling": work.scaling, "ramp": work.ramp}
    return {
        "model": default_values(model),
        "train": {name: default_values(part) for name, part in parts.items()},
        "data": {"documents": to_data(DocumentMasking.JOINED)},
    }


def read_steps_done(plan: Plan, run_dir: Path, identity: Mapping[str, Any]) -> int:
    """Updates that the last checkpoint stands for, once it is known to be of this very job.

    Where there is none, the weights to start from are known to be of this model. Raises BadInput.
    """
    checkpoint, passed_over = find_resume_point(run_dir / "checkpoints")
    if checkpoint is None:
        if plan.workload.weights:
            _refuse_other_model(plan.model, Path(plan.workload.weights))
        return 0
    index = read_index(checkpoint)
    refuse_mismatch(index.extra, identity, defaults=_identity_defaults(plan.model, plan.workload))
    for path in passed_over:
        print(
            f"{path} is not a committed checkpoint: going on from {checkpoint.name}",
            file=sys.stderr,
        )
    return index.step


def _refuse_other_model(model: ModelSpec, weights: Path) -> None:
    """Raise BadInput unless the weights to start from are of this model, whatever its name."""
    if is_hf_folder(weights):
        build_name_table(model, open_hf_folder(weights))
        return
    found = read_index(find_checkpoint(weights)).extra.get("model", {})
    theirs, ours = (
        {k: v for k, v in data.items() if k != "name"} for data in (found, to_data(model))
    )
    refuse_mismatch(
        {"model": theirs},
        {"model": ours},
        field="model.weights",
        defaults={"model": default_values(model)},
    )


def restore(job: TrainState, run_dir: Path, identity: Mapping[str, Any], comm: Coordinator) -> int:
    """Load the last checkpoint, or the weights to start from, if any; returns the number of updates
    made so far."""
    checkpoint, weights = find_latest(run_dir / "checkpoints"), job.runtime.workload.weights
    if checkpoint is None:
        if weights:
            _load_initial_weights(job, Path(weights), comm)
        return 0
    index = read_index(checkpoint)
    refuse_mismatch(
        index.extra, identity, defaults=_identity_defaults(job.runtime.model, job.runtime.workload)
    )
    load_checkpoint(checkpoint, shards=job.local_shards(), comm=comm)
    job.optimizer.all_gather_params()
    return index.step


def _load_initial_weights(job: TrainState, weights: Path, comm: Coordinator) -> None:
    """Take up weights: of a Hugging Face folder, of which each rank reads its part, or of a
    checkpoint of ours."""
    if is_hf_folder(weights):
        run_on_all_ranks(
            comm, lambda: _fill_from_hf(job.weight_shards(), weights, job.runtime.model)
        )
    else:
        load_checkpoint(find_checkpoint(weights), shards=job.weight_shards(), comm=comm)
    job.optimizer.all_gather_params()


def _fill_from_hf(pieces: Sequence[LocalShard], weights: Path, model: ModelSpec) -> None:
    folder = open_hf_folder(weights)
    table = build_name_table(model, folder)
    with HfReader(folder) as reader:
        for piece in pieces:
            if piece.tensor.numel():
                piece.tensor.copy_(read_parameter_box(reader, table[piece.name], *piece.box))
