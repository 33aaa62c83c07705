"""A job: a model, a workload and a layout, with the quantities that follow from all three.

Symbols as in docs/formulas.md: m micro-batches of a step, T tokens of a micro-batch on a TP group,
t tokens of it that a rank routes, R rows through the experts of a rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from moewright.rules import capacity, micro_batches
from moewright.rules.timetable import stages
from moewright.rules.timetable.stages import Chunk
from moewright.spec.layout import Layout
from moewright.spec.model import ModelSpec
from moewright.spec.plan import Plan
from moewright.spec.workload import Workload


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
        return micro_batches.micro_batches(self.workload, self.layout)

    @cached_property
    def tp_group_tokens(self) -> int:
        """The tokens of one micro-batch on a TP group (T)."""
        return micro_batches.tp_group_tokens(self.workload, self.layout)

    @cached_property
    def micro_batch_tokens(self) -> int:
        """The tokens of one micro-batch that a rank routes (t)."""
        return micro_batches.micro_batch_tokens(self.workload, self.layout)

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
        return capacity.routed_rows(self.model, self.workload, self.layout, load)


def plan_job(plan: Plan) -> Job:
    """Return the job of a plan."""
    return Job(model=plan.model, workload=plan.workload, layout=plan.layout)
