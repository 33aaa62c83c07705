"""Seconds of collectives: a measured curve where the hardware file has one, else bytes over a
two-level fabric."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from moewright.cost.constants import Constants
from moewright.cost.op_time import interpolate
from moewright.rules import grid, routing
from moewright.spec.hardware import Collective, Curve, Hardware
from moewright.spec.layout import DispatcherKind, Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSpan:
    """How a group lies on the fabric: `size` ranks, `inside` of them in each of `domains` fast
    domains."""

    size: int
    ranks_per_domain: int
    domains: int


def group_span(layout: Layout, group: str, domain_size: int) -> GroupSpan:
    """A group's ranks are a run with the stride of its first axis, so a domain holds domain_size /
    stride of them."""
    axes = grid.GROUPS[group]
    stride = grid.stride(layout, axes[0])
    size = prod(grid.axis_size(layout, axis) for axis in axes)
    inside = max(1, min(size, domain_size // stride))
    return GroupSpan(size=size, ranks_per_domain=inside, domains=-(-size // inside))


class CollectiveModel:
    """Collectives on one hardware. Payloads are the bytes one rank hands in, its own part
    included."""

    __slots__ = ("_curves", "_domain_Bps", "_fabric", "_network_Bps", "constants")

    def __init__(self, hardware: Hardware, constants: Constants) -> None:
        self._fabric = hardware.fabric
        self._curves = {(t.op, t.group_size): t.curve for t in hardware.fabric.times}
        self.constants = constants
        self._domain_Bps = hardware.fabric.domain_Bps.value * constants["domain_efficiency"]
        self._network_Bps = hardware.fabric.network_Bps.value * constants["network_efficiency"]

    def span(self, layout: Layout, group: str) -> GroupSpan:
        return group_span(layout, group, self._fabric.domain_size)

    def measured_curve(self, op: Collective, size: int) -> Curve | None:
        return self._curves.get((op, size))

    def seconds(
        self, op: Collective, where: GroupSpan, payload_bytes: float, *, efficiency: float = 1.0
    ) -> float:
        """One call. Ring collectives move (n-1)/n of the whole buffer past each rank, and past each
        network port only what leaves a domain, shared by the ports of its ranks; the slower level
        counts. An all-to-all uses both levels in turn. `efficiency` scales the bandwidth of the
        formula, not a measured curve.
        """
        if where.size == 1 or payload_bytes == 0:
            return 0.0
        curve = self._curves.get((op, where.size))
        if curve is not None:
            return _along(curve, payload_bytes)
        if op is Collective.ALL_TO_ALL:
            return self._exchange(where, payload_bytes) / efficiency
        whole = payload_bytes * where.size if op is Collective.ALL_GATHER else payload_bytes
        rounds = 2.0 if op is Collective.ALL_REDUCE else 1.0
        if op is Collective.P2P:
            near = where.domains == 1  # a ring is as slow as its slowest hop
            return whole / (self._domain_Bps if near else self._network_Bps) + self._latency(near)
        inside = (
            whole * (where.size - 1) / where.size / self._domain_Bps
            if where.ranks_per_domain > 1
            else 0.0
        )
        between = (
            whole
            * (where.domains - 1)
            / where.domains
            / (where.ranks_per_domain * self._network_Bps)
        )
        return rounds * (max(inside, between) / efficiency + self._latency(where.domains == 1))

    def _latency(self, near: bool) -> float:
        return self._fabric.domain_latency_s.value if near else self._fabric.network_latency_s.value

    def _exchange(self, where: GroupSpan, payload_bytes: float) -> float:
        c = self.constants
        inside = (
            payload_bytes
            / where.domains
            * (where.ranks_per_domain - 1)
            / where.ranks_per_domain
            / self._domain_Bps
        )
        between = payload_bytes * (1 - 1 / where.domains) / self._network_Bps
        moving = (
            c["alltoall_inside_time_scale"] * inside + c["alltoall_between_time_scale"] * between
        )
        return moving + self._latency(where.domains == 1)

    def dispatch_s(
        self, layout: Layout, *, tokens: int, top_k: int, row_bytes: int, load: float
    ) -> float:
        """One direction of expert parallelism (dispatch or combine) of `tokens` tokens with `top_k`
        rows each.

        A plain all-to-all sends every row. De-duplicating dispatchers send one copy to each domain
        that a token visits, and fan it out to the distinct ranks there; nodes that the layout names
        count for domains.
        """
        where = self.span(layout, "ep")
        if where.size == 1:
            return 0.0
        if layout.dispatcher is DispatcherKind.ALL_GATHER:
            return self.seconds(Collective.ALL_GATHER, where, tokens * row_bytes)
        if layout.dispatcher is DispatcherKind.ALL_TO_ALL:
            return self.seconds(Collective.ALL_TO_ALL, where, load * tokens * top_k * row_bytes)
        n, near = (
            where.size // layout.ep_node if layout.ep_node else where.domains,
            where.domains == 1,
        )
        leaving = tokens * routing.expected_distinct(n, top_k) * (1 - 1 / n) * row_bytes
        between = leaving / (self._domain_Bps if near else self._network_Bps)
        fan_out = tokens * routing.expected_distinct(where.size, top_k) * row_bytes
        inside = fan_out / (
            self._fabric.domain_Bps.value * self.constants["dedup_domain_efficiency"]
        )
        c = self.constants
        moving = c["dedup_inside_time_scale"] * inside + c["dedup_between_time_scale"] * between
        return load * moving + self._latency(near)


def _along(curve: Curve, payload_bytes: float) -> float:
    """A measured time; beyond the largest payload it grows with the bytes instead of staying
    flat."""
    largest, seconds = curve.points[-1]
    return (
        seconds * payload_bytes / largest
        if payload_bytes > largest
        else interpolate(curve, payload_bytes)
    )
