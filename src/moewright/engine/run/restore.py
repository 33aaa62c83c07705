"""What a run starts from: its own last checkpoint, the weights of another run, or fresh ones."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from moewright.codec import default_values, to_data
from moewright.engine.checkpoint import (
    CheckpointIndex,
    Coordinator,
    LocalShard,
    fetch_newer,
    find_checkpoint,
    find_latest,
    find_resume_point,
    latest_step,
    load_checkpoint,
    offer_older,
    put_damaged_aside,
    read_index,
    read_index_on_all_ranks,
    read_newest_index,
    refuse_mismatch,
    run_on_all_ranks,
)
from moewright.engine.checkpoint.local_shard import SAFETENSORS_DTYPES
from moewright.engine.hf.folder import (
    HfReader,
    fingerprint_hf_folder,
    is_hf_folder,
    open_hf_folder,
)
from moewright.engine.hf.import_weights import read_local_part, read_parameter_box
from moewright.engine.hf.names import build_name_table
from moewright.engine.optim.frozen_weights import FrozenWeights, build_frozen_shards
from moewright.engine.run.expert_mover import MOVER_KEYS
from moewright.engine.run.peer_copies import PeerCopies
from moewright.engine.run.train_state import TrainState
from moewright.engine.runtime import Runtime
from moewright.rules.adapters import is_frozen
from moewright.rules.delayed_scaling import is_delayed
from moewright.spec.errors import BadInput
from moewright.spec.model import ModelSpec
from moewright.spec.plan import Plan
from moewright.spec.workload import DocumentMasking, Dtype, Fp8Format, MatrixUpdate, Workload


def build_identity(plan: Plan, data_fingerprint: str) -> Mapping[str, Any]:
    """Return what a checkpoint and the plan that continues it must share."""
    return describe_job(plan.model, plan.workload, data_fingerprint)


def describe_job(model: ModelSpec, workload: Workload, data_fingerprint: str) -> Mapping[str, Any]:
    """Return what a checkpoint and the job that continues it must share.

    That is everything that decides the next update. The layout is not part of it: any layout
    continues any other.
    """
    optimizer = dict(to_data(workload.optimizer))
    # Buckets decide no update, and the end of the decay is stated below, with its default.
    del optimizer["decay_steps"]
    del optimizer["bucket_elements"]
    train: dict[str, Any] = {
        "seq_len": workload.seq_len,
        "global_batch": workload.global_batch,
        "seed": workload.seed,
        "precision": to_data(workload.precision),
        "decay_steps": workload.optimizer.decay_steps or workload.steps,
        "optimizer": optimizer,
        "loss": to_data(workload.loss),
        "router": to_data(workload.router),
    }
    if workload.precision is Dtype.FP8:
        train["tensor_scaling"] = to_data(workload.tensor_scaling)
        train["fp8_format"] = to_data(workload.fp8_format)
    if is_delayed(workload):
        train["delayed"] = to_data(workload.delayed)
    if workload.optimizer.matrix_update is MatrixUpdate.MUON:
        train["muon"] = to_data(workload.muon)
    if workload.precision is Dtype.FP16:
        train["scaling"] = to_data(workload.scaling)
    if workload.ramp.ramp_start:
        train["ramp"] = to_data(workload.ramp)
    if is_frozen(workload):
        # A checkpoint of adapters is of no use without the weights that they were trained beside.
        base = Path(workload.weights)
        train["fine_tuning"] = to_data(workload.fine_tuning)
        train["base"] = fingerprint_hf_folder(base) if is_hf_folder(base) else workload.weights
    elif workload.fine_tuning.freeze:
        train["fine_tuning"] = to_data(workload.fine_tuning)
    data: dict[str, Any] = {"fingerprint": data_fingerprint}
    if workload.data.documents is not DocumentMasking.JOINED:
        data["documents"] = to_data(workload.data.documents)
    return {"model": to_data(model), "train": train, "data": data}


def _identity_defaults(model: ModelSpec, workload: Workload) -> Mapping[str, Any]:
    """Return what each field of the identity means in a checkpoint older than the field."""
    return {
        "model": default_values(model),
        "train": {
            "fp8_format": to_data(Fp8Format.HYBRID),
            "optimizer": default_values(workload.optimizer),
            "loss": default_values(workload.loss),
            "router": default_values(workload.router),
            "muon": default_values(workload.muon),
            "scaling": default_values(workload.scaling),
            "ramp": default_values(workload.ramp),
            "fine_tuning": default_values(workload.fine_tuning),
        },
        "data": {"documents": to_data(DocumentMasking.JOINED)},
    }


def fetch_remote_checkpoint(
    job: Runtime | Plan,
    run_dir: Path,
    identity: Mapping[str, Any],
    *,
    find_newest: Callable[[Path], Path | None],
    note: Callable[[str], None] = lambda piece: None,
) -> Path | None:
    """Bring the newest copy of a checkpoint here, where copies are made and it is newer.

    That is newer than what `find_newest` makes of the folder of checkpoints. Returns its path.

    Raises:
        BadInput: it is of another job, or the copies cannot be looked at (see `fetch_newer`).
    """
    url = job.workload.checkpoint.copy_to
    if not url:
        return None
    defaults = _identity_defaults(job.model, job.workload)

    def accept(index: CheckpointIndex) -> None:
        _refuse_other_job(index.extra, identity, defaults)

    directory = run_dir / "checkpoints"
    return fetch_newer(url, directory, accept, find_newest=find_newest, note=note)


def read_steps_done(
    plan: Plan, run_dir: Path, identity: Mapping[str, Any], *, falls_back: bool = False
) -> int:
    """Return the updates made up to the last checkpoint, which is checked to be of this job.

    Where there is no checkpoint, the weights to start from are checked to be of this model. With
    `falls_back`, a checkpoint whose index is damaged is passed over.

    Raises:
        BadInput: when the checkpoint or the weights are of another job.
    """
    directory = run_dir / "checkpoints"
    if falls_back and (index := read_newest_index(directory)) is not None:
        _refuse_other_job(index.extra, identity, _identity_defaults(plan.model, plan.workload))
        return index.step
    newest = find_latest(directory)
    if newest is not None:
        offer_older(newest, read_index, plan.workload.checkpoint.copy_to)
    checkpoint, passed_over = find_resume_point(directory)
    if checkpoint is None:
        if plan.workload.weights:
            _refuse_other_model(plan.model, Path(plan.workload.weights))
        return 0
    index = read_index(checkpoint)
    _refuse_other_job(index.extra, identity, _identity_defaults(plan.model, plan.workload))
    for path in passed_over:
        message = f"{path} is not a committed checkpoint: going on from {checkpoint.name}"
        print(message, file=sys.stderr)
    return index.step


def _refuse_other_job(
    saved: Mapping[str, Any], identity: Mapping[str, Any], defaults: Mapping[str, Any]
) -> None:
    """Raise BadInput unless a checkpoint's identity is the job's, whatever its model is called."""
    model = _rename(saved.get("model", {}), identity["model"])
    # Where experts lie is no part of the job: it follows the load of a run.
    job = {name: value for name, value in saved.items() if name not in MOVER_KEYS}
    refuse_mismatch({**job, "model": model}, identity, defaults=defaults)


def _refuse_other_model(model: ModelSpec, weights: Path) -> None:
    """Raise BadInput unless the weights to start from are of this model, whatever its name."""
    if is_hf_folder(weights):
        build_name_table(model, open_hf_folder(weights))
        return
    saved = read_index(find_checkpoint(weights)).extra.get("model", {})
    expected = to_data(model)
    refuse_mismatch(
        {"model": _rename(saved, expected)},
        {"model": expected},
        field="model.weights",
        defaults={"model": default_values(model)},
    )


def _rename(saved: Mapping[str, Any], expected: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a saved model under the expected name, which may be that of a folder that moved."""
    return {**saved, "name": expected["name"]}


