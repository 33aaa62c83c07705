"""Muon: updates of matrices by their orthogonal momentum (rules.muon says which, and where).

Each rank keeps the momentum of the elements that it owns. For an update the pieces of a matrix go
to the rank that it is dealt to, which makes the whole matrix orthogonal and sends every piece back:
two exchanges a step for each group that shards optimizer states. Under tensor parallelism all TP
ranks gather the whole matrix and keep their part of the result. One process computes the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from moewright.engine.comm.autograd_collectives import all_to_all
from moewright.engine.comm.collectives import Group, all_gather_rows
from moewright.engine.comm.mesh import TensorPlacement
from moewright.engine.model.layers import NamedParameter
from moewright.engine.optim.flat_buffers import FlatBucket
from moewright.engine.optim.fsdp import ShardedParameter
from moewright.engine.optim.optimizer_states import (
    OptimizerStates,
    OwnedRange,
    copy_to_state_device,
    uses_muon,
)
from moewright.engine.runtime import Runtime
from moewright.rules.grid import axis_size
from moewright.rules.optimizers import (
    COEFFICIENTS,
    Matrix,
    deal_matrices,
    list_matrices,
    scale_update,
)
from moewright.rules.shapes.fsdp import momentum_group
from moewright.rules.shapes.shards import GRADIENT_GROUPS, gradient_group, shard_size
from moewright.spec.workload import Dtype

# Matrices of one shape are made orthogonal together, up to so many elements.
_BATCH_NUMEL = 1 << 24
_EPS = 1e-7

Coefficients = tuple[tuple[float, float, float], ...]
# Elements [first, last) of a parameter as it is on this rank, flat.
_Span = tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class _MatrixExchange:
    """The matrices that the ranks of a group deal among them; alone without a group.

    `spans` [ranks] are the elements that each rank owns, by parameter.
    """

    group: Group | None
    matrices: tuple[Matrix, ...]
    owners: tuple[int, ...]
    spans: tuple[Mapping[str, _Span], ...]

    @property
    def rank(self) -> int:
        return self.group.index if self.group else 0

    def matrices_of(self, owner: int) -> list[Matrix]:
        """Return the matrices that are dealt to a rank."""
        pairs = zip(self.matrices, self.owners, strict=True)
        return [matrix for matrix, rank in pairs if rank == owner]

    def pieces(self, rank: int, owner: int) -> Iterator[tuple[Matrix, int, int]]:
        """Yield what a rank has of the matrices of another, as elements of the parameter."""
        for matrix in self.matrices_of(owner):
            first, last = self.spans[rank].get(matrix.name, (0, 0))
            first, last = max(first, matrix.first), min(last, matrix.first + matrix.numel)
            if first < last:
                yield matrix, first, last


@dataclass(frozen=True, kw_only=True, slots=True)
class _Direction:
    """The way that the owned elements of a parameter go, before it is made orthogonal."""

    states: OptimizerStates
    owned: OwnedRange
    flat: torch.Tensor

    def span(self, first: int, last: int) -> _Span:
        """Return where elements [first, last) of the parameter lie in `flat`; maybe nowhere."""
        start = min(max(first, self.owned.first), self.owned.last)
        stop = min(max(last, start), self.owned.last)
        return start - self.owned.first, stop - self.owned.first


class MuonUpdate:
    """The update of all matrices of a rank, from gradients to master weights.

    Without Muon in the workload it has no matrices and does nothing.
    """

    def __init__(
        self,
        runtime: Runtime,
        parameters: Sequence[NamedParameter],
        buckets: Sequence[FlatBucket],
        sharded: Sequence[ShardedParameter],
    ) -> None:
        self._runtime = runtime
        self._spec = runtime.workload.muon
        matrices = [parameter for parameter in parameters if uses_muon(runtime, parameter)]
        self._placements = {parameter.name: parameter.placement for parameter in matrices}
        self._exchanges = [
            exchange
            for group in GRADIENT_GROUPS
            if (exchange := _plan_exchange(runtime, matrices, group, buckets, sharded))
        ]
        # What add_gradients left for update: the pieces of a parameter, and where they belong.
        self._directions: dict[str, list[_Direction]] = defaultdict(list)

    def add_gradients(self, states: OptimizerStates, grads: torch.Tensor) -> None:
        """Add the gradients of a shard to its momentum."""
        decay = self._spec.muon_momentum
        for owned in states.owned:
            if not owned.has_momentum:
                continue
            grad = grads[owned.shard_slice]
            momentum = states.momentum[owned.moment_slice].lerp_(grad, 1 - decay)
            direction = grad.lerp(momentum, decay) if self._spec.muon_nesterov else momentum
            self._directions[owned.parameter.name].append(
                _Direction(states=states, owned=owned, flat=direction)
            )

    def update(self, *, lr: float) -> None:
        """Update the master weights of the shards whose gradients were added."""
        for exchange in self._exchanges:
            self._update_group(exchange, lr)
        self._directions.clear()

    def _update_group(self, exchange: _MatrixExchange, lr: float) -> None:
        ranks = range(len(exchange.spans))
        own = exchange.rank
        sent = [list(exchange.pieces(own, owner)) for owner in ranks]
        received = [list(exchange.pieces(rank, own)) for rank in ranks]
        send = [sum(last - first for _, first, last in pieces) for pieces in sent]
        receive = [sum(last - first for _, first, last in pieces) for pieces in received]
        # By the rank that makes the matrix, as the exchange takes them.
        flat = self._join([piece for pieces in sent for piece in pieces])
        if exchange.group is not None:
            flat = all_to_all(flat, exchange.group, send=send, receive=receive)
        matrices = exchange.matrices_of(own)
        flat = _arrange(flat, matrices, [piece for pieces in received for piece in pieces])
        # The ledger has the FLOPs of the model, and these are the update's.
        with self._runtime.counters.leave_out_flops():
            flat = self._orthogonalize(flat, matrices)
        if exchange.group is not None:
            order = [piece for pieces in received for piece in pieces]
            flat = _pick(flat, matrices, order)
            flat = all_to_all(flat, exchange.group, send=receive, receive=send)
        self._apply(flat, [piece for pieces in sent for piece in pieces], lr)

    def _join(self, pieces: Sequence[tuple[Matrix, int, int]]) -> torch.Tensor:
        """Return the directions of pieces one after the other, on the device."""
        device = self._runtime.device
        parts = [
            direction.flat[slice(*direction.span(first, last))].to(device)
            for matrix, first, last in pieces
            for direction in self._directions[matrix.name]
        ]
        return torch.cat(parts) if parts else torch.zeros(0, device=device)

    def _apply(
        self, flat: torch.Tensor, pieces: Sequence[tuple[Matrix, int, int]], lr: float
    ) -> None:
        """Update the master weights of pieces with their updates one after the other."""
        weight_decay = self._runtime.workload.optimizer.weight_decay
        parts = flat.split([last - first for _, first, last in pieces]) if pieces else ()
        for (matrix, first, last), update in zip(pieces, parts, strict=True):
            done = 0
            for direction in self._directions[matrix.name]:
                start, stop = direction.span(first, last)
                master = direction.states.master[direction.owned.shard_slice][start:stop]
                part = update[done : done + len(master)]
                done += len(master)
                master.mul_(1 - lr * weight_decay)
                master.sub_(copy_to_state_device(part, master.device), alpha=lr)

    def _orthogonalize(self, flat: torch.Tensor, matrices: Sequence[Matrix]) -> torch.Tensor:
        """Return the updates of matrices, each this rank's part of it, one after the other."""
        parts = list(flat.split([matrix.numel for matrix in matrices])) if matrices else []
        wholes = self._gather_wholes(parts, matrices)
        by_shape: dict[tuple[int, int], list[int]] = defaultdict(list)
        for index, matrix in enumerate(matrices):
            by_shape[matrix.rows, matrix.columns].append(index)
        for (rows, columns), indices in by_shape.items():
            size = max(1, _BATCH_NUMEL // (rows * columns))
            for start in range(0, len(indices), size):
                batch = indices[start : start + size]
                stacked = torch.stack([wholes[index].reshape(rows, columns) for index in batch])
                for index, update in zip(batch, self._make_updates(stacked), strict=True):
                    parts[index] = self._own_part(update, matrices[index])
        return _join(parts, flat)

    def _make_updates(self, matrices: torch.Tensor) -> torch.Tensor:
        spec = self._spec
        is_wide = self._runtime.workload.precision is Dtype.FP32
        updates = orthogonalize(
            matrices,
            steps=spec.muon_num_ns_steps,
            coefficients=COEFFICIENTS[spec.muon_coefficient_type],
            dtype=torch.float32 if is_wide else torch.bfloat16,
        )
        rows, columns = matrices.shape[1:]
        factor = scale_update(spec.muon_scale_mode, spec.muon_extra_scale_factor, rows, columns)
        return updates.float() * factor

    def _gather_wholes(
        self, parts: Sequence[torch.Tensor], matrices: Sequence[Matrix]
    ) -> list[torch.Tensor]:
        """Return each matrix whole, of which TP ranks have a part each."""
        wholes = list(parts)
        by_axis: dict[str, list[int]] = defaultdict(list)
        for index, matrix in enumerate(matrices):
            if cut := _matrix_cut(self._runtime, self._placements[matrix.name]):
                by_axis[cut[0]].append(index)
        for axis, indices in by_axis.items():
            gathered = all_gather_rows(
                torch.cat([parts[index] for index in indices])[None], self._runtime.mesh.group(axis)
            )
            pieces = gathered.split([matrices[index].numel for index in indices], dim=1)
            for index, piece in zip(indices, pieces, strict=True):
                placement = self._placements[matrices[index].name]
                cut = _matrix_cut(self._runtime, placement)
                assert cut is not None  # by which `axis` came about
                shape = _matrix_shape(placement)
                wholes[index] = torch.cat([row.view(shape) for row in piece], dim=cut[1])
        return wholes

    def _own_part(self, update: torch.Tensor, matrix: Matrix) -> torch.Tensor:
        """Return this rank's part of a whole update, flat."""
        placement = self._placements[matrix.name]
        cut = _matrix_cut(self._runtime, placement)
        if cut is None:
            return update.reshape(-1)
        axis, dim = cut
        shape = list(_matrix_shape(placement))
        size = shape[dim]
        shape[dim] *= axis_size(self._runtime.mesh.layout, axis)
        first = self._runtime.mesh.coordinate(axis) * size
        return update.reshape(shape).narrow(dim, first, size).reshape(-1)


def orthogonalize(
    matrices: torch.Tensor, *, steps: int, coefficients: Coefficients, dtype: torch.dtype
) -> torch.Tensor:
    """Return the nearest (semi-)orthogonal matrices, nearly, by Newton-Schulz steps in `dtype`.

    All singular values come near 1; those of zero stay. Shape: [count, rows, columns].
    """
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.to(dtype)
    # The Gram matrix is then the smaller of the two.
    if is_tall:
        x = x.mT
    # No singular value is above the Frobenius norm, and the steps converge from 1 down.
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=_EPS)
    for step in range(steps):
        a, b, c = coefficients[step % len(coefficients)]
        # On singular values the step is a x + b x^3 + c x^5, as a x + (b G + c G^2) x for matrices.
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if is_tall else x


