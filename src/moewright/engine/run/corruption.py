"""Silent corruption: bits of the state that change by no update, and replicas that differ.

Nothing may change a weight, a master weight or a moment between the end of an update and the next.
A guard notes checksums after a checked update and compares them right before the next one: a
flipped bit is found on the rank that has it, whether or not another rank holds a copy. Weights of
which several ranks hold a copy are compared between these as well.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from moewright.engine.model.layers import list_parameters
from moewright.engine.optim.fsdp import is_fully_sharded, local_weight
from moewright.engine.run.step import TrainState
from moewright.engine.run.worker import CorruptionError

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor's bits as integers, [] int64: a flipped bit always changes it."""
    whole = tensor.detach().contiguous().reshape(-1)
    return whole.view(_INTEGERS[tensor.element_size()]).sum(dtype=torch.int64)


class StateGuard:
    """Checksums of the state of this rank, noted after every `every`-th update; 0 for never."""

    def __init__(self, state: TrainState, *, every: int, rank: int) -> None:
        self._state = state
        self._every = every
        self._rank = rank
        self._step = 0
        self._sums: dict[str, int] = {}

    def note(self, step: int, gather: Callable[[Any], list[Any]]) -> None:
        """Note the state after update `step`, if that is to be checked; all ranks call this.

        Raises:
            CorruptionError: on a rank whose copy of a weight is not that of the others; on all that
                hold it, where there are but two.
        """
        self._sums = {}
        if not self._every or step % self._every:
            return
        self._state.optimizer.finish_pending()
        self._step = step
        self._sums = self._sum_up()
        culprits = find_odd_replicas(gather(self._sum_up_replicas()))
        if self._rank in culprits:
            raise CorruptionError(
                f"{culprits[self._rank]} is not what other ranks have after step {step}"
            )

    def verify(self) -> None:
        """Compare the state with what was noted.

        Raises:
            CorruptionError: naming the tensor.
        """
        if not self._sums:
            return
        self._state.optimizer.finish_pending()
        for name, value in self._sum_up().items():
            if value != self._sums[name]:
                raise CorruptionError(f"{name} has changed since step {self._step}, by no update")

    def _sum_up(self) -> dict[str, int]:
        names = []
        sums = []
        for name, tensor in self._list_tensors():
            names.append(name)
            sums.append(checksum(tensor).cpu())
        return dict(zip(names, torch.stack(sums).tolist(), strict=True))

    def _list_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for parameter in list_parameters(self._state.model):
            yield f"weight {parameter.name}", local_weight(parameter)
        for number, shard in enumerate(self._state.local_shards()):
            if shard.tensor.numel():
                yield f"{shard.name} ({number})", shard.tensor

    def _sum_up_replicas(self) -> dict[str, int]:
        """Return the checksums of weights by their box, which other ranks may hold as well."""
        sums = {}
        for parameter in list_parameters(self._state.model):
            if not is_fully_sharded(parameter):
                place = parameter.placement
                box = f"{parameter.name} {place.offsets} {place.local_shape} {place.row_indices}"
                sums[box] = int(checksum(parameter.parameter))
        return sums


def find_odd_replicas(sums_by_rank: Sequence[Mapping[str, int]]) -> dict[int, str]:
    """Return the ranks whose checksum of a box is not that of most, and the name of its weight."""
    ranks_by_box: dict[str, dict[int, int]] = defaultdict(dict)
    for rank, sums in enumerate(sums_by_rank):
        for box, value in sums.items():
            ranks_by_box[box][rank] = value
    culprits: dict[int, str] = {}
    for box, values in ranks_by_box.items():
        (common, count), *_ = Counter(values.values()).most_common(1)
        is_majority = 2 * count > len(values)
        for rank, value in values.items():
            if len(set(values.values())) > 1 and (value != common or not is_majority):
                culprits.setdefault(rank, f"weight {box.split()[0]}")
    return culprits
