"""One layout worked out once, so that its step can be priced again and again under other constants."""

from __future__ import annotations

from dataclasses import replace

from moewright.cost.comm import Links
from moewright.cost.compute import Rates
from moewright.cost.estimate import held_share, size_of
from moewright.cost.states import stage_sets
from moewright.cost.step_time import LayerKind, Pricer, kind_of, tail, work_of
from moewright.cost.timeline import pipeline_s
from moewright.rules import stages
from moewright.rules.legality import illegal
from moewright.spec.errors import BadInput
from moewright.spec.hardware import Constant, Hardware
from moewright.spec.layout import Layout
from moewright.spec.model import ModelSpec
from moewright.spec.workload import Workload


class Prepared:
    """Rows of work, layers of each stage and held parameters of one layout: all that its constants do not change.

    Raises BadInput when the layout is illegal.
    """

    __slots__ = ("_hardware", "_layout", "_shares", "_size", "_stages", "_work", "_workload")

    def __init__(self, model: ModelSpec, workload: Workload, hardware: Hardware, layout: Layout) -> None:
        if reasons := illegal(model, workload, layout):
            raise BadInput(*reasons)
        self._hardware, self._layout, self._workload = hardware, layout, workload
        self._size = size_of(model, workload, hardware, layout, Rates(hardware).constants)
        self._work = work_of(self._size)
        self._stages = _stage_counts(model, layout)
        self._shares = {held_share(of_rank) for of_rank in stage_sets(model, workload, layout)}

    def step_s(self, constants: tuple[Constant, ...]) -> float:
        """Seconds of a step under these constants, which win over the hardware's own."""
        hardware, layout = self._hardware, self._layout
        rates = Rates(replace(hardware, constants=(*hardware.constants, *constants)))
        links = Links(hardware, rates.constants)
        pieces = Pricer(rates, links, self._size, self._work).pieces(layout)
        layers = {kind: times.total_s for kind, times in pieces.layers.items()}
        embedding, head, mtp = pieces.embedding.total_s, pieces.head.total_s, pieces.mtp.total_s
        totals = [
            sum(layers[kind] * count for kind, count in counts) + a * embedding + b * head + d * mtp
            for counts, a, b, d in self._stages
        ]
        last = max(tail(rates, links, self._workload, self._size, layout, share).total_s for share in self._shares)
        moving = pipeline_s(totals, vpp=layout.vpp, micro_batches=self._size.m, transfer_s=pieces.transfer_s)
        return moving + last


_Counts = tuple[tuple[tuple[LayerKind, int], ...], int, int, int]


def _stage_counts(model: ModelSpec, layout: Layout) -> tuple[_Counts, ...]:
    """Of each pipeline rank: layers by kind, embeddings, heads and MTP depths."""
    found = []
    chunks = stages.chunks(model, layout)
    for pp_rank in range(layout.pp):
        mine = [chunk for chunk in chunks if chunk.pp_rank == pp_rank]
        mtp = sum(chunk.mtp for chunk in mine)
        kinds = [kind_of(model, layer) for chunk in mine for layer in chunk.layers]
        kinds += [kind_of(model, model.layers + 1)] * mtp
        counts = tuple((kind, kinds.count(kind)) for kind in sorted(set(kinds)))
        found.append((counts, sum(c.embedding for c in mine), sum(c.loss for c in mine), mtp))
    return tuple(found)
