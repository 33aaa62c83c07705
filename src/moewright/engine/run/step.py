"""One training step: micro-batches through the timetable, gradients reduced, one update.

The held-out loss is here too, since it runs the same micro-batches forward.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, Protocol

import torch
from torch.autograd import profiler
from torch.autograd.graph import GradientEdge
from torch.profiler import record_function

from moewright.engine.checkpoint import LocalShard
from moewright.engine.comm.collectives import all_reduce
from moewright.engine.memory.weight_gradients import Operands
from moewright.engine.model.micro_batch import MicroBatch
from moewright.engine.model.router import aux_loss_coefficients, list_routers, selection_bias_shards
from moewright.engine.model.transformer import ModelOutput, Transformer
from moewright.engine.optim.distributed_optimizer import DistributedOptimizer
from moewright.engine.pipeline.executor import ChunkResult, Key
from moewright.engine.pipeline.run_batch import evaluate_batch, train_batch
from moewright.engine.run.corpus_loader import BatchSource, local_rows
from moewright.engine.run.step_graph import GraphTensors, StepGraph
from moewright.engine.runtime import Runtime
from moewright.rules.adapters import is_adapter, is_frozen
from moewright.rules.batch_rampup import step_samples, workload_at_step
from moewright.rules.context_parallel import (
    rank_positions,
    split_at_chunks,
    twice_attended_pairs,
)
from moewright.rules.micro_batches import micro_batches
from moewright.rules.routing import counts_copies, dispatch_nodes
from moewright.rules.stages import Chunk, chunk_layers
from moewright.rules.timetable_row import RowKind
from moewright.spec.layout import Overlap
from moewright.spec.ledger import StepPhase, TimeRow
from moewright.spec.workload import DocumentMasking


class Stamps(Protocol):
    """A source of moments, between which a clock counts seconds once all have passed."""

    def take(self) -> Any: ...
    def seconds(self, start: Any, stop: Any) -> float: ...
    def wait(self, last: Any) -> None: ...


class HostStamps:
    """The moments of the host, which are those of a CPU's work."""

    def take(self) -> float:
        return time.perf_counter()

    def seconds(self, start: float, stop: float) -> float:
        return stop - start

    def wait(self, last: float) -> None:
        pass


class DeviceStamps:
    """The moments at which a GPU comes to a place of its stream.

    The host only launches its work: by the host's clock a phase would last as long as its launches.
    """

    def take(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, stop: torch.cuda.Event) -> float:
        return 1e-3 * float(start.elapsed_time(stop))

    def wait(self, last: torch.cuda.Event) -> None:
        last.synchronize()


def build_phase_clock(device: torch.device) -> PhaseClock:
    """Build the clock of a step on a device."""
    return PhaseClock(DeviceStamps() if device.type == "cuda" else HostStamps())