def _arrange(
    flat: torch.Tensor, matrices: Sequence[Matrix], pieces: Sequence[tuple[Matrix, int, int]]
) -> torch.Tensor:
    """Put pieces that came one after the other where they belong in their matrices."""
    out = torch.empty_like(flat)
    spans = _spans_in(matrices, pieces)
    for span, part in zip(spans, flat.split([b - a for a, b in spans]), strict=True):
        out[span[0] : span[1]] = part
    return out


def _pick(
    flat: torch.Tensor, matrices: Sequence[Matrix], pieces: Sequence[tuple[Matrix, int, int]]
) -> torch.Tensor:
    """Return pieces of matrices one after the other."""
    return _join([flat[first:last] for first, last in _spans_in(matrices, pieces)], flat)


def _join(parts: Sequence[torch.Tensor], empty: torch.Tensor) -> torch.Tensor:
    """Return parts one after the other; `empty` where there are none, which cat refuses."""
    return torch.cat(list(parts)) if parts else empty


def _spans_in(matrices: Sequence[Matrix], pieces: Sequence[tuple[Matrix, int, int]]) -> list[_Span]:
    """Return where pieces lie in their matrices one after the other."""
    starts: dict[tuple[str, int], int] = {}
    start = 0
    for matrix in matrices:
        starts[matrix.name, matrix.first] = start
        start += matrix.numel
    spans = []
    for matrix, first, last in pieces:
        offset = starts[matrix.name, matrix.first] - matrix.first
        spans.append((offset + first, offset + last))
    return spans


