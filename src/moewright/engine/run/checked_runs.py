"""Runs of the first steps of a job that a check compares, and what each leaves.

A run trains as training does, at the peak learning rate. Its weights may be off by a unit in the
last place, its micro-batches may come several times, and it may measure the slopes of its loss in
place of training (engine.run.loss_slopes).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from moewright.engine.checkpoint import (
    LocalShard,
    load_checkpoint,
    read_index,
    save_checkpoint,
    single_process,
    whole_shard,
)
from moewright.engine.checkpoint.local_shard import SAFETENSORS_DTYPES
from moewright.engine.comm import collectives
from moewright.engine.data.corpus_rows import open_corpora
from moewright.engine.data.sampler import SampleOrder
from moewright.engine.model.micro_batch import MicroBatch
from moewright.engine.model.routes import prepare_routes
from moewright.engine.model.transformer import draw_initial_value
from moewright.engine.run.build_state import (
    build_coordinator,
    build_train_state,
    init_distributed,
)
from moewright.engine.run.checked_update import WrittenUpdates
from moewright.engine.run.corpus_loader import CorpusLoader
from moewright.engine.run.launch import launch
from moewright.engine.run.loss_slopes import Deviation, measure_slopes
from moewright.engine.run.restore import describe_job, restore
from moewright.engine.run.step import BackwardResult, train_step
from moewright.engine.run.train_state import TrainState
from moewright.engine.run.worker import ExitCode, RankContext, RankOutcome
from moewright.engine.runtime import Runtime
from moewright.rules.job import Job
from moewright.spec.record import to_plain_data
from moewright.spec.workload import RoutesSpec, Workload

_FIGURES_FILE = "figures.json"
_SLOPES_FILE = "slopes.json"
_RESTARTED_AT = 2  # the step before a checkpoint has moments


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedSteps:
    """What some steps left: (loss, aux loss, gradient norm) of each, and tensors by their names.

    `moved` are weights after the last step less those before the first. A run that measured slopes
    has these alone; `updates` are there where a run repeated them.
    """

    figures: tuple[tuple[float, float, float], ...] = ()
    gradients: Mapping[str, torch.Tensor]
    moved: Mapping[str, torch.Tensor]
    slopes: tuple[Deviation, ...] = ()
    updates: tuple[Deviation, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedJob:
    """A run of some steps: weights off by a share of `noise`, each micro-batch `copies` times.

    `routes` are the experts that it records or replays. One that `restarts` is saved after its
    first step, built again, and goes on. One of one process may repeat its updates as they are
    written (engine.run.checked_update).
    """

    job: Job
    noise: float = 0.0
    seed: int = 0
    copies: int = 1
    routes: RoutesSpec = field(default_factory=RoutesSpec)
    measures_slopes: bool = False
    restarts: bool = False
    repeats_updates: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class _RepeatedBatches:
    """A source that hands out each micro-batch of another several times in a row."""

    loader: CorpusLoader
    workload: Workload
    copies: int

    def micro_batch(self, runtime: Runtime, step: int, micro_batch: int) -> MicroBatch:
        own = replace(runtime, job=replace(runtime.job, workload=self.workload))
        return self.loader.micro_batch(own, step, micro_batch // self.copies)


class FailedRun(Exception):
    """A rank of a run failed, and has told why; `code` is how the job ends."""

    def __init__(self, code: ExitCode) -> None:
        super().__init__(code)
        self.code = code


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedRuns:
    """What trains the runs of a check, one after the other, in a folder that each leaves empty."""

    folder: Path
    steps: int
    data: str  # fingerprint of the tokens

    def train(self, run: CheckedJob) -> TrainedSteps:
        """Train a run.

        Raises:
            FailedRun: where a rank failed.
        """
        workload = replace(run.job.workload, routes=run.routes)
        run = replace(run, job=replace(run.job, workload=workload))
        prepare_routes(run.job.model, workload, self.data)
        out = self.folder / "run"
        shutil.rmtree(out, ignore_errors=True)
        code = launch(
            partial(_train_rank, run, out, self.steps),
            nproc=run.job.layout.world_size,
            run_dir=out,
        )
        if code is not ExitCode.DONE:
            raise FailedRun(code)
        steps = _read_slopes(out) if run.measures_slopes else _read_steps(out)
        shutil.rmtree(out)
        return steps


def _train_rank(run: CheckedJob, out: Path, steps: int, context: RankContext) -> RankOutcome:
    """Train some steps at a constant rate as training does, and write what they leave."""
    workload = run.job.workload
    device = init_distributed(context)
    comm = build_coordinator(context)
    corpora = open_corpora(workload.data.train, workload, SampleOrder.SHUFFLED)
    loader = CorpusLoader(data=corpora, follows_rampup=True)
    larger = replace(workload, global_batch=run.copies * workload.global_batch)
    identity = describe_job(run.job.model, workload, corpora.fingerprint)

    def start() -> TrainState:
        built = build_train_state(
            replace(run.job, workload=larger),
            _RepeatedBatches(loader=loader, workload=workload, copies=run.copies),
            rank=context.rank,
            device=device,
            initial_value=draw_initial_value,
        )
        restore(built, out, identity, comm)
        return replace(built, step_size=loader.step_size)

    state = start()
    if run.measures_slopes:
        slopes = [to_plain_data(slope) for slope in measure_slopes(state, context.beat)]
        (out / _SLOPES_FILE).write_text(json.dumps(slopes), "utf-8")
        return RankOutcome.DONE
    if run.noise:
        _move_weights(state, run.noise, run.seed)
    before = [_copy(shard, "before/") for shard in _weights(state)]
    gradients: list[LocalShard] = []
    written = WrittenUpdates(workload.optimizer, _trained(state)) if run.repeats_updates else None
    figures = []
    for step in range(1, steps + 1):
        context.beat(step)
        if run.restarts and step == _RESTARTED_AT:
            shards = state.local_shards()
            folder = out / "checkpoints"
            save_checkpoint(folder, step=step - 1, shards=shards, extra=identity, keep=1, comm=comm)
            del state, shards  # or both would be in memory
            state = start()
        figures.append(_train_step(state, step, gradients, written))
    state.optimizer.finish_pending()
    after = [_copy(shard, "after/") for shard in _weights(state)]
    shards = [*gradients, *before, *after]
    save_checkpoint(out / "tensors", step=steps, shards=shards, extra={}, keep=1, comm=comm)
    updates = [] if written is None else [*map(to_plain_data, written.compare(_trained(state)))]
    if context.rank == 0:
        text = json.dumps({"figures": figures, "updates": updates})
        (out / _FIGURES_FILE).write_text(text, "utf-8")
    collectives.leave_world()
    return RankOutcome.DONE


def _train_step(
    state: TrainState, step: int, gradients: list[LocalShard], written: WrittenUpdates | None
) -> tuple[float, float, float]:
    """Train a step, and return its figures; the first one's gradients go to `gradients`."""
    lr = state.runtime.workload.optimizer.lr

    def keep_gradients(backward: BackwardResult) -> None:
        if not gradients:
            gradients.extend(_copy(shard) for shard in state.optimizer.gradient_shards())
        if written is not None:
            written.update(state.optimizer.gradient_shards(), lr)

    result = train_step(
        state,
        step=step,
        lr=lr,
        stop_requested=False,
        count_ledger=False,
        before_update=keep_gradients,
    )
    passes = result.backward
    return passes.loss, passes.aux_loss, passes.grad_norm


