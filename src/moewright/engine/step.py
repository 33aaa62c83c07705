"""One training step: micro-batches through the timetable, gradients reduced, one update; and the held-out loss."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Protocol

import torch

from moewright.engine.checkpoint import Piece
from moewright.engine.collectives import all_reduce
from moewright.engine.data.indexed import IndexedDataset
from moewright.engine.data.sampler import Sampler, fetch, rows_of
from moewright.engine.model.router import biases_of, routers_of
from moewright.engine.model.transformer import Output, Transformer
from moewright.engine.optim.distributed import DistributedOptimizer
from moewright.engine.pipeline.executor import execute
from moewright.engine.runtime import Runtime
from moewright.rules.legality import micro_batches
from moewright.rules.ramp import batch_of, workload_of
from moewright.rules.schedule import timetable
from moewright.spec.ledger import Phase, TimeRow
from moewright.spec.workload import RampSpec


class Clock:
    """Wall time by phase, since it was made; phases do not nest."""

    def __init__(self) -> None:
        self._spent = dict.fromkeys(Phase, 0.0)
        self._started = time.perf_counter()

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self._spent[phase] += time.perf_counter() - started

    def rows(self) -> tuple[TimeRow, ...]:
        """Seconds a phase; what no phase claimed is OTHER, so the rows sum to the time since the start."""
        self._spent[Phase.OTHER] = time.perf_counter() - self._started - sum(self._spent.values())
        return tuple(TimeRow(phase=phase, seconds=seconds) for phase, seconds in self._spent.items())


class Batches(Protocol):
    """Where micro-batches come from."""

    def micro_batch(self, run: Runtime, step: int, micro_batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets [mbs, seq_len / cp] of this rank, for the step counted from 0; targets < 0 are none."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """A mapped corpus and the order in which it is read, by global batches that grow or all alike."""

    dataset: IndexedDataset
    sampler: Sampler
    grows: bool

    def micro_batch(self, run: Runtime, step: int, micro_batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets [mbs, seq_len / cp] of this rank, for the step counted from 0."""
        layout, work = run.mesh.layout, run.workload
        batch = batch_of(work if self.grows else replace(work, ramp=RampSpec()), step)
        rows = rows_of(
            global_batch=batch.size,
            dp=layout.dp,
            dp_rank=run.mesh.coordinate("dp"),
            mbs=layout.mbs,
            micro_batch=micro_batch,
        )
        ids = self.sampler.ids(batch.first + rows.start, len(rows))
        tokens = fetch(self.dataset, ids, seq_len=work.seq_len, vocab_size=run.model.vocab_size)
        whole, here = torch.from_numpy(tokens), run.positions
        return whole[:, here].to(run.device), whole[:, here + 1].to(run.device)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trainee:
    """The model of this rank and what trains it."""

    run: Runtime
    model: Transformer
    optimizer: DistributedOptimizer
    train_data: Batches

    def pieces(self) -> list[Piece]:
        """Everything that a checkpoint holds of this rank."""
        return [*self.optimizer.pieces(), *biases_of(self.model)]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What one step did. counts [micro-batches, MoE layers, E] are this rank's (under dedup followed by its copies to
    each EP rank), loads [MoE layers, E] everyone's.
    """

    loss: float
    aux_loss: float
    grad_norm: float
    skipped: bool
    stop: bool  # some rank was asked to stop
    own_nll: float  # of this rank's own targets, summed
    counts: torch.Tensor
    loads: torch.Tensor
    phases: tuple[TimeRow, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Gradients:
    """What is known once a step's gradients are reduced and before they are used; losses as in StepResult."""

    loss: float
    aux_loss: float
    norm: float  # before clipping
    finite: bool
    stop: bool
    own_nll: float
    counts: torch.Tensor


@dataclass(kw_only=True, slots=True)
class _Sums:
    """What the micro-batches of a step add up to on this rank."""

    nll: float = 0.0
    aux: float = 0.0
    counts: list[torch.Tensor] = field(default_factory=list)


def train_step(job: Trainee, *, step: int, lr: float, stop_asked: bool, counted: bool) -> StepResult:
    """Update number `step` (from 1). `counted`: keep full books of this step.

    The loss is the sum of token losses over the number of valid targets of the global batch, so gradients are summed,
    never averaged. A gradient that is not finite anywhere skips the update on every rank alike.
    """
    with job.run.books.counting() if counted else nullcontext():
        return _train_step(job, step, lr, stop_asked)


