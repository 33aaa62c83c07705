"""Which tensors have delayed FP8 scales, and what a rank keeps and reduces for them.

A linear layer has three scales: of its input, its weight and the gradient of its output; of routed
experts each expert has three. Weights that one product makes together (queries, keys and values;
what goes into a recurrence) are one linear, as they are one tensor in Megatron-LM, by the name of
the first. Scales are those of Transformer Engine's DelayedScaling, but that the history moves on
once a step, when all micro-batches and all ranks of the pipeline stage have contributed to its
amaxes: a step's scales then depend on the batches before it alone, and not on the layout.

A rank keeps histories and scales of the experts in its slots, its own and replicas, and the amaxes
of all experts of its layers, as these are reduced over the stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from moewright.rules.expert_placement import count_slots, rank_experts, slot_experts
from moewright.rules.job import Job
from moewright.rules.shapes.param import Param, name_in_layer
from moewright.rules.shapes.shards import stage_parameters
from moewright.spec.ledger import Component, MemoryRow, Module
from moewright.spec.units import FP32_BYTES
from moewright.spec.workload import Dtype, TensorScaling, Workload

SCALES_OF_LINEAR = 3  # of rules.low_precision.OperandKind, in its order
# The weights of all linear layers with products of 8 or 4 bits, by the first of each.
FIRST_WEIGHTS = frozenset(
    {
        "attention.q",
        "attention.q_down",
        "attention.q_up",
        "attention.kv",
        "attention.kv_down",
        "attention.kv_up",
        "attention.qkvz",
        "attention.zxbcdt",
        "attention.o",
        "attention.indexer.q",
        "attention.indexer.k",
        "attention.indexer.heads",
        "mlp.gate_up",
        "mlp.up",
        "mlp.down",
        "moe.latent.down",
        "moe.latent.up",
        "moe.experts.gate_up",
        "moe.experts.up",
        "moe.experts.down",
        "moe.shared.gate_up",
        "moe.shared.up",
        "moe.shared.down",
        "proj",  # of an MTP depth
        "embed_proj",
        "hidden_proj",
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaledLinear:
    """A linear layer with scales: the name of its first weight, and how many experts it has.

    `owned` are the experts that a rank owns, `replicated` those of its replicas, both in the order
    of its slots. A linear that is not of routed experts counts as one expert, number 0.
    """

    name: str
    module: Module
    experts: int
    owned: tuple[int, ...]
    replicated: tuple[int, ...] = ()

    @property
    def slot_experts(self) -> tuple[int, ...]:
        """The experts in the rank's slots."""
        return self.owned + self.replicated


def is_delayed(workload: Workload) -> bool:
    """Return whether FP8 takes its scales from earlier steps."""
    return workload.precision is Dtype.FP8 and workload.tensor_scaling is TensorScaling.DELAYED


def scaled_linears(job: Job, pp_rank: int, ep_rank: int) -> tuple[ScaledLinear, ...]:
    """Return the linears with scales of a pipeline stage, in the order of their parameters."""
    return tuple(_build_linear(job, param, ep_rank) for param in _scaled_params(job, pp_rank))


def _scaled_params(job: Job, pp_rank: int) -> Iterator[Param]:
    """Yield the first weight of each linear with scales of a pipeline stage."""
    for param in stage_parameters(job.model, job.layout, pp_rank):
        if name_in_layer(param.name) in FIRST_WEIGHTS:
            yield param


def _build_linear(job: Job, param: Param, ep_rank: int) -> ScaledLinear:
    if not param.is_expert:
        return ScaledLinear(name=param.name, module=param.module, experts=1, owned=(0,))
    slots = tuple(rank_experts(slot_experts(job, param.layer), job.layout.ep, ep_rank))
    return ScaledLinear(
        name=param.name,
        module=param.module,
        experts=_count_experts(param),
        owned=slots[: job.local_experts],
        replicated=slots[job.local_experts :],
    )


def _count_experts(param: Param) -> int:
    return param.shape[0] if param.is_expert else 1


def amax_reduction_bytes(job: Job, pp_rank: int) -> int:
    """Return the bytes of the amaxes that the ranks of a stage reduce once a step; 0 for none."""
    if not is_delayed(job.workload):
        return 0
    experts = sum(map(_count_experts, _scaled_params(job, pp_rank)))
    return FP32_BYTES * SCALES_OF_LINEAR * experts


def delayed_scaling_rows(job: Job, pp_rank: int) -> tuple[MemoryRow, ...]:
    """Return the bytes of histories, scales and amaxes on every rank of a pipeline stage."""
    if not is_delayed(job.workload):
        return ()
    numbers = job.workload.delayed.amax_history_len + 1  # and the scale
    return tuple(
        MemoryRow(
            component=Component.BUFFERS,
            module=param.module,
            bytes=FP32_BYTES
            * SCALES_OF_LINEAR
            * (_count_slots(job, param) * numbers + _count_experts(param)),
        )
        for param in _scaled_params(job, pp_rank)
    )


def _count_slots(job: Job, param: Param) -> int:
    return count_slots(job, param.layer) // job.layout.ep if param.is_expert else 1