class PhaseClock:
    """A clock that splits the time since it was made into phases, which do not nest.

    Where two passes take turns, `change_to` says which phase goes on.
    """

    def __init__(self, stamps: Stamps) -> None:
        self._stamps = stamps
        self._spans: list[tuple[StepPhase, Any, Any]] = []
        self._started = stamps.take()
        self._phase: StepPhase | None = None
        self._phase_started = self._started

    def change_to(self, phase: StepPhase | None) -> None:
        """Count the time from now on to a phase; None: to none."""
        now = self._stamps.take()
        if self._phase is not None:
            self._spans.append((self._phase, self._phase_started, now))
        self._phase = phase
        self._phase_started = now

    @contextmanager
    def phase(self, phase: StepPhase) -> Iterator[None]:
        """Count the time inside to a phase, and name it in a profile."""
        self.change_to(phase)
        try:
            with record_function(phase) if profiler._is_profiler_enabled else nullcontext():
                yield
        finally:
            self.change_to(None)

    def time_rows(self) -> tuple[TimeRow, ...]:
        """Return the seconds of each phase, which sum to the time since the start.

        Time outside of every phase is OTHER. It waits for the device's work.
        """
        stopped = self._stamps.take()
        self._stamps.wait(stopped)
        spent = dict.fromkeys(StepPhase, 0.0)
        for phase, start, stop in self._spans:
            spent[phase] += self._stamps.seconds(start, stop)
        elapsed = self._stamps.seconds(self._started, stopped)
        spent[StepPhase.OTHER] = elapsed - sum(spent.values())
        return tuple(TimeRow(phase=phase, seconds=seconds) for phase, seconds in spent.items())


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainState:
    """The state of this rank: its part of the model, and what trains it."""

    runtime: Runtime
    model: Transformer
    optimizer: DistributedOptimizer
    train_data: BatchSource
    graph: StepGraph | None = None  # where the layout captures whole steps

    def local_shards(self) -> list[LocalShard]:
        """Return everything that a checkpoint holds of this rank.

        Frozen parts are among it; of a model whose adapters alone train, the adapters.
        """
        return [*self.optimizer.local_shards(), *self._other_shards()]

    def load(self, load: Callable[[Sequence[LocalShard]], None]) -> None:
        """Have `load` read everything that a checkpoint holds of this rank."""
        self.optimizer.load(self._other_shards(), load)

    def _other_shards(self) -> list[LocalShard]:
        frozen = [] if is_frozen(self.runtime.workload) else self.optimizer.frozen.local_shards()
        return [*frozen, *selection_bias_shards(self.model)]

    def weight_shards(self) -> list[LocalShard]:
        """Return the shards that make the model: parameters, and the routers' selection biases.

        Frozen weights are among them, adapters are not.
        """
        saved = [shard for shard in self.local_shards() if not shard.name.startswith("optim/")]
        if not is_frozen(self.runtime.workload):
            return saved
        biases = [shard for shard in saved if not is_adapter(shard.name)]
        return [*self.optimizer.frozen.local_shards(), *biases]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """The result of one step.

    expert_counts [micro-batches, MoE layers, E] are the token rows of this rank for each expert, 0
    in layers of other ranks. Where copies are counted (rules.routing), the last dim goes on with
    this rank's copies to each EP rank, then to each node. expert_loads [MoE layers, E] are the rows
    of tokens that count, summed over micro-batches and all ranks. router_losses [MoE layers, 4]
    fp64 are the auxiliary losses of each layer as a Router returns them; `aux_loss` is their sum
    plus the loss of the MTP depths.

    attended_pairs and window_pairs are `attended` and `near` of a Selection, for this rank; 0 where
    documents do not bound attention.
    """

    loss: float
    aux_loss: float
    grad_norm: float
    skipped: bool
    stop_agreed: bool  # some rank was asked to stop
    local_nll: float  # summed over this rank's own targets
    attended_pairs: int
    window_pairs: int
    expert_counts: torch.Tensor
    expert_loads: torch.Tensor
    router_losses: torch.Tensor
    phases: tuple[TimeRow, ...]
    is_repeated: bool  # run again, since some rank had more rows than its budget


@dataclass(frozen=True, kw_only=True, slots=True)
class BackwardResult:
    """The result of a step once its gradients are reduced; fields are those of StepResult."""

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
    counts_all_tokens: bool  # False where padding and masked tokens are left out of statistics
    is_repeated: bool  # run again, since some rank had more rows than its budget


def train_step(
    state: TrainState,
    *,
    step: int,
    lr: float,
    stop_requested: bool,
    count_ledger: bool,
    before_update: Callable[[BackwardResult], None] = lambda backward: None,
) -> StepResult:
    """Do update number `step` (from 1); `count_ledger` counts this step for the ledger.

    `before_update` is called when the gradients are reduced, and nothing has been updated.

    The loss is the sum of token losses over the number of valid targets of the global batch, so
    gradients are summed, never averaged. When a gradient of any rank is not finite, all ranks skip
    the update.
    """
    with state.runtime.counters.counting() if count_ledger else nullcontext():
        return _train_step(state, step, lr, stop_requested, before_update)


def _train_step(
    state: TrainState,
    step: int,
    lr: float,
    stop_requested: bool,
    before_update: Callable[[BackwardResult], None],
) -> StepResult:
    runtime = state.runtime
    clock = build_phase_clock(runtime.device)
    backward = forward_backward(state, clock, step=step, stop_requested=stop_requested)
    before_update(backward)
    apply_update(state, clock, backward, lr=lr)
    expert_loads = _sum_expert_loads(state, backward)
    if expert_loads.numel():
        all_reduce(expert_loads, runtime.mesh.group("world"))
    if backward.is_finite:
        for router in list_routers(state.model):
            layer = runtime.model.routed_layers.index(router.layer_number)
            router.update_selection_bias(expert_loads[layer])
    gc_every = runtime.workload.gc_every_steps
    if gc_every and step % gc_every == 0:
        gc.collect()
    return StepResult(
        loss=backward.loss,
        aux_loss=backward.aux_loss,
        grad_norm=backward.grad_norm,
        skipped=not backward.is_finite,
        stop_agreed=backward.stop_agreed,
        local_nll=backward.local_nll,
        attended_pairs=backward.attended_pairs,
        window_pairs=backward.window_pairs,
        expert_counts=backward.expert_counts,
        expert_loads=expert_loads,
        router_losses=backward.router_losses,
        phases=clock.time_rows(),
        is_repeated=backward.is_repeated,
    )


