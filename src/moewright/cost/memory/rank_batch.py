"""Pipeline ranks whose bytes are worked out at once: the one of an estimate, the many of a search.

What the terms of a peak ask of ranks is stated here. An estimate counts it from the buckets of its
rank, a search from trees that its ranks have in common (search.screening_memory).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from moewright.cost.constants import Constants
from moewright.cost.memory.buffers import rank_layer_numel
from moewright.cost.memory.model_states import (
    LINEAR_MODULES,
    BucketSet,
    StateElements,
    count_copied,
    count_state_elements,
)
from moewright.cost.stage_parts import Array, StageParts
from moewright.cost.symbols import Symbols
from moewright.rules.job import Job
from moewright.rules.shapes import shards
from moewright.rules.shapes.param import Param
from moewright.spec.ledger import Component, MemoryRow, Module

EVERY_MODULE = {module: column for column, module in enumerate(Module)}

Booked = Mapping[Component, Array]
"""Bytes by component [ranks, columns]."""


@dataclass(frozen=True, kw_only=True)
class RankBatch(ABC):
    """Pipeline ranks under one sharding of model states, in arrays [ranks, columns].

    `columns` says in which column the bytes of a module are counted. `sym` are the symbols of the
    layout of all ranks but for its pipeline, which is that of any of them.
    """

    constants: Constants
    sym: Symbols
    columns: Mapping[Module, int]

    def book(self, values: Array, module: Module) -> Array:
        """Return values [ranks] in the column of a module, and 0 in the others."""
        # Modules may share a column: the highest number tells how many there are.
        booked = np.zeros((len(values), 1 + max(self.columns.values())))
        booked[:, self.columns[module]] = values
        return booked

    @property
    def is_linear(self) -> Array:
        """The mask of the columns of weights that are operands of 8-bit linears [columns]."""
        mask = np.zeros(1 + max(self.columns.values()), dtype=bool)
        mask[[self.columns[module] for module in LINEAR_MODULES]] = True
        return mask

    def recall(self, term: object, fields: Sequence[str], compute: Callable[[], Booked]) -> Booked:
        """Return what a term books; a search works it out once for equal `fields` of layouts."""
        return compute()

    @abstractmethod
    def count_elements(self) -> StateElements:
        """Count the elements of what trains, in flat buffers [ranks, columns]."""

    @abstractmethod
    def count_checkpointed(self) -> Array:
        """Count the elements that each rank copies for a checkpoint [ranks]."""

    @abstractmethod
    def count_by_layer(self) -> Array:
        """Count the elements of each layer of a rank before ZeRO shards them [ranks, layers]."""

    @abstractmethod
    def sum_parameters(self, rows: Callable[[Job, Sequence[Param]], Iterable[MemoryRow]]) -> Booked:
        """Sum the memory rows of the parameters that each rank holds, given its job.

        The rows of parameters are those of each alone: they know neither its rank nor the others.
        """

    @abstractmethod
    def sum_rows(self, rows: Callable[[Job, int], Iterable[MemoryRow]]) -> Booked:
        """Sum the memory rows of each pipeline rank, given its job and its number."""

    @abstractmethod
    def by_degree(self, nbytes: Callable[[Symbols], float]) -> Array:
        """Return the bytes of each rank that its symbols alone decide [ranks]."""

    @abstractmethod
    def by_contents(self, nbytes: Callable[[Collection[bool], bool], float]) -> Array:
        """Return the bytes that the kinds of a rank's layers decide, and whether it has the head.

        The kinds are whether layers have experts: without, with, both, or no layer [ranks].
        """


@dataclass(frozen=True, kw_only=True)
class StageRank(RankBatch):
    """The first rank of a pipeline stage, a column for each module.

    It holds `counts` [chunks, parts] and the parameters of bucket `sets`.
    """

    pp_rank: int
    sets: Sequence[BucketSet]
    parts: StageParts
    counts: Array

    def count_elements(self) -> StateElements:
        """Count the elements of the rank's buckets by module."""
        return count_state_elements(self.sets, self.sym.layout)

    def count_checkpointed(self) -> Array:
        """Count the elements of the rank's part of its buckets."""
        return np.array([count_copied(self.sym.layout, self.sets)])

    def count_by_layer(self) -> Array:
        """Count the elements of the rank's layers, in rules.shapes.parameters' order."""
        return rank_layer_numel(self.sym.model, self.sym.layout, self.pp_rank)[None]

    def sum_parameters(self, rows: Callable[[Job, Sequence[Param]], Iterable[MemoryRow]]) -> Booked:
        """Sum over the parameters of the stage."""
        job = self.sym.job
        params = shards.stage_parameters(job.model, job.layout, self.pp_rank)
        return sum_rows([rows(job, params)], self.columns)

    def sum_rows(self, rows: Callable[[Job, int], Iterable[MemoryRow]]) -> Booked:
        """Sum the rows of the one rank."""
        return sum_rows([rows(self.sym.job, self.pp_rank)], self.columns)

    def by_degree(self, nbytes: Callable[[Symbols], float]) -> Array:
        """Return the bytes of the one rank."""
        return np.array([nbytes(self.sym)], dtype=float)

    def by_contents(self, nbytes: Callable[[Collection[bool], bool], float]) -> Array:
        """Return the bytes of the one rank."""
        layers = self.parts.layers
        columns = np.flatnonzero(self.counts[:, : len(layers)].any(axis=0)).tolist()
        kinds = {layers[column].kind.is_moe for column in columns}
        has_head = bool(self.counts[:, self.parts.head_columns].any())
        return np.array([nbytes(kinds, has_head)], dtype=float)


def add_booked(booked: Booked, more: Booked) -> Booked:
    """Return the sum of what two terms book."""
    sums = dict(booked)
    for component, nbytes in more.items():
        # Not in place: `recall` may keep what a term has booked.
        sums[component] = sums[component] + nbytes if component in sums else nbytes
    return sums


def sum_rows(ranks: Sequence[Iterable[MemoryRow]], columns: Mapping[Module, int]) -> Booked:
    """Sum the memory rows of each of some ranks, in the columns of their modules."""
    sums: dict[Component, Array] = {}
    for place, rows in enumerate(ranks):
        for row in rows:
            if row.component not in sums:
                sums[row.component] = np.zeros((len(ranks), 1 + max(columns.values())))
            sums[row.component][place, columns[row.module]] += row.bytes
    return sums
