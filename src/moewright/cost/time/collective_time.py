"""Seconds of collectives: a measured curve, else bytes over the fast domain and the network.

The network between domains carries what all ports send, unless the fabric has levels of switches
(cost.time.topology).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, log2, prod

from moewright.cost.constants import Constants
from moewright.cost.time.op_time import interpolate
from moewright.cost.time.topology import NO_CROSSING, Crossing, find_crossing
from moewright.rules import grid
from moewright.rules.routing import expected_places, message_path, message_tokens
from moewright.spec.choices import Payload
from moewright.spec.hardware import Collective, Curve, Hardware, MessagePath, NetworkKind
from moewright.spec.layout import Layout, Overlap
from moewright.spec.model import RouterSpec

# Groups that the degrees of a layout decide.
_DEGREE_GROUPS = frozenset({"tp", "cp", "pp", "dp_cp", "etp", "ep", "edp"})


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSpan:
    """How a process group lies on the fabric: its ranks, and how many share a fast domain.

    `crossing` is what the levels of the network add between domains.
    """

    size: int
    ranks_per_domain: int
    domains: int
    crossing: Crossing = NO_CROSSING

    @property
    def is_inside_domain(self) -> bool:
        """Whether all ranks lie in one fast domain."""
        return self.domains == 1


def group_span(layout: Layout, group: str, domain_size: int) -> GroupSpan:
    """Return how a group of a layout lies on fast domains of so many ranks.

    Ranks of neighbouring axes follow each other with the stride of the first, so a domain holds
    domain_size / stride of them; where other axes lie between two axes, each counts by itself.
    """
    axes = grid.GROUPS[group]
    size = prod(grid.axis_size(layout, axis) for axis in axes)
    ranks_per_domain = 1
    for stride, ranks in _runs(layout, axes):
        # A stride beyond the domain leaves one rank of the group in it.
        inside = max(1, min(ranks, domain_size // stride))
        ranks_per_domain *= inside
        # The run leaves the domain, so the slower ones behind it have one place there.
        if inside < ranks:
            break
    return GroupSpan(
        size=size, ranks_per_domain=ranks_per_domain, domains=-(-size // ranks_per_domain)
    )


def _runs(layout: Layout, axes: Sequence[str]) -> list[tuple[int, int]]:
    """Return stride and size of each run of axes that no other axis of the grid lies between."""
    runs: list[tuple[int, int]] = []
    for axis in axes:
        step = grid.stride(layout, axis)
        ranks = grid.axis_size(layout, axis)
        if runs and step == runs[-1][0] * runs[-1][1]:
            step, before = runs.pop()
            ranks *= before
        runs.append((step, ranks))
    return runs


@dataclass(frozen=True, kw_only=True, slots=True)
class _ProxyCost:
    """Seconds a copy of a token and a wait for counts; the network's share that messages get."""

    token_s: float
    wait_s: float
    rail_share: float