def _sum_expert_loads(state: TrainState, backward: BackwardResult) -> torch.Tensor:
    """Return this rank's rows to each expert in the step [MoE layers, E], of tokens that count."""
    runtime = state.runtime
    experts = runtime.model.moe.experts if runtime.model.moe else 0
    loads = backward.expert_counts[:, :, :experts].sum(0)
    if backward.counts_all_tokens:
        return loads
    loads.zero_()
    for router in list_routers(state.model):
        loads[runtime.model.routed_layers.index(router.layer_number)] = router.counted_loads
    return loads


def forward_backward(
    state: TrainState, clock: PhaseClock, *, step: int, stop_requested: bool = False
) -> BackwardResult:
    """Run every micro-batch of step `step` (from 1) forward and backward; reduce the gradients.

    Weights are untouched.
    """
    runtime = state.runtime
    mesh = runtime.mesh
    count = micro_batches(workload_at_step(runtime.workload, step - 1), mesh.layout)
    with clock.phase(StepPhase.DATA):
        batches = [
            state.train_data.micro_batch(runtime, step - 1, number).to(runtime.device)
            for number in range(count)
        ]
        local_targets = torch.stack([_count_targets(batch) for batch in batches]).sum()
        # A step without a target has no loss to divide; its gradients are those of other losses.
        valid_targets = max(1, int(all_reduce(local_targets[None], mesh.group("dp_cp"))))
    passes = _MicroBatchPasses(
        state=state,
        clock=clock,
        batches=batches,
        step=step,
        valid_targets=valid_targets,
        sums=_zero_sums(runtime, count),
    )
    if runtime.row_budget is not None:
        with runtime.row_budget.enforce():
            result = _run_passes(passes, stop_requested)
        if result is not None:
            return result
        runtime.counters.note("the step again, with all rows")
        passes = replace(passes, sums=_zero_sums(runtime, count), is_repeated=True)
    result = _run_passes(passes, stop_requested)
    assert result is not None  # nothing was over a budget
    return result


def _run_passes(passes: _MicroBatchPasses, stop_requested: bool) -> BackwardResult | None:
    """Run the micro-batches of a step and reduce its gradients.

    Return None where some rank had more rows for another than an enforced budget.
    """
    state = passes.state
    runtime = state.runtime
    mesh = runtime.mesh
    clock = passes.clock
    batches = passes.batches
    valid_targets = passes.valid_targets
    runtime.products.begin_step(passes.step)
    state.optimizer.begin_step(len(batches))
    for router in list_routers(state.model):
        router.begin_step()
    _run_micro_batches(passes)
    sums = passes.sums
    with clock.phase(StepPhase.GRAD_REDUCE):
        squared_norm = state.optimizer.reduce_gradients()
        # The ranks of a TP group have the same losses: one of them adds them up.
        adds_up = float(mesh.coordinate("tp") == 0)
        stop_flag = torch.full_like(squared_norm, float(stop_requested))
        world_sums = [squared_norm, stop_flag, sums.nll * adds_up, sums.mtp_loss * adds_up]
        if runtime.row_budget is not None:
            world_sums.append(runtime.row_budget.flag())
        local = torch.cat((torch.stack(world_sums), sums.router_losses.flatten()))
        # The last is this rank's own, and comes to the host with the others.
        reduced = torch.cat((all_reduce(local, mesh.group("world")), sums.nll[None])).cpu()
        squares, stops, nll, mtp_loss, *excess = reduced[: len(world_sums)].tolist()
        local_nll = float(reduced[-1])
        router_losses = reduced[len(world_sums) : -1].view_as(sums.router_losses)
    if sum(excess) > 1:
        return None
    grad_norm = squares**0.5 / state.optimizer.loss_scale
    attended_pairs, window_pairs = _count_attended_pairs(runtime, batches)
    return BackwardResult(
        loss=nll / valid_targets,
        aux_loss=mtp_loss + float(router_losses.sum()),
        grad_norm=grad_norm,
        is_finite=isfinite(grad_norm) and isfinite(nll),
        stop_agreed=stops > 0,
        local_nll=local_nll,
        attended_pairs=attended_pairs,
        window_pairs=window_pairs,
        expert_counts=sums.expert_counts,
        router_losses=router_losses,
        counts_all_tokens=all(batch.counted is None for batch in batches),
        is_repeated=passes.is_repeated,
    )


