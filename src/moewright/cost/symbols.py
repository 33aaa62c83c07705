"""The symbols that all cost formulas use, for one model, workload, layout and expert load."""

from __future__ import annotations

from dataclasses import dataclass

from moewright.rules.adapters import is_frozen, trained_share
from moewright.rules.expert_load import RankLoad, step_rows
from moewright.rules.job import Job
from moewright.rules.low_precision import find_rate_dtype
from moewright.rules.saved.recompute import activation_nbytes
from moewright.spec.hardware import DeviceKind
from moewright.spec.layout import Layout
from moewright.spec.model import ModelSpec
from moewright.spec.units import divide
from moewright.spec.workload import Dtype, NarrowedProducts, Workload

# With so few micro-batches a step nothing runs ahead of the device, so all of the host time shows
# (docs/formulas.md 11, docs/findings.md 3).
_FEW_MICRO_BATCHES = 2
_NVFP4_BYTES = 1 / 2 + 1 / 16  # 4 bits, and 8 bits of scale every 16 elements


@dataclass(frozen=True, kw_only=True, slots=True)
class Symbols:
    """The letters of docs/formulas.md as numbers of one layout, and the records they derive from.

    `dtype` is that whose rates time the products (rules.low_precision). `c` is the bytes of an
    activation; `T` the tokens of a micro-batch on a tensor-parallel group, of which one rank holds
    `t` under sequence parallelism; `R` the rows through the experts of the rank that a step waits
    for, `R_peak` those that the fullest rank keeps of a micro-batch; `m` the micro-batches of a
    step. `attended_share` is the share of a sequence's pairs of tokens that documents leave to
    attention, `router_efficiency` the router's share of the usual GEMM rate, `trained_share` the
    elements that train over those of the model (1 but for adapters).
    """

    job: Job
    device_kind: DeviceKind
    dtype: Dtype
    c: int
    T: int
    t: int
    R: int
    R_peak: int
    seq_len: int
    attended_share: float
    router_efficiency: float
    m: int
    trained_share: float = 1.0

    @property
    def model(self) -> ModelSpec:
        """The model of the job."""
        return self.job.model

    @property
    def workload(self) -> Workload:
        """The workload of the job."""
        return self.job.workload

    @property
    def layout(self) -> Layout:
        """The layout of the job."""
        return self.job.layout

    @property
    def peak_load(self) -> float:
        """Rows that the fullest rank keeps of a micro-batch, over those of even routing."""
        even = self.job.routed_rows(1.0)
        return divide(self.R_peak, even, otherwise=1.0)

    @property
    def is_frozen(self) -> bool:
        """Whether the weights are frozen, so that products make no gradients of them."""
        return is_frozen(self.workload)

    @property
    def is_steady(self) -> bool:
        """Whether there are enough micro-batches that the host can run ahead of the device."""
        return self.m > _FEW_MICRO_BATCHES

    @property
    def wide_dtype(self) -> Dtype:
        """The dtype of the router and the head, which 8-bit recipes leave in 16 bits."""
        if self.is_low_precision:
            return Dtype.BF16
        return self.dtype

    @property
    def head_dtype(self) -> Dtype:
        """The dtype of the logits' product."""
        if NarrowedProducts.HEAD in self.workload.trainer.narrowed:
            return self.dtype
        return self.wide_dtype

    def product_dtype(self, name: str) -> Dtype:
        """Return the dtype of a product by the name of its row."""
        wide = self.workload.trainer.bf16_products
        return self.wide_dtype if wide and name.startswith(wide) else self.dtype

    @property
    def is_low_precision(self) -> bool:
        """Whether linear layers multiply in 8 or 4 bits, so that their operands are quantised."""
        return self.dtype.is_narrow

    @property
    def operand_bytes(self) -> float:
        """Bytes of an element of a weight as products read it."""
        if self.dtype is Dtype.NVFP4:
            return _NVFP4_BYTES
        if self.is_low_precision:
            return self.dtype.nbytes
        return self.c

    @property
    def is_fused(self) -> bool:
        """Whether a chain of elementwise operations is one kernel, as on every accelerator.

        The engine on a CPU is eager: it makes one pass an operation.
        """
        return self.device_kind.is_accelerator


def build_symbols(
    job: Job,
    *,
    device_kind: DeviceKind,
    load: RankLoad,
    router_efficiency: float,
) -> Symbols:
    """Return the symbols of a layout whose experts get `load` times the balanced rows."""
    return Symbols(
        job=job,
        device_kind=device_kind,
        dtype=find_rate_dtype(job.workload),
        c=activation_nbytes(job.workload),
        T=job.tp_group_tokens,
        t=job.micro_batch_tokens,
        R=step_rows(job, load.step, load.within),
        R_peak=job.routed_rows(load.peak),
        seq_len=job.workload.seq_len,
        attended_share=job.workload.data.attended_share,
        router_efficiency=router_efficiency,
        m=job.workload.global_batch // (job.layout.mbs * job.layout.dp),
        trained_share=trained_share(job.model, job.workload),
    )
