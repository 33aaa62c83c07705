"""Which tensors have delayed FP8 scales, and what a rank keeps and reduces for them.

A linear layer has three scales: of its input, its weight and the gradient of its output; of routed
experts each expert has three. Weights that one product makes together (queries, keys and values;
what goes into a recurrence) are one linear, as they are one tensor in Megatron-LM, by the name of
the first. Scales are those of Transformer Engine's DelayedScaling, but that the history moves on
once a step, when all micro-batches and all ranks of the pipeline stage have contributed to its
amaxes: a step's scales then depend on the batches before it alone, and not on the layout.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from moewright.rules.job import Job
from moewright.rules.param import Param, name_in_layer
from moewright.rules.shards import stage_parameters
from moewright.spec.ledger import Component, MemoryRow, Module
from moewright.spec.workload import Dtype, TensorScaling, Workload

SCALES_OF_LINEAR = 3  # of rules.low_precision.OperandKind, in its order
_FP32_BYTES = 4
# Beside the history: the scale, and the amax of the step that runs.
_BESIDE_HISTORY = 2
_LINEARS = frozenset(
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

    `experts` is 1 for a linear that is not of routed experts.
    """

    name: str
    module: Module
    experts: int


def is_delayed(workload: Workload) -> bool:
    """Return whether FP8 takes its scales from earlier steps."""
    return workload.precision is Dtype.FP8 and workload.tensor_scaling is TensorScaling.DELAYED


def scaled_linears(params: Iterable[Param]) -> tuple[ScaledLinear, ...]:
    """Return the linears with scales among parameters, in their order."""
    return tuple(
        ScaledLinear(
            name=param.name,
            module=param.module,
            experts=param.shape[0] if param.is_expert else 1,
        )
        for param in params
        if name_in_layer(param.name) in _LINEARS and not param.name.endswith(".bias")
    )


def amax_reduction_bytes(job: Job, pp_rank: int) -> int:
    """Return the bytes of the amaxes that the ranks of a stage reduce once a step; 0 for none."""
    if not is_delayed(job.workload):
        return 0
    linears = scaled_linears(stage_parameters(job.model, job.layout, pp_rank))
    return _FP32_BYTES * SCALES_OF_LINEAR * sum(linear.experts for linear in linears)


def delayed_scaling_rows(job: Job, pp_rank: int) -> tuple[MemoryRow, ...]:
    """Return the bytes of histories, scales and amaxes on every rank of a pipeline stage.

    Each rank keeps those of all experts of its layers: they are few, and any rank may hold any.
    """
    if not is_delayed(job.workload):
        return ()
    numbers = job.workload.delayed.amax_history_len + _BESIDE_HISTORY
    return tuple(
        MemoryRow(
            component=Component.BUFFERS,
            module=linear.module,
            bytes=_FP32_BYTES * SCALES_OF_LINEAR * linear.experts * numbers,
        )
        for linear in scaled_linears(stage_parameters(job.model, job.layout, pp_rank))
    )
