"""A global batch through the pipeline: forwards and backwards as the timetable says, or its
forwards alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch

from moewright.engine.data.batch import Batch
from moewright.engine.model.transformer import Output, Transformer
from moewright.engine.pipeline.executor import Backward, Forward, Key, Made, Weights, execute
from moewright.engine.pipeline.p2p import Wires
from moewright.engine.runtime import Runtime
from moewright.rules.p2p import Stop, itinerary
from moewright.rules.schedule import timetable
from moewright.rules.timetable_rows import Kind
from moewright.spec.layout import Layout


def train(
    run: Runtime,
    batches: Sequence[Batch],
    *,
    forward: Forward,
    backward: Backward,
    weights: Weights,
) -> None:
    """Every forward and backward of `batches`, which are all micro-batches of the step."""
    stops = _stops(run.mesh.layout, len(batches), run.mesh.coordinate("pp"))
    execute(stops, _wires(run, stops, batches), forward=forward, backward=backward, weights=weights)


@torch.no_grad()
def evaluate(
    run: Runtime,
    model: Transformer,
    batches: Sequence[Batch],
    see: Callable[[Key, Output], None],
    *,
    logits: bool = False,
) -> None:
    """Every forward of `batches`; `see` gets what each chunk on this rank made of each of them,
    with whole logits where they are asked for.
    """
    stops = _forward_stops(run.mesh.layout, len(batches), run.mesh.coordinate("pp"))

    def forward(key: Key, hidden: torch.Tensor | None) -> Made:
        out = model(batches[key[0]], chunk=key[1], hidden_tH=hidden, logits=logits)
        see(key, out)
        return Made(hidden=None if model.chunks[key[1]].loss else out.hidden_tH, loss=None)

    execute(stops, _wires(run, stops, batches), forward=forward, backward=_never, weights=_never)


def _never(*_: object) -> None:
    raise AssertionError("a course of forwards has no backward")


def _wires(run: Runtime, stops: Sequence[Stop], batches: Sequence[Batch]) -> Wires:
    layout, mesh = run.mesh.layout, run.mesh

    def like(micro_batch: int) -> torch.Tensor:
        tokens = batches[micro_batch].inputs.numel() // (layout.tp if layout.sp else 1)
        return torch.empty(tokens, run.model.hidden_size, dtype=run.dtype, device=run.device)

    return Wires(layout, stops, mesh.group("pp"), mesh.upstream, like)


@lru_cache(maxsize=4)  # the same every step but under a ramp of the batch
def _stops(layout: Layout, micro_batches: int, pp_rank: int) -> tuple[Stop, ...]:
    return itinerary(layout, timetable(layout, micro_batches), pp_rank)


@lru_cache(maxsize=4)
def _forward_stops(layout: Layout, micro_batches: int, pp_rank: int) -> tuple[Stop, ...]:
    table = [
        [row for row in rows if row.kind is Kind.F] for rows in timetable(layout, micro_batches)
    ]
    return itinerary(layout, table, pp_rank)
