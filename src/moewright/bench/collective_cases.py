"""Cases of communication: collectives over groups of every size, and the link of each pair."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist

from moewright.bench.case import BenchContext, Call, Case, Probe
from moewright.rules.limits.divisibility import divisors
from moewright.spec.hardware import Collective
from moewright.spec.units import KIB, MIB
from moewright.spec.workload import Dtype

PAYLOAD_BYTES = (64, KIB, 16 * KIB, 128 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
# The result of an all-gather is no larger than this.
MAX_GATHERED_BYTES = 128 * MIB
LINK_BYTES = 4 * MIB

# Sets up the call of a collective on a buffer, over a group of so many ranks.
BuildCall = Callable[[torch.Tensor, int, BenchContext], Call]


def group_sizes(ranks: int) -> tuple[int, ...]:
    """Return the sizes of the groups that a world splits into; none for one rank."""
    return tuple(size for size in divisors(ranks) if size > 1)


def build_collective_cases(ranks: int) -> Iterator[Case]:
    """Yield every collective over groups of every size of the world, by payload."""
    for group_size in group_sizes(ranks):
        for op, build_call in _COLLECTIVES.items():
            for payload_bytes in PAYLOAD_BYTES:
                elements = max(payload_bytes // 4 // group_size, 1) * group_size
                gathered_bytes = elements * 4 * group_size
                if op is Collective.ALL_GATHER and gathered_bytes > MAX_GATHERED_BYTES:
                    continue
                yield _build_case(op, elements, group_size, build_call)


def _build_case(op: Collective, elements: int, ranks: int, build_call: BuildCall) -> Case:
    """Build the case of a payload: x is the bytes that a rank hands in, its own part included.

    The curve's y is seconds, so a call is one unit of work.
    """

    def setup(context: BenchContext) -> Call:
        return build_call(torch.zeros(elements, device=context.device), ranks, context)

    return Case(op=op, dtype=Dtype.FP32, x=4 * elements, work=1, setup=setup, ranks=ranks)


def _all_reduce(data: torch.Tensor, ranks: int, context: BenchContext) -> Call:
    group = context.groups.get(ranks)
    return lambda: dist.all_reduce(data, group=group)


def _all_gather(data: torch.Tensor, ranks: int, context: BenchContext) -> Call:
    gathered = data.new_empty(data.numel() * ranks)
    group = context.groups.get(ranks)
    return lambda: dist.all_gather_into_tensor(gathered, data, group=group)


def _reduce_scatter(data: torch.Tensor, ranks: int, context: BenchContext) -> Call:
    shard = data.new_empty(data.numel() // ranks)
    group = context.groups.get(ranks)
    return lambda: dist.reduce_scatter_tensor(shard, data, group=group)


def _all_to_all(data: torch.Tensor, ranks: int, context: BenchContext) -> Call:
    received = torch.empty_like(data)
    group = context.groups.get(ranks)
    return lambda: dist.all_to_all_single(received, data, group=group)


def _broadcast(data: torch.Tensor, ranks: int, context: BenchContext) -> Call:
    group = context.groups.get(ranks)
    source = _first_of_group(context, ranks)
    return lambda: dist.broadcast(data, src=source, group=group)


def _ring_shift(data: torch.Tensor, ranks: int, context: BenchContext) -> Call:
    """Send to the next rank of the group and receive from the one before."""
    first = _first_of_group(context, ranks)
    position = context.rank - first
    target = first + (position + 1) % ranks
    source = first + (position - 1) % ranks
    return _send_and_receive(data, target, source, context.groups.get(ranks))


def _first_of_group(context: BenchContext, ranks: int) -> int:
    return context.rank // ranks * ranks


_COLLECTIVES: Mapping[Collective, BuildCall] = {
    Collective.ALL_REDUCE: _all_reduce,
    Collective.ALL_GATHER: _all_gather,
    Collective.REDUCE_SCATTER: _reduce_scatter,
    Collective.ALL_TO_ALL: _all_to_all,
    Collective.BROADCAST: _broadcast,
    Collective.P2P: _ring_shift,
}


def _send_and_receive(
    data: torch.Tensor, target: int, source: int, group: dist.ProcessGroup | None
) -> Call:
    received = torch.empty_like(data)

    def call() -> None:
        send = dist.P2POp(dist.isend, data, target, group)
        receive = dist.P2POp(dist.irecv, received, source, group)
        for transfer in dist.batch_isend_irecv([send, receive]):
            transfer.wait()

    return call


def build_link_cases(ranks: int) -> Iterator[Case]:
    """Yield the exchanges of every pair of ranks, one case for each round; none for two ranks.

    In a round every rank has a partner, except one rank where their number is odd.
    """
    if ranks <= 2:
        return
    for number, partners in enumerate(pairing_rounds(ranks), 1):
        yield _build_link_case(number, partners, ranks)


def _build_link_case(number: int, partners: Mapping[int, int], ranks: int) -> Case:
    def setup(context: BenchContext) -> Call:
        partner = partners.get(context.rank)
        if partner is None:
            return lambda: None
        data = torch.zeros(LINK_BYTES // 4, device=context.device)
        return _send_and_receive(data, partner, partner, None)

    return Case(
        op=Probe.LINK, dtype=Dtype.FP32, x=number, work=LINK_BYTES, setup=setup, ranks=ranks
    )


def pairing_rounds(ranks: int) -> tuple[Mapping[int, int], ...]:
    """Return every rank's partner in each round of a tournament in which all pairs meet once.

    The rounds are those of the circle method: one rank keeps its seat, the others move on by one.
    With an odd number of ranks, the rank opposite the empty seat has no partner.
    """
    seats: list[int | None] = list(range(ranks))
    if ranks % 2:
        seats.append(None)
    rounds = []
    for _ in range(len(seats) - 1):
        partners = {}
        for index in range(len(seats) // 2):
            first = seats[index]
            second = seats[-1 - index]
            if first is not None and second is not None:
                partners[first] = second
                partners[second] = first
        rounds.append(partners)
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return tuple(rounds)
