"""One layout worked out once, so that its step can be priced again and again under other
constants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from moewright.cost.collective_time import CollectiveModel
from moewright.cost.estimate import count_rank_parameters, expected_symbols
from moewright.cost.model_states import stage_bucket_sets
from moewright.cost.op_time import DeviceRates
from moewright.cost.pipeline_time import build_pipeline, exposed_transfers
from moewright.cost.stage_parts import LayerKind, layer_kind
from moewright.cost.step_time import (
    LayerTimes,
    Pricer,
    model_ops,
    price_model_ops,
    step_tail,
)
from moewright.rules import stages
from moewright.rules.legality import check_legality
from moewright.spec.errors import BadInput
from moewright.spec.hardware import Constant, Hardware
from moewright.spec.layout import Layout
from moewright.spec.model import ModelSpec
from moewright.spec.workload import Workload

_LONGER = 1.4  # about as far as fitted constants move what one piece takes against another


class RepriceableStep:
    """Rows of work, layers of each stage and held parameters of one layout: all that its constants
    do not change.

    Raises BadInput when the layout is illegal.
    """

    __slots__ = (
        "_hardware",
        "_held",
        "_layout",
        "_pipeline",
        "_shares",
        "_size",
        "_transfers",
        "_work",
        "_workload",
    )

    def __init__(
        self, model: ModelSpec, workload: Workload, hardware: Hardware, layout: Layout
    ) -> None:
        if reasons := check_legality(model, workload, layout):
            raise BadInput(*reasons)
        self._hardware, self._layout, self._workload = hardware, layout, workload
        self._size = expected_symbols(
            model, workload, hardware, layout, DeviceRates(hardware).constants
        )
        self._work = model_ops(self._size)
        self._held = count_chunk_layers(model, layout, tuple(self._work.layers))
        self._shares = {
            count_rank_parameters(of_rank) for of_rank in stage_bucket_sets(model, workload, layout)
        }
        self._transfers = float(exposed_transfers(layout.pp, layout.vpp, self._size.m))
        _, _, pieces = self._priced(())
        forward, backward = (self._held @ around.T for around in _around(*pass_seconds(pieces)))
        self._pipeline = build_pipeline(layout, self._size.m).restrict_to_longest_paths(
            forward, backward
        )

    def step_s(self, constants: tuple[Constant, ...]) -> float:
        """Seconds of a step under these constants, which win over the hardware's own; the pipeline
        by the paths that take longest where pieces take about as long as under the hardware's own.
        """
        rates, links, pieces = self._priced(constants)
        forward, backward = pass_seconds(pieces)
        last = max(
            step_tail(rates, links, self._workload, self._size, self._layout, share).total_s
            for share in self._shares
        )
        moving = self._pipeline.total_s(self._held @ forward, self._held @ backward)
        return moving + self._transfers * pieces.transfer_s + last

    def _priced(
        self, constants: tuple[Constant, ...]
    ) -> tuple[DeviceRates, CollectiveModel, LayerTimes]:
        rates = DeviceRates(
            replace(self._hardware, constants=(*self._hardware.constants, *constants))
        )
        links = CollectiveModel(self._hardware, rates.constants)
        return (
            rates,
            links,
            Pricer(
                links, self._size, price_model_ops(rates, links, self._size, self._work)
            ).layer_times(self._layout),
        )


def pass_seconds(pieces: LayerTimes) -> tuple[np.ndarray, np.ndarray]:
    """[pieces] seconds of a forward and of a backward of every kind of piece."""
    kinds = [*pieces.layers.values(), pieces.embedding, pieces.head, pieces.mtp]
    forward = np.array([times.forward_s for times in kinds])
    return forward, np.array([times.total_s for times in kinds]) - forward


def _around(forward: np.ndarray, backward: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[columns, pieces]: the seconds as they are, with those of some kinds of piece longer than of
    the others, and with all backwards shorter and longer.
    """
    some = 1 + (_LONGER - 1) * np.array(list(product((0, 1), repeat=len(forward))))[:-1]
    same, backwards = np.ones((2, len(forward))), np.array([[1 / _LONGER], [_LONGER]])
    return forward * np.concatenate([some, same]), backward * np.concatenate(
        [some, same * backwards]
    )


def count_chunk_layers(model: ModelSpec, layout: Layout, kinds: Sequence[LayerKind]) -> np.ndarray:
    """[virtual stages, pieces]: layers of each kind, embeddings, heads and MTP depths."""
    rows = []
    for chunk in stages.pipeline_chunks(model, layout):
        held = [layer_kind(model, layer) for layer in chunk.layers]
        held += [layer_kind(model, model.layers + 1)] * chunk.mtp_layers
        rows.append(
            [
                *(held.count(kind) for kind in kinds),
                chunk.has_embedding,
                chunk.has_loss,
                chunk.mtp_layers,
            ]
        )
    return np.array(rows, dtype=float)
