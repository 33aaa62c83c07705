"""How many token rows reach the experts of a rank, and how a capacity bounds them."""

from __future__ import annotations

from fractions import Fraction
from math import ceil

from moewright.rules.micro_batches import micro_batch_tokens
from moewright.spec.layout import CapacityFill, Layout
from moewright.spec.model import ModelSpec
from moewright.spec.workload import Workload


def capacity_rows(tokens: int, top_k: int, experts: int, factor: float) -> int:
    """Return the rows that an expert takes from one source rank (docs/formulas.md 4).

    That is ceil(tokens * top_k / experts * factor), at most `tokens`; a `factor` of 0 is dropless
    and gives `tokens`. The result is exact: a factor like 0.1 is read as its shortest decimal.
    """
    if factor <= 0:
        return tokens
    return min(tokens, ceil(Fraction(tokens * top_k, experts) * Fraction(str(factor))))


def rows_for_peer(tokens: int, top_k: int, layout: Layout) -> int:
    """Return the rows that a rank sends to each rank of its expert group under a rank_capacity.

    That is ceil(tokens * top_k / ep * rank_capacity), at most all rows of the rank.
    """
    even = Fraction(tokens * top_k, layout.ep)
    return min(tokens * top_k, ceil(even * Fraction(str(layout.rank_capacity))))


def routed_rows(model: ModelSpec, workload: Workload, layout: Layout, load: float) -> int:
    """Return the rows that the experts of one rank compute per MoE layer and micro-batch.

    `load` is the load of the rank over the mean. Under an even load tokens * top_k rows leave every
    rank and as many arrive, and ETP ranks share the rows of their group. A capacity bounds the rows
    by what each source may send; rows padded to the capacity are always as many as this bound, and
    those padded to a rank_capacity as many as that says.
    """
    if model.moe is None:
        return 0
    tokens = micro_batch_tokens(workload, layout)
    top_k = model.moe.router.top_k
    even = tokens * top_k * layout.etp
    if layout.rank_capacity > 0:
        return rows_for_peer(tokens, top_k, layout) * layout.ep * layout.etp
    if layout.capacity <= 0:
        return round(load * even)
    experts = model.moe.experts
    source_ranks = layout.ep * layout.etp
    rows_per_expert = capacity_rows(tokens, top_k, experts, layout.capacity) * source_ranks
    most = rows_per_expert * (experts // layout.ep)
    if layout.capacity_fill is CapacityFill.PADDED:
        return most
    return min(round(load * min(even, most)), most)
