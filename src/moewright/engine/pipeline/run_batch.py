"""A global batch through the pipeline: forwards and backwards as the timetable says, or its
forwards alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch

from moewright.engine.data.micro_batch import MicroBatch
from moewright.engine.model.transformer import ModelOutput, Transformer
from moewright.engine.pipeline.executor import (
    BackwardStep,
    ChunkResult,
    ForwardStep,
    Key,
    WeightGradStep,
    execute_timetable,
)
from moewright.engine.pipeline.p2p import P2PChannel
from moewright.engine.runtime import Runtime
from moewright.rules.p2p import PipelineAction, pipeline_actions
from moewright.rules.schedule import timetable
from moewright.rules.timetable_row import RowKind
from moewright.spec.layout import Layout


def train_batch(
    run: Runtime,
    batches: Sequence[MicroBatch],
    *,
    forward: ForwardStep,
    backward: BackwardStep,
    weight_grad: WeightGradStep,
) -> None:
    """Every forward and backward of `batches`, which are all micro-batches of the step."""
    stops = _stops(run.mesh.layout, len(batches), run.mesh.coordinate("pp"))
    execute_timetable(
        stops,
        _wires(run, stops, batches),
        forward=forward,
        backward=backward,
        weight_grad=weight_grad,
    )


@torch.no_grad()
def evaluate_batch(
    run: Runtime,
    model: Transformer,
    batches: Sequence[MicroBatch],
    see: Callable[[Key, ModelOutput], None],
    *,
    needs_logits: bool = False,
) -> None:
    """Every forward of `batches`; `see` gets what each chunk on this rank made of each of them,
    with whole logits where they are asked for.
    """
    stops = _forward_stops(run.mesh.layout, len(batches), run.mesh.coordinate("pp"))

    def forward(key: Key, hidden: torch.Tensor | None) -> ChunkResult:
        out = model(batches[key[0]], chunk=key[1], hidden_tH=hidden, logits=needs_logits)
        see(key, out)
        return ChunkResult(
            hidden=None if model.chunks[key[1]].has_loss else out.hidden_tH, loss=None
        )

    execute_timetable(
        stops, _wires(run, stops, batches), forward=forward, backward=_never, weight_grad=_never
    )


def _never(*_: object) -> None:
    raise AssertionError("a course of forwards has no backward")


def _wires(
    run: Runtime, stops: Sequence[PipelineAction], batches: Sequence[MicroBatch]
) -> P2PChannel:
    layout, mesh = run.mesh.layout, run.mesh

    def like(micro_batch: int) -> torch.Tensor:
        tokens = batches[micro_batch].inputs.numel() // (layout.tp if layout.sp else 1)
        return torch.empty(tokens, run.model.hidden_size, dtype=run.dtype, device=run.device)

    return P2PChannel(layout, stops, mesh.group("pp"), mesh.upstream, like)


@lru_cache(maxsize=4)  # the same every step but under a ramp of the batch
def _stops(layout: Layout, micro_batches: int, pp_rank: int) -> tuple[PipelineAction, ...]:
    return pipeline_actions(layout, timetable(layout, micro_batches), pp_rank)


@lru_cache(maxsize=4)
def _forward_stops(layout: Layout, micro_batches: int, pp_rank: int) -> tuple[PipelineAction, ...]:
    table = [
        [row for row in rows if row.kind is RowKind.F] for rows in timetable(layout, micro_batches)
    ]
    return pipeline_actions(layout, table, pp_rank)
