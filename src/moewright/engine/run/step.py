"""One training step: micro-batches through the timetable, gradients reduced, one update; and the
held-out loss."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from math import isfinite

import torch
from torch.autograd import profiler
from torch.autograd.graph import GradientEdge
from torch.profiler import record_function

from moewright.engine.checkpoint import Piece
from moewright.engine.comm.collectives import all_reduce
from moewright.engine.data.batch import Batch
from moewright.engine.data.batches import Batches
from moewright.engine.data.sampler import rows_of
from moewright.engine.kernels.attention import Runs
from moewright.engine.model.router import biases_of, coefficients_of, routers_of
from moewright.engine.model.transformer import Output, Transformer
from moewright.engine.optim.distributed import DistributedOptimizer
from moewright.engine.pipeline.executor import Key, Made
from moewright.engine.pipeline.run_batch import evaluate, train
from moewright.engine.runtime import Runtime
from moewright.rules.batch_rampup import batch_of, workload_of
from moewright.rules.context_parallel import attended, held
from moewright.rules.legality import micro_batches
from moewright.rules.routing import counts_copies, nodes_of
from moewright.rules.stages import Chunk, chunk_layers
from moewright.spec.ledger import Phase, TimeRow


class Clock:
    """Wall time by phase, since it was made; phases do not nest."""

    def __init__(self) -> None:
        self._spent = dict.fromkeys(Phase, 0.0)
        self._started = time.perf_counter()

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        started = time.perf_counter()
        try:
            with record_function(phase) if profiler._is_profiler_enabled else nullcontext():
                yield
        finally:
            self._spent[phase] += time.perf_counter() - started

    def rows(self) -> tuple[TimeRow, ...]:
        """Seconds a phase; what no phase claimed is OTHER, so the rows sum to the time since the
        start."""
        self._spent[Phase.OTHER] = time.perf_counter() - self._started - sum(self._spent.values())
        return tuple(
            TimeRow(phase=phase, seconds=seconds) for phase, seconds in self._spent.items()
        )


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

    def weights(self) -> list[Piece]:
        """Those of them that make the model: parameters, and the routers' biases."""
        return [piece for piece in self.pieces() if not piece.name.startswith("optim/")]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What one step did. counts [micro-batches, MoE layers, E] are this rank's (followed by its
    copies to each EP rank and node, where those are counted), 0 in layers of other ranks; loads
    [MoE layers, E] everyone's. router_losses [MoE layers, 4] fp64 are the auxiliary losses of each
    layer, as a Router returns them; `aux_loss` is their sum and that of MTP depths.
    """

    loss: float
    aux_loss: float
    grad_norm: float
    skipped: bool
    stop: bool  # some rank was asked to stop
    own_nll: float  # of this rank's own targets, summed
    attended: (
        int  # of this rank as in Selection, and `near`; 0 where documents do not bound attention
    )
    near: int
    counts: torch.Tensor
    loads: torch.Tensor
    router_losses: torch.Tensor
    phases: tuple[TimeRow, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Gradients:
    """What is known once a step's gradients are reduced and before they are used; losses as in
    StepResult."""

    loss: float
    aux_loss: float
    norm: float  # before clipping
    finite: bool
    stop: bool
    own_nll: float
    attended: int
    near: int
    counts: torch.Tensor
    router_losses: torch.Tensor  # on the CPU


@dataclass(kw_only=True, slots=True)
class _Sums:
    """What the micro-batches of a step add up to on this rank."""

    counts: torch.Tensor  # as in StepResult
    router_losses: torch.Tensor
    nll: float = 0.0
    ahead: float = 0.0  # of MTP depths, weighted


def train_step(
    job: Trainee, *, step: int, lr: float, stop_asked: bool, counted: bool
) -> StepResult:
    """Update number `step` (from 1). `counted`: keep full books of this step.

    The loss is the sum of token losses over the number of valid targets of the global batch, so
    gradients are summed, never averaged. A gradient that is not finite anywhere skips the update on
    every rank alike.
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
        all_reduce(loads, job.run.mesh.group("world"))
    if found.finite:
        for router in routers_of(job.model):
            router.rebalance(loads[job.run.model.routed_layers.index(router.number)])
    every = job.run.workload.gc_every_steps
    if every and step % every == 0:
        gc.collect()
    return StepResult(
        loss=found.loss,
        aux_loss=found.aux_loss,
        grad_norm=found.norm,
        skipped=not found.finite,
        stop=found.stop,
        own_nll=found.own_nll,
        attended=found.attended,
        near=found.near,
        counts=counts,
        loads=loads,
        router_losses=found.router_losses,
        phases=clock.rows(),
    )


