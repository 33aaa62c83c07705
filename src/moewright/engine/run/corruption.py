"""Silent corruption: bits of the state that change by no update, and replicas that differ.

Nothing may change a weight, a master weight or a moment between the end of an update and the next.
A guard notes hashes after a checked update and compares them right before the next one: a flipped
bit is found on the rank that has it, whether or not another rank holds a copy. Weights of which
several ranks hold a copy are compared between these as well.

Gradients have no such rest. A checked step is done twice, and the losses and gradients of both
times are compared before the update: the engine repeats a step bit for bit. What a rank computes
wrongly both times is found by another, which runs one of its micro-batches and its update again
(neighbour_pass, neighbour_update). Where two ranks differ, a third one tells which is wrong.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from moewright.engine.model.layers import list_parameters
from moewright.engine.observe.phase_clock import build_phase_clock
from moewright.engine.optim.flat_buffers import FlatBucket
from moewright.engine.optim.fsdp import is_fully_sharded, local_weight
from moewright.engine.run.bit_hash import hash_bits
from moewright.engine.run.neighbour_pass import NeighbourPass, find_obstacle
from moewright.engine.run.neighbour_update import NeighbourUpdate
from moewright.engine.run.step import BackwardResult, clipping_factor, forward_backward
from moewright.engine.run.train_state import TrainState
from moewright.engine.run.worker import CorruptionError
from moewright.spec.units import mention

_WEIGHT = "weight "
_REDUCED = "the reduced gradient of "


class StateGuard:
    """Hashes of the state of this rank, noted after every `every`-th update; 0 for never.

    The step after is the checked one: it ends with a comparison, is done twice, and one of its
    micro-batches and its update are repeated by another rank.
    """

    def __init__(
        self,
        state: TrainState,
        *,
        every: int,
        rank: int,
        gather: Callable[[Any], list[Any]],
    ) -> None:
        self._state = state
        self._gather = gather
        self._every = every
        self._rank = rank
        self._step = 0
        self._checks = 0
        self._update: NeighbourUpdate | None = None  # of the checked step, until it is done
        obstacle = find_obstacle(state)
        self._has_neighbour = state.runtime.mesh.layout.world_size > 1
        self._repeats_passes = self._has_neighbour and not obstacle
        if every and obstacle and rank == 0:
            _tell(f"train.check_every: no rank runs another's micro-batch again with {obstacle}")
        self._sums: dict[str, int] = {}
        self._repeats = every > 0
        self._own_gradients: dict[str, torch.Tensor] = {}

    def begin_step(self) -> None:
        """Begin a step: sums of its gradients are taken if it is a checked one."""
        self._own_gradients = {}
        optimizer = self._state.optimizer
        is_checked = bool(self._sums) and self._repeats
        optimizer.before_reduce = self._sum_gradients if is_checked else _ignore_bucket

    def note(self, step: int) -> None:
        """Note the state after update `step`, if that is to be checked; all ranks call this.

        Raises:
            CorruptionError: on a rank whose update came out otherwise than beforehand, or whose
                copy of a weight is not that of the others; on all that hold it, where there are but
                two.
        """
        update, self._update = self._update, None
        difference = update.find_difference() if update is not None else ""
        if difference:
            raise CorruptionError(f"{difference} in step {step} is not what it was beforehand")
        self._sums = {}
        if not self._every or step % self._every:
            return
        self._state.optimizer.finish_pending()
        self._step = step
        self._sums = self._sum_up()
        # All ranks gather before any of them raises.
        culprits = find_odd_replicas(self._gather(self._sum_up_replicas()))
        if self._rank in culprits:
            raise CorruptionError(
                f"{culprits[self._rank]} is not what other ranks have after step {step}",
                is_certain=len(culprits) == 1,
            )

    def verify(
        self, step: int, backward: BackwardResult, *, lr: float, is_counted: bool = False
    ) -> None:
        """Compare the state with what was noted, and step `step` with itself; all ranks call this.

        A step that is counted for the ledger is not repeated.

        Raises:
            CorruptionError: on the rank at fault, naming the tensor; on two ranks where there are
                no more, and they differ.
        """
        if not self._sums:
            return
        self.verify_state()
        if is_counted:
            return
        if self._repeats:
            self._compare_passes(step, backward)
        # A step that is not finite makes no update.
        if backward.is_finite and self._has_neighbour:
            scale = clipping_factor(self._state.runtime.workload, backward.grad_norm)
            self._update = NeighbourUpdate(self._state, lr=lr, scale=scale)
            self._compare_ranks(step, self._update.compare)

    def verify_state(self, *, only_saved: bool = False) -> None:
        """Compare the state with what was noted after the last update, if it was.

        With `only_saved`, what a checkpoint holds alone: after an evaluation, weights that are cut
        over ranks may still lie gathered.

        Raises:
            CorruptionError: on the rank at fault, naming the tensor.
        """
        if not self._sums:
            return
        self._state.optimizer.finish_pending()
        for name, value in self._sum_up().items():
            is_skipped = only_saved and name.startswith(_WEIGHT)
            if value != self._sums[name] and not is_skipped:
                raise CorruptionError(f"{name} has changed since step {self._step}, by no update")

    def _compare_passes(self, step: int, backward: BackwardResult) -> None:
        first = self._take_pass(backward)
        if not self._repeats_passes:
            second = self._repeat(step)
            differences = self._gather(_find_difference(first, second))
            if any(differences):
                self._name_culprits(step, first, second, differences)
            return
        number = self._checks % self._count_micro_batches(step)
        self._checks += 1
        neighbour = NeighbourPass(self._state, step=step, micro_batch=number)
        second = self._take_pass(neighbour.run())
        differences = self._gather(_find_difference(first, second))
        if any(differences):
            self._name_culprits(step, first, second, differences)
        else:
            self._compare_ranks(step, neighbour.compare)
        neighbour.close()

    def _count_micro_batches(self, step: int) -> int:
        layout = self._state.runtime.mesh.layout
        size = self._state.step_size(self._state.runtime, step - 1)
        return size.sequences // (layout.dp * layout.mbs)

    def _compare_ranks(self, step: int, compare: Callable[[int], str]) -> None:
        """Have other ranks repeat this one's work, and stop the rank that is wrong."""
        world_size = self._state.runtime.mesh.layout.world_size
        by_next = _by_checked_rank(self._gather(compare(1)), 1)
        if not any(by_next):
            return
        by_third: list[str] = []
        if world_size > 2:
            by_third = _by_checked_rank(self._gather(compare(2)), 2)
        culprits = find_wrong_ranks(by_next, by_third)
        if self._rank in culprits:
            raise CorruptionError(
                f"{culprits[self._rank]} of step {step} comes out otherwise on other ranks"
                + ("" if by_third else "; of two ranks, nobody can tell which is wrong"),
                is_certain=len(culprits) == 1,
            )

    def _name_culprits(
        self,
        step: int,
        first: Mapping[str, str],
        second: Mapping[str, str],
        differences: Sequence[str],
    ) -> None:
        third = self._repeat(step)
        # A fault that passes: the third time is on all ranks as the first or as the second.
        # All ranks gather the same, so that all leave this together.
        is_transient = not all(
            any(self._gather(_find_difference(other, third))) for other in (first, second)
        )
        # A CPU's kernels repeat themselves, so that there it is a fault all the same.
        if not is_transient and self._state.runtime.device.type != "cpu":
            self._repeats = False
            if self._rank == 0:
                message = (
                    f"step {step} gives other gradients each time, so kernels are not "
                    "deterministic: steps are compared with themselves no more"
                )
                _tell(message)
            return
        culprits = find_culprits(differences)
        if self._rank in culprits:
            others = [str(rank) for rank in culprits if rank != self._rank]
            also = mention(" (so it did on rank {})", ", ".join(others))
            raise CorruptionError(
                f"{culprits[self._rank]} of step {step} came out otherwise when repeated{also}"
            )

    def _repeat(self, step: int) -> dict[str, str]:
        clock = build_phase_clock(self._state.runtime.device)
        return self._take_pass(forward_backward(self._state, clock, step=step))

    def _take_pass(self, backward: BackwardResult) -> dict[str, str]:
        """Return what this rank computed itself, and after that what came of the reduction."""
        sums = {f"the {name}": value for name, value in self._own_gradients.items()}
        for number, shard in enumerate(self._state.optimizer.gradient_shards()):
            name = shard.name.removeprefix("grad/")
            sums[f"{_REDUCED}{name} ({number})"] = hash_bits(shard.tensor)
        values = torch.stack([value.cpu() for value in sums.values()]).tolist()
        self._own_gradients = {}
        return {
            # repr tells floats apart to the last bit, and takes every NaN for the same.
            "the loss": repr(backward.local_nll),
            **{name: str(value) for name, value in zip(sums, values, strict=True)},
        }

    def _sum_gradients(self, bucket: FlatBucket) -> None:
        for parameter, gradient in bucket.grad_views:
            self._own_gradients[f"gradient of {parameter.name}"] = hash_bits(gradient)

    def _sum_up(self) -> dict[str, int]:
        names = []
        sums = []
        for name, tensor in self._list_tensors():
            names.append(name)
            sums.append(hash_bits(tensor).cpu())
        return dict(zip(names, torch.stack(sums).tolist(), strict=True))

    def _list_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for parameter in list_parameters(self._state.model):
            yield f"{_WEIGHT}{parameter.name}", local_weight(parameter)
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
                sums[box] = int(hash_bits(parameter.parameter))
        return sums