def _plan_exchange(
    runtime: Runtime,
    parameters: Sequence[NamedParameter],
    group_name: str,
    buckets: Sequence[FlatBucket],
    sharded: Sequence[ShardedParameter],
) -> _MatrixExchange | None:
    """Return the exchange of the matrices whose gradients a group sums; None if there are none."""
    layout = runtime.mesh.layout
    members = [
        parameter
        for parameter in parameters
        if gradient_group(parameter.placement.sharding, layout) == group_name
    ]
    if not members:
        return None
    matrices = [
        matrix
        for parameter in members
        for matrix in list_matrices(
            parameter.name,
            parameter.placement.global_shape,
            parameter.placement.local_shape,
            parameter.placement.sharding,
        )
    ]
    name = momentum_group(layout, group_name)
    group = runtime.mesh.group(name) if name else None
    ranks = 1
    if group is not None:
        ranks = group.size
    return _MatrixExchange(
        group=group if ranks > 1 else None,
        matrices=tuple(matrices),
        owners=deal_matrices(matrices, ranks),
        spans=tuple(
            {**_flat_spans(members, buckets, rank), **_sharded_spans(members, sharded, rank, ranks)}
            for rank in range(ranks)
        ),
    )


def _flat_spans(
    members: Sequence[NamedParameter], buckets: Sequence[FlatBucket], rank: int
) -> dict[str, _Span]:
    """Return what the shard of a rank holds of parameters in flat buffers."""
    names = {parameter.name for parameter in members}
    spans = {}
    for bucket in buckets:
        start = rank * bucket.shard_numel
        for parameter, view in bucket.grad_views:
            if parameter.name in names:
                offset = int(view.storage_offset())
                # Nothing of it may lie in the shard: then `last` is below `first`, and no piece
                # comes of it.
                first = max(0, start - offset)
                last = min(view.numel(), start + bucket.shard_numel - offset)
                spans[parameter.name] = first, last
    return spans


