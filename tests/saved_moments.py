"""What a rank keeps for backward at each moment of a step, as predicted and as counted.

A ledger has one moment, the fullest. Two that tie there, or a tensor that lives longer than it is
said to, can hide behind it; so every moment is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest

from moewright.cost.memory import activations, paired_memory, snapshots
from moewright.cost.memory.activations import MODULES, ActivationContext
from moewright.cost.memory.snapshots import RankTable, Snapshots
from moewright.engine.observe.counters import Counters, ForwardKey
from moewright.rules.job import Job
from moewright.spec.ledger import Module

Moment = dict[Module, int]
# The tokens of a micro-batch and its targets, which live until the backward of a chunk has ended.
_OF_MICRO_BATCHES = {Module.EMBEDDING, Module.HEAD, Module.MTP}


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedMoments:
    """The bytes by module at the moments of a rank's step.

    `predicted` are those of the walk of pairs, or of each row of a timetable: before, while and
    after it runs, with and without what comes back from the host beside it. `counted` are those
    that the engine notes. `left` is what each chunk still keeps as its backward ends, when every
    node of its graph is there: the tokens of its micro-batch, and what it received, which has the
    gradient.
    """

    predicted: list[list[Moment]] = field(default_factory=list)
    counted: list[Moment] = field(default_factory=list)
    left: list[Moment] = field(default_factory=list)

    def check(self, job: Job) -> None:
        """Assert that each moment which is counted is predicted, in the same order.

        More are predicted: the ends of segments after which the same pass goes on, and of rows.
        """
        context = ActivationContext(job=job)
        targets = activations.token_id_bytes(context)
        ids_bytes = (1 + job.model.mtp_layers) * targets
        received = int(activations.outside_bytes(context)[2].sum())
        # A stage of the head alone keeps what it received as the head's, beside the targets.
        may_stay = [[]] if job.layout.pp == 1 else [[], [received], [received + targets]]
        place = 0
        for moment in self.counted:
            later = self.predicted[place:]
            rows = [row for row, moments in enumerate(later) if moment in moments]
            assert rows, (moment, later)
            place += rows[0]
        for moment in self.left:
            others = [
                nbytes
                for module, nbytes in moment.items()
                if module not in _OF_MICRO_BATCHES or nbytes > ids_bytes
            ]
            assert others in may_stay, moment


def _drop_zeros(sizes: Iterable[tuple[Module, int]]) -> Moment:
    return {module: int(nbytes) for module, nbytes in sizes if nbytes}


def _name_columns(rows: np.ndarray) -> list[Moment]:
    return [_drop_zeros(zip(MODULES, row, strict=True)) for row in rows.tolist()]


def _list_moments(
    taken: Snapshots,
    table: RankTable,
    contents: np.ndarray,
    item: np.ndarray,
    owed_contents: np.ndarray | None = None,
    *_: object,
) -> list[list[Moment]]:
    """List the moments of each row of a timetable."""
    while_it_runs = taken.live + taken.owed
    states = [while_it_runs]
    # Rows that run beside each other have moments of their own.
    if not table.is_paired.any():
        rows = contents[item]
        owing = rows if owed_contents is None else owed_contents[item]
        change = table.is_forward.astype(float) - table.frees
        debt = table.owes.astype(float) - table.settles
        after = np.cumsum(rows * change[:, None] + owing * debt[:, None], axis=0)
        states += [np.concatenate([np.zeros_like(after[:1]), after[:-1]]), after]
    if len(taken.fetched):
        states += [state + taken.fetched for state in states]
    return [list(moments) for moments in zip(*map(_name_columns, states), strict=True)]


@contextmanager
def watch_moments() -> Iterator[SavedMoments]:
    """Watch the moments that are predicted and counted inside."""
    moments = SavedMoments()
    walk_pairs = paired_memory.walk_pairs
    take_snapshots = snapshots.take_snapshots
    note_saved = Counters.note_saved
    release = Counters.release

    def walk_and_keep(*inputs: object) -> np.ndarray:
        walk: Callable[..., np.ndarray] = walk_pairs
        walked = walk(*inputs)
        moments.predicted[:] = [[moment] for moment in _name_columns(walked)]
        return walked

    def take_and_keep(*inputs: object) -> Snapshots:
        take: Callable[..., Snapshots] = take_snapshots
        list_moments: Callable[..., list[list[Moment]]] = _list_moments
        taken = take(*inputs)
        moments.predicted[:] = list_moments(taken, *inputs)
        return taken

    def note(counters: Counters) -> None:
        note_saved(counters)
        moments.counted.append(_drop_zeros(counters.sum_saved().items()))

    def note_and_release(counters: Counters, key: ForwardKey) -> None:
        moments.left.append(_drop_zeros(counters._saved_in_flight.get(key, {}).items()))
        release(counters, key)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paired_memory, "walk_pairs", walk_and_keep)
        patch.setattr(activations, "take_snapshots", take_and_keep)
        patch.setattr(Counters, "note_saved", note)
        patch.setattr(Counters, "release", note_and_release)
        yield moments
