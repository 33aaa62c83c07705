"""Estimate and Plan: what is expected of a layout, and the whole job that the engine reads."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from moewright.spec.hardware import Hardware
from moewright.spec.layout import Layout
from moewright.spec.ledger import Ledger
from moewright.spec.model import ModelSpec
from moewright.spec.sourced import SourceKind
from moewright.spec.workload import Workload


class Verdict(StrEnum):
    FITS = "fits"
    UNCERTAIN = "uncertain"
    OOM = "oom"


class TimePart(StrEnum):
    """Parts of a predicted step on the slowest pipeline rank; they sum to the step."""

    ATTENTION = "attention"
    DENSE = "dense"  # projections, dense MLP, shared experts, router
    EXPERTS = "experts"
    ELEMENTWISE = "elementwise"
    HEAD = "head"  # embedding, logits, loss
    RECOMPUTE = "recompute"
    OFFLOAD = "offload"  # activations that are late from or to the host
    EP_COMM = "ep_comm"
    TP_COMM = "tp_comm"
    CP_COMM = "cp_comm"
    PP_COMM = "pp_comm"
    DP_COMM = "dp_comm"
    BUBBLE = "bubble"
    HOST = "host"
    OPTIMIZER = "optimizer"


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeShare:
    part: TimePart
    seconds: float  # exposed on the critical path
    hidden_s: float = 0.0  # done under other work


@dataclass(frozen=True, kw_only=True, slots=True)
class Assumption:
    """A default or constant that went into an estimate."""

    name: str
    value: str
    kind: SourceKind
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Expected memory and time of one layout.

    `ledgers` holds one predicted Ledger a pipeline rank (the worst rank of that stage); MFU counts
    model FLOPs only, HFU adds recomputation.
    """

    ledgers: tuple[Ledger, ...]
    peak_rank: int  # the pipeline rank with the highest peak
    peak_bytes: int
    capacity_bytes: int
    verdict: Verdict
    margin_bytes: int  # capacity - peak
    peak_sd_bytes: int  # standard deviation of the peak
    largest: str  # the largest contributor, "component of module"
    step_s: float
    step_sd: float  # standard deviation of the step over the step
    shares: tuple[TimeShare, ...]
    micro_batches: int
    bubble_fraction: float
    tokens_per_s_per_device: float
    model_flops_per_step: float
    tflops_per_device: float
    mfu: float
    hfu: float
    assumptions: tuple[Assumption, ...]
    # Rows of the hottest expert rank over the even ones at which the device is full; 0: no load
    # fills it.
    load_limit: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class WhatIf:
    """The best layout if something were different, and its step by closed forms."""

    change: str
    layout: Layout
    step_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A whole job. The engine runs it; `fingerprint` covers everything but the estimate and the
    gains."""

    model: ModelSpec
    workload: Workload
    hardware: Hardware
    layout: Layout
    estimate: Estimate
    fingerprint: str
    gains: tuple[WhatIf, ...] = ()
    schema: int = 1
