"""Runs one rank's rows of the timetable; it knows no schedule by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from moewright.engine.pipeline.p2p import P2PChannel
from moewright.rules.p2p import PipelineAction
from moewright.rules.schedule import split_backwards
from moewright.rules.timetable_row import RowKind

Key = tuple[int, int]  # micro-batch, chunk


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkResult:
    """What the forward of a chunk gives: the hidden state for the next stage (None on the last),
    and its scalar share of the loss (None where it has none that depends on a weight).
    """

    hidden: torch.Tensor | None
    loss: torch.Tensor | None


ForwardStep = Callable[[Key, torch.Tensor | None], ChunkResult]
BackwardStep = Callable[[Key, Sequence[GradientEdge], Sequence[torch.Tensor | None], bool], None]
WeightGradStep = Callable[[Key], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class _InFlightChunk:
    """A chunk between its forward and its backward. The tensors that it handed on are not held,
    only their place in the graph; `loss` comes last among the roots. A chunk that does nothing has
    no roots: gradients pass through it.
    """

    entry: torch.Tensor | None
    hands_on: bool
    roots: tuple[GradientEdge, ...]


def execute_timetable(
    stops: Sequence[PipelineAction],
    wires: P2PChannel,
    *,
    forward: ForwardStep,
    backward: BackwardStep,
    weight_grad: WeightGradStep,
) -> None:
    """Run the rows in order. Activations live exactly as long as the timetable says; under no_grad
    none do.

    `forward` gets the hidden state that the stage before made (None on the first); `backward` the
    roots of a chunk's graph, the gradient of each (None for the loss), and whether its weight
    gradients are left to `weights`.
    """
    split = split_backwards([stop.row for stop in stops])
    live: dict[Key, _InFlightChunk] = {}
    for place, stop in enumerate(stops):
        key = stop.row.micro_batch, stop.row.chunk
        given = wires.receive_input(place)
        if stop.row.kind is RowKind.F:
            entry = (
                given.requires_grad_() if given is not None and torch.is_grad_enabled() else given
            )
            made = forward(key, entry)
            if torch.is_grad_enabled():
                live[key] = _live(entry, made)
            if made.hidden is not None:
                wires.send_output(place, made.hidden.detach())
        elif stop.row.kind is RowKind.B:
            at = live.pop(key)
            result = given
            grads = ((given,) if at.hands_on else ()) + (None,) * (len(at.roots) - at.hands_on)
            backward(key, at.roots, grads if at.roots else (), key in split)
            if at.entry is not None:
                result = at.entry.grad
            if result is not None:
                wires.send_output(place, result)
        else:
            weight_grad(key)
    wires.close()


def _live(entry: torch.Tensor | None, made: ChunkResult) -> _InFlightChunk:
    hidden = made.hidden
    if hidden is not None and hidden is entry:
        if made.loss is None:
            return _InFlightChunk(entry=None, hands_on=False, roots=())
        # MTP depths alone: a place in the graph where the gradient that comes back enters.
        hidden = entry.view_as(entry)
    roots = tuple(get_gradient_edge(root) for root in (hidden, made.loss) if root is not None)
    return _InFlightChunk(entry=entry, hands_on=hidden is not None, roots=roots)
