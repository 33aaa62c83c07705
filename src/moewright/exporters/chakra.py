"""The predicted step of a plan as Chakra execution traces, and what ASTRA-sim reads beside them.

A rank's rows follow each other as the timetable has them. The collectives of a row are its part of
those in the predicted ledger, so that the traces of a step move the ledger's bytes; what the plan
prices of them is taken from the row, and the rest is computed in slices between them. Collectives
that the plan hides run beside the slices.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from moewright.codec import write_text
from moewright.codec.files import write_pieces
from moewright.cost.pipeline_rows import KINDS, PipelineRows, simulate_plan
from moewright.cost.time.collective_time import CollectiveModel
from moewright.cost.time.op_time import DeviceRates
from moewright.exporters.chakra_wire import (
    COLLECTIVE_TYPES,
    NodeType,
    TraceNode,
    encode_attribute,
    encode_trace,
)
from moewright.rules import grid
from moewright.rules.timetable import p2p
from moewright.rules.timetable.stages import stage_position, virtual_stage
from moewright.rules.timetable.timetable_row import RowKind
from moewright.spec.hardware import Collective
from moewright.spec.layout import Layout
from moewright.spec.ledger import CommRow
from moewright.spec.plan import Plan, TimePart
from moewright.spec.units import US_PER_S

# Groups whose collectives are made for every micro-batch, and the part that prices them.
_MICRO_BATCH_GROUPS = {
    "tp": TimePart.TP_COMM,
    "tp_cp": TimePart.TP_COMM,
    "cp": TimePart.CP_COMM,
    "cp_a2a": TimePart.CP_COMM,
    "cp_kv": TimePart.CP_COMM,
    "etp": TimePart.EP_COMM,
    "ep": TimePart.EP_COMM,
    "ep_near": TimePart.EP_COMM,
    "ep_far": TimePart.EP_COMM,
    "etp_ep": TimePart.EP_COMM,
}
_RING_TAGS = 1 << 24  # above those of transfers between stages
_NS_PER_S = 1e9
_ASTRA_GB = 2**30  # bytes of what ASTRA-sim's analytical network calls a GB


@dataclass(frozen=True, kw_only=True, slots=True)
class _TraceCall:
    """One collective of a rank; a hidden one keeps nothing waiting until its row ends."""

    op: Collective
    group: str
    nbytes: int
    is_hidden: bool


def write_traces(plan: Plan, folder: Path) -> int:
    """Write `step.<rank>.et` for every rank, and ASTRA-sim's files, and return how many ranks.

    Raises:
        BadInput: the layout has no timetable, or a file cannot be written.
    """
    for rank, messages in enumerate(build_traces(plan)):
        write_pieces(folder / f"step.{rank}.et", messages)
    for name, text in astra_files(plan).items():
        write_text(folder / name, text)
    return plan.layout.world_size


def build_traces(plan: Plan) -> Iterator[Iterator[bytes]]:
    """Yield the messages of every rank's step, in the order of ranks.

    Raises:
        BadInput: the layout has no timetable.
    """
    layout = plan.layout
    rows = simulate_plan(plan)
    stages = [_StageTrace(plan, rows, pp_rank) for pp_rank in range(layout.pp)]
    ids = _number_groups(layout)
    for rank in range(layout.world_size):
        yield encode_trace(stages[grid.coordinate(layout, rank, "pp")].render(rank, ids))


def _number_groups(layout: Layout) -> dict[tuple[int, ...], int]:
    """Return a number for each process group of more than one rank.

    The world has one too: ASTRA-sim counts the collectives of its default group, 0, together with
    those of all others, so that ranks of two stages would not meet in it.
    """
    ids: dict[tuple[int, ...], int] = {}
    for name in grid.GROUPS:
        if grid.group_size(layout, name) > 1:
            for ranks in grid.all_groups(layout, name):
                # Groups of two names that have the same ranks are one.
                ids.setdefault(tuple(sorted(ranks)), len(ids) + 1)
    return ids


@dataclass(kw_only=True, slots=True)
class _Chain:
    """The nodes of a stage so far. `tail` is what the next node waits for, `open` what runs beside.

    `messages` are the nodes' fields, without the attributes that each rank has of its own.
    """

    messages: list[tuple[NodeType, bytes]] = field(default_factory=list)
    tail: tuple[int, ...] = ()
    open: tuple[int, ...] = ()
    worked_s: float = 0.0
    worked_us: int = 0

    def add(
        self,
        name: str,
        kind: NodeType,
        *,
        after: tuple[int, ...],
        micros: int = 0,
        attributes: tuple[tuple[str, int], ...] = (),
    ) -> int:
        number = len(self.messages) + 1
        node = TraceNode(id=number, name=name, type=kind, after=after, micros=micros)
        encoded = b"".join(encode_attribute(*attribute) for attribute in attributes)
        self.messages.append((kind, node.encode() + encoded))
        return number

    def compute(self, name: str, seconds: float, *, joins: bool = False) -> None:
        """Add work after all that came before; its microseconds add up without rounding errors."""
        self.worked_s += seconds
        micros = round(self.worked_s * US_PER_S) - self.worked_us
        self.worked_us += micros
        after = self.tail + self.open if joins else self.tail
        if joins:
            self.open = ()
        # A node of no length is needed only where several ends meet.
        if micros or len(after) > 1:
            self.tail = (self.add(name, NodeType.COMPUTE, after=after, micros=micros),)

    def collect(self, call: _TraceCall) -> None:
        """Add a collective, after or beside what came before."""
        attributes: tuple[tuple[str, int], ...] = (("comm_size", call.nbytes),)
        name = f"{call.op.value} {call.group}"
        if call.op is Collective.P2P:  # a step of a ring
            self.add(f"{name} send", NodeType.SEND, after=self.tail, attributes=attributes)
            kind = NodeType.RECEIVE
        else:
            kind = NodeType.COLLECTIVE
            attributes = (("comm_type", COLLECTIVE_TYPES[call.op]), *attributes)
        number = self.add(name, kind, after=self.tail, attributes=attributes)
        if call.is_hidden:
            self.open += (number,)
        else:
            self.tail = (number,)


class _StageTrace:
    """The trace that the ranks of a pipeline stage have in common: all but groups and peers."""

    __slots__ = ("_calls", "_chain", "_groups", "_peers", "_plan", "_pp_rank", "_spans")

    def __init__(self, plan: Plan, rows: PipelineRows, pp_rank: int) -> None:
        self._plan, self._pp_rank = plan, pp_rank
        self._chain = _Chain()
        self._groups: dict[int, str] = {}  # of collective nodes
        self._peers: dict[int, tuple[int, int]] = {}  # pipeline rank and tag of sends and receives
        constants = DeviceRates(plan.hardware).constants
        collectives = CollectiveModel(plan.hardware, constants)
        self._spans = {
            name: collectives.span(plan.layout, name)
            for name in grid.GROUPS
            if grid.group_size(plan.layout, name) > 1
        }
        ledger = next(ledger for ledger in plan.estimate.ledgers if ledger.pp_rank == pp_rank)
        kinds = [KINDS[kind] for kind in rows.kind[pp_rank].tolist()]
        # Gradients of weights alone need no other rank.
        count = sum(kind is not RowKind.W for kind in kinds)
        in_rows, after_rows = _share_calls(plan, ledger.comm, count)
        turn = 0
        for place, kind in enumerate(kinds):
            calls: Sequence[_TraceCall] = ()
            if kind is not RowKind.W:
                calls = in_rows[turn]
                turn += 1
            micro_batch = int(rows.micro_batch[pp_rank, place])
            chunk = int(rows.chunk[pp_rank, place])
            length_s = float(rows.length_s[pp_rank, place])
            self._add_row(collectives, kind, micro_batch, chunk, length_s, calls)
        self._add_tail(after_rows)

    def _add_row(
        self,
        collectives: CollectiveModel,
        kind: RowKind,
        micro_batch: int,
        chunk: int,
        length_s: float,
        calls: Sequence[_TraceCall],
    ) -> None:
        layout, chain = self._plan.layout, self._chain
        stage = virtual_stage(layout, self._pp_rank, chunk)
        name = f"{kind}{micro_batch} stage {stage}"
        source = p2p.input_stage(layout, kind, stage) if kind is not RowKind.W else None
        if source is not None:
            number = self._transfer(NodeType.RECEIVE, kind, micro_batch, stage, source)
            chain.tail += (number,) if number else ()
        shown_s = sum(
            collectives.seconds(call.op, self._spans[call.group], call.nbytes)
            for call in calls
            if not call.is_hidden
        )
        slice_s = max(0.0, length_s - shown_s) / (len(calls) + 1)
        for call in calls:
            chain.compute(name, slice_s)
            self._collect(call)
        # The row is over when what runs beside it is.
        chain.compute(name, slice_s, joins=True)
        target = p2p.output_stage(layout, kind, stage) if kind is not RowKind.W else None
        if target is not None:
            self._transfer(NodeType.SEND, kind, micro_batch, target, target)

    def _transfer(
        self, kind: NodeType, row: RowKind, micro_batch: int, into: int, peer: int
    ) -> int | None:
        """Add a transfer of the row that the virtual stage `into` takes; None within a rank."""
        layout, chain = self._plan.layout, self._chain
        peer_rank, _ = stage_position(layout, peer)
        if peer_rank == self._pp_rank:
            return None
        micro_batches = self._plan.estimate.micro_batches
        # Both ends find the same tag, and no other transfer has it.
        tag = (into * micro_batches + micro_batch) * 2 + (row is RowKind.B)
        verb = "send" if kind is NodeType.SEND else "receive"
        attributes: tuple[tuple[str, int], ...] = (("comm_size", _stage_bytes(self._plan)),)
        name = f"{verb} {row}{micro_batch}"
        number = chain.add(name, kind, after=chain.tail, attributes=attributes)
        self._peers[number] = peer_rank, tag
        return number

    def _collect(self, call: _TraceCall) -> None:
        before = len(self._chain.messages)
        self._chain.collect(call)
        for index in range(before, len(self._chain.messages)):
            self._groups[index + 1] = call.group

    def _add_tail(self, calls: Sequence[_TraceCall]) -> None:
        chain = self._chain
        shares = self._plan.estimate.shares
        update_s = sum(share.seconds for share in shares if share.part is TimePart.OPTIMIZER)
        for call in calls:
            # Gradients meet before the update, weights after it.
            if call.op is not Collective.ALL_GATHER:
                self._collect(call)
        chain.compute("optimizer", update_s, joins=True)
        for call in calls:
            if call.op is Collective.ALL_GATHER:
                self._collect(call)

    def render(self, rank: int, ids: dict[tuple[int, ...], int]) -> Iterator[bytes]:
        """Yield the nodes of a rank of the stage, with its own groups and peers."""
        layout = self._plan.layout
        members = {
            name: grid.group_ranks(layout, name, rank) for name in set(self._groups.values())
        }
        names = {
            name: encode_attribute("pg_name", str(ids[tuple(sorted(ranks))]))
            for name, ranks in members.items()
        }
        step = grid.stride(layout, "pp")
        for index, (kind, message) in enumerate(self._chain.messages):
            number = index + 1
            if kind is NodeType.COMPUTE:
                yield message
            elif kind is NodeType.COLLECTIVE:
                yield message + names[self._groups[number]]
            elif number in self._peers:
                peer_rank, tag = self._peers[number]
                yield message + _ends(kind, rank, rank + (peer_rank - self._pp_rank) * step, tag)
            else:
                ring = members[self._groups[number]]
                # A rank sends to the next of the ring and receives from the one before.
                side = 1 if kind is NodeType.SEND else -1
                peer = ring[(ring.index(rank) + side) % len(ring)]
                # A send and the receive behind it have one tag, which both ends number alike.
                tag = number + (kind is NodeType.SEND) + _RING_TAGS
                yield message + _ends(kind, rank, peer, tag)


def _ends(kind: NodeType, rank: int, peer: int, tag: int) -> bytes:
    source, target = (rank, peer) if kind is NodeType.SEND else (peer, rank)
    return b"".join(
        encode_attribute(name, value)
        for name, value in (("comm_src", source), ("comm_dst", target), ("comm_tag", tag))
    )


def _stage_bytes(plan: Plan) -> int:
    """Return the bytes of a transfer between stages, as the ledger counts them."""
    for ledger in plan.estimate.ledgers:
        for row in ledger.comm:
            if row.op is Collective.P2P and row.group == "pp":
                # Stages pass on activations of one size.
                return row.bytes // row.calls
    return 0


def _share_calls(
    plan: Plan, comm: Sequence[CommRow], rows: int
) -> tuple[list[list[_TraceCall]], list[_TraceCall]]:
    """Return the calls of each row of the timetable, and those after the last.

    Rows have equal parts of the calls for micro-batches; what is left over goes to later ones, so
    that calls and bytes add up to the ledger's. State exchanges that the plan hides are spread in
    the same way.
    """
    in_rows: list[list[_TraceCall]] = [[] for _ in range(rows)]
    after_rows: list[_TraceCall] = []
    for row in comm:
        if row.group == "pp" and row.op is Collective.P2P:
            continue  # sends and receives of rows
        part = _MICRO_BATCH_GROUPS.get(row.group, TimePart.DP_COMM)
        hidden = _hidden_share(plan, part)
        is_shared = row.group in _MICRO_BATCH_GROUPS
        # A group over stages meets when all of them have ended their rows.
        is_state = not is_shared and "pp" not in grid.GROUPS[row.group]
        calls_in_rows = row.calls
        if not is_shared:
            calls_in_rows = round(hidden * row.calls) if is_state else 0
        for place in range(row.calls):
            nbytes = _part(row.bytes, row.calls, place)
            # Hidden ones are evenly among the others, as many as the share says.
            is_hidden = is_state or int((place + 1) * hidden) > int(place * hidden)
            call = _TraceCall(op=row.op, group=row.group, nbytes=nbytes, is_hidden=is_hidden)
            if place < calls_in_rows:
                in_rows[place * rows // calls_in_rows].append(call)
            else:
                after_rows.append(
                    _TraceCall(op=row.op, group=row.group, nbytes=nbytes, is_hidden=False)
                )
    return in_rows, after_rows


def _part(total: int, count: int, place: int) -> int:
    return (place + 1) * total // count - place * total // count


def _hidden_share(plan: Plan, part: TimePart) -> float:
    for share in plan.estimate.shares:
        if share.part is part and share.hidden_s:
            return share.hidden_s / (share.seconds + share.hidden_s)
    return 0.0


def astra_files(plan: Plan) -> dict[str, str]:
    """Return ASTRA-sim's descriptions of groups, network, system and memory by file name.

    The network has the plan's two levels as switches. A level has the bandwidth that the plan's
    collectives reach over it, all together, and latency such that the messages of one collective
    over the whole level wait for it once.
    """
    layout, fabric = plan.layout, plan.hardware.fabric
    groups = {str(number): ranks for ranks, number in _number_groups(layout).items()}
    inside = min(layout.world_size, fabric.domain_size)
    sizes = [inside]
    if layout.world_size > inside:
        sizes.append(layout.world_size // inside)
    latencies_s = (fabric.domain_latency_s.value, fabric.network_latency_s.value)
    rates_Bps = _reached_bandwidths(plan)
    network = {
        "topology": ["Switch"] * len(sizes),
        "npus_count": sizes,
        "bandwidth": [Bps / _ASTRA_GB for _, Bps in zip(sizes, rates_Bps, strict=False)],
        # A message passes two links of a switch.
        "latency": [
            latency_s * _NS_PER_S / 2 / max(1, size - 1)
            for size, latency_s in zip(sizes, latencies_s, strict=False)
        ],
    }
    ring = ["ring"] * len(sizes)
    system = {
        "scheduling-policy": "LIFO",
        "endpoint-delay": 1,
        "active-chunks-per-dimension": 1,
        "preferred-dataset-splits": 1,
        "all-reduce-implementation": ring,
        "all-gather-implementation": ring,
        "reduce-scatter-implementation": ring,
        # Messages to peers one after another. Groups smaller than the world have one level, and a
        # ring would pass on what is for others.
        "all-to-all-implementation": ["direct1"],
        "collective-optimization": "localBWAware",
        "local-mem-bw": plan.hardware.device.memory_Bps.value / _NS_PER_S,
        "boost-mode": 0,
        "roofline-enabled": 0,
        "peak-perf": 1,
    }
    return {
        "groups.json": json.dumps(groups),
        "network.yml": "".join(f"{key}: {json.dumps(value)}\n" for key, value in network.items()),
        "system.json": json.dumps(system, indent=1),
        "memory.json": json.dumps({"memory-type": "NO_MEMORY_EXPANSION"}),
    }


def _reached_bandwidths(plan: Plan) -> tuple[float, float]:
    """Return the bytes/s of a rank inside domains and between them, over all calls of a step.

    Where a level has no call it is what long rings reach.
    """
    fabric = plan.hardware.fabric
    constants = DeviceRates(plan.hardware).constants
    collectives = CollectiveModel(plan.hardware, constants)
    sent_bytes, seconds = [0.0, 0.0], [0.0, 0.0]
    latencies_s = (fabric.domain_latency_s.value, fabric.network_latency_s.value)
    for ledger in plan.estimate.ledgers:
        for row in ledger.comm:
            span = collectives.span(plan.layout, row.group)
            call_bytes = row.bytes / row.calls
            level = int(not span.is_inside_domain)
            # The network's file has the latency by itself.
            call_s = collectives.seconds(row.op, span, call_bytes) - latencies_s[level]
            sent_bytes[level] += row.calls * _sent_bytes(row.op, span.size, call_bytes)
            seconds[level] += row.calls * call_s
    defaults = (
        fabric.domain_Bps.value * constants["domain_efficiency"],
        fabric.network_Bps.value * constants["network_efficiency"],
    )
    inside_Bps, between_Bps = (
        sent_bytes[level] / seconds[level] if seconds[level] > 0 else defaults[level]
        for level in (0, 1)
    )
    return inside_Bps, between_Bps


def _sent_bytes(op: Collective, size: int, payload_bytes: float) -> float:
    """Return what a rank sends in a collective by a ring, or to every peer."""
    share = (size - 1) / size
    factors = {Collective.ALL_GATHER: size - 1.0, Collective.ALL_REDUCE: 2 * share}
    if op is Collective.P2P:
        return payload_bytes
    return payload_bytes * factors.get(op, share)
