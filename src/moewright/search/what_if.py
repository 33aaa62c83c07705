"""What would change the best plan: more memory, a faster network, or overlapped expert exchange.

A change that can only help never makes the answer worse: the best plan itself, priced under the
change, is among the candidates, and another layout replaces it only where neither its bound nor its
step is longer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from moewright.cost.estimate import estimate
from moewright.rules.limits.divisibility import divisors
from moewright.rules.shapes.parameters import count_parameters
from moewright.search.candidates import Candidate
from moewright.search.ranking import bound_s, is_safe
from moewright.search.search import SearchResult, search, search_near
from moewright.search.space import Objections, no_objections
from moewright.spec.hardware import Hardware
from moewright.spec.layout import Layout, Overlap
from moewright.spec.model import ModelSpec
from moewright.spec.plan import DEFAULT_RULE, Plan, RankingRule, WhatIf
from moewright.spec.units import format_bytes
from moewright.spec.workload import Workload

# The fewest devices on which a layout of a job fits as probably as asked for.

_LEAST_BYTES = 2  # of a parameter on some device: its weight in 16 bits


def list_device_counts(hardware: Hardware) -> Iterator[int]:
    """Yield equal parts of a node, then whole nodes, up to the hardware's own count, the last."""
    node, most = hardware.fabric.devices_per_node, hardware.count
    yield from (count for count in divisors(node) if count < min(node, most))
    yield from range(node, most, node)
    yield most


def find_fewest(
    model: ModelSpec,
    workload: Workload,
    hardware: Hardware,
    *,
    fixed: str = "",
    allowed: Objections = no_objections,
    rule: RankingRule = DEFAULT_RULE,
) -> Hardware | None:
    """Return the hardware with the fewest devices on which a layout is safe; None where none is.

    Counts are tried from the smallest that can hold the weights, as what fits depends on what the
    count divides. The global batch stays as it is.
    """
    weight_bytes = _LEAST_BYTES * count_parameters(model).total
    capacity_bytes = hardware.device.memory_bytes.value
    for count in list_device_counts(hardware):
        if weight_bytes > count * capacity_bytes:
            continue
        fewer = replace(hardware, count=count)
        result = search(model, workload, fewer, fixed=fixed, top=1, allowed=allowed, rule=rule)
        if result.plans and is_safe(result.plans[0].estimate, rule):
            return fewer
    return None


NETWORK_SPEEDUP = 2.0  # the next generation of a network
_WORTH_SAYING = 0.005  # of the step


@dataclass(frozen=True, kw_only=True, slots=True)
class _Incumbent:
    """The best plan under a change of the machine."""

    layout: Layout
    step_s: float
    bound_s: float


def find_gains(
    result: SearchResult, *, fixed: str = "", allowed: Objections = no_objections
) -> tuple[WhatIf, ...]:
    """Return the best layout under each change that moves the step by more than _WORTH_SAYING.

    `result` is that of a search under `fixed` and `allowed`. What more memory and the overlap of
    expert communication change is read from it; for a faster network the degrees of the best
    candidates are searched again.
    """
    if not result.plans:
        return ()
    best_s = result.plans[0].estimate.step_s
    changes = [*_memory(result), *_network(result, fixed, allowed), *_overlap(result)]
    if fixed:
        changes.append(_unpin(result, allowed))
    return tuple(change for change in changes if abs(change.step_s / best_s - 1) > _WORTH_SAYING)


def _memory(result: SearchResult) -> Iterator[WhatIf]:
    """Yield the best layout with each amount of memory, least first, which no more makes worse.

    What is safe without more is none: it ties with the plan, which is simpler.
    """
    plan = result.plans[0]
    best = _price(plan, plan.hardware, result.rule)
    for extra_bytes, candidates in sorted(result.with_memory, key=lambda pair: pair[0]):
        best = _improve(best, [candidate for candidate in candidates if not candidate.is_safe])
        change = f"{format_bytes(extra_bytes)} more memory a device"
        yield WhatIf(change=change, layout=best.layout, step_s=best.step_s)


def _network(result: SearchResult, fixed: str, allowed: Objections) -> Iterator[WhatIf]:
    plan = result.plans[0]
    faster = speed_up_network(plan.hardware, NETWORK_SPEEDUP)
    # One domain: nothing travels over the network.
    if faster.fabric.domain_size >= faster.count:
        return
    candidates = search_near(result, faster, fixed=fixed, allowed=allowed)
    change = f"a network {NETWORK_SPEEDUP:g} x as fast"
    best = _improve(_price(plan, faster, result.rule), candidates)
    yield WhatIf(change=change, layout=best.layout, step_s=best.step_s)


def speed_up_network(hardware: Hardware, factor: float) -> Hardware:
    """Return the hardware with so many times the bandwidth between domains."""
    Bps = hardware.fabric.network_Bps
    network_Bps = replace(Bps, value=factor * Bps.value)
    return replace(hardware, fabric=replace(hardware.fabric, network_Bps=network_Bps))


def _overlap(result: SearchResult) -> Iterator[WhatIf]:
    """Yield the best candidate whose expert communication is not treated as the best plan's is.

    That is the best with overlap where the plan has none, and the best without where it has.
    """
    candidate = result.other_overlap
    if candidate is not None:
        how = "overlapped" if Overlap.EP in candidate.layout.overlap else "not overlapped"
        change = f"expert communication {how}"
        yield WhatIf(change=change, layout=candidate.layout, step_s=candidate.step_s)


def _unpin(result: SearchResult, allowed: Objections) -> WhatIf:
    """Return the best layout without the pinned keys."""
    plan = result.plans[0]
    nouns = (plan.model, plan.workload, plan.hardware)
    free = search(*nouns, top=1, allowed=allowed, rule=result.rule)
    best = _improve(_price(plan, plan.hardware, result.rule), free.near_best)
    return WhatIf(change="no pinned layout keys", layout=best.layout, step_s=best.step_s)


def _price(plan: Plan, hardware: Hardware, rule: RankingRule) -> _Incumbent:
    """Return what the plan's own layout takes on a hardware."""
    priced = plan
    if hardware != plan.hardware:
        priced = replace(plan, estimate=estimate(plan.model, plan.workload, hardware, plan.layout))
    return _Incumbent(
        layout=plan.layout,
        step_s=priced.estimate.step_s,
        bound_s=bound_s(priced.estimate, rule),
    )


def _improve(incumbent: _Incumbent, candidates: Iterable[Candidate]) -> _Incumbent:
    """Return the best of the candidates that are no worse than the incumbent, else the incumbent.

    No worse means neither a longer bound nor a longer step.
    """
    better = [
        candidate
        for candidate in candidates
        if candidate.bound_s <= incumbent.bound_s and candidate.step_s <= incumbent.step_s
    ]
    best = min(better, key=lambda candidate: candidate.bound_s, default=None)
    if best is None:
        return incumbent
    return _Incumbent(layout=best.layout, step_s=best.step_s, bound_s=best.bound_s)
