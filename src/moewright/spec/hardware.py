"""Hardware: one kind of device, how many, how they are wired; every number with its source."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from moewright.spec.layout import DispatcherKind
from moewright.spec.record import OMIT_EMPTY, Record, Row
from moewright.spec.units import Sourced, SourceKind
from moewright.spec.workload import Dtype

MAX_DEVICES = 1_000_000  # of one job


class DeviceKind(StrEnum):
    """The kinds of device that a hardware file describes, by the software that drives them."""

    CPU = "cpu"
    CUDA = "cuda"
    ROCM = "rocm"  # AMD's, which torch drives as CUDA devices
    TPU = "tpu"  # a compiler (XLA) makes one program of a step
    NPU = "npu"  # Ascend

    @property
    def is_accelerator(self) -> bool:
        """Whether it has a memory of its own, apart from the host's."""
        return self is not DeviceKind.CPU

    @property
    def runs_cuda(self) -> bool:
        """Whether torch drives it as a CUDA device: graphs and libraries such as DeepEP exist."""
        return self in (DeviceKind.CUDA, DeviceKind.ROCM)


class Op(StrEnum):
    """The kinds of work that have a rate of their own."""

    GEMM = "gemm"  # x: FLOPs of the call; y: FLOP/s
    GROUPED_GEMM = "grouped_gemm"  # x: rows per expert; y: FLOP/s
    ATTENTION = "attention"  # x: sequence length; y: FLOP/s, forward, causal half counted
    # x: sequence length; y: FLOP/s at 2 x the forward FLOPs
    ATTENTION_BACKWARD = "attention_backward"
    ELEMENTWISE = "elementwise"  # x: bytes moved by the call; y: bytes/s
    OPTIMIZER = "optimizer"  # x: parameters updated; y: parameters/s


class Collective(StrEnum):
    """The collective operations and point-to-point messages that are timed and counted."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"
    P2P = "p2p"


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """Points (x, y) in ascending x, interpolated in log x and log y, and flat outside their range.

    `measured` is the range of x that was measured, where the points are a fit that goes further; ()
    means that it is the range of the points.
    """

    points: tuple[tuple[float, float], ...]
    kind: SourceKind
    source: str
    measured: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class OpRate:
    """The rate of one kind of work in one dtype, over the size of the call."""

    op: Op
    dtype: Dtype
    curve: Curve


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveTime:
    """The seconds of one collective over `group_size` ranks.

    x is the payload that one rank hands in, in bytes.
    """

    op: Collective
    group_size: int
    curve: Curve


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """The bandwidth between two ranks that send to each other while other pairs do the same."""

    first: int
    second: int
    Bps: Sourced  # in each direction


@dataclass(frozen=True, kw_only=True, slots=True)
class DtypePeak:
    """The dense peak of a dtype in FLOP/s, the denominator of MFU."""

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


class NetworkKind(StrEnum):
    """The known kinds of network: those that join a domain's devices, and those between domains."""

    NVLINK = "nvlink"  # NVLink switches of one node
    NVL4 = "nvl4"  # four GH200 of one board
    NVL36 = "nvl36"
    NVL72 = "nvl72"
    PCIE = "pcie"
    XGMI = "xgmi"  # AMD's Infinity Fabric
    HCCS = "hccs"  # Ascend
    ICI = "ici"  # the torus of a TPU pod
    MEMORY = "memory"  # processes of one machine
    IB = "ib"  # InfiniBand, GPUs post messages themselves (IBGDA)
    ROCE = "roce"
    SLINGSHOT = "slingshot"
    EFA = "efa"  # AWS, a CPU thread posts the messages
    TCP = "tcp"


# Kinds in which each device of a domain has links of its own to every other one, without a switch.
_MESHES = frozenset({NetworkKind.NVL4, NetworkKind.XGMI})


class MessagePath(StrEnum):
    """The ways in which the messages of a dispatcher's library leave a device."""

    GPU = "gpu"  # its kernels write to the peer, or post the messages
    PROXY = "proxy"  # a CPU thread posts what the kernels ask for
    NONE = "none"  # the library does not run there


@dataclass(frozen=True, kw_only=True, slots=True)
class LibraryPath:
    """The ways in which a dispatcher's library moves tokens inside a domain and between domains."""

    dispatcher: DispatcherKind
    inside: MessagePath
    between: MessagePath