def _trained(state: TrainState) -> list[LocalShard]:
    """Return the master weights."""
    shards = state.optimizer.local_shards()
    return [shard for shard in shards if not shard.name.startswith("optim/")]


def _weights(state: TrainState) -> list[LocalShard]:
    """Return what trains, and what routers hold, as a checkpoint has it."""
    return [shard for shard in state.local_shards() if not shard.name.startswith("optim/")]


def _copy(shard: LocalShard, prefix: str = "") -> LocalShard:
    return replace(shard, name=prefix + shard.name, tensor=shard.tensor.clone())


def _move_weights(state: TrainState, unit: float, seed: int) -> None:
    """Move every master weight of one process by up to a unit in the last place of its format."""
    generator = torch.Generator().manual_seed(seed)
    for shard in _weights(state):
        if shard.tensor.is_floating_point():
            noise = torch.rand(shard.tensor.shape, generator=generator) * 2 - 1
            shard.tensor.mul_(1 + unit * noise.to(shard.tensor))
    state.optimizer.all_gather_params()


def _read_slopes(out: Path) -> TrainedSteps:
    slopes = json.loads((out / _SLOPES_FILE).read_text("utf-8"))
    return TrainedSteps(
        gradients={}, moved={}, slopes=tuple(Deviation(**slope) for slope in slopes)
    )


def _read_steps(out: Path) -> TrainedSteps:
    """Read what the ranks of a run left, as whole tensors."""
    (gathered,) = (out / "tensors").glob("step-*")
    tensors = {
        entry.name: torch.empty(entry.shape, dtype=SAFETENSORS_DTYPES[entry.dtype])
        for entry in read_index(gathered).tensors
    }
    shards = [whole_shard(name, tensor) for name, tensor in tensors.items()]
    load_checkpoint(gathered, shards=shards, comm=single_process())
    names = [name.removeprefix("after/") for name in tensors if name.startswith("after/")]
    written = json.loads((out / _FIGURES_FILE).read_text("utf-8"))
    return TrainedSteps(
        figures=tuple(map(tuple, written["figures"])),
        updates=tuple(Deviation(**update) for update in written["updates"]),
        gradients={
            name.removeprefix("grad/"): tensor
            for name, tensor in tensors.items()
            if name.startswith("grad/")
        },
        moved={
            name: tensors[f"after/{name}"].double() - tensors[f"before/{name}"].double()
            for name in names
        },
    )
