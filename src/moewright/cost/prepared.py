"""One layout worked out once, so that its step can be priced again and again under other constants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from moewright.cost.comm import Links
from moewright.cost.compute import Rates
from moewright.cost.estimate import held_share, size_of
from moewright.cost.states import stage_sets
from moewright.cost.step_time import LayerKind, Pricer, kind_of, tail, work_of
from moewright.cost.timeline import pipeline_of
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

    __slots__ = ("_hardware", "_held", "_layout", "_pipeline", "_shares", "_size", "_work", "_workload")

    def __init__(self, model: ModelSpec, workload: Workload, hardware: Hardware, layout: Layout) -> None:
        if reasons := illegal(model, workload, layout):
            raise BadInput(*reasons)
        self._hardware, self._layout, self._workload = hardware, layout, workload
        self._size = size_of(model, workload, hardware, layout, Rates(hardware).constants)
        self._work = work_of(self._size)
        self._held = _chunk_counts(model, layout, tuple(self._work.layers))
        self._pipeline = pipeline_of(layout, self._size.m)
        self._shares = {held_share(of_rank) for of_rank in stage_sets(model, workload, layout)}

    def step_s(self, constants: tuple[Constant, ...]) -> float:
        """Seconds of a step under these constants, which win over the hardware's own."""
        hardware, layout = self._hardware, self._layout
        rates = Rates(replace(hardware, constants=(*hardware.constants, *constants)))
        links = Links(hardware, rates.constants)
        pieces = Pricer(rates, links, self._size, self._work).pieces(layout)
        kinds = [*pieces.layers.values(), pieces.embedding, pieces.head, pieces.mtp]
        forward = self._held @ [times.forward_s for times in kinds]
        whole = self._held @ [times.total_s for times in kinds]
        last = max(tail(rates, links, self._workload, self._size, layout, share).total_s for share in self._shares)
        moving = self._pipeline.total_s(forward, whole - forward, transfer_s=pieces.transfer_s)
        return moving + last


def _chunk_counts(model: ModelSpec, layout: Layout, kinds: Sequence[LayerKind]) -> np.ndarray:
    """[virtual stages, pieces]: layers of each kind, embeddings, heads and MTP depths."""
    rows = []
    for chunk in stages.chunks(model, layout):
        held = [kind_of(model, layer) for layer in chunk.layers]
        held += [kind_of(model, model.layers + 1)] * chunk.mtp
        rows.append([*(held.count(kind) for kind in kinds), chunk.embedding, chunk.loss, chunk.mtp])
    return np.array(rows, dtype=float)
