"""Verify: run a Hugging Face checkpoint on given batches in a layout, and write what came out in
its own names.

It is the trainer's model, step and optimizer, in fp32, without auxiliary losses; its own are only
the data, the first weights and, if asked, a plain SGD update. Whoever has another implementation
can hold the two against each other.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file

from moewright.engine.checkpoint import (
    Coordinator,
    LocalShard,
    load_checkpoint,
    read_index,
    save_checkpoint,
    single_process,
)
from moewright.engine.comm import collectives
from moewright.engine.data.micro_batch import MicroBatch, build_micro_batch
from moewright.engine.data.sampler import micro_batch_rows
from moewright.engine.hf.folder import HfFolder, HfReader, open_hf_folder, open_safetensors
from moewright.engine.hf.names import (
    build_name_table,
    drop_absent_mtp,
    read_local_part,
    read_parameter_box,
    to_hf_tensors,
)
from moewright.engine.model.layers import NamedParameter
from moewright.engine.model.router import list_routers
from moewright.engine.model.transformer import ModelOutput
from moewright.engine.observe.record import clamp_to_finite
from moewright.engine.optim.update_rules import adamw_update, sgd_update
from moewright.engine.pipeline.executor import Key
from moewright.engine.pipeline.run_batch import evaluate_batch
from moewright.engine.run.batch_file import BATCH_TENSORS, read_batch_workload
from moewright.engine.run.build_state import build_train_state, init_distributed
from moewright.engine.run.launch import launch
from moewright.engine.run.step import PhaseClock, TrainState, apply_update, forward_backward
from moewright.engine.run.worker import ExitCode, RankContext, RankOutcome
from moewright.engine.runtime import Runtime
from moewright.rules.context_parallel import rank_positions
from moewright.rules.engine_limits import require_runnable
from moewright.rules.legality import micro_batches
from moewright.rules.parameters import parameters, selection_bias_name
from moewright.spec.errors import BadInput, Reason
from moewright.spec.layout import Layout
from moewright.spec.model import ModelSpec
from moewright.spec.workload import OptimizerSpec, Workload

_IGNORED_LABEL = -100
_GATHER_FOLDER = ".verify"  # a checkpoint through which the ranks' parts become whole tensors


class UpdateKind(StrEnum):
    SGD = "sgd"
    ADAMW = "adamw"


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyJob:
    """What to run. `lr` is constant; `optimizer` gives the other numbers; `weights` is the
    folder."""

    model: ModelSpec
    weights: Path
    batch: Path
    layout: Layout
    steps: int
    update_kind: UpdateKind
    lr: float
    optimizer: OptimizerSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedBatches:
    """Batches [N,B,T] in order, the first again after the last; targets are the labels one to the
    left."""

    inputs: torch.Tensor
    targets: torch.Tensor

    def micro_batch(self, run: Runtime, step: int, micro_batch: int) -> MicroBatch:
        rows = local_rows(run, micro_batch)
        batch = step % len(self.inputs)
        inputs, targets = (x[batch, rows.start : rows.stop] for x in (self.inputs, self.targets))
        return build_micro_batch(run, inputs, targets, None)


def local_rows(run: Runtime, micro_batch: int) -> range:
    """Rows of the global batch in a micro-batch of this rank."""
    layout = run.mesh.layout
    return micro_batch_rows(
        global_batch=run.workload.global_batch,
        dp=layout.dp,
        dp_rank=run.mesh.coordinate("dp"),
        mbs=layout.mbs,
        micro_batch=micro_batch,
    )


def verify(job: VerifyJob, out: Path) -> ExitCode:
    """Write `out`/tensors.safetensors (logits, nll, grad/<their name> of the first batch) and
    `out`/curve.json.

    Raises BadInput before any process starts for what is not legal, not of the checkpoint, or not
    run by the engine.
    """
    work = read_batch_workload(job.batch, steps=job.steps, optimizer=job.optimizer)
    batches = read_batches(job.batch, vocab_size=job.model.vocab_size)
    folder = open_hf_folder(job.weights)
    job = _without_absent_mtp(job, folder)
    require_runnable(job.model, work, job.layout)
    build_name_table(job.model, folder)
    return launch(
        partial(_verify_rank, job, work, batches, out), nproc=job.layout.world_size, run_dir=out
    )


def _without_absent_mtp(job: VerifyJob, folder: HfFolder) -> VerifyJob:
    model = drop_absent_mtp(job.model, folder.tensors.keys())
    if model is not job.model:
        print(f"{job.weights}: holds no MTP layer; it is left out", file=sys.stderr)
    return replace(job, model=model)


def read_batches(path: Path, *, vocab_size: int) -> FixedBatches:
    """input_ids and labels of a file whose header `workload_of` has read; -100 in labels is no
    target.

    Raises BadInput for an id that is not of the vocabulary.
    """
    with open_safetensors(path) as file:
        ids, labels = (file.get_tensor(name) for name in BATCH_TENSORS)
    for name, tensor, low in zip(BATCH_TENSORS, (ids, labels), (0, _IGNORED_LABEL), strict=True):
        wrong = (tensor >= vocab_size) | ((tensor < 0) & (tensor != low))
        if wrong.any():
            value = str(int(tensor[wrong][0]))
            raise BadInput(
                Reason(
                    field=f"{path}: {name}", value=value, rule=f"ids must be in 0..{vocab_size - 1}"
                )
            )
    targets = torch.full_like(ids, _IGNORED_LABEL, dtype=torch.int64)
    targets[:, :, :-1] = labels[:, :, 1:]
    return FixedBatches(inputs=ids.long(), targets=targets)


def _verify_rank(
    job: VerifyJob, work: Workload, batches: FixedBatches, out: Path, seat: RankContext
) -> RankOutcome:
    device = init_distributed(seat)
    folder = open_hf_folder(job.weights)
    table = build_name_table(job.model, folder)
    with HfReader(folder) as reader:

        def stored(slot: NamedParameter, run: Runtime) -> torch.Tensor:
            return read_local_part(reader, table[slot.name], slot.placement)

        rule = sgd_update if job.update_kind is UpdateKind.SGD else adamw_update
        here = build_train_state(
            job.model,
            work,
            job.layout,
            batches,
            rank=seat.rank,
            device=device,
            initial_value=stored,
            update_rule=rule,
        )
        for router in list_routers(here.model):
            if router.selection_bias is not None:
                bias = table[selection_bias_name(router.layer_number)]
                router.selection_bias.copy_(
                    read_parameter_box(reader, bias, (0,), router.selection_bias.shape)
                )
    pieces = _compute_outputs(here, batches)
    curve: list[tuple[float, float]] = []
    for step in range(1, job.steps + 1):
        seat.beat(step)
        clock = PhaseClock()
        found = forward_backward(here, clock, step=step)
        if step == 1:
            comm = Coordinator(
                rank=seat.rank, world_size=seat.world_size, gather=collectives.gather_json
            )
            whole = save_checkpoint(
                out / _GATHER_FOLDER,
                step=1,
                shards=[*pieces, *here.optimizer.gradient_shards()],
                extra={},
                keep=1,
                comm=comm,
            )
        apply_update(here, clock, found, lr=job.lr)
        curve.append((clamp_to_finite(found.loss), clamp_to_finite(found.grad_norm)))
    if seat.rank == 0:
        _write_results(job, whole, curve, out)
    here.optimizer.finish_pending()
    collectives.leave_world()
    return RankOutcome.DONE


def _compute_outputs(here: TrainState, batches: FixedBatches) -> list[LocalShard]:
    """Logits and token losses of the first batch: this rank's rows and part of the vocabulary, if
    it has the head."""
    run = here.runtime
    rows, length, vocab = run.workload.global_batch, run.workload.seq_len, run.model.vocab_size
    cp = run.mesh.layout.cp
    parts = rank_positions(length, cp, run.mesh.coordinate("cp"))
    found = []

    def see(key: Key, out: ModelOutput) -> None:
        if not here.model.chunks[key[1]].has_loss:
            return
        first = local_rows(run, key[0]).start
        width = out.logits.shape[1]
        start = run.mesh.coordinate("tp") * width
        logits = out.logits.unflatten(0, (-1, length // cp))[:, :, : max(0, vocab - start)].float()
        nll = out.nll.unflatten(0, (-1, length // cp))
        for place, part in enumerate(parts):
            columns = slice(place * len(part), (place + 1) * len(part))
            found.append(
                LocalShard(
                    name="logits",
                    global_shape=(rows, length, vocab),
                    offsets=(first, part.start, start),
                    tensor=logits[:, columns].contiguous(),
                )
            )
            found.append(
                LocalShard(
                    name="nll",
                    global_shape=(rows, length),
                    offsets=(first, part.start),
                    tensor=nll[:, columns].contiguous(),
                )
            )

    count = micro_batches(run.workload, run.mesh.layout)
    evaluate_batch(
        run,
        here.model,
        [batches.micro_batch(run, 0, number) for number in range(count)],
        see,
        needs_logits=True,
    )
    return found


def _write_results(
    job: VerifyJob, whole: Path, curve: Sequence[tuple[float, float]], out: Path
) -> None:
    """The gathered tensors in their names, and the curve; the gathering folder goes."""
    tensors = {entry.name: torch.empty(entry.shape) for entry in read_index(whole).tensors}
    load_checkpoint(
        whole,
        shards=[
            LocalShard(name=name, global_shape=tuple(t.shape), offsets=(0,) * t.dim(), tensor=t)
            for name, t in tensors.items()
        ],
        comm=single_process(),
    )
    given = {"logits": tensors["logits"], "nll": tensors["nll"][:, :-1].contiguous()}
    table = build_name_table(job.model, open_hf_folder(job.weights))
    for param in parameters(job.model):
        for name, grad in to_hf_tensors(tensors[f"grad/{param.name}"], table[param.name]):
            given[f"grad/{name}"] = grad
    part = out / "tensors.safetensors.part"
    save_file(given, str(part))
    part.rename(out / "tensors.safetensors")
    losses, norms = zip(*curve, strict=True)
    (out / "curve.json").write_text(
        json.dumps({"loss": losses, "grad_norm": norms}) + "\n", "utf-8"
    )
    shutil.rmtree(whole.parent)
