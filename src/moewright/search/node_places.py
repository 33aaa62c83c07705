"""Which of a scheduler's nodes has which ranks: the order that is fastest over levels of switches.

The nodes are those that the fabric's placement lists; what is chosen is which fast domain of the
job gets which of them, and the order of the layout's axes. Small jobs try every order that differs,
so that the answer is exact: nodes below one switch are alike, and so are switches whose nodes are.
Large ones try every nesting of the layout's axes, with blocks of ranks kept below one switch, and
then exchange domains for as long as that helps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, permutations
from math import gcd, prod

import numpy as np

from moewright.cost.estimate import estimate
from moewright.cost.time.collective_time import group_span
from moewright.cost.time.topology import Crossing, find_crossing
from moewright.rules import grid
from moewright.rules.job import Job
from moewright.rules.limits.legality import check_legality
from moewright.spec.errors import BadInput, Reason
from moewright.spec.hardware import Fabric, TopologyLevel
from moewright.spec.layout import Layout, RankOrder
from moewright.spec.plan import Plan
from moewright.spec.record import Record, Row
from moewright.spec.units import format_seconds

_MOST_EXACT = 2000  # orders that differ, of which all are tried
_FEW_DOMAINS = 16  # whose orders are listed
_RANKS_PRICED = 1 << 23  # ranks times orders tried, of a job with more of them
_FEWEST_TRIED, _MOST_TRIED = 24, 400
_FURTHEST_AXES = 5  # whose nestings are all tried
_Places = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class NodePlaces(Record):
    """The fastest order of a plan's nodes: the place of each fast domain, and the layout's order.

    `given_s` is the step as the scheduler gave the nodes. `is_exact` says that no order is faster;
    otherwise `tried` were the most promising.
    """

    places: tuple[int, ...]
    layout: Layout
    step_s: float
    given_s: float
    tried: int
    is_exact: bool

    def title(self) -> str:
        """Return what the order gains over the scheduler's, and how it was found."""
        own_step = f"a step of {format_seconds(self.given_s)} as the scheduler gave the nodes"
        tried = f"{self.tried:,} orders tried"
        if self.is_exact:
            tried = f"no order is faster, {tried}"
        if self.step_s >= self.given_s:
            return f"{own_step}; {tried}"
        gain = f"{1 - self.step_s / self.given_s:.1%} less"
        return (
            f"{own_step}, {format_seconds(self.step_s)} with ranks placed ({gain}) under "
            f"order={self.layout.order}; {tried}"
        )

    def to_rows(self) -> list[Row]:
        """Return a row for each fast domain of the job, in rank order."""
        return [{"domain": domain, "place": place} for domain, place in enumerate(self.places)]


@dataclass(frozen=True, kw_only=True)
class _Pricer:
    """The step of a plan under an order of its nodes.

    Orders that slow every group alike take as long, and are estimated once.
    """

    plan: Plan
    seen: dict[tuple[object, ...], float] = field(default_factory=dict)

    def price(self, layout: Layout, places: _Places) -> tuple[float, float]:
        """Return the seconds of a step, and how much the levels slow all groups together."""
        hardware = self.plan.hardware
        fabric = replace(hardware.fabric, placement=places)
        crossings = tuple(_list_crossings(fabric, layout))
        key = (layout.order, crossings)
        if key not in self.seen:
            self.seen[key] = estimate(
                self.plan.model, self.plan.workload, replace(hardware, fabric=fabric), layout
            ).step_s
        # The second number decides between equal steps: what no step waits for may still gain.
        return self.seen[key], sum(crossing.ring + crossing.exchange for crossing in crossings)


def _list_crossings(fabric: Fabric, layout: Layout) -> Iterator[Crossing]:
    """Yield what the levels add to every group that leaves a fast domain."""
    for group in grid.GROUPS:
        span = group_span(layout, group, fabric.domain_size)
        if group != "world" and not span.is_inside_domain:
            yield find_crossing(fabric, layout, group, span.ranks_per_domain)