class Wiring(StrEnum):
    """The ways in which a level's switches join devices, and units of them with each other."""

    TREE = "tree"  # a rack, a pod or a site, with links up to what joins all of them
    RAIL = "rail"  # a switch joins the devices of one place in each domain of the unit
    DRAGONFLY = "dragonfly"  # units with a link between every two of them


@dataclass(frozen=True, kw_only=True, slots=True)
class TopologyLevel:
    """A level of switches: units of so many devices, and what their links to other units carry.

    `oversubscription` is what a unit's devices can send over what its links carry, `background` the
    share of these that other jobs take, `latency_s` how much longer a message between units takes.
    """

    wiring: Wiring
    devices: int
    oversubscription: float = 1.0
    background: float = 0.0
    latency_s: float = 0.0
    source: str = ""

    def title(self) -> str:
        """Return wiring and devices."""
        return f"oversubscription of a {self.wiring} of {self.devices:,} devices"

    def sourced_oversubscription(self) -> Sourced:
        """Return the oversubscription with its source."""
        source = self.source or "stated"
        return Sourced(value=self.oversubscription, kind=SourceKind.ASSUMED, source=source)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fabric:
    """Domains of ranks on the fast link, and the network between domains.

    A dispatcher that `library_paths` does not list needs collectives alone. `levels` of switches
    are listed from the lowest; without any, the network carries what all ports send. `placement`
    lists the place of every domain of the job among the domains of the cluster; without it, the job
    has the first ones.
    """

    domain_size: int
    devices_per_node: int
    domain_Bps: Sourced  # per device and direction
    network_Bps: Sourced  # per device and direction
    domain_latency_s: Sourced
    network_latency_s: Sourced
    times: tuple[CollectiveTime, ...] = ()  # measured curves, preferred to the formula
    links: tuple[Link, ...] = ()  # measured; not used by estimates, they show which link is slow
    domain: str = NetworkKind.NVLINK  # a NetworkKind, or the name of one that a package adds
    network: str = NetworkKind.IB
    library_paths: tuple[LibraryPath, ...] = ()
    levels: tuple[TopologyLevel, ...] = field(default=(), metadata={OMIT_EMPTY: True})
    placement: tuple[int, ...] = field(default=(), metadata={OMIT_EMPTY: True})

    def link_share(self, peers: int) -> float:
        """Return the share of a device's links in its domain that lead to so many of its peers.

        A switch gives a device all of its bandwidth to any peer; a mesh has some links to each.
        """
        others = self.domain_size - 1
        if self.domain not in _MESHES or others < 1:
            return 1.0
        return min(peers, others) / others


@dataclass(frozen=True, kw_only=True, slots=True)
class Constant:
    """A named constant of the time or memory model, e.g. "host_s_per_layer_microbatch"."""

    name: str
    value: Sourced


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnRun:
    """A run measured on this hardware, by the choices that it made.

    `weight` moves the logarithm of the predicted seconds of runs with the same choices, and less
    the more choices differ (cost.own_runs). `moewright fit` writes it.
    """

    choices: tuple[str, ...]
    weight: Sourced


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Hardware(Record):
    """A number of equal devices and the fabric that joins them.

    `fingerprint` tells one measured machine from another; "" for parts of the catalogue. `own_runs`
    say what its constants leave open of runs that were measured.
    """

    name: str
    count: int
    device: Device
    fabric: Fabric
    constants: tuple[Constant, ...] = ()
    fingerprint: str = ""
    own_runs: tuple[OwnRun, ...] = ()

    def title(self) -> str:
        """Return count and name."""
        return f"{self.count:,} x {self.name}"

    def to_rows(self) -> list[Row]:
        """Return a row for each figure of device and fabric, with its source."""
        figures = [
            ("memory, bytes", self.device.memory_bytes),
            ("memory bandwidth, B/s", self.device.memory_Bps),
            *((f"{peak.dtype.value} peak, FLOP/s", peak.rate) for peak in self.device.peaks),
            ("bandwidth inside a domain, B/s", self.fabric.domain_Bps),
            ("bandwidth of the network, B/s", self.fabric.network_Bps),
            ("latency inside a domain, s", self.fabric.domain_latency_s),
            ("latency of the network, s", self.fabric.network_latency_s),
            *((level.title(), level.sourced_oversubscription()) for level in self.fabric.levels),
            *((constant.name, constant.value) for constant in self.constants),
        ]
        return [
            {"figure": name, "value": item.value, "kind": item.kind.value, "source": item.source}
            for name, item in figures
        ]
