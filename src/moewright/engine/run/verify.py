"""Verify: run a Hugging Face checkpoint on given batches in a layout, and write what came out.

The results have the checkpoint's own names, so that whoever has another implementation can hold the
two against each other. It is the trainer's model, step and optimizer, in fp32, without auxiliary
losses; only the data, the first weights and, if asked, a plain SGD update are its own.
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
    LocalShard,
    load_checkpoint,
    read_index,
    save_checkpoint,
    single_process,
    whole_shard,
)
from moewright.engine.comm import collectives
from moewright.engine.hf.folder import HfFolder, HfReader, open_hf_folder, open_safetensors
from moewright.engine.hf.import_weights import read_local_part, read_parameter_box
from moewright.engine.hf.names import (
    build_name_table,
    drop_absent_mtp,
    join_hf_tensors,
    to_hf_tensors,
)
from moewright.engine.model.layers import NamedParameter
from moewright.engine.model.micro_batch import MicroBatch, build_micro_batch
from moewright.engine.model.router import router_states
from moewright.engine.model.transformer import ModelOutput
from moewright.engine.observe.phase_clock import build_phase_clock
from moewright.engine.observe.record import clamp_to_finite
from moewright.engine.optim.update_rules import UpdateRule, adamw_update, sgd_update
from moewright.engine.pipeline.executor import Key
from moewright.engine.pipeline.run_batch import evaluate_batch
from moewright.engine.run.build_state import (
    build_coordinator,
    build_train_state,
    init_distributed,
)
from moewright.engine.run.corpus_loader import BatchSource, local_rows
from moewright.engine.run.early_checks import read_batch_workload
from moewright.engine.run.launch import launch
from moewright.engine.run.step import apply_update, forward_backward
from moewright.engine.run.train_state import TrainState
from moewright.engine.run.worker import ExitCode, RankContext, RankOutcome
from moewright.engine.runtime import Runtime
from moewright.rules.context_parallel import rank_positions
from moewright.rules.job import Job
from moewright.rules.limits.engine_limits import require_runnable
from moewright.rules.shapes.parameters import parameters
from moewright.spec.errors import BadInput, Reason
from moewright.spec.layout import Layout
from moewright.spec.model import ModelSpec
from moewright.spec.workload import OptimizerSpec, Workload

_IGNORED_LABEL = -100  # torch's ignore_index
# A checkpoint through which the ranks' parts become whole tensors.
_GATHER_FOLDER = ".verify"


class UpdateKind(StrEnum):
    """The rules by which verify can update weights."""

    SGD = "sgd"
    ADAMW = "adamw"


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyJob:
    """A job to verify: `weights` is the folder, `lr` is constant, `optimizer` has the rest."""

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
    """A source of batches [N,B,T] in order, which begins again after the last."""

    inputs: torch.Tensor
    targets: torch.Tensor

    def micro_batch(self, runtime: Runtime, step: int, micro_batch: int) -> MicroBatch:
        rows = local_rows(runtime, micro_batch, global_batch=runtime.workload.global_batch)
        batch = step % len(self.inputs)
        inputs_BS = self.inputs[batch, rows.start : rows.stop]
        targets_BS = self.targets[batch, rows.start : rows.stop]
        return build_micro_batch(runtime, inputs_BS, targets_BS, None)


def verify(job: VerifyJob, out: Path) -> ExitCode:
    """Write tensors.safetensors and curve.json in `out`.

    The first has the logits, the nll and the gradients (grad/<name>) of the first batch.

    Raises:
        BadInput: before any process starts, for what is not legal, not of the checkpoint, or not
            run by the engine.
    """
    workload = read_batch_workload(job.batch, steps=job.steps, optimizer=job.optimizer)
    batches = read_batches(job.batch, vocab_size=job.model.vocab_size)
    folder = open_hf_folder(job.weights)
    job = _drop_absent_mtp(job, folder)
    require_runnable(Job(model=job.model, workload=workload, layout=job.layout))
    build_name_table(job.model, folder)
    return launch(
        partial(_verify_rank, job, workload, batches, out),
        nproc=job.layout.world_size,
        run_dir=out,
    )


def _drop_absent_mtp(job: VerifyJob, folder: HfFolder) -> VerifyJob:
    model = drop_absent_mtp(job.model, folder.tensors.keys())
    if model is not job.model:
        print(f"{job.weights}: holds no MTP layer; it is left out", file=sys.stderr)
    return replace(job, model=model)


def read_batches(path: Path, *, vocab_size: int) -> FixedBatches:
    """Read input_ids and labels of a file whose header `read_batch_workload` has read.

    Targets are the labels shifted one to the left; -100 in labels is no target.

    Raises:
        BadInput: for an id that is not of the vocabulary.
    """
    with open_safetensors(path) as file:
        ids = file.get_tensor("input_ids")
        labels = file.get_tensor("labels")
    _check_ids(f"{path}: input_ids", ids, vocab_size)
    _check_ids(f"{path}: labels", labels[labels != _IGNORED_LABEL], vocab_size)
    targets = torch.full_like(ids, _IGNORED_LABEL, dtype=torch.int64)
    targets[:, :, :-1] = labels[:, :, 1:]
    return FixedBatches(inputs=ids.long(), targets=targets)


def _check_ids(field: str, ids: torch.Tensor, vocab_size: int) -> None:
    wrong = ids[(ids >= vocab_size) | (ids < 0)]
    if wrong.numel():
        rule = f"ids must be in 0..{vocab_size - 1}"
        raise BadInput(Reason(field=field, value=str(int(wrong[0])), rule=rule))


def _verify_rank(
    job: VerifyJob, workload: Workload, batches: FixedBatches, out: Path, context: RankContext
) -> RankOutcome:
    device = init_distributed(context)
    state = load_hf_state(
        Job(model=job.model, workload=workload, layout=job.layout),
        job.weights,
        batches,
        rank=context.rank,
        device=device,
        update_rule=sgd_update if job.update_kind is UpdateKind.SGD else adamw_update,
    )
    outputs = _compute_outputs(state, batches)
    comm = build_coordinator(context)
    curve: list[tuple[float, float]] = []
    for step in range(1, job.steps + 1):
        context.beat(step)
        clock = build_phase_clock(state.runtime.device)
        backward = forward_backward(state, clock, step=step)
        if step == 1:
            gathered = save_checkpoint(
                out / _GATHER_FOLDER,
                step=1,
                shards=[*outputs, *state.optimizer.gradient_shards()],
                extra={},
                keep=1,
                comm=comm,
            )
        apply_update(state, clock, backward, lr=job.lr)
        curve.append((clamp_to_finite(backward.loss), clamp_to_finite(backward.grad_norm)))
    if context.rank == 0:
        _write_results(job, gathered, curve, out)
    state.optimizer.finish_pending()
    collectives.leave_world()
    return RankOutcome.DONE


def load_hf_state(
    job: Job,
    weights: Path,
    batches: BatchSource,
    *,
    rank: int,
    device: torch.device,
    update_rule: UpdateRule = adamw_update,
) -> TrainState:
    """Build this rank's state of a job with the weights of a Hugging Face folder.

    Raises:
        BadInput: when the folder is not of the job's model.
    """
    folder = open_hf_folder(weights)
    table = build_name_table(job.model, folder)
    with HfReader(folder) as reader:

        def read_weight(parameter: NamedParameter, runtime: Runtime) -> torch.Tensor:
            return read_local_part(reader, table[parameter.name], parameter.placement)

        state = build_train_state(
            job,
            batches,
            rank=rank,
            device=device,
            initial_value=read_weight,
            update_rule=update_rule,
        )
        for name, value in router_states(state.model):
            value.copy_(read_parameter_box(reader, table[name], (0,) * value.dim(), value.shape))
    return state


def _compute_outputs(state: TrainState, batches: FixedBatches) -> list[LocalShard]:
    """Compute logits and token losses of the first batch.

    A rank that has the output head returns its rows and its part of the vocabulary; the others
    return nothing.
    """
    runtime = state.runtime
    layout = runtime.mesh.layout
    global_batch = runtime.workload.global_batch
    seq_len = runtime.workload.seq_len
    vocab_size = runtime.model.vocab_size
    positions = rank_positions(seq_len, layout.cp, runtime.mesh.coordinate("cp"))
    shards = []

    def keep_outputs(key: Key, out: ModelOutput) -> None:
        micro_batch, chunk = key
        if not state.model.chunks[chunk].has_loss:
            return
        first_row = local_rows(
            runtime, micro_batch, global_batch=runtime.workload.global_batch
        ).start
        first_id = runtime.mesh.coordinate("tp") * out.logits.shape[1]
        local_vocab = max(0, vocab_size - first_id)  # without padding
        logits = out.logits.unflatten(0, (-1, seq_len // layout.cp))[:, :, :local_vocab].float()
        nll = out.nll.unflatten(0, (-1, seq_len // layout.cp))
        start = 0
        for part in positions:
            columns = slice(start, start + len(part))
            start += len(part)
            shards.append(
                LocalShard(
                    name="logits",
                    global_shape=(global_batch, seq_len, vocab_size),
                    offsets=(first_row, part.start, first_id),
                    tensor=logits[:, columns].contiguous(),
                )
            )
            shards.append(
                LocalShard(
                    name="nll",
                    global_shape=(global_batch, seq_len),
                    offsets=(first_row, part.start),
                    tensor=nll[:, columns].contiguous(),
                )
            )

    batch = [
        batches.micro_batch(runtime, 0, number).to(runtime.device)
        for number in range(runtime.job.micro_batches)
    ]
    evaluate_batch(runtime, state.model, batch, keep_outputs, needs_logits=True)
    return shards


def _write_results(
    job: VerifyJob, gathered: Path, curve: Sequence[tuple[float, float]], out: Path
) -> None:
    """Write the gathered tensors in the checkpoint's names, and the curve.

    The folder through which they were gathered is removed.
    """
    tensors = {entry.name: torch.empty(entry.shape) for entry in read_index(gathered).tensors}
    shards = [whole_shard(name, tensor) for name, tensor in tensors.items()]
    load_checkpoint(gathered, shards=shards, comm=single_process())
    # The last token of a sequence has no target.
    results = {"logits": tensors["logits"], "nll": tensors["nll"][:, :-1].contiguous()}
    table = build_name_table(job.model, open_hf_folder(job.weights))
    parts: list[tuple[str, torch.Tensor]] = []
    for parameter in parameters(job.model):
        gradient = tensors[f"grad/{parameter.name}"]
        parts += to_hf_tensors(gradient, table[parameter.name])
    results |= {f"grad/{name}": part for name, part in join_hf_tensors(parts).items()}
    # Under another name until it is whole.
    temporary = out / "tensors.safetensors.part"
    save_file(results, str(temporary))
    temporary.rename(out / "tensors.safetensors")
    losses, norms = zip(*curve, strict=True)
    text = json.dumps({"loss": losses, "grad_norm": norms}) + "\n"
    (out / "curve.json").write_text(text, "utf-8")
    shutil.rmtree(gathered.parent)