def _run_micro_batches(passes: _MicroBatchPasses) -> None:
    """Run the micro-batches of a step, by its graph where the layout captures one.

    A step that is counted for the ledger runs as it is, as does one that is run again.
    """
    state = passes.state
    graph = state.graph
    count = len(passes.batches)
    is_plain = passes.is_repeated or state.runtime.counters.is_counting
    if graph is None or is_plain or not graph.is_warm(count):
        passes.run()
        return

    def build() -> tuple[GraphTensors, Callable[[], frozenset[str]]]:
        own = replace(
            passes,
            clock=PhaseClock(HostStamps()),  # a graph has no moments inside
            batches=[batch.clone() for batch in passes.batches],
            valid_targets=_to_tensor(passes.valid_targets, state.runtime.device),
            sums=_zero_sums(state.runtime, count),
        )

        def body() -> frozenset[str]:
            own.run()
            return state.optimizer.unwritten_gradients

        return own.graph_tensors(), body

    with passes.clock.phase(StepPhase.BACKWARD):
        outer = replace(
            passes, valid_targets=_to_tensor(passes.valid_targets, state.runtime.device)
        )
        state.optimizer.unwritten_gradients = graph.run(count, outer.graph_tensors(), build)


def _to_tensor(number: float | torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.as_tensor(number, dtype=torch.float64, device=device)


def _round_like(number: float | torch.Tensor, like: torch.Tensor) -> float | torch.Tensor:
    """Return a factor as an operation with `like` rounds it: a number is rounded to its dtype."""
    return number.to(like.dtype) if isinstance(number, torch.Tensor) else number


def apply_update(
    state: TrainState, clock: PhaseClock, backward: BackwardResult, *, lr: float
) -> None:
    """Clip, update, and bring the new weights to every rank.

    Nothing is updated when a gradient is not finite.
    """
    if backward.is_finite:
        state.runtime.counters.note("update of the weights")
        with clock.phase(StepPhase.OPTIMIZER):
            clip_norm = state.runtime.workload.optimizer.clip_norm
            scale = min(1.0, clip_norm / (backward.grad_norm + 1e-6)) if clip_norm else 1.0
            state.optimizer.update(lr=lr, scale=scale)
    state.optimizer.update_loss_scale(finite=backward.is_finite)
    with clock.phase(StepPhase.PARAM_GATHER):
        state.optimizer.all_gather_params()


@dataclass(kw_only=True, slots=True)
class _StepSums:
    """The sums over the micro-batches of a step on this rank."""

    expert_counts: torch.Tensor  # as in StepResult
    router_losses: torch.Tensor
    nll: torch.Tensor  # fp64, on the device like all sums: the host waits once a step
    mtp_loss: torch.Tensor  # of all MTP depths, weighted; fp64


def _zero_sums(runtime: Runtime, micro_batch_count: int) -> _StepSums:
    moe = runtime.model.moe
    layout = runtime.mesh.layout
    layers = len(runtime.model.routed_layers)
    width = 0
    if moe is not None:
        width = moe.experts
        if counts_copies(layout):
            width += layout.ep + dispatch_nodes(layout)
    losses = len(aux_loss_coefficients(runtime.workload.loss))
    device = runtime.device
    return _StepSums(
        expert_counts=torch.zeros(
            micro_batch_count, layers, width, dtype=torch.int64, device=device
        ),
        router_losses=torch.zeros(layers, losses, dtype=torch.float64, device=device),
        nll=torch.zeros((), dtype=torch.float64, device=device),
        mtp_loss=torch.zeros((), dtype=torch.float64, device=device),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _MicroBatchPasses:
    """The forward and backward of a step's micro-batches, as the timetable calls them."""

    state: TrainState
    clock: PhaseClock
    batches: Sequence[MicroBatch]
    step: int
    valid_targets: int | torch.Tensor  # fp64 inside a graph
    sums: _StepSums
    is_repeated: bool = False

    def run(self) -> None:
        """Run every forward and backward of the step."""
        train_batch(
            self.state.runtime,
            self.batches,
            forward=self.forward,
            backward=self.backward,
            weight_grad=self.weight_grad,
            note_turn=self.note_turn,
        )

    def graph_tensors(self) -> GraphTensors:
        """Return what differs between two steps of the same shapes, and the sums of the step."""
        assert isinstance(self.valid_targets, torch.Tensor)
        inputs = [tensor for batch in self.batches for tensor in batch.tensors()]
        sums = self.sums
        outputs = (sums.expert_counts, sums.router_losses, sums.nll, sums.mtp_loss)
        return GraphTensors(inputs=(*inputs, self.valid_targets), outputs=outputs)

    def forward(self, key: Key, hidden: torch.Tensor | None) -> ChunkResult:
        """Run a micro-batch through a chunk; its loss is what backward starts from."""
        micro_batch, chunk_number = key
        state = self.state
        runtime = state.runtime
        runtime.counters.note(f"forward of micro-batch {micro_batch}, chunk {chunk_number}")
        chunk = state.model.chunks[chunk_number]
        with (
            self.clock.phase(StepPhase.FORWARD),
            runtime.saved_tensors.track_forward(key, state.optimizer.is_weight),
        ):
            out: ModelOutput = state.model(
                self.batches[micro_batch],
                chunk=chunk_number,
                hidden_tH=hidden,
                first_sequence=_first_sequence_number(runtime, self.step, micro_batch),
            )
            loss = self._sum_losses(chunk, out)
            self._add_router_results(chunk, micro_batch, out)
        return ChunkResult(
            hidden=None if chunk.has_loss else out.hidden_tH,
            loss=loss if loss.requires_grad else None,
        )

    def backward(
        self,
        key: Key,
        roots: Sequence[GradientEdge],
        grads: Sequence[torch.Tensor | None],
        split: bool,
    ) -> None:
        """Run the backward of a chunk; with `split`, weight gradients are left to `weight_grad`."""
        runtime = self.state.runtime
        runtime.counters.note(f"backward of micro-batch {key[0]}, chunk {key[1]}")
        if split:
            self._backward_inputs(key, roots, grads)
            return
        with self.clock.phase(StepPhase.BACKWARD):
            if Overlap.WGRAD in runtime.mesh.layout.overlap:
                with runtime.weight_grads.defer_for(key):
                    torch.autograd.backward(roots, grads)
                runtime.weight_grads.run_deferred(key)
            else:
                torch.autograd.backward(roots, grads)
        runtime.counters.release(key)

    def note_turn(self, kind: RowKind | None) -> None:
        """Count the time from now on to the pass of a pair that goes on."""
        phases = {RowKind.F: StepPhase.FORWARD, RowKind.B: StepPhase.BACKWARD}
        self.clock.change_to(phases.get(kind) if kind else None)

    def _backward_inputs(
        self, key: Key, roots: Sequence[GradientEdge], grads: Sequence[torch.Tensor | None]
    ) -> None:
        """Run a backward without weight gradients; what these wait with is counted for the key."""
        runtime = self.state.runtime
        with (
            self.clock.phase(StepPhase.BACKWARD),
            runtime.counters.count_saved(key, self.state.optimizer.is_weight) as count,
        ):

            def count_operands(operands: Operands) -> None:
                for tensor in operands:
                    if count is not None:
                        count(tensor)

            with runtime.weight_grads.defer_for(key, count_operands):
                torch.autograd.backward(roots, grads)

    def weight_grad(self, key: Key) -> None:
        """Compute the weight gradients that `backward` left."""
        runtime = self.state.runtime
        runtime.counters.note(f"weight gradients of micro-batch {key[0]}, chunk {key[1]}")
        with self.clock.phase(StepPhase.BACKWARD):
            runtime.weight_grads.run_deferred(key)
        runtime.counters.release(key)

    @property
    def _aux_divisor(self) -> int:
        # A mean over micro-batches and DP ranks; the auxiliary losses of the ranks that share
        # tokens (TP, CP) add up.
        return len(self.batches) * self.state.runtime.mesh.layout.dp

    def _sum_losses(self, chunk: Chunk, out: ModelOutput) -> torch.Tensor:
        runtime = self.state.runtime
        loss = out.aux_losses.sum() / self._aux_divisor
        if chunk.has_loss:
            nll = out.nll.sum()
            self.sums.nll += nll.detach()
            loss = nll / _round_like(self.valid_targets, nll) + loss
        if chunk.mtp_layers:
            weight = runtime.workload.loss.mtp_coeff / chunk.mtp_layers / self.valid_targets
            mtp_loss = out.mtp_nll * _round_like(weight, out.mtp_nll)
            self.sums.mtp_loss += mtp_loss.detach().sum()
            loss = loss + mtp_loss
        return loss * self.state.optimizer.loss_scale

    def _add_router_results(self, chunk: Chunk, micro_batch: int, out: ModelOutput) -> None:
        if not len(out.expert_counts):
            return
        layers = _routed_layer_indices(self.state.runtime, chunk)
        self.sums.expert_counts[micro_batch, layers] = out.expert_counts
        self.sums.router_losses[layers] += out.aux_losses.detach() / self._aux_divisor


def _routed_layer_indices(runtime: Runtime, chunk: Chunk) -> slice:
    """Return where a chunk's MoE layers stand among those of the model; MTP depths come last.

    They follow each other, as the layers of a chunk do.
    """
    layers = chunk_layers(runtime.model, chunk)
    indices = [i for i, layer in enumerate(runtime.model.routed_layers) if layer in layers]
    return slice(indices[0], indices[-1] + 1)


def _count_targets(batch: MicroBatch) -> torch.Tensor:
    return (batch.targets >= 0).sum()


def _count_attended_pairs(runtime: Runtime, batches: Sequence[MicroBatch]) -> tuple[int, int]:
    """Return attended_pairs and window_pairs of StepResult."""
    group = runtime.mesh.group("cp_kv")
    seq_len = runtime.workload.seq_len
    positions = rank_positions(seq_len, group.size, group.index)
    window = runtime.model.max_window
    attended = 0
    within_window = 0
    for batch in batches:
        if not batch.segments:
            continue
        lengths = batch.segments.lengths
        attended += twice_attended_pairs(lengths, seq_len, positions, 0)
        if window and runtime.model.attention.chunked:
            restarts = runtime.workload.data.documents is DocumentMasking.RESTARTED
            lengths = split_at_chunks(lengths, seq_len, window, restarts=restarts)
            within_window += twice_attended_pairs(lengths, seq_len, positions, 0)
        elif window:
            within_window += twice_attended_pairs(lengths, seq_len, positions, window)
    return attended, within_window


def _first_sequence_number(runtime: Runtime, step: int, micro_batch: int) -> int:
    """Return the number, over all of training, of a micro-batch's first sequence on this rank."""
    samples = step_samples(runtime.workload, step - 1)
    return samples.first + local_rows(runtime, micro_batch, global_batch=samples.size).start


def compute_heldout_loss(
    state: TrainState, data: BatchSource, batches: int, beat: Callable[[], None]
) -> tuple[float, int]:
    """Return the mean nats per target over `batches` global batches, and the number of targets.

    `beat` is called once a batch, so that a long evaluation is not taken for a hang.
    """
    runtime = state.runtime
    mesh = runtime.mesh
    count = micro_batches(runtime.workload, mesh.layout)
    # The ranks of a TP group have the same nll: one of them adds it up.
    adds_up = mesh.coordinate("tp") == 0
    sums = torch.zeros(2, dtype=torch.float64, device=runtime.device)  # nll and targets
    for step in range(batches):
        beat()
        batch = [
            data.micro_batch(runtime, step, number).to(runtime.device) for number in range(count)
        ]

        def add_losses(key: Key, out: ModelOutput, batch: Sequence[MicroBatch] = batch) -> None:
            micro_batch, chunk = key
            if adds_up and state.model.chunks[chunk].has_loss:
                sums[0] += out.nll.sum()
                sums[1] += _count_targets(batch[micro_batch])

        evaluate_batch(runtime, state.model, batch, add_losses)
    total_nll, total_targets = all_reduce(sums, mesh.group("world")).tolist()
    return total_nll / max(1.0, total_targets), int(total_targets)
