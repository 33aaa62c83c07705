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

from moewright.engine.checkpoint import Coordinator, Piece, alone, load, read_index, save
from moewright.engine.comm import collectives
from moewright.engine.data.batch import Batch, batch_here
from moewright.engine.data.sampler import rows_of
from moewright.engine.hf.folder import HfFolder, HfReader, open_folder, open_weights
from moewright.engine.hf.names import (
    in_their_names,
    read_box,
    read_part,
    table_of,
    without_absent_mtp,
)
from moewright.engine.model.layers import Slot
from moewright.engine.model.router import routers_of
from moewright.engine.model.transformer import Output
from moewright.engine.observe.record import finite
from moewright.engine.optim.update import adamw_update, sgd_update
from moewright.engine.pipeline.executor import Key
from moewright.engine.pipeline.run_batch import evaluate
from moewright.engine.run.batch_file import NAMES, workload_of
from moewright.engine.run.build import join, trainee
from moewright.engine.run.launch import launch
from moewright.engine.run.step import Clock, Trainee, accumulate, apply
from moewright.engine.run.worker import Exit, Outcome, RankContext
from moewright.engine.runtime import Runtime
from moewright.rules.context_parallel import held
from moewright.rules.legality import micro_batches
from moewright.rules.parameters import parameters, selection_bias_name
from moewright.rules.runnable import refuse_unrunnable
from moewright.spec.errors import BadInput, Reason
from moewright.spec.layout import Layout
from moewright.spec.model import ModelSpec
from moewright.spec.workload import OptimizerSpec, Workload

_IGNORED = -100
_GATHERED = ".verify"  # a checkpoint through which the ranks' parts become whole tensors


class Rule(StrEnum):
    SGD = "sgd"
    ADAMW = "adamw"


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """What to run. `lr` is constant; `optimizer` gives the other numbers; `weights` is the
    folder."""

    model: ModelSpec
    weights: Path
    batch: Path
    layout: Layout
    steps: int
    rule: Rule
    lr: float
    optimizer: OptimizerSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedBatches:
    """Batches [N,B,T] in order, the first again after the last; targets are the labels one to the
    left."""

    inputs: torch.Tensor
    targets: torch.Tensor

    def micro_batch(self, run: Runtime, step: int, micro_batch: int) -> Batch:
        rows = rows_here(run, micro_batch)
        batch = step % len(self.inputs)
        inputs, targets = (x[batch, rows.start : rows.stop] for x in (self.inputs, self.targets))
        return batch_here(run, inputs, targets, None)


def rows_here(run: Runtime, micro_batch: int) -> range:
    """Rows of the global batch in a micro-batch of this rank."""
    layout = run.mesh.layout
    return rows_of(
        global_batch=run.workload.global_batch,
        dp=layout.dp,
        dp_rank=run.mesh.coordinate("dp"),
        mbs=layout.mbs,
        micro_batch=micro_batch,
    )


def verify(job: Verification, out: Path) -> Exit:
    """Write `out`/tensors.safetensors (logits, nll, grad/<their name> of the first batch) and
    `out`/curve.json.

    Raises BadInput before any process starts for what is not legal, not of the checkpoint, or not
    run by the engine.
    """
    work = workload_of(job.batch, steps=job.steps, optimizer=job.optimizer)
    batches = read_batches(job.batch, vocab_size=job.model.vocab_size)
    folder = open_folder(job.weights)
    job = _without_absent_mtp(job, folder)
    refuse_unrunnable(job.model, work, job.layout)
    table_of(job.model, folder)
    return launch(
        partial(_verify_rank, job, work, batches, out), nproc=job.layout.world_size, run_dir=out
    )


def _without_absent_mtp(job: Verification, folder: HfFolder) -> Verification:
    model = without_absent_mtp(job.model, folder.tensors.keys())
    if model is not job.model:
        print(f"{job.weights}: holds no MTP layer; it is left out", file=sys.stderr)
    return replace(job, model=model)


def read_batches(path: Path, *, vocab_size: int) -> FixedBatches:
    """input_ids and labels of a file whose header `workload_of` has read; -100 in labels is no
    target.

    Raises BadInput for an id that is not of the vocabulary.
    """
    with open_weights(path) as file:
        ids, labels = (file.get_tensor(name) for name in NAMES)
    for name, tensor, low in zip(NAMES, (ids, labels), (0, _IGNORED), strict=True):
        wrong = (tensor >= vocab_size) | ((tensor < 0) & (tensor != low))
        if wrong.any():
            value = str(int(tensor[wrong][0]))
            raise BadInput(
                Reason(
                    field=f"{path}: {name}", value=value, rule=f"ids must be in 0..{vocab_size - 1}"
                )
            )
    targets = torch.full_like(ids, _IGNORED, dtype=torch.int64)
    targets[:, :, :-1] = labels[:, :, 1:]
    return FixedBatches(inputs=ids.long(), targets=targets)