def accumulate(job: Trainee, clock: Clock, *, step: int, stop_asked: bool = False) -> Gradients:
    """Forward and backward of every micro-batch of step `step` (from 1); gradients reduced, weights
    untouched."""
    run, mesh = job.run, job.run.mesh
    count = micro_batches(workload_of(run.workload, step - 1), mesh.layout)
    with clock.phase(Phase.DATA):
        batches = [job.train_data.micro_batch(run, step - 1, m) for m in range(count)]
        valid = torch.tensor(
            [sum(int((one.targets >= 0).sum()) for one in batches)], device=run.device
        )
        valid_targets = int(all_reduce(valid, mesh.group("dp_cp")))
    sums = _no_sums(run, count)
    job.optimizer.begin(count)
    for router in routers_of(job.model):
        router.begin_step()
    _pass(job, clock, batches, sums, step=step, valid_targets=valid_targets)
    with clock.phase(Phase.GRAD_REDUCE):
        squared = job.optimizer.reduce()
        own_nll = sums.nll if mesh.coordinate("tp") == 0 else 0.0  # a TP group shares one
        own = torch.tensor(
            [squared, float(stop_asked), own_nll, sums.ahead],
            dtype=torch.float64,
            device=run.device,
        )
        shared = all_reduce(
            torch.cat((own, sums.router_losses.flatten())), mesh.group("world")
        ).cpu()
        squared, stops, nll, ahead = shared[:4].tolist()
        router_losses = shared[4:].view_as(sums.router_losses)
    norm = squared**0.5 / job.optimizer.loss_scale
    return Gradients(
        loss=nll / valid_targets,
        aux_loss=ahead + float(router_losses.sum()),
        norm=norm,
        finite=isfinite(norm) and isfinite(nll),
        stop=stops > 0,
        own_nll=sums.nll,
        attended=sum(_attended(run, one.runs) for one in batches if one.runs),
        near=sum(
            _attended(run, one.runs, run.model.window)
            for one in batches
            if one.runs and run.model.window
        ),
        counts=sums.counts,
        router_losses=router_losses,
    )


def _pass(
    job: Trainee,
    clock: Clock,
    batches: Sequence[Batch],
    sums: _Sums,
    *,
    step: int,
    valid_targets: int,
) -> None:
    """All micro-batches through this rank's chunks and back, as the timetable says."""
    run = job.run
    aux_share = (
        len(batches) * run.mesh.layout.dp
    )  # the auxiliary losses of the ranks that share tokens add up

    def forward(key: Key, hidden: torch.Tensor | None) -> Made:
        micro_batch, number = key
        chunk = job.model.chunks[number]
        with clock.phase(Phase.FORWARD), run.keeper.forward(key, job.optimizer.resident):
            first = _first_sequence(run, step, micro_batch)
            out: Output = job.model(
                batches[micro_batch], chunk=number, hidden_tH=hidden, first=first
            )
            loss = out.aux.sum() / aux_share
            if chunk.loss:
                nll = out.nll.sum()
                sums.nll += float(nll.detach())
                loss = nll / valid_targets + loss
            if chunk.mtp:
                further = out.ahead_nll * (run.workload.loss.mtp_coeff / chunk.mtp / valid_targets)
                sums.ahead += (
                    float(further.detach()) if run.mesh.coordinate("tp") == 0 else 0.0
                )  # a TP group shares one
                loss = loss + further
            loss = loss * job.optimizer.loss_scale
            if len(out.counts):
                places = _places(run, chunk)
                sums.counts[micro_batch, places] = out.counts
                sums.router_losses[places] += out.aux.detach() / aux_share
        return Made(
            hidden=None if chunk.loss else out.hidden_tH, loss=loss if loss.requires_grad else None
        )

    def backward(
        key: Key, roots: Sequence[GradientEdge], grads: Sequence[torch.Tensor | None], split: bool
    ) -> None:
        with (
            clock.phase(Phase.BACKWARD),
            run.books.later.collecting(key) if split else nullcontext(),
        ):
            torch.autograd.backward(roots, grads)
        if not split:
            run.books.released(key)

    def weights(key: Key) -> None:
        with clock.phase(Phase.BACKWARD):
            run.books.later.make(key)
        run.books.released(key)

    train(run, batches, forward=forward, backward=backward, weights=weights)


