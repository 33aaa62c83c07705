"""The update of each rank's shard, done beforehand by the rank and by another, and compared.

A wrong element of an update has nothing that it could be compared with afterwards: the state before
it is gone. So both ranks compute it on copies first, in pieces. When the rank then updates its
shard in place, the result must be what it has found before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from moewright.engine.comm import collectives
from moewright.engine.optim.distributed_optimizer import DistributedOptimizer, UpdatePiece
from moewright.engine.run.bit_hash import hash_bits
from moewright.engine.run.train_state import TrainState

# Pieces travel together up to so many elements of each tensor.
_PACKAGE_NUMEL = 1 << 22
# Rows of a piece: the master, both moments, the gradient.
_ROWS = 4

Hashes = tuple[int, ...]  # of the master and both moments


@dataclass(frozen=True, kw_only=True, slots=True)
class _PieceInfo:
    """What another rank must know of a piece besides its numbers."""

    name: str
    numel: int
    has_weight_decay: bool
    on_host: bool


class NeighbourUpdate:
    """The update of one step, before it is done; all ranks make one at the same time."""

    def __init__(self, state: TrainState, *, lr: float, scale: float) -> None:
        self._optimizer: DistributedOptimizer = state.optimizer
        self._lr = lr
        self._scale = scale
        self._world = state.runtime.mesh.group("world")
        self._device = state.runtime.device
        self._infos = [_describe(piece) for piece in self._optimizer.list_pieces()]
        self._hashes = [
            self._repeat(_stack(piece), _describe(piece)) for piece in self._optimizer.list_pieces()
        ]

    def compare(self, distance: int) -> str:
        """Do the update of the rank `distance` before this one; all ranks call this.

        Returns the first parameter whose result is not that rank's own; "" for none.
        """
        world = self._world
        other = world.ranks[(world.index - distance) % world.size]
        rows = [[x.name, x.numel, x.has_weight_decay, x.on_host] for x in self._infos]
        gathered = collectives.gather_json([rows, self._hashes])[other]
        infos = [
            _PieceInfo(name=name, numel=numel, has_weight_decay=decays, on_host=on_host)
            for name, numel, decays, on_host in gathered[0]
        ]
        own = [self._repeat(numbers, info) for numbers, info in self._exchange(infos, distance)]
        pairs = zip(infos, gathered[1], own, strict=True)
        names = (info.name for info, expected, actual in pairs if tuple(expected) != actual)
        name = next(names, "")
        return name and f"the update of {name}"

    def find_difference(self) -> str:
        """Return the first parameter whose update in place came out otherwise; "" for none."""
        for piece, expected in zip(self._optimizer.list_pieces(), self._hashes, strict=True):
            tensors = [piece.master]
            if piece.are_moments_exact:
                tensors += [piece.exp_avg, piece.exp_avg_sq]
            if self._hash_all(tensors) != expected[: len(tensors)]:
                return f"the update of {piece.name}"
        return ""

    def _exchange(
        self, infos: Sequence[_PieceInfo], distance: int
    ) -> Iterator[tuple[torch.Tensor, _PieceInfo]]:
        """Send the pieces of this rank package by package, and yield the other's, [4, n] each."""
        own = self._optimizer.list_pieces()
        sent = _group_pieces(self._infos)
        received = _group_pieces(infos)
        # A rank with fewer packages sends empty ones, for each exchange needs both sides.
        for number in range(max(len(sent), len(received))):
            numbers = [_stack(next(own)) for _ in sent[number]] if number < len(sent) else []
            flat = torch.cat([x.to(self._device).flatten() for x in numbers] or [self._empty()])
            group = received[number] if number < len(received) else []
            count = _ROWS * sum(info.numel for info in group)
            package = collectives.shift_flat(flat, self._world, count=count, distance=distance)
            sizes = [_ROWS * info.numel for info in group]
            for part, info in zip(package.split(sizes), group, strict=True):
                yield part.view(_ROWS, info.numel), info

    def _repeat(self, numbers: torch.Tensor, info: _PieceInfo) -> Hashes:
        device = torch.device("cpu") if info.on_host else self._device
        after = self._optimizer.repeat_update(
            numbers.to(device),
            has_weight_decay=info.has_weight_decay,
            lr=self._lr,
            scale=self._scale,
        )
        return self._hash_all(after.unbind())

    def _hash_all(self, tensors: Sequence[torch.Tensor]) -> Hashes:
        return tuple(torch.stack([hash_bits(tensor) for tensor in tensors]).tolist())

    def _empty(self) -> torch.Tensor:
        return torch.empty(0, device=self._device)


def _describe(piece: UpdatePiece) -> _PieceInfo:
    return _PieceInfo(
        name=piece.name,
        numel=piece.master.numel(),
        has_weight_decay=piece.has_weight_decay,
        on_host=piece.on_host,
    )


def _stack(piece: UpdatePiece) -> torch.Tensor:
    """Return copies of what the update of a piece takes, [4, n]."""
    return torch.stack([piece.master, piece.exp_avg, piece.exp_avg_sq, piece.gradient])


def _group_pieces(infos: Sequence[_PieceInfo]) -> list[list[_PieceInfo]]:
    """Group pieces that travel together."""
    groups: list[list[_PieceInfo]] = []
    room = 0
    for info in infos:
        if not groups or info.numel > room:
            groups.append([])
            room = max(_PACKAGE_NUMEL, info.numel)
        groups[-1].append(info)
        room -= info.numel
    return groups
