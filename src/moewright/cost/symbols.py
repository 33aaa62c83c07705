"""The symbols that all cost formulas use, for one model, workload, layout and expert load."""

from __future__ import annotations

from dataclasses import dataclass

from moewright.rules import routing
from moewright.rules.recompute import activation_nbytes
from moewright.spec.hardware import DeviceKind
from moewright.spec.layout import Layout
from moewright.spec.model import ModelSpec
from moewright.spec.workload import Dtype, Workload

# With so few micro-batches a step the host time is simply added (time_model_findings, section 7).
_FEW_MICRO_BATCHES = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Symbols:
    """c: bytes of an activation; T: tokens of a micro-batch on a TP group, t of them on one rank
    under sequence parallelism; R: rows through the rank's experts; seq: sequence length;
    attended_share: of its pairs those that documents leave; router_share: of the usual GEMM rate;
    m: micro-batches of a step.
    """

    model: ModelSpec
    workload: Workload
    layout: Layout
    device_kind: DeviceKind
    dtype: Dtype
    c: int
    T: int
    t: int
    R: int
    seq_len: int
    attended_share: float
    router_efficiency: float
    m: int

    @property
    def is_steady(self) -> bool:
        """Whether there are enough micro-batches that the host can run ahead of the device."""
        return self.m > _FEW_MICRO_BATCHES

    @property
    def wide_dtype(self) -> Dtype:
        """What the router and the head multiply in: 8-bit recipes leave them in 16 bits."""
        return Dtype.BF16 if self.is_low_precision else self.dtype

    @property
    def is_low_precision(self) -> bool:
        """Whether linear layers multiply in 8 bits, so that their operands are converted first."""
        return self.dtype.is_narrow

    @property
    def is_fused(self) -> bool:
        """Whether chains of elementwise work are one kernel (CUDA stacks) or one pass an operation
        (eager CPU)."""
        return self.device_kind is DeviceKind.CUDA


def build_symbols(
    model: ModelSpec,
    workload: Workload,
    layout: Layout,
    *,
    device_kind: DeviceKind,
    load: float,
    router_efficiency: float,
) -> Symbols:
    return Symbols(
        model=model,
        workload=workload,
        layout=layout,
        device_kind=device_kind,
        dtype=workload.precision,
        c=activation_nbytes(workload),
        T=workload.seq_len * layout.mbs // layout.cp,
        t=routing.micro_batch_tokens(workload, layout),
        R=routing.routed_rows(model, workload, layout, load),
        seq_len=workload.seq_len,
        attended_share=workload.data.attended_share,
        router_efficiency=router_efficiency,
        m=workload.global_batch // (layout.mbs * layout.dp),
    )
