"""What a rank keeps at each moment of the passes that run beside each other, as counted.

A ledger has one moment, the fullest. Two that tie there, or a tensor that lives a pass longer than
the walk of passes says, can hide behind it; so every moment is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest

from moewright.cost.memory import paired_memory
from moewright.cost.memory.activations import MODULES
from moewright.engine.observe.counters import Counters
from moewright.spec.ledger import Module

Moment = dict[Module, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class PairedMoments:
    """The bytes by module at the moments of a rank's pairs, as they are walked and as counted."""

    walked: list[Moment] = field(default_factory=list)
    counted: list[Moment] = field(default_factory=list)

    def check(self) -> None:
        """Assert that each moment which is counted is walked, in the same order.

        The walk has more: the ends of segments after which the same pass goes on. Without pairs
        nothing is walked.
        """
        place = 0
        for moment in self.counted if self.walked else ():
            later = self.walked[place:]
            assert moment in later, (moment, later)
            place += later.index(moment)


def _drop_zeros(sizes: Iterable[tuple[Module, int]]) -> Moment:
    return {module: int(nbytes) for module, nbytes in sizes if nbytes}


@contextmanager
def watch_moments() -> Iterator[PairedMoments]:
    """Watch the moments that are walked and counted inside."""
    moments = PairedMoments()
    walk_pairs = paired_memory.walk_pairs
    note_saved = Counters.note_saved

    def walk_and_note(*inputs: object) -> np.ndarray:
        walk: Callable[..., np.ndarray] = walk_pairs
        walked = walk(*inputs)
        moments.walked[:] = [_drop_zeros(zip(MODULES, row, strict=True)) for row in walked.tolist()]
        return walked

    def note(counters: Counters) -> None:
        note_saved(counters)
        moments.counted.append(_drop_zeros(counters.sum_saved().items()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paired_memory, "walk_pairs", walk_and_note)
        patch.setattr(Counters, "note_saved", note)
        yield moments