def _attended(run: Runtime, runs: Runs, window: int = 0) -> int:
    """As in StepResult, of one micro-batch."""
    group, length = run.mesh.group("cp_kv"), run.workload.seq_len
    return attended(runs.lengths, length, held(length, group.size, group.index), window)


def _first_sequence(run: Runtime, step: int, micro_batch: int) -> int:
    """Number, over all of training, of the first sequence of a micro-batch of step `step` (from 1)
    on this rank."""
    batch, layout = batch_of(run.workload, step - 1), run.mesh.layout
    dp_rank = run.mesh.coordinate("dp")
    rows = rows_of(
        global_batch=batch.size,
        dp=layout.dp,
        dp_rank=dp_rank,
        mbs=layout.mbs,
        micro_batch=micro_batch,
    )
    return batch.first + rows.start


def _no_sums(run: Runtime, count: int) -> _Sums:
    """Zeros in the shapes of StepResult."""
    moe, layout, layers = run.model.moe, run.mesh.layout, len(run.model.routed_layers)
    copies = layout.ep + nodes_of(layout) if counts_copies(layout) else 0
    width = 0 if moe is None else moe.experts + copies
    return _Sums(
        counts=torch.zeros(count, layers, width, dtype=torch.int64, device=run.device),
        router_losses=torch.zeros(
            layers, len(coefficients_of(run.workload.loss)), dtype=torch.float64, device=run.device
        ),
    )


def _places(run: Runtime, chunk: Chunk) -> list[int]:
    """Places of the layers with experts of a chunk, its MTP depths last, among those of the
    model."""
    here = chunk_layers(run.model, chunk)
    return [place for place, number in enumerate(run.model.routed_layers) if number in here]


def apply(job: Trainee, clock: Clock, found: Gradients, *, lr: float) -> None:
    """Clip, update, and bring the new weights to every rank; nothing is updated when a gradient is
    not finite."""
    if found.finite:
        with clock.phase(Phase.OPTIMIZER):
            clip = job.run.workload.optimizer.clip_norm
            scale = min(1.0, clip / (found.norm + 1e-6)) if clip else 1.0
            job.optimizer.update(lr=lr, scale=scale)
    job.optimizer.judge(finite=found.finite)
    with clock.phase(Phase.PARAM_GATHER):
        job.optimizer.publish()


def heldout_loss(
    job: Trainee, data: Batches, batches: int, beat: Callable[[], None]
) -> tuple[float, int]:
    """Mean nats per target over the first `batches` global batches of `data`, and the number of
    targets.

    `beat` is called once a batch, so that a long evaluation is not taken for a hang.
    """
    run, mesh = job.run, job.run.mesh
    here = {"nll": 0.0, "targets": 0}
    for step in range(batches):
        beat()
        parts = [
            data.micro_batch(run, step, m) for m in range(micro_batches(run.workload, mesh.layout))
        ]

        def see(key: Key, out: Output, parts: Sequence[Batch] = parts) -> None:
            if (
                job.model.chunks[key[1]].loss and mesh.coordinate("tp") == 0
            ):  # a TP group shares one
                here["nll"] += float(out.nll.sum())
                here["targets"] += int((parts[key[0]].targets >= 0).sum())

        evaluate(run, job.model, parts, see)
    shared = torch.tensor(
        [here["nll"], float(here["targets"])], dtype=torch.float64, device=run.device
    )
    total, count = all_reduce(shared, mesh.group("world")).tolist()
    return total / count, int(count)