def _tell(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _by_checked_rank(differences: Sequence[str], distance: int) -> list[str]:
    """Sort what each rank has found out by the rank `distance` before it, which it is about."""
    size = len(differences)
    return [differences[(rank + distance) % size] for rank in range(size)]


def find_wrong_ranks(by_next: Sequence[str], by_third: Sequence[str]) -> dict[int, str]:
    """Return the ranks that compute wrongly, and what.

    `by_next` says of each rank what the next one got otherwise, `by_third` what the one after that;
    it is empty where there is none. Where the third rank agrees with the first, the next is wrong.
    Of several, some may be healthy: wrong ones have told of them.
    """
    culprits: dict[int, str] = {}
    for rank, name in enumerate(by_next):
        neighbour = (rank + 1) % len(by_next)
        if name and (not by_third or by_third[rank]):
            culprits.setdefault(rank, name)
        if name and not (by_third and by_third[rank]):
            culprits.setdefault(neighbour, name)
    return culprits


def _ignore_bucket(bucket: FlatBucket) -> None:
    """Take no sums of a step that is not checked."""


def _find_difference(first: Mapping[str, str], second: Mapping[str, str]) -> str:
    """Return the first name whose value is not the same in both passes; "" where all are."""
    return next((name for name in first if first[name] != second[name]), "")


def find_culprits(differences: Sequence[str]) -> dict[int, str]:
    """Return the ranks at fault, and what differs there, from what differs on each rank.

    What a rank computes itself is nearer to the fault than what comes of a reduction, in which
    all have a part.
    """
    by_rank = {rank: name for rank, name in enumerate(differences) if name}
    own = {rank: name for rank, name in by_rank.items() if not name.startswith(_REDUCED)}
    return own or by_rank


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