def restore(
    state: TrainState,
    run_dir: Path,
    identity: Mapping[str, Any],
    comm: Coordinator,
    *,
    falls_back: bool = False,
    copies: PeerCopies | None = None,
    take_extra: Callable[[Mapping[str, Any]], None] = lambda extra: None,
) -> int:
    """Load the last checkpoint, or the weights to start from, if there are any.

    Where the ranks have `copies` in memory of a step that is not older, these are loaded. With
    `falls_back`, damaged checkpoints are put aside, and the last whole one is loaded, or a newer
    copy that lies elsewhere. `take_extra` is called with what a checkpoint says besides its
    tensors, before they are read. Returns the number of updates made so far.
    """
    checkpoints = run_dir / "checkpoints"
    if copies is not None:
        world = state.runtime.mesh.group("world")
        step = copies.recover(latest_step(checkpoints), comm, world)
        if step is not None:
            state.load(copies.load)
            # A load fills the parts that this rank owns.
            state.optimizer.all_gather_params()
            return step
    try:
        return _load_newest(state, checkpoints, identity, comm, take_extra)
    except BadInput:
        if not falls_back:
            raise
    # A load reads the whole checkpoint to verify it; only where it failed are they all verified.

    def fetch(newest: Path | None) -> Path | None:
        return fetch_remote_checkpoint(
            state.runtime, run_dir, identity, find_newest=lambda folder: newest, note=comm.note
        )

    put_damaged_aside(checkpoints, comm, fetch)
    return _load_newest(state, checkpoints, identity, comm, take_extra)