def _verify_rank(
    job: Verification, work: Workload, batches: FixedBatches, out: Path, seat: RankContext
) -> Outcome:
    device = join(seat)
    folder = open_folder(job.weights)
    table = table_of(job.model, folder)
    with HfReader(folder) as reader:

        def stored(slot: Slot, run: Runtime) -> torch.Tensor:
            return read_part(reader, table[slot.name], slot.placement)

        rule = sgd_update if job.rule is Rule.SGD else adamw_update
        here = trainee(
            job.model,
            work,
            job.layout,
            batches,
            rank=seat.rank,
            device=device,
            initial=stored,
            rule=rule,
        )
        for router in routers_of(here.model):
            if router.selection_bias is not None:
                bias = table[selection_bias_name(router.number)]
                router.selection_bias.copy_(
                    read_box(reader, bias, (0,), router.selection_bias.shape)
                )
    pieces = _outputs(here, batches)
    curve: list[tuple[float, float]] = []
    for step in range(1, job.steps + 1):
        seat.beat(step)
        clock = Clock()
        found = accumulate(here, clock, step=step)
        if step == 1:
            comm = Coordinator(rank=seat.rank, world=seat.world, gather=collectives.gather_json)
            whole = save(
                out / _GATHERED,
                step=1,
                pieces=[*pieces, *here.optimizer.gradients()],
                extra={},
                keep=1,
                comm=comm,
            )
        apply(here, clock, found, lr=job.lr)
        curve.append((finite(found.loss), finite(found.norm)))
    if seat.rank == 0:
        _write(job, whole, curve, out)
    here.optimizer.settle()
    collectives.stop()
    return Outcome.DONE


def _outputs(here: Trainee, batches: FixedBatches) -> list[Piece]:
    """Logits and token losses of the first batch: this rank's rows and part of the vocabulary, if
    it has the head."""
    run = here.run
    rows, length, vocab = run.workload.global_batch, run.workload.seq_len, run.model.vocab_size
    cp = run.mesh.layout.cp
    parts = held(length, cp, run.mesh.coordinate("cp"))
    found = []

    def see(key: Key, out: Output) -> None:
        if not here.model.chunks[key[1]].loss:
            return
        first = rows_here(run, key[0]).start
        width = out.logits.shape[1]
        start = run.mesh.coordinate("tp") * width
        logits = out.logits.unflatten(0, (-1, length // cp))[:, :, : max(0, vocab - start)].float()
        nll = out.nll.unflatten(0, (-1, length // cp))
        for place, part in enumerate(parts):
            columns = slice(place * len(part), (place + 1) * len(part))
            found.append(
                Piece(
                    name="logits",
                    global_shape=(rows, length, vocab),
                    offsets=(first, part.start, start),
                    tensor=logits[:, columns].contiguous(),
                )
            )
            found.append(
                Piece(
                    name="nll",
                    global_shape=(rows, length),
                    offsets=(first, part.start),
                    tensor=nll[:, columns].contiguous(),
                )
            )

    count = micro_batches(run.workload, run.mesh.layout)
    evaluate(
        run,
        here.model,
        [batches.micro_batch(run, 0, number) for number in range(count)],
        see,
        logits=True,
    )
    return found


def _write(job: Verification, whole: Path, curve: Sequence[tuple[float, float]], out: Path) -> None:
    """The gathered tensors in their names, and the curve; the gathering folder goes."""
    tensors = {entry.name: torch.empty(entry.shape) for entry in read_index(whole).tensors}
    load(
        whole,
        pieces=[
            Piece(name=name, global_shape=tuple(t.shape), offsets=(0,) * t.dim(), tensor=t)
            for name, t in tensors.items()
        ],
        comm=alone(),
    )
    given = {"logits": tensors["logits"], "nll": tensors["nll"][:, :-1].contiguous()}
    table = table_of(job.model, open_folder(job.weights))
    for param in parameters(job.model):
        for name, grad in in_their_names(tensors[f"grad/{param.name}"], table[param.name]):
            given[f"grad/{name}"] = grad
    part = out / "tensors.safetensors.part"
    save_file(given, str(part))
    part.rename(out / "tensors.safetensors")
    losses, norms = zip(*curve, strict=True)
    (out / "curve.json").write_text(
        json.dumps({"loss": losses, "grad_norm": norms}) + "\n", "utf-8"
    )
    shutil.rmtree(whole.parent)
