"""The step of one layout, prepared so that it can be priced again under other constants."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np

from moewright.cost.estimate import count_rank_parameters
from moewright.cost.memory.estimate_memory import expected_symbols
from moewright.cost.memory.model_states import stage_bucket_sets
from moewright.cost.stage_parts import count_parts, list_parts
from moewright.cost.time.collective_time import CollectiveModel
from moewright.cost.time.op_time import DeviceRates
from moewright.cost.time.pipeline_time import build_pipeline, exposed_transfers
from moewright.cost.time.step_tail import step_tail
from moewright.cost.time.step_time import PartTimes, Pricer, model_ops, price_model_ops
from moewright.rules.job import Job
from moewright.rules.limits.legality import check_legality
from moewright.rules.timetable import stages
from moewright.spec.errors import BadInput
from moewright.spec.hardware import Constant, Hardware
from moewright.spec.layout import Layout
from moewright.spec.model import ModelSpec
from moewright.spec.workload import Workload

_LONGER = 1.4  # about as far as fitted constants change the time of one part against another


class RepriceableStep:
    """A step of one layout, with all that does not depend on constants computed beforehand.

    These are the rows of work, the parts of stages, the parameters and the timetable.

    Raises:
        BadInput: The layout is illegal.
    """

    __slots__ = (
        "_counts",
        "_hardware",
        "_layout",
        "_parts",
        "_pipeline",
        "_rank_parameters",
        "_sym",
        "_transfers",
        "_work",
    )

    def __init__(
        self, model: ModelSpec, workload: Workload, hardware: Hardware, layout: Layout
    ) -> None:
        job = Job(model=model, workload=workload, layout=layout)
        if reasons := check_legality(job):
            raise BadInput(*reasons)
        self._hardware, self._layout = hardware, layout
        self._sym = expected_symbols(
            job,
            hardware,
            DeviceRates(hardware).constants,
        )
        self._work = model_ops(self._sym)
        self._parts = list_parts(model, layout, workload.trainer)
        chunks = stages.pipeline_chunks(model, layout)
        self._counts = count_parts(model, layout, self._parts, chunks)
        self._rank_parameters = {count_rank_parameters(sets) for sets in stage_bucket_sets(job)}
        self._transfers = float(exposed_transfers(layout.pp, layout.vpp, self._sym.m))
        _, _, times = self._priced(())
        is_held = self._counts.any(axis=0)
        held_counts = self._counts[:, is_held]
        forward, backward = _vary_times(times.forward_s[is_held], times.backward_s[is_held])
        self._pipeline = build_pipeline(layout, self._sym.m).restrict_to_longest_paths(
            held_counts @ forward.T, held_counts @ backward.T
        )

    def step_s(self, constants: tuple[Constant, ...]) -> float:
        """Return the seconds of a step under these constants, which win over the hardware's own.

        The pipeline is priced by its longest paths, found for times of parts around those under the
        hardware's own constants.
        """
        rates, collectives, times = self._priced(constants)
        computing_s = self._pipeline.total_s(
            self._counts @ times.forward_s, self._counts @ times.backward_s
        )
        pipeline_s = computing_s + self._transfers * times.transfer_s
        tails = (
            step_tail(rates, collectives, self._sym, parameters)
            for parameters in self._rank_parameters
        )
        return max(tail.step_s(pipeline_s) for tail in tails)

    def _priced(
        self, constants: tuple[Constant, ...]
    ) -> tuple[DeviceRates, CollectiveModel, PartTimes]:
        rates = DeviceRates(
            replace(self._hardware, constants=(*self._hardware.constants, *constants))
        )
        collectives = CollectiveModel(self._hardware, rates.constants)
        priced = price_model_ops(rates, collectives, self._sym, self._work)
        times = Pricer(collectives, self._sym, priced).part_times(self._layout, self._parts)
        return rates, collectives, times


def _vary_times(forward: np.ndarray, backward: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return variations [variations, parts] of the seconds of forwards and backwards [parts].

    They are the seconds themselves, every choice of some parts longer than the others, and all
    backwards shorter, then longer.
    """
    # The last choice lengthens all parts alike, under which the same paths are the longest.
    part_scales = 1 + (_LONGER - 1) * np.array(list(product((0, 1), repeat=len(forward))))[:-1]
    unchanged = np.ones((2, len(forward)))
    backward_scales = unchanged * np.array([[1 / _LONGER], [_LONGER]])
    return (
        forward * np.concatenate([part_scales, unchanged]),
        backward * np.concatenate([part_scales, backward_scales]),
    )