def _sharded_spans(
    members: Sequence[NamedParameter],
    sharded: Sequence[ShardedParameter],
    rank: int,
    ranks: int,
) -> dict[str, _Span]:
    """Return what a rank holds of parameters that fully_shard shards by rows."""
    names = {parameter.name for parameter in members}
    spans = {}
    for parameter in sharded:
        if parameter.named.name in names:
            rows, *row_shape = map(int, parameter.parameter.shape)
            row_numel = prod(row_shape)
            part = shard_size(rows, ranks)
            first = min(rows, rank * part)
            spans[parameter.named.name] = first * row_numel, min(rows, first + part) * row_numel
    return spans


def _matrix_shape(placement: TensorPlacement) -> tuple[int, ...]:
    """Return the shape of a rank's part of a matrix, of which an expert parameter has several."""
    return placement.local_shape[_stacked_dims(placement) :]


def _matrix_cut(runtime: Runtime, placement: TensorPlacement) -> tuple[str, int] | None:
    """Return the axis of more than one rank that shards a matrix, and the dim of it."""
    for axis, dim in placement.sharding:
        # EP deals whole matrices out and cuts none.
        if axis != "ep" and axis_size(runtime.mesh.layout, axis) > 1:
            return axis, dim - _stacked_dims(placement)
    return None


def _stacked_dims(placement: TensorPlacement) -> int:
    return int(any(axis == "ep" for axis, _ in placement.sharding))
