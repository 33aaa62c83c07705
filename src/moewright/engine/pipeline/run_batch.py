"""A global batch through the pipeline.

Its forwards and backwards run as the timetable says, or its forwards alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import torch

from moewright.engine.comm.pass_turns import run_backward_here
from moewright.engine.model.micro_batch import MicroBatch
from moewright.engine.model.transformer import ModelOutput, Transformer
from moewright.engine.pipeline.executor import (
    BackwardStep,
    ChunkResult,
    ForwardStep,
    Key,
    P2PChannel,
    Pairing,
    RowHooks,
    WeightGradStep,
    execute_timetable,
)
from moewright.engine.runtime import Runtime
from moewright.rules.saved.saved_tensor import chunk_to_fetch, fetches_chunks
from moewright.rules.timetable.p2p import PipelineAction, pipeline_actions
from moewright.rules.timetable.paired_passes import (
    backward_segments,
    can_pair,
    forward_segments,
    pair_passes,
    paired_rows,
)
from moewright.rules.timetable.schedule import timetable
from moewright.rules.timetable.stages import Chunk
from moewright.rules.timetable.timetable_row import RowKind, TimetableRow
from moewright.spec.layout import Layout
from moewright.spec.model import ModelSpec

# Is called with the pass that goes on, None where the pair has ended.
NoteTurn = Callable[[RowKind | None], None]


def train_batch(
    runtime: Runtime,
    batches: Sequence[MicroBatch],
    *,
    forward: ForwardStep,
    backward: BackwardStep,
    weight_grad: WeightGradStep,
    note_turn: NoteTurn,
) -> None:
    """Run every forward and backward of `batches`, which are all micro-batches of the step.

    `note_turn` is called where another pass of a pair goes on.
    """
    mesh = runtime.mesh
    actions = _training_actions(mesh.layout, len(batches), mesh.coordinate("pp"))
    pairing = None
    if can_pair(mesh.layout, len(batches)):
        pairing = Pairing(
            forwards=paired_rows([action.row for action in actions]),
            run=partial(_run_pair, runtime, note_turn),
        )
    # A backward of a pair stops inside, and must not hold up autograd's thread of the device.
    with run_backward_here():
        execute_timetable(
            actions,
            _open_channel(runtime, actions, batches),
            forward=forward,
            backward=backward,
            weight_grad=weight_grad,
            hooks=RowHooks(
                before_row=partial(_fetch_chunk, runtime, [action.row for action in actions]),
                before_backward=runtime.saved_tensors.fetch_last_layer,
                after_row=runtime.counters.note_row_end,
            ),
            pairing=pairing,
        )


def _fetch_chunk(runtime: Runtime, rows: Sequence[TimetableRow], index: int) -> None:
    """Begin to fetch what the backward of the next row needs, where whole chunks are fetched."""
    if not fetches_chunks(runtime.mesh.layout):
        return
    row = chunk_to_fetch(rows, index)
    if row is not None:
        runtime.saved_tensors.fetch_chunk((row.micro_batch, row.chunk))


def _run_pair(
    runtime: Runtime,
    note_turn: NoteTurn,
    forward_key: Key,
    forward: Callable[[], None],
    backward_key: Key,
    backward: Callable[[], None],
) -> None:
    """Run two passes beside each other; both are keyed by their micro-batch and chunk."""
    mesh = runtime.mesh
    chunks = runtime.job.rank_chunks(mesh.coordinate("pp"))
    order = _pair_order(runtime.model, mesh.layout, chunks[forward_key[1]], chunks[backward_key[1]])

    def note(kind: RowKind | None) -> None:
        note_turn(kind)
        runtime.counters.note_saved()

    runtime.turns.run_pair(forward, backward, order, note)


@lru_cache(maxsize=16)
def _pair_order(
    model: ModelSpec, layout: Layout, forward_chunk: Chunk, backward_chunk: Chunk
) -> tuple[RowKind, ...]:
    segments = pair_passes(
        forward_segments(model, forward_chunk), backward_segments(model, layout, backward_chunk)
    )
    return tuple(segment.kind for segment in segments)


@torch.no_grad()
def evaluate_batch(
    runtime: Runtime,
    model: Transformer,
    batches: Sequence[MicroBatch],
    on_output: Callable[[Key, ModelOutput], None],
    *,
    needs_logits: bool = False,
) -> None:
    """Run every forward of `batches`.

    `on_output` gets the output of each chunk on this rank for each micro-batch; with `needs_logits`
    it has all logits of this rank.
    """
    mesh = runtime.mesh
    actions = _forward_actions(mesh.layout, len(batches), mesh.coordinate("pp"))

    def forward(key: Key, hidden: torch.Tensor | None) -> ChunkResult:
        micro_batch, chunk = key
        runtime.counters.note(f"evaluation of micro-batch {micro_batch}, chunk {chunk}")
        out = model(batches[micro_batch], chunk=chunk, hidden_tH=hidden, needs_logits=needs_logits)
        on_output(key, out)
        is_last = model.chunks[chunk].has_loss
        return ChunkResult(hidden=None if is_last else out.hidden_tH, loss=None)

    execute_timetable(
        actions,
        _open_channel(runtime, actions, batches),
        forward=forward,
        backward=_never,
        weight_grad=_never,
    )


def _never(*_: object) -> None:
    raise AssertionError("an evaluation has no backward")


def _open_channel(
    runtime: Runtime, actions: Sequence[PipelineAction], batches: Sequence[MicroBatch]
) -> P2PChannel:
    mesh = runtime.mesh
    layout = mesh.layout

    def new_buffer(micro_batch: int) -> torch.Tensor:
        tokens = batches[micro_batch].inputs.numel() // (layout.sp_degree)
        width = runtime.model.residual_streams * runtime.model.hidden_size
        return torch.empty(tokens, width, dtype=runtime.dtype, device=runtime.device)

    return P2PChannel(layout, actions, mesh.group("pp"), mesh.upstream, new_buffer)


@lru_cache(maxsize=4)  # the same every step but under a batch ramp-up
def _training_actions(
    layout: Layout, micro_batches: int, pp_rank: int
) -> tuple[PipelineAction, ...]:
    return pipeline_actions(layout, timetable(layout, micro_batches), pp_rank)


@lru_cache(maxsize=4)
def _forward_actions(
    layout: Layout, micro_batches: int, pp_rank: int
) -> tuple[PipelineAction, ...]:
    forwards = [
        [row for row in rows if row.kind is RowKind.F] for rows in timetable(layout, micro_batches)
    ]
    return pipeline_actions(layout, forwards, pp_rank)
