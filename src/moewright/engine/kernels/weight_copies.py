"""Weights of a rank in 8 or 4 bits, which the first micro-batch of a step converts for all.

rules.weight_copies says which weights have copies. A weight is found by its storage, which it keeps
from step to step, and where it begins there, whatever view of it a product reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from moewright.engine.kernels.low_precision import NarrowWeight
from moewright.engine.torch_private import storage_id
from moewright.rules.weight_copies import keeps_copies
from moewright.spec.ledger import Component, MemoryRow, Module

_Key = tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class CopiedWeight:
    """A weight that has copies, the module of its bytes, and whether a step changes it."""

    tensor: torch.Tensor
    module: Module
    is_trained: bool


class WeightCopies:
    """The copies of the weights that `register` has named."""

    def __init__(self) -> None:
        self._weights: dict[_Key, CopiedWeight] = {}
        self._copies: dict[_Key, NarrowWeight] = {}
        self._current: set[_Key] = set()  # copies of weights as they are now
        self._keeps_new = False

    def register(self, weights: Iterable[CopiedWeight]) -> None:
        """Name the weights that have copies; their storages live as long as this object."""
        self._weights = {_find_key(weight.tensor): weight for weight in weights}

    def begin_step(self, micro_batches: int) -> None:
        """Begin the passes of a step, whose weights are not those of the step before."""
        self._keeps_new = keeps_copies(micro_batches)
        if not self._keeps_new:
            self.clear()
        self._forget_trained()

    def end_passes(self) -> None:
        """End the passes of a step: the memory of copies stays, and weights may change."""
        self._keeps_new = False
        self._forget_trained()

    def clear(self) -> None:
        """Free all copies: any weight may have changed."""
        self._copies.clear()
        self._current.clear()

    def _forget_trained(self) -> None:
        self._current = {key for key in self._current if not self._weights[key].is_trained}

    def find(
        self, weight: torch.Tensor, convert: Callable[[], NarrowWeight]
    ) -> NarrowWeight | None:
        """Return the copies of a weight, or of its transpose; None where it has none.

        The first that asks in a step converts it. Outside of a step's passes nothing is kept.
        """
        key = _find_key(weight)
        if key in self._current:
            return self._copies[key]
        if not self._keeps_new or key not in self._weights:
            return None
        # Freed before the new ones are made, which may take their memory.
        self._copies.pop(key, None)  # of the step before
        self._copies[key] = convert()
        self._current.add(key)
        return self._copies[key]

    def memory_rows(self) -> list[MemoryRow]:
        """Return the bytes of the copies."""
        return [
            MemoryRow(
                component=Component.WEIGHTS,
                module=self._weights[key].module,
                bytes=sum(tensor.nbytes for tensor in copy.tensors()),
            )
            for key, copy in self._copies.items()
        ]

    def state_tensors(self) -> Iterator[torch.Tensor]:
        """Yield the tensors of which `memory_rows` has the bytes."""
        for copy in self._copies.values():
            yield from copy.tensors()


def _find_key(weight: torch.Tensor) -> _Key:
    return storage_id(weight), int(weight.storage_offset())