def place_nodes(plan: Plan) -> NodePlaces:
    """Choose which node of a plan's has which ranks, by the step over the levels of its fabric.

    Raises:
        BadInput: the fabric has no levels, over which all orders are alike.
    """
    fabric = plan.hardware.fabric
    if not fabric.levels:
        rule = "needs levels of switches, over which nodes differ"
        raise BadInput(
            Reason(field="network", value=fabric.network, rule=rule, nearest="tree:16:4")
        )
    domains = -(-plan.layout.world_size // fabric.domain_size)
    own_places = list_places(fabric, domains)
    layouts = _list_layouts(plan)
    pricer = _Pricer(plan=plan)
    # The scheduler's order first: of equal prices min keeps the earlier.
    best = (pricer.price(plan.layout, own_places), plan.layout, own_places)
    given_s = best[0][0]
    tried = 1
    orders: list[_Places] = []
    if domains <= _FEW_DOMAINS:
        orders = list(islice(_extend((), tuple(sorted(own_places)), fabric), _MOST_EXACT + 1))
    is_exact = 0 < len(orders) <= _MOST_EXACT
    most = len(layouts) * len(orders)
    if not is_exact:
        most = min(_MOST_TRIED, max(_FEWEST_TRIED, _RANKS_PRICED // plan.layout.world_size))
        orders = []
    for layout, places in islice(_list_candidates(fabric, layouts, own_places, orders), most):
        tried += 1
        priced = (pricer.price(layout, places), layout, places)
        best = min(best, priced, key=lambda item: item[0])
    if not is_exact:
        best = _exchange_domains(pricer, best, most - tried)
        tried = max(tried, most)
    (step_s, _), layout, places = best
    return NodePlaces(
        places=places,
        layout=layout,
        step_s=step_s,
        given_s=given_s,
        tried=tried,
        is_exact=is_exact,
    )


def list_places(fabric: Fabric, domains: int) -> _Places:
    """Return the place of each of a job's domains; those not listed follow the last."""
    further = range(
        max(fabric.placement, default=-1) + 1, domains + max((0, *fabric.placement)) + 1
    )
    return (*fabric.placement, *further)[:domains]


def _list_layouts(plan: Plan) -> tuple[Layout, ...]:
    """Return the layout under every order of its axes that is legal, its own first."""
    others = [
        replace(plan.layout, order=order) for order in RankOrder if order is not plan.layout.order
    ]
    return (
        plan.layout,
        *(
            layout
            for layout in others
            if not check_legality(Job(model=plan.model, workload=plan.workload, layout=layout))
        ),
    )


def _list_candidates(
    fabric: Fabric, layouts: Sequence[Layout], own_places: _Places, orders: Sequence[_Places]
) -> Iterator[tuple[Layout, _Places]]:
    """Yield layouts with orders to try: all of `orders`, or where there are none, nestings."""
    for layout in layouts:
        if orders:
            yield from ((layout, places) for places in orders)
        else:
            yield from ((layout, places) for places in _list_nestings(fabric, layout, own_places))


def _extend(used: _Places, free: _Places, fabric: Fabric) -> Iterator[_Places]:
    """Yield every order of places that differs and begins with those used.

    An order is the first domain's place, the second's, and so on.
    """
    if not free:
        yield used
        return
    alike: set[object] = set()
    for place in free:
        kind = _describe_place(place, used, free, fabric)
        if kind not in alike:
            alike.add(kind)
            rest = tuple(other for other in free if other != place)
            yield from _extend((*used, place), rest, fabric)


def _describe_place(place: int, used: _Places, free: _Places, fabric: Fabric) -> object:
    """Return what tells a place from others that are not alike.

    It is the unit of each level, of which those without a used place are told by their shape alone.
    """
    size = fabric.domain_size
    kinds: list[object] = []
    for level in reversed(fabric.levels):
        unit = place * size // level.devices
        if any(other * size // level.devices == unit for other in used):
            kinds.append(unit)
        else:
            members = [other for other in free if other * size // level.devices == unit]
            below = [lower for lower in fabric.levels if lower.devices < level.devices]
            kinds.append(("unused", _describe_unit(members, below, size)))
    return tuple(kinds)


def _describe_unit(members: Sequence[int], below: Sequence[TopologyLevel], size: int) -> object:
    """Return the shape of a unit: how many places it has in each unit below it."""
    if not below:
        return len(members)
    units: dict[int, list[int]] = {}
    for place in members:
        units.setdefault(place * size // below[-1].devices, []).append(place)
    shapes = (_describe_unit(part, below[:-1], size) for part in units.values())
    # By text: shapes are numbers and tuples, which do not compare with each other.
    return tuple(sorted(shapes, key=repr))


def _list_nestings(fabric: Fabric, layout: Layout, own_places: _Places) -> Iterator[_Places]:
    """Yield orders in which one axis of domains after another lies closest together, each once.

    Domains follow each other over the switches' places, or as blocks that stay below one.
    """
    size, domains = fabric.domain_size, len(own_places)
    units = _split_by_unit(sorted(own_places), fabric)
    bounds = _list_bounds(layout, size, domains, Counter(map(len, units)).most_common(1)[0][0])
    sizes = [bounds[i + 1] // bounds[i] for i in range(len(bounds) - 1)]
    index = np.arange(domains)
    digits = [index // bound % count for bound, count in zip(bounds, sizes, strict=False)]
    seen = {own_places}
    for nesting in permutations(range(len(sizes))):
        # np.lexsort takes the slowest axis last.
        order = np.lexsort([digits[axis] for axis in nesting]) if nesting else index
        blocks = [prod(sizes[axis] for axis in nesting[:inner]) for inner in range(len(nesting))]
        for block in blocks or [1]:
            places = _pack(order.tolist(), units, block)
            if places not in seen:
                seen.add(places)
                yield places


def _split_by_unit(places: Sequence[int], fabric: Fabric) -> list[list[int]]:
    """Return the places below each switch of the lowest level."""
    units: dict[int, list[int]] = {}
    for place in places:
        units.setdefault(place * fabric.domain_size // fabric.levels[0].devices, []).append(place)
    return list(units.values())


def _list_bounds(layout: Layout, size: int, domains: int, unit: int) -> list[int]:
    """Return the strides of the axes between domains, in domains, each a multiple of the last.

    Axes that are longer than what lies below a switch are split there.
    """
    axes = (*grid.DENSE_AXES, *grid.EXPERT_AXES)
    strides = {grid.stride(layout, axis) for axis in axes}
    starts = sorted({stride // size for stride in strides if stride % size == 0} - {0, 1})
    bounds = [1]
    for bound in (*starts, domains):
        part = bounds[-1] * gcd(bound // bounds[-1], unit)
        if bound % bounds[-1] or bound == bounds[-1]:
            continue
        if bounds[-1] < part < bound and bound % part == 0 and len(bounds) < _FURTHEST_AXES:
            bounds.append(part)
        bounds.append(bound)
    return bounds


def _pack(order: Sequence[int], units: Sequence[Sequence[int]], block: int) -> _Places:
    """Return the place of each domain: whole blocks of `order` below a switch, then the rest."""
    places, next_domain = [0] * len(order), 0
    left: list[int] = []
    for unit in units:
        whole = len(unit) // block * block
        for place in unit[:whole]:
            places[order[next_domain]] = place
            next_domain += 1
        left += unit[whole:]
    for place, domain in zip(left, order[next_domain:], strict=True):
        places[domain] = place
    return tuple(places)


_Priced = tuple[tuple[float, float], Layout, _Places]


def _exchange_domains(pricer: _Pricer, best: _Priced, tries: int) -> _Priced:
    """Exchange two domains below different switches, drawn at random, where the step gains."""
    fabric = pricer.plan.hardware.fabric
    # One seed: the same plan has the same places each time.
    draws = np.random.default_rng(0)
    for _ in range(max(0, tries)):
        _, layout, places = best
        first, second = draws.integers(len(places), size=2).tolist()
        units = [
            places[domain] * fabric.domain_size // fabric.levels[0].devices
            for domain in (first, second)
        ]
        if units[0] == units[1]:
            continue
        changed = list(places)
        changed[first], changed[second] = places[second], places[first]
        priced = (pricer.price(layout, tuple(changed)), layout, tuple(changed))
        best = min(best, priced, key=lambda item: item[0])
    return best