def _train_step(job: Trainee, step: int, lr: float, stop_asked: bool) -> StepResult:
    clock = Clock()
    found = accumulate(job, clock, step=step, stop_asked=stop_asked)
    apply(job, clock, found, lr=lr)
    counts = found.counts
    moe = job.run.model.moe
    loads = counts[:, :, : moe.experts if moe else 0].sum(0)
    if loads.numel():
        all_reduce(loads, job.run.mesh.group("tp_cp_dp"))
    if found.finite:
        for router, load in zip(routers_of(job.model), loads, strict=True):
            router.rebalance(load)
    return StepResult(
        loss=found.loss,
        aux_loss=found.aux_loss,
        grad_norm=found.norm,
        skipped=not found.finite,
        stop=found.stop,
        own_nll=found.own_nll,
        counts=counts,
        loads=loads,
        phases=clock.rows(),
    )


def accumulate(job: Trainee, clock: Clock, *, step: int, stop_asked: bool = False) -> Gradients:
    """Forward and backward of every micro-batch of step `step` (from 1); gradients reduced, weights untouched."""
    run, sums = job.run, _Sums()
    layout = run.mesh.layout
    count = micro_batches(workload_of(run.workload, step - 1), layout)
    with clock.phase(Phase.DATA):
        batches = [job.train_data.micro_batch(run, step - 1, m) for m in range(count)]
        valid = torch.tensor([sum(int((targets >= 0).sum()) for _, targets in batches)], device=run.device)
        valid_targets = int(all_reduce(valid, run.mesh.group("dp_cp")))
    aux_share = count * layout.dp  # the auxiliary losses of the ranks that share tokens add up

    def forward(micro_batch: int) -> torch.Tensor:
        with clock.phase(Phase.FORWARD), run.keeper.forward(job.optimizer.resident):
            out: Output = job.model(*batches[micro_batch])
            nll = out.nll.sum()
            sums.nll += float(nll.detach())
            sums.aux += float(out.aux.detach()) / aux_share
            sums.counts.append(out.counts)
            return (nll / valid_targets + out.aux / aux_share) * job.optimizer.loss_scale

    def backward(loss: torch.Tensor) -> None:
        with clock.phase(Phase.BACKWARD):
            loss.backward()

    job.optimizer.begin(count)
    for router in routers_of(job.model):
        router.begin_step()
    execute(timetable(layout, count)[run.mesh.coordinate("pp")], forward=forward, backward=backward)
    with clock.phase(Phase.GRAD_REDUCE):
        squared = job.optimizer.reduce()
        own_nll = sums.nll if run.mesh.coordinate("tp") == 0 else 0.0  # a TP group shares one
        shared = torch.tensor([squared, float(stop_asked), own_nll, sums.aux], dtype=torch.float64, device=run.device)
        squared, stops, nll, aux = all_reduce(shared, run.mesh.group("world")).tolist()
    norm = squared**0.5 / job.optimizer.loss_scale
    return Gradients(
        loss=nll / valid_targets,
        aux_loss=aux,
        norm=norm,
        finite=isfinite(norm) and isfinite(nll),
        stop=stops > 0,
        own_nll=sums.nll,
        counts=torch.stack(sums.counts),
    )


def apply(job: Trainee, clock: Clock, found: Gradients, *, lr: float) -> None:
    """Clip, update, and bring the new weights to every rank; nothing is updated when a gradient is not finite."""
    if found.finite:
        with clock.phase(Phase.OPTIMIZER):
            clip = job.run.workload.optimizer.clip_norm
            scale = min(1.0, clip / (found.norm + 1e-6)) if clip else 1.0
            job.optimizer.update(lr=lr, scale=scale)
    job.optimizer.judge(finite=found.finite)
    with clock.phase(Phase.PARAM_GATHER):
        job.optimizer.publish()


@torch.no_grad()
def heldout_loss(job: Trainee, data: Batches, batches: int, beat: Callable[[], None]) -> tuple[float, int]:
    """Mean nats per target over the first `batches` global batches of `data`, and the number of targets.

    `beat` is called once a batch, so that a long evaluation is not taken for a hang.
    """
    run = job.run
    total, targets_seen = 0.0, 0
    for step in range(batches):
        beat()
        for m in range(micro_batches(run.workload, run.mesh.layout)):
            inputs, targets = data.micro_batch(run, step, m)
            total += float(job.model(inputs, targets).nll.sum())
            targets_seen += int((targets >= 0).sum())
    shared = torch.tensor([total, float(targets_seen)], dtype=torch.float64, device=run.device)
    total, count = all_reduce(shared, run.mesh.group("dp_cp")).tolist()
    return total / count, int(count)
