"""One layout worked out once, so that its step can be priced again under other constants."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np

from moewright.cost.collective_time import CollectiveModel
from moewright.cost.estimate import count_rank_parameters, expected_symbols
from moewright.cost.model_states import stage_bucket_sets
from moewright.cost.op_time import DeviceRates
from moewright.cost.pipeline_time import build_pipeline, exposed_transfers
from moewright.cost.stage_parts import count_parts, list_parts
from moewright.cost.step_time import (
    PartTimes,
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
    """What constants do not change of one layout: rows of work, parts of stages, parameters.

    Raises:
        BadInput: The layout is illegal.
    """

    __slots__ = (
        "_counts",
        "_hardware",
        "_layout",
        "_parts",
        "_pipeline",
        "_shares",
        "_sym",
        "_transfers",
        "_work",
    )

    def __init__(
        self, model: ModelSpec, workload: Workload, hardware: Hardware, layout: Layout
    ) -> None:
        if reasons := check_legality(model, workload, layout):
            raise BadInput(*reasons)
        self._hardware, self._layout = hardware, layout
        self._sym = expected_symbols(
            model, workload, hardware, layout, DeviceRates(hardware).constants
        )
        self._work = model_ops(self._sym)
        self._parts = list_parts(model, layout)
        chunks = stages.pipeline_chunks(model, layout)
        self._counts = count_parts(model, layout, self._parts, chunks)
        self._shares = {
            count_rank_parameters(of_rank) for of_rank in stage_bucket_sets(model, workload, layout)
        }
        self._transfers = float(exposed_transfers(layout.pp, layout.vpp, self._sym.m))
        _, _, times = self._priced(())
        is_held = self._counts.any(axis=0)
        forward, backward = (
            self._counts[:, is_held] @ around.T
            for around in _around(times.forward_s[is_held], times.backward_s[is_held])
        )
        self._pipeline = build_pipeline(layout, self._sym.m).restrict_to_longest_paths(
            forward, backward
        )

    def step_s(self, constants: tuple[Constant, ...]) -> float:
        """Return the seconds of a step under these constants, which win over the hardware's own.

        The pipeline is priced by the paths that take longest where parts take about as long as
        under the hardware's own constants.
        """
        rates, collectives, times = self._priced(constants)
        last = max(
            step_tail(rates, collectives, self._sym, share).total_s for share in self._shares
        )
        moving = self._pipeline.total_s(
            self._counts @ times.forward_s, self._counts @ times.backward_s
        )
        return moving + self._transfers * times.transfer_s + last

    def _priced(
        self, constants: tuple[Constant, ...]
    ) -> tuple[DeviceRates, CollectiveModel, PartTimes]:
        rates = DeviceRates(
            replace(self._hardware, constants=(*self._hardware.constants, *constants))
        )
        collectives = CollectiveModel(self._hardware, rates.constants)
        return (
            rates,
            collectives,
            Pricer(
                collectives, self._sym, price_model_ops(rates, collectives, self._sym, self._work)
            ).part_times(self._layout, self._parts),
        )


def _around(forward: np.ndarray, backward: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return seconds near these [columns, parts].

    They are the seconds as they are, with those of some parts longer than of the others, and with
    all backwards shorter and longer.
    """
    some = 1 + (_LONGER - 1) * np.array(list(product((0, 1), repeat=len(forward))))[:-1]
    same, backwards = np.ones((2, len(forward))), np.array([[1 / _LONGER], [_LONGER]])
    return forward * np.concatenate([some, same]), backward * np.concatenate(
        [some, same * backwards]
    )
