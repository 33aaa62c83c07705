"""Hardware: one kind of device, how many, how they are wired; every number with its source."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from moewright.spec.sourced import Sourced, SourceKind
from moewright.spec.workload import Dtype


class DeviceKind(StrEnum):
    CPU = "cpu"
    CUDA = "cuda"


class Op(StrEnum):
    """Kinds of work that have a rate of their own."""

    GEMM = "gemm"  # x: FLOPs of the call; y: FLOP/s
    GROUPED_GEMM = "grouped_gemm"  # x: rows per expert; y: FLOP/s
    ATTENTION = "attention"  # x: sequence length; y: FLOP/s, forward, causal half counted
    ATTENTION_BACKWARD = (
        "attention_backward"  # x: sequence length; y: FLOP/s at 2 x the forward FLOPs
    )
    ELEMENTWISE = "elementwise"  # x: bytes moved by the call; y: bytes/s
    OPTIMIZER = "optimizer"  # x: parameters updated; y: parameters/s


class Collective(StrEnum):
    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"
    P2P = "p2p"


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """Points (x, y), x ascending, interpolated in log x and log y and held flat outside of them.

    `measured` is the range of x that was measured where the points are a fit that goes further; ()
    is their own range.
    """

    points: tuple[tuple[float, float], ...]
    kind: SourceKind
    source: str
    measured: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class OpRate:
    op: Op
    dtype: Dtype
    curve: Curve


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveTime:
    """Seconds of one collective over `group_size` ranks against the payload one rank hands in (x:
    bytes)."""

    op: Collective
    group_size: int
    curve: Curve


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """What two ranks send to each other at once, all pairs of a round doing so together."""

    first: int
    second: int
    Bps: Sourced  # in each direction


@dataclass(frozen=True, kw_only=True, slots=True)
class DtypePeak:
    """Dense peak of a dtype, FLOP/s: the denominator of MFU."""

    dtype: Dtype
    rate: Sourced


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One accelerator, or the share of a CPU that one rank gets (one thread)."""

    name: str
    kind: DeviceKind
    memory_bytes: Sourced  # what one rank may use
    memory_Bps: Sourced
    peaks: tuple[DtypePeak, ...]
    rates: tuple[OpRate, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fabric:
    """Two levels: a domain of ranks joined by the fast link, and the network between domains."""

    domain_size: int
    devices_per_node: int
    domain_Bps: Sourced  # per device and direction
    network_Bps: Sourced  # per device and direction
    domain_latency_s: Sourced
    network_latency_s: Sourced
    times: tuple[CollectiveTime, ...] = ()  # measured curves win over the formula
    links: tuple[Link, ...] = ()  # measured; of no estimate, they show which one is slow


@dataclass(frozen=True, kw_only=True, slots=True)
class Constant:
    """A named constant of the time or memory model, e.g. "host_s_per_layer_microbatch"."""

    name: str
    value: Sourced


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """`count` devices. `fingerprint` tells one measured machine from another; "" for catalogue
    parts."""

    name: str
    count: int
    device: Device
    fabric: Fabric
    constants: tuple[Constant, ...] = ()
    fingerprint: str = ""
