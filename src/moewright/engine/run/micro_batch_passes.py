"""Forward and backward of the micro-batches of a step, as the timetable calls them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol

import torch
from torch.autograd.graph import GradientEdge

from moewright.engine.memory.weight_gradients import Operands
from moewright.engine.model.micro_batch import MicroBatch
from moewright.engine.model.preferences import compute_pair_losses
from moewright.engine.model.router_losses import aux_loss_coefficients
from moewright.engine.model.transformer import ModelOutput, Transformer
from moewright.engine.observe.phase_clock import PhaseClock
from moewright.engine.pipeline.executor import ChunkResult, Key
from moewright.engine.pipeline.run_batch import train_batch
from moewright.engine.run.corpus_loader import local_rows
from moewright.engine.run.step_graph import GraphTensors
from moewright.engine.runtime import Runtime
from moewright.rules.batch_rampup import step_samples
from moewright.rules.context_parallel import (
    rank_positions,
    split_at_chunks,
    twice_attended_pairs,
)
from moewright.rules.packing import StepSize
from moewright.rules.routing import counts_copies, dispatch_nodes
from moewright.rules.timetable.stages import Chunk, chunk_layers
from moewright.rules.timetable.timetable_row import RowKind
from moewright.spec.layout import Overlap
from moewright.spec.ledger import StepPhase
from moewright.spec.units import divide
from moewright.spec.workload import DocumentMasking, Objective


@dataclass(kw_only=True, slots=True)
class StepSums:
    """The sums over the micro-batches of a step on this rank."""

    expert_counts: torch.Tensor  # as in BackwardResult
    router_losses: torch.Tensor
    nll: torch.Tensor  # fp64, on the device like all sums: the host waits once a step
    mtp_loss: torch.Tensor  # of all MTP depths, weighted; fp64
    rewards: torch.Tensor  # of pairs: the chosen answers that win, and the margins; fp64 [2] or [0]


def zero_sums(runtime: Runtime, micro_batch_count: int) -> StepSums:
    """Return the sums of a step that has not begun."""
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
    return StepSums(
        expert_counts=torch.zeros(
            micro_batch_count, layers, width, dtype=torch.int64, device=device
        ),
        router_losses=torch.zeros(layers, losses, dtype=torch.float64, device=device),
        nll=torch.zeros((), dtype=torch.float64, device=device),
        mtp_loss=torch.zeros((), dtype=torch.float64, device=device),
        rewards=torch.zeros(
            2 * (runtime.workload.loss.objective is Objective.DPO),
            dtype=torch.float64,
            device=device,
        ),
    )


class PassWeights(Protocol):
    """What the passes of a step ask of whoever holds the weights."""

    @property
    def loss_scale(self) -> float: ...
    def is_weight(self, tensor: torch.Tensor) -> bool: ...


class PassInputs(Protocol):
    """What the passes of a step work with: a TrainState, or the model alone."""

    @property
    def runtime(self) -> Runtime: ...
    @property
    def model(self) -> Transformer: ...
    @property
    def optimizer(self) -> PassWeights: ...


class PassSteps(Protocol):
    """The passes of one micro-batch through one chunk, as `train_batch` calls them."""

    def forward(self, key: Key, hidden: torch.Tensor | None) -> ChunkResult: ...
    def backward(
        self,
        key: Key,
        roots: Sequence[GradientEdge],
        grads: Sequence[torch.Tensor | None],
        split: bool,
    ) -> None: ...
    def weight_grad(self, key: Key) -> None: ...


def run_as_is(passes: MicroBatchPasses) -> PassSteps:
    """Return passes as they are."""
    return passes


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatchPasses:
    """The forward and backward of a step's micro-batches, as the timetable calls them.

    `wrap` puts something around each of them.
    """

    state: PassInputs
    clock: PhaseClock
    batches: Sequence[MicroBatch]
    step: int
    size: StepSize
    valid_targets: int | torch.Tensor  # fp64 inside a graph
    sums: StepSums
    is_repeated: bool = False
    wrap: Callable[[MicroBatchPasses], PassSteps] = run_as_is

    def run(self) -> None:
        """Run every forward and backward of the step."""
        steps = self.wrap(self)
        train_batch(
            self.state.runtime,
            self.batches,
            forward=steps.forward,
            backward=steps.backward,
            weight_grad=steps.weight_grad,
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
            runtime.part_graphs.track_forward(key),
            runtime.saved_tensors.track_forward(key, state.optimizer.is_weight),
        ):
            out: ModelOutput = state.model(
                self.batches[micro_batch],
                chunk=chunk_number,
                hidden_tH=hidden,
                first_sequence=self._first_sequence_number(micro_batch),
                objective_weight=state.optimizer.loss_scale / self._aux_divisor(micro_batch),
            )
            loss = self._sum_losses(chunk, micro_batch, out)
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
        runtime.part_graphs.release(key)

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

    def _rows(self, micro_batch: int) -> range:
        """Return the rows of the step in a micro-batch of this rank."""
        return local_rows(self.state.runtime, micro_batch, global_batch=self.size.sequences)

    def _aux_divisor(self, micro_batch: int) -> float:
        """Return what the auxiliary losses of a micro-batch are divided by.

        Their sum is a mean over micro-batches and DP ranks, by the sequences that hold samples; the
        losses of the ranks that share tokens (TP, CP) add up.
        """
        filled = self.size.filled_in(self._rows(micro_batch))
        # A micro-batch of padding alone adds nothing.
        return divide(self.size.filled, filled, otherwise=inf)

    def _first_sequence_number(self, micro_batch: int) -> int:
        """Return the number, over all of training, of a micro-batch's first sequence."""
        samples = step_samples(self.state.runtime.workload, self.step - 1)
        return samples.first + self._rows(micro_batch).start

    def _sum_losses(self, chunk: Chunk, micro_batch: int, out: ModelOutput) -> torch.Tensor:
        runtime = self.state.runtime
        loss = out.aux_losses.sum() / self._aux_divisor(micro_batch)
        if chunk.has_loss:
            nll = self._sum_nll(micro_batch, out)
            loss = nll / _round_like(self.valid_targets, nll) + loss
        if chunk.mtp_layers:
            weight = runtime.workload.loss.mtp_coeff / chunk.mtp_layers / self.valid_targets
            mtp_loss = out.mtp_nll * _round_like(weight, out.mtp_nll)
            self.sums.mtp_loss += mtp_loss.detach().sum()
            loss = loss + mtp_loss
        return loss * self.state.optimizer.loss_scale

    def _sum_nll(self, micro_batch: int, out: ModelOutput) -> torch.Tensor:
        """Return the sum that backward starts from, and count the loss.

        Of pairs it is not the loss, but has its gradient. All CP ranks have the losses of pairs:
        one of them counts them.
        """
        answers = self.batches[micro_batch].answers
        if answers is None:
            nll = out.nll.sum()
            self.sums.nll += nll.detach()
            return nll
        pairs = compute_pair_losses(self.state.runtime, answers, out.nll)
        if self.state.runtime.mesh.coordinate("cp") == 0:
            self.sums.nll += pairs.sums[0]
            self.sums.rewards += pairs.sums[1:]
        return (out.nll * pairs.nll_weights).sum()

    def _add_router_results(self, chunk: Chunk, micro_batch: int, out: ModelOutput) -> None:
        if not len(out.expert_counts):
            return
        layers = _routed_layer_indices(self.state.runtime, chunk)
        self.sums.expert_counts[micro_batch, layers] = out.expert_counts
        divisor = self._aux_divisor(micro_batch)
        self.sums.router_losses[layers] += out.aux_losses.detach() / divisor


def _routed_layer_indices(runtime: Runtime, chunk: Chunk) -> slice:
    """Return where a chunk's MoE layers stand among those of the model; MTP depths come last.

    They follow each other, as the layers of a chunk do.
    """
    layers = chunk_layers(runtime.model, chunk)
    indices = [i for i, layer in enumerate(runtime.model.routed_layers) if layer in layers]
    return slice(indices[0], indices[-1] + 1)


def _round_like(number: float | torch.Tensor, like: torch.Tensor) -> float | torch.Tensor:
    """Return a factor as an operation with `like` rounds it: a number is rounded to its dtype."""
    return number.to(like.dtype) if isinstance(number, torch.Tensor) else number


def count_attended_pairs(runtime: Runtime, batches: Sequence[MicroBatch]) -> tuple[int, int]:
    """Return attended_pairs and window_pairs of BackwardResult."""
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