class CollectiveModel:
    """The times of collectives on one hardware.

    A payload is the bytes that one rank hands in, its own part included.
    """

    __slots__ = ("_curves", "_domain_Bps", "_fabric", "_network_Bps", "_spans", "constants")

    def __init__(self, hardware: Hardware, constants: Constants) -> None:
        self._fabric = hardware.fabric
        self._curves = {(time.op, time.group_size): time.curve for time in hardware.fabric.times}
        self._spans: dict[tuple[str | int, ...], GroupSpan] = {}
        self.constants = constants
        self._domain_Bps = hardware.fabric.domain_Bps.value * constants["domain_efficiency"]
        self._network_Bps = hardware.fabric.network_Bps.value * constants["network_efficiency"]

    def span(self, layout: Layout, group: str) -> GroupSpan:
        """Return how a group of a layout lies on this hardware."""
        if group not in _DEGREE_GROUPS:
            return self._find_span(layout, group)
        degrees = layout.tp, layout.cp, layout.pp, layout.ep, layout.etp, layout.order
        key = group, layout.world_size, *degrees
        if key not in self._spans:
            self._spans[key] = self._find_span(layout, group)
        return self._spans[key]

    def _find_span(self, layout: Layout, group: str) -> GroupSpan:
        span = group_span(layout, group, self._fabric.domain_size)
        if span.is_inside_domain:
            return span
        crossing = find_crossing(self._fabric, layout, group, span.ranks_per_domain)
        return replace(span, crossing=crossing)

    def seconds(
        self, op: Collective, span: GroupSpan, payload_bytes: float, *, efficiency: float = 1.0
    ) -> float:
        """Return the time of one call.

        In a ring collective (n-1)/n of the full buffer passes each rank. The network carries only
        the part that leaves a domain, shared by the ports of the domain's ranks. The slower of the
        two levels decides. An all-to-all uses both levels in turn. Beside that a message passes
        every domain in turn, or for an all-reduce of many domains up and down a tree. `efficiency`
        scales the bandwidth of the formula, not a measured curve.
        """
        if span.size == 1 or payload_bytes == 0:
            return 0.0
        curve = self._curves.get((op, span.size))
        if curve is not None:
            return _measured_s(curve, payload_bytes)
        if op is Collective.ALL_TO_ALL:
            return self._all_to_all_s(span, payload_bytes) / efficiency
        latency_s = self._latency_s(span)
        if op is Collective.P2P:
            # A ring is as slow as its slowest hop.
            moving_s = span.crossing.ring * payload_bytes / self._bandwidth(span)
            return moving_s + span.crossing.latency_s + latency_s
        buffer_bytes = payload_bytes
        if op is Collective.ALL_GATHER:
            # An all-gather hands in one part; the others hand in the full buffer.
            buffer_bytes = payload_bytes * span.size
        inside_s = 0.0
        if span.ranks_per_domain > 1:
            inside_s = buffer_bytes * (span.size - 1) / span.size / self._rate_inside(span)
        ports_Bps = span.ranks_per_domain * self._network_Bps / span.crossing.ring
        between_s = buffer_bytes * (span.domains - 1) / span.domains / ports_Bps
        rounds = 1.0
        hops = span.domains - 1
        if op is Collective.ALL_REDUCE:
            rounds = 2.0
            # NCCL takes a tree where a ring would be longer.
            hops = min(hops, ceil(log2(span.domains)))
        latency_s += hops * self.constants["network_hop_s"] + span.crossing.ring_latency_s
        return rounds * (max(inside_s, between_s) / efficiency + latency_s)

    def _latency_s(self, span: GroupSpan) -> float:
        fabric = self._fabric
        latency = fabric.domain_latency_s if span.is_inside_domain else fabric.network_latency_s
        return latency.value

    def _bandwidth(self, span: GroupSpan) -> float:
        if span.is_inside_domain:
            return self._domain_Bps * self._fabric.link_share(1)
        return self._network_Bps

    def _rate_inside(self, span: GroupSpan) -> float:
        """Return the bandwidth of a device to the ranks of a group in its domain."""
        return self._domain_Bps * self._fabric.link_share(span.ranks_per_domain - 1)

    def neighbour_share(self, span: GroupSpan) -> float:
        """Return the share of a device's bandwidth inside a group that it has to one neighbour."""
        peers = span.ranks_per_domain - 1
        return self._fabric.link_share(1) / self._fabric.link_share(peers) if peers else 1.0

    def _all_to_all_s(self, span: GroupSpan, payload_bytes: float) -> float:
        c = self.constants
        domain_bytes = payload_bytes / span.domains
        local = span.ranks_per_domain
        inside_s = 0.0
        if local > 1:
            inside_s = domain_bytes * (local - 1) / local / self._rate_inside(span)
        network_Bps = self._network_Bps
        if self._fabric.network == NetworkKind.EFA:
            network_Bps *= c["efa_alltoall_share"]
        between_s = payload_bytes * (1 - 1 / span.domains) / network_Bps
        between_s *= span.crossing.exchange
        moving_s = c["alltoall_inside_time_scale"] * inside_s
        moving_s += c["alltoall_between_time_scale"] * between_s
        moving_s += c["alltoall_peer_s"] * (span.size - local)
        return moving_s + span.crossing.latency_s + self._latency_s(span)

    def dispatch_s(
        self, layout: Layout, *, tokens: int, router: RouterSpec, row_bytes: int, load: float
    ) -> float:
        """Return the time of one dispatch or combine of `tokens` tokens.

        A plain all-to-all sends every row. De-duplicating dispatchers send one copy to each domain
        that a token visits, and fan it out to the distinct ranks there; nodes that the layout names
        count for domains. A library takes some time a call and node besides, and where a CPU thread
        posts its messages, which hold a few tokens each, at least the time of those.
        """
        span = self.span(layout, "ep")
        if span.size == 1:
            return 0.0
        facts = layout.dispatcher.facts
        if facts.payload is Payload.TOKENS:
            return self.seconds(Collective.ALL_GATHER, span, tokens * row_bytes)
        if facts.payload is Payload.ROWS:
            return self.seconds(
                Collective.ALL_TO_ALL, span, load * tokens * router.top_k * row_bytes
            )
        c = self.constants
        nodes = span.size // layout.ep_node if layout.ep_node else span.domains
        node_copies = tokens * expected_places(router, nodes)
        sent_copies = node_copies * (1 - 1 / nodes)
        between_s = sent_copies * row_bytes / self._bandwidth(span)
        between_s *= span.crossing.exchange
        call_s = 0.0
        if facts.is_library:
            call_s = c["library_call_s"] * nodes
        path = message_path(self._fabric, layout.dispatcher, domains=span.domains)
        if path is MessagePath.PROXY:
            proxy = self._proxy_cost(span)
            between_s = max(between_s / proxy.rail_share, sent_copies * proxy.token_s)
        rank_copies = tokens * expected_places(router, span.size)
        inside_s = 0.0
        if span.ranks_per_domain > 1:
            fan_out_Bps = self._fabric.domain_Bps.value * c["dedup_domain_efficiency"]
            fan_out_Bps *= self._fabric.link_share(span.ranks_per_domain - 1)
            inside_s = rank_copies * row_bytes / fan_out_Bps
        moving_s = c["dedup_inside_time_scale"] * inside_s
        moving_s += c["dedup_between_time_scale"] * between_s
        return load * moving_s + call_s + span.crossing.latency_s + self._latency_s(span)

    def dispatch_waits_s(self, layout: Layout) -> tuple[float, float]:
        """Return how long the host waits in a dispatch and combine, forward and backward.

        A plain all-to-all waits for the split sizes of a forward, which its backward knows, DeepEP
        for the counts of its peers. What is lost is that the host has launched nothing ahead, so it
        takes as long as launches do, longer in older software, and the kernels of another
        micro-batch beside it hide a share. Counts that a CPU thread sends come later; where the
        number of rows is fixed there are none.
        """
        c = self.constants
        if layout.ep == 1:
            return 0.0, 0.0
        facts = layout.dispatcher.facts
        if not facts.is_library:
            if layout.has_fixed_rows:
                return c["sync_s_fused"], c["sync_s_fused"]
            return self._lost_launches_s(layout, c["sync_s_alltoall"]), 0.0
        span = self.span(layout, "ep")
        path = message_path(self._fabric, layout.dispatcher, domains=span.domains)
        own_s = c["sync_s_fused"]
        if path is MessagePath.PROXY:
            own_s += self._proxy_cost(span).wait_s
        if not facts.waits_for_counts or layout.has_fixed_rows:
            return own_s, own_s
        return own_s + self._lost_launches_s(layout, c["sync_s_deepep"]), own_s

    def _lost_launches_s(self, layout: Layout, seconds: float) -> float:
        """Return what a wait of the host costs that takes `seconds` in software of today."""
        c = self.constants
        hidden = 0.0
        if Overlap.EP in layout.overlap:
            hidden = c["ep_overlap_hidden"]
        age = float(c["host_per_year"] ** c["stack_age_years"])
        return seconds * age * (1 - hidden)

    def _proxy_cost(self, span: GroupSpan) -> _ProxyCost:
        """Return what a CPU thread that posts the messages of a library adds.

        DeepEP over NVSHMEM waits for each message to arrive before it signals it, over one rail; a
        library that posts each token by itself (UCCL) does not wait and uses every rail.
        """
        c = self.constants
        # A constant, as the hardware says which library its hosts have.
        if c["proxy_posts_tokens"]:
            return _ProxyCost(
                token_s=c["proxy_token_s"], wait_s=c["proxy_token_wait_s"], rail_share=1.0
            )
        return _ProxyCost(
            token_s=c["proxy_message_s"] / message_tokens(span.size),
            wait_s=c["proxy_wait_s"],
            rail_share=c["proxy_rail_share"],
        )


def _measured_s(curve: Curve, payload_bytes: float) -> float:
    """Return a measured time, which beyond the largest payload grows with the bytes."""
    largest_bytes, seconds = curve.points[-1]
    if payload_bytes > largest_bytes:
        return seconds * payload_bytes / largest_bytes
    return interpolate(curve, payload_bytes)
