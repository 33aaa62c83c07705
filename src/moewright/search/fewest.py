"""The fewest devices on which a layout of a job fits as probably as asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from moewright.rules.limits.divisibility import divisors
from moewright.rules.shapes.parameters import count_parameters
from moewright.search.ranking import is_safe
from moewright.search.search import search
from moewright.search.space import Objections, no_objections
from moewright.spec.hardware import Hardware
from moewright.spec.model import ModelSpec
from moewright.spec.plan import RankingRule
from moewright.spec.workload import Workload

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
    rule: RankingRule | None = None,
) -> Hardware | None:
    """Return the hardware with the fewest devices on which a layout is safe; None where none is.

    Counts are tried from the smallest that can hold the weights, as what fits depends on what the
    count divides. The global batch stays as it is.
    """
    rule = RankingRule() if rule is None else rule
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
