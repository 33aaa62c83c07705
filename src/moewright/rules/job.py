"""A job: a model, a workload and a layout, with the quantities that follow from all three.

Symbols as in docs/formulas.md: m micro-batches of a step, T tokens of a micro-batch on a TP group,
t tokens of it that a rank routes, R rows through the experts of a rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import ceil

from moewright.rules.grid import min_world_size
from moewright.rules.limits.divisibility import divisors, nearest_legal, nearest_multiples
from moewright.rules.timetable import stages
from moewright.rules.timetable.stages import Chunk
from moewright.spec.errors import BadInput, Reason
from moewright.spec.layout import CapacityFill, Layout
from moewright.spec.model import ModelSpec
from moewright.spec.plan import Plan
from moewright.spec.workload import Workload

# How many token rows reach the experts of a rank, and how a capacity bounds them.


def capacity_rows(tokens: int, top_k: int, experts: int, factor: float) -> int:
    """Return the rows that an expert takes from one source rank (docs/formulas.md 4).

    That is ceil(tokens * top_k / experts * factor), at most `tokens`; a `factor` of 0 is dropless
    and gives `tokens`. The result is exact: a factor like 0.1 is read as its shortest decimal.
    """
    if factor <= 0:
        return tokens
    # Fractions: a float product may lie just above a whole number, and ceil would add a row.
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
    # `load` is over what even loads keep under the capacity (skewed_load_factor).
    return min(round(load * min(even, most)), most)


# How a global batch splits into micro-batches, and how many tokens of one a rank sees.


def micro_batches(workload: Workload, layout: Layout) -> int:
    """Return the micro-batches of a step, GBS / (mbs * dp).

    Raises:
        BadInput: The global batch is not a whole number of micro-batches.
    """
    reasons = tuple(check_batch(workload, layout))
    if reasons:
        raise BadInput(*reasons)
    return workload.global_batch // (layout.mbs * layout.dp)


def check_batch(workload: Workload, layout: Layout) -> Iterator[Reason]:
    """Yield why the global batch does not split into whole micro-batches, GBS = mbs * dp * m."""
    batch = workload.global_batch
    dp = layout.dp
    mbs = layout.mbs
    if dp < 1:
        dense_ranks = layout.tp * layout.cp * layout.pp
        least = min_world_size(layout)
        yield Reason(
            field="layout.world_size",
            value=str(layout.world_size),
            rule=f"world_size={layout.world_size} is less than tp * cp * pp = {dense_ranks}",
            nearest=str(least),
        )
        return
    if batch % (mbs * dp) == 0:
        return
    rule = f"mbs * dp = {mbs} * {dp} must divide global_batch={batch}"
    batches = nearest_multiples(batch, mbs * dp)
    if batch % dp == 0:
        sizes = nearest_legal(mbs, divisors(batch // dp))
        near = f"{sizes}, or global_batch {batches}"
        yield Reason(field="layout.mbs", value=str(mbs), rule=rule, nearest=near)
    else:
        yield Reason(field="workload.global_batch", value=str(batch), rule=rule, nearest=batches)


def tp_group_tokens(workload: Workload, layout: Layout) -> int:
    """Return the tokens of one micro-batch on a TP group (T): its CP part of every sequence."""
    return workload.seq_len * layout.mbs // layout.cp


def micro_batch_tokens(workload: Workload, layout: Layout) -> int:
    """Return the tokens of one micro-batch that a rank routes (t).

    These are the TP group's tokens, or the rank's part of them under sequence parallelism.
    """
    tokens = tp_group_tokens(workload, layout)
    return tokens // layout.sp_degree


@dataclass(frozen=True, kw_only=True)  # without slots, which would leave no place for cached values
class Job:
    """A model, a workload and a layout that belong together.

    Derived quantities are computed once, when they are first read. The record itself is not
    checked: rules.limits.legality says whether the layout is legal, and a quantity that an illegal
    layout does not have raises BadInput. `dataclasses.replace(job, layout=...)` gives the job in
    another layout.
    """

    model: ModelSpec
    workload: Workload
    layout: Layout

    @cached_property
    def micro_batches(self) -> int:
        """The micro-batches of a step (m), on each data-parallel rank."""
        return micro_batches(self.workload, self.layout)

    @cached_property
    def tp_group_tokens(self) -> int:
        """The tokens of one micro-batch on a TP group (T)."""
        return tp_group_tokens(self.workload, self.layout)

    @cached_property
    def micro_batch_tokens(self) -> int:
        """The tokens of one micro-batch that a rank routes (t)."""
        return micro_batch_tokens(self.workload, self.layout)

    @cached_property
    def local_experts(self) -> int:
        """The experts of one EP rank, without replicas; 0 for a dense model."""
        return self.model.expert_count // self.layout.ep

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """The model chunks of the pipeline in model order, pp * vpp of them."""
        return stages.pipeline_chunks(self.model, self.layout)

    def rank_chunks(self, pp_rank: int) -> tuple[Chunk, ...]:
        """Return the model chunks of one pipeline rank, in model order."""
        return tuple(chunk for chunk in self.chunks if chunk.pp_rank == pp_rank)

    def routed_rows(self, load: float = 1.0) -> int:
        """Return the rows through the experts of a rank per MoE layer and micro-batch (R).

        `load` is the load of the rank over the mean.
        """
        return routed_rows(self.model, self.workload, self.layout, load)


def plan_job(plan: Plan) -> Job:
    """Return the job of a plan."""
    return Job(model=plan.model, workload=plan.workload, layout=plan.layout)


# A rank may die while a copy is taken: the one before it is kept meanwhile.
GENERATIONS = 2
# Each generation is a copy of the rank's own state, and one of another rank's.
COPIES = 2 * GENERATIONS
