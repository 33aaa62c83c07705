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

from moewright.engine.checkpoint import LocalShard
from moewright.engine.comm.collectives import all_reduce
from moewright.engine.data.corpus_loader import BatchSource
from moewright.engine.data.micro_batch import MicroBatch
from moewright.engine.data.sampler import micro_batch_rows
from moewright.engine.kernels.attention import Segments
from moewright.engine.model.router import aux_loss_coefficients, list_routers, selection_bias_pieces
from moewright.engine.model.transformer import ModelOutput, Transformer
from moewright.engine.optim.distributed_optimizer import DistributedOptimizer
from moewright.engine.pipeline.executor import ChunkResult, Key
from moewright.engine.pipeline.run_batch import evaluate_batch, train_batch
from moewright.engine.runtime import Runtime
from moewright.rules.batch_rampup import step_samples, workload_at_step
from moewright.rules.context_parallel import rank_positions, twice_attended_pairs
from moewright.rules.legality import micro_batches
from moewright.rules.routing import counts_copies, dispatch_nodes
from moewright.rules.stages import Chunk, chunk_layers
from moewright.spec.ledger import StepPhase, TimeRow


class PhaseClock:
    """Wall time by phase, since it was made; phases do not nest."""

    def __init__(self) -> None:
        self._spent = dict.fromkeys(StepPhase, 0.0)
        self._started = time.perf_counter()

    @contextmanager
    def phase(self, phase: StepPhase) -> Iterator[None]:
        started = time.perf_counter()
        try:
            with record_function(phase) if profiler._is_profiler_enabled else nullcontext():
                yield
        finally:
            self._spent[phase] += time.perf_counter() - started

    def time_rows(self) -> tuple[TimeRow, ...]:
        """Seconds a phase; what no phase claimed is OTHER, so the rows sum to the time since the
        start."""
        self._spent[StepPhase.OTHER] = (
            time.perf_counter() - self._started - sum(self._spent.values())
        )
        return tuple(
            TimeRow(phase=phase, seconds=seconds) for phase, seconds in self._spent.items()
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainState:
    """The model of this rank and what trains it."""

    runtime: Runtime
    model: Transformer
    optimizer: DistributedOptimizer
    train_data: BatchSource

    def local_shards(self) -> list[LocalShard]:
        """Everything that a checkpoint holds of this rank."""
        return [*self.optimizer.local_shards(), *selection_bias_pieces(self.model)]

    def weight_shards(self) -> list[LocalShard]:
        """Those of them that make the model: parameters, and the routers' biases."""
        return [piece for piece in self.local_shards() if not piece.name.startswith("optim/")]


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
    stop_agreed: bool  # some rank was asked to stop
    local_nll: float  # of this rank's own targets, summed
    attended_pairs: (
        int  # of this rank as in Selection, and `near`; 0 where documents do not bound attention
    )
    window_pairs: int
    expert_counts: torch.Tensor
    expert_loads: torch.Tensor
    router_losses: torch.Tensor
    phases: tuple[TimeRow, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class BackwardResult:
    """What is known once a step's gradients are reduced and before they are used; losses as in
    StepResult."""

    loss: float
    aux_loss: float
    grad_norm: float  # before clipping
    is_finite: bool
    stop_agreed: bool
    local_nll: float
    attended_pairs: int
    window_pairs: int
    expert_counts: torch.Tensor
    router_losses: torch.Tensor  # on the CPU


@dataclass(kw_only=True, slots=True)
class _StepSums:
    """What the micro-batches of a step add up to on this rank."""

    expert_counts: torch.Tensor  # as in StepResult
    router_losses: torch.Tensor
    nll: float = 0.0
    mtp_loss: float = 0.0  # of MTP depths, weighted


def train_step(
    state: TrainState, *, step: int, lr: float, stop_requested: bool, count_ledger: bool
) -> StepResult:
    """Update number `step` (from 1). `counted`: keep full books of this step.

    The loss is the sum of token losses over the number of valid targets of the global batch, so
    gradients are summed, never averaged. A gradient that is not finite anywhere skips the update on
    every rank alike.
    """
    with state.runtime.counters.counting() if count_ledger else nullcontext():
        return _train_step(state, step, lr, stop_requested)


def _train_step(job: TrainState, step: int, lr: float, stop_asked: bool) -> StepResult:
    clock = PhaseClock()
    found = forward_backward(job, clock, step=step, stop_requested=stop_asked)
    apply_update(job, clock, found, lr=lr)
    counts = found.expert_counts
    moe = job.runtime.model.moe
    loads = counts[:, :, : moe.experts if moe else 0].sum(0)
    if loads.numel():
        all_reduce(loads, job.runtime.mesh.group("world"))
    if found.is_finite:
        for router in list_routers(job.model):
            router.update_selection_bias(
                loads[job.runtime.model.routed_layers.index(router.layer_number)]
            )
    every = job.runtime.workload.gc_every_steps
    if every and step % every == 0:
        gc.collect()
    return StepResult(
        loss=found.loss,
        aux_loss=found.aux_loss,
        grad_norm=found.grad_norm,
        skipped=not found.is_finite,
        stop_agreed=found.stop_agreed,
        local_nll=found.local_nll,
        attended_pairs=found.attended_pairs,
        window_pairs=found.window_pairs,
        expert_counts=counts,
        expert_loads=loads,
        router_losses=found.router_losses,
        phases=clock.time_rows(),
    )


def forward_backward(
    state: TrainState, clock: PhaseClock, *, step: int, stop_requested: bool = False
) -> BackwardResult:
    """Forward and backward of every micro-batch of step `step` (from 1); gradients reduced, weights
    untouched."""
    run, mesh = state.runtime, state.runtime.mesh
    count = micro_batches(workload_at_step(run.workload, step - 1), mesh.layout)
    with clock.phase(StepPhase.DATA):
        batches = [state.train_data.micro_batch(run, step - 1, m) for m in range(count)]
        valid = torch.tensor(
            [sum(int((one.targets >= 0).sum()) for one in batches)], device=run.device
        )
        valid_targets = int(all_reduce(valid, mesh.group("dp_cp")))
    sums = _zero_sums(run, count)
    state.optimizer.begin_step(count)
    for router in list_routers(state.model):
        router.begin_step()
    _run_micro_batches(state, clock, batches, sums, step=step, valid_targets=valid_targets)
    with clock.phase(StepPhase.GRAD_REDUCE):
        squared = state.optimizer.reduce_gradients()
        own_nll = sums.nll if mesh.coordinate("tp") == 0 else 0.0  # a TP group shares one
        own = torch.tensor(
            [squared, float(stop_requested), own_nll, sums.mtp_loss],
            dtype=torch.float64,
            device=run.device,
        )
        shared = all_reduce(
            torch.cat((own, sums.router_losses.flatten())), mesh.group("world")
        ).cpu()
        squared, stops, nll, ahead = shared[:4].tolist()
        router_losses = shared[4:].view_as(sums.router_losses)
    norm = squared**0.5 / state.optimizer.loss_scale
    return BackwardResult(
        loss=nll / valid_targets,
        aux_loss=ahead + float(router_losses.sum()),
        grad_norm=norm,
        is_finite=isfinite(norm) and isfinite(nll),
        stop_agreed=stops > 0,
        local_nll=sums.nll,
        attended_pairs=sum(
            _count_attended_pairs(run, one.segments) for one in batches if one.segments
        ),
        window_pairs=sum(
            _count_attended_pairs(run, one.segments, run.model.max_window)
            for one in batches
            if one.segments and run.model.max_window
        ),
        expert_counts=sums.expert_counts,
        router_losses=router_losses,
    )


def _run_micro_batches(
    state: TrainState,
    clock: PhaseClock,
    batches: Sequence[MicroBatch],
    sums: _StepSums,
    *,
    step: int,
    valid_targets: int,
) -> None:
    """All micro-batches through this rank's chunks and back, as the timetable says."""
    run = state.runtime
    aux_share = (
        len(batches) * run.mesh.layout.dp
    )  # the auxiliary losses of the ranks that share tokens add up

    def forward(key: Key, hidden: torch.Tensor | None) -> ChunkResult:
        micro_batch, number = key
        chunk = state.model.chunks[number]
        with (
            clock.phase(StepPhase.FORWARD),
            run.saved_tensors.track_forward(key, state.optimizer.is_weight),
        ):
            first = _first_sequence_number(run, step, micro_batch)
            out: ModelOutput = state.model(
                batches[micro_batch], chunk=number, hidden_tH=hidden, first=first
            )
            loss = out.aux_losses.sum() / aux_share
            if chunk.has_loss:
                nll = out.nll.sum()
                sums.nll += float(nll.detach())
                loss = nll / valid_targets + loss
            if chunk.mtp_layers:
                further = out.mtp_nll * (
                    run.workload.loss.mtp_coeff / chunk.mtp_layers / valid_targets
                )
                sums.mtp_loss += (
                    float(further.detach()) if run.mesh.coordinate("tp") == 0 else 0.0
                )  # a TP group shares one
                loss = loss + further
            loss = loss * state.optimizer.loss_scale
            if len(out.expert_counts):
                places = _moe_layer_places(run, chunk)
                sums.expert_counts[micro_batch, places] = out.expert_counts
                sums.router_losses[places] += out.aux_losses.detach() / aux_share
        return ChunkResult(
            hidden=None if chunk.has_loss else out.hidden_tH,
            loss=loss if loss.requires_grad else None,
        )

    def backward(
        key: Key, roots: Sequence[GradientEdge], grads: Sequence[torch.Tensor | None], split: bool
    ) -> None:
        with (
            clock.phase(StepPhase.BACKWARD),
            run.counters.weight_grads.defer_for(key) if split else nullcontext(),
        ):
            torch.autograd.backward(roots, grads)
        if not split:
            run.counters.release(key)

    def weights(key: Key) -> None:
        with clock.phase(StepPhase.BACKWARD):
            run.counters.weight_grads.run_deferred(key)
        run.counters.release(key)

    train_batch(run, batches, forward=forward, backward=backward, weight_grad=weights)


def _count_attended_pairs(run: Runtime, runs: Segments, window: int = 0) -> int:
    """As in StepResult, of one micro-batch."""
    group, length = run.mesh.group("cp_kv"), run.workload.seq_len
    return twice_attended_pairs(
        runs.lengths, length, rank_positions(length, group.size, group.index), window
    )


def _first_sequence_number(run: Runtime, step: int, micro_batch: int) -> int:
    """Number, over all of training, of the first sequence of a micro-batch of step `step` (from 1)
    on this rank."""
    batch, layout = step_samples(run.workload, step - 1), run.mesh.layout
    dp_rank = run.mesh.coordinate("dp")
    rows = micro_batch_rows(
        global_batch=batch.size,
        dp=layout.dp,
        dp_rank=dp_rank,
        mbs=layout.mbs,
        micro_batch=micro_batch,
    )
    return batch.first + rows.start


def _zero_sums(run: Runtime, count: int) -> _StepSums:
    """Zeros in the shapes of StepResult."""
    moe, layout, layers = run.model.moe, run.mesh.layout, len(run.model.routed_layers)
    copies = layout.ep + dispatch_nodes(layout) if counts_copies(layout) else 0
    width = 0 if moe is None else moe.experts + copies
    return _StepSums(
        expert_counts=torch.zeros(count, layers, width, dtype=torch.int64, device=run.device),
        router_losses=torch.zeros(
            layers,
            len(aux_loss_coefficients(run.workload.loss)),
            dtype=torch.float64,
            device=run.device,
        ),
    )


def _moe_layer_places(run: Runtime, chunk: Chunk) -> list[int]:
    """Places of the layers with experts of a chunk, its MTP depths last, among those of the
    model."""
    here = chunk_layers(run.model, chunk)
    return [place for place, number in enumerate(run.model.routed_layers) if number in here]


def apply_update(
    state: TrainState, clock: PhaseClock, backward: BackwardResult, *, lr: float
) -> None:
    """Clip, update, and bring the new weights to every rank; nothing is updated when a gradient is
    not finite."""
    if backward.is_finite:
        with clock.phase(StepPhase.OPTIMIZER):
            clip = state.runtime.workload.optimizer.clip_norm
            scale = min(1.0, clip / (backward.grad_norm + 1e-6)) if clip else 1.0
            state.optimizer.update(lr=lr, scale=scale)
    state.optimizer.update_loss_scale(finite=backward.is_finite)
    with clock.phase(StepPhase.PARAM_GATHER):
        state.optimizer.all_gather_params()


def compute_heldout_loss(
    state: TrainState, data: BatchSource, batches: int, beat: Callable[[], None]
) -> tuple[float, int]:
    """Mean nats per target over the first `batches` global batches of `data`, and the number of
    targets.

    `beat` is called once a batch, so that a long evaluation is not taken for a hang.
    """
    run, mesh = state.runtime, state.runtime.mesh
    here = {"nll": 0.0, "targets": 0}
    for step in range(batches):
        beat()
        parts = [
            data.micro_batch(run, step, m) for m in range(micro_batches(run.workload, mesh.layout))
        ]

        def see(key: Key, out: ModelOutput, parts: Sequence[MicroBatch] = parts) -> None:
            if (
                state.model.chunks[key[1]].has_loss and mesh.coordinate("tp") == 0
            ):  # a TP group shares one
                here["nll"] += float(out.nll.sum())
                here["targets"] += int((parts[key[0]].targets >= 0).sum())

        evaluate_batch(run, state.model, parts, see)
    shared = torch.tensor(
        [here["nll"], float(here["targets"])], dtype=torch.float64, device=run.device
    )
    total, count = all_reduce(shared, mesh.group("world")).tolist()
    return total / count, int(count)