def _load_newest(
    state: TrainState,
    checkpoints: Path,
    identity: Mapping[str, Any],
    comm: Coordinator,
    take_extra: Callable[[Mapping[str, Any]], None],
) -> int:
    runtime = state.runtime
    checkpoint = find_latest(checkpoints)
    # A checkpoint of adapters has none of the weights beside them.
    if runtime.workload.weights and (checkpoint is None or is_frozen(runtime.workload)):
        _load_initial_weights(state, Path(runtime.workload.weights), comm)
    if checkpoint is None:
        return 0
    index = read_index_on_all_ranks(checkpoint, comm)
    defaults = _identity_defaults(runtime.model, runtime.workload)
    _refuse_other_job(index.extra, identity, defaults)
    take_extra(index.extra)
    copies = runtime.workload.checkpoint.copy_to
    offer_older(checkpoint, lambda path: state.load(partial(_load_shards, path, comm)), copies)
    state.optimizer.all_gather_params()
    return index.step


def _load_shards(checkpoint: Path, comm: Coordinator, shards: Sequence[LocalShard]) -> None:
    load_checkpoint(checkpoint, shards=shards, comm=comm)


def _load_initial_weights(state: TrainState, weights: Path, comm: Coordinator) -> None:
    """Load weights: each rank reads its part of a Hugging Face folder or of a checkpoint."""
    frozen = state.optimizer.frozen
    shards = state.weight_shards()
    if is_hf_folder(weights):
        model = state.runtime.model
        run_on_all_ranks(comm, lambda: _fill_from_hf(shards, weights, model, comm.note))
        _pack_from_hf(frozen, weights, model, comm.note)
    else:
        unpacked = frozen.unpack_all()
        shards += build_frozen_shards(unpacked)
        _load_in_any_dtype(find_checkpoint(weights), shards, comm)
        for parameter, value in unpacked:
            frozen.pack(parameter, value)
    state.optimizer.all_gather_params()


def _pack_from_hf(
    frozen: FrozenWeights, weights: Path, model: ModelSpec, note: Callable[[str], None]
) -> None:
    """Pack the weights of a folder one after the other, so that one at a time is whole."""
    if not frozen.packed_parameters:
        return
    folder = open_hf_folder(weights)
    table = build_name_table(model, folder)
    with HfReader(folder, note) as reader:
        for parameter in frozen.packed_parameters:
            part = read_local_part(reader, table[parameter.name], parameter.placement)
            frozen.pack(parameter, part)


def _load_in_any_dtype(checkpoint: Path, shards: Sequence[LocalShard], comm: Coordinator) -> None:
    """Load shards from a checkpoint that may hold them in another dtype.

    Weights that trained are stored in fp32, frozen ones in the compute dtype.
    """
    entries = read_index_on_all_ranks(checkpoint, comm).tensors
    dtypes = {entry.name: SAFETENSORS_DTYPES[entry.dtype] for entry in entries}
    stored = [
        replace(shard, tensor=shard.tensor.to(dtypes.get(shard.name, shard.tensor.dtype)))
        for shard in shards
    ]
    load_checkpoint(checkpoint, shards=stored, comm=comm)
    for shard, loaded in zip(shards, stored, strict=True):
        # `to` returns the tensor itself where the dtype is right already.
        if loaded.tensor is not shard.tensor:
            shard.tensor.copy_(loaded.tensor)


def _fill_from_hf(
    shards: Sequence[LocalShard], weights: Path, model: ModelSpec, note: Callable[[str], None]
) -> None:
    folder = open_hf_folder(weights)
    table = build_name_table(model, folder)
    with HfReader(folder, note) as reader:
        for shard in shards:
            if shard.tensor.numel():
                box = read_parameter_box(reader, table[shard.name], *shard.box)
                shard.tensor.copy_(box)
