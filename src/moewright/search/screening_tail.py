"""Seconds of what a step does once: gradient reduction, weight gathers and the optimizer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moewright.cost.stage_parts import Array
from moewright.cost.symbols import Symbols
from moewright.cost.time.step_tail import RankParameters, StepTail, step_tail
from moewright.rules.shapes import shards
from moewright.search.pipeline_arrays import PipelineBatch
from moewright.search.screening_memory import ScreeningMemory
from moewright.search.screening_time import ScreeningTimes
from moewright.search.space import StatePolicy
from moewright.spec.layout import Layout, Overlap
from moewright.spec.record import copy_with

_DENSE, _EXPERT = (shards.GRADIENT_GROUPS.index(group) for group in ("dp_cp", "edp"))


class ScreeningTails:
    """A calculator of the seconds that ranks take once a step, each distinct rank priced once."""

    def __init__(
        self, times: ScreeningTimes, memory: ScreeningMemory, states: Sequence[StatePolicy]
    ) -> None:
        self._times, self._memory, self._states = times, memory, states
        self._tails: dict[tuple[object, ...], StepTail] = {}

    def seconds(self, base: Layout, batch: PipelineBatch, is_needed: Array) -> tuple[Array, Array]:
        """Return the seconds of what a step does once, and the least that a step takes for it.

        The first are gradient reduction, weight gathers and the optimizer [pipelines, state
        policies] after the micro-batches, on the rank that takes longest; the others count what
        runs beside the micro-batches too. Both are 0 where `is_needed` asks for nothing.
        """
        tails = np.zeros((len(batch.pp), len(self._states)))
        least = np.zeros_like(tails)
        for column, policy in enumerate(self._states):
            pipelines = np.asarray(is_needed[:, :, column].any(axis=1))
            ranks = np.flatnonzero(pipelines[batch.pipeline_of_rank])
            if len(ranks):
                of_ranks = self._rank_tails(base, policy, batch, ranks)
                places = batch.pipeline_of_rank[ranks]
                np.maximum.at(tails[:, column], places, [tail.total_s for tail in of_ranks])
                np.maximum.at(least[:, column], places, [tail.least_s for tail in of_ranks])
        return tails, least

    def _rank_tails(
        self, base: Layout, policy: StatePolicy, batch: PipelineBatch, ranks: Array
    ) -> list[StepTail]:
        """Return what each of these ranks does once a step."""
        base = copy_with(
            base, zero=policy.zero, offload=tuple(sorted({*base.offload, *policy.offload}))
        )
        # Only zero=2 and 3 reduce more often with more micro-batches.
        mbs = base.mbs if base.zero >= 2 else 0
        overlaps_reduction = Overlap.GRAD in base.overlap
        shared_key = (
            base.tp,
            base.cp,
            base.ep,
            base.etp,
            mbs,
            base.zero,
            base.offload,
            overlaps_reduction,
        )
        elements = self._memory.elements(base, policy.zero, batch)
        columns = [_DENSE, _EXPERT]
        parameters = np.concatenate(
            [elements.numel[:, columns], elements.calls[:, columns]], axis=1
        )
        pp = batch.pp[batch.pipeline_of_rank]
        symbols: dict[int, Symbols] = {}
        of_ranks = []
        for rank_pp, numbers in zip(
            pp[ranks].tolist(), parameters[ranks].astype(np.int64).tolist(), strict=True
        ):
            key = shared_key, rank_pp, *numbers
            if key not in self._tails:
                if rank_pp not in symbols:
                    symbols[rank_pp] = self._times.symbols(copy_with(base, pp=rank_pp))
                self._tails[key] = self._one_tail(symbols[rank_pp], numbers)
            of_ranks.append(self._tails[key])
        return of_ranks

    def _one_tail(self, sym: Symbols, numbers: Sequence[int]) -> StepTail:
        dense, expert, dense_calls, expert_calls = numbers
        parameters = RankParameters(
            dense=dense,
            expert=expert,
            dense_calls=max(1, dense_calls),
            expert_calls=max(1, expert_calls),
        )
        times = self._times
        return step_tail(times.rates, times.collectives, sym, parameters)
