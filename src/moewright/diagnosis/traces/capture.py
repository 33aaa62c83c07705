"""Captures: records of what one rank's device and host did, the same for every profiling tool."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import cache, lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moewright.diagnosis.traces.intervals import Intervals
from moewright.spec.errors import escape_controls
from moewright.spec.hardware import Collective

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class KernelKind(StrEnum):
    """The kind of work that a kernel does, recognised by its name."""

    GEMM = "gemm"
    GROUPED_GEMM = "grouped_gemm"
    ATTENTION = "attention"
    OTHER = "other"  # elementwise, norms, permutes, optimizer
    COPY = "copy"  # between host and device, or within it; memset
    COMMUNICATION = "communication"


class TrainerMark(StrEnum):
    """What a trace shows of the trainer and of what it has switched on."""

    MOE = "mixture of experts"
    DDP = "DistributedDataParallel"
    FSDP = "FullyShardedDataParallel"
    MEGATRON = "Megatron"
    DEEPEP = "DeepEP"
    GRAPHS = "CUDA graphs"
    FUSED_PERMUTE = "fused permute"
    GROUPED_GEMM = "grouped products"
    EXCHANGES = "calls of all-to-all"
    SENDS = "calls of send and receive"


@dataclass(frozen=True, kw_only=True, slots=True)
class CommChannel:
    """A kind of collective over a group of ranks.

    A field that the tool did not record is "", () or 0.
    """

    op: Collective | None  # None: sends and receives, of an exchange or of a pipeline
    group: str = ""  # name of the process group, a number with most trainers
    description: str = ""  # e.g. "EXPERT_MODEL_PARALLEL_GROUP"
    ranks: tuple[int, ...] = ()
    size: int = 0
    stream: str = ""
    library: str = ""  # such as "deepep" or "userbuffers": not a collective of NCCL
    kernel: str = field(default="", compare=False)  # name of the first kernel seen on it


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelTable:
    """Columns of n device activities in order of start; seconds on the capture's clock."""

    names: tuple[str, ...]
    name_index: Ints  # into names
    start_s: Floats
    end_s: Floats
    stream_index: Ints  # into Capture.streams
    launched_s: Floats  # when the host began to launch it; NaN: not recorded
    launch_end_s: Floats  # when that call returned
    correlation: Floats  # what ties it to that call; NaN: not recorded
    external_id: Floats  # what ties it to the operation that launched it; NaN: not recorded
    kind_index: Ints  # into list(KernelKind)
    channel_index: Ints  # into Capture.channels; -1: no communication
    payload_bytes: Floats  # handed in to the collective, or copied; 0: not recorded
    flops: Floats  # of matrix products whose shapes were recorded; 0: not recorded
    # launched inside a checkpoint's backward, before its own backward
    is_recompute: NDArray[np.bool_]

    def intervals(self, mask: NDArray[np.bool_]) -> Intervals:
        """Return the intervals of the activities that the mask selects; they may overlap."""
        return np.stack((self.start_s[mask], self.end_s[mask]), axis=1)

    def select(self, mask: NDArray[np.bool_]) -> KernelTable:
        """Return the table of the activities that the mask selects."""
        columns = {
            column.name: getattr(self, column.name)[mask]
            for column in fields(self)
            if column.name != "names"
        }
        return replace(self, **columns)

    def has_kind(self, *kinds: KernelKind) -> NDArray[np.bool_]:
        """Return the mask of the activities of these kinds."""
        return np.isin(self.kind_index, [list(KernelKind).index(kind) for kind in kinds])


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedRows:
    """Rows of grouped products whose shapes were recorded."""

    rows: float  # of a call, mean
    experts: int  # of a call


@dataclass(frozen=True, kw_only=True, slots=True)
class HostRanges:
    """Long operations, frames and ranges of the host's threads that launch work.

    Columns of n ranges in order of start; seconds on the capture's clock.
    """

    names: tuple[str, ...]
    name_index: Ints  # into names
    start_s: Floats
    end_s: Floats

    def innermost(self, start_s: float, end_s: float, *, least_share: float) -> str:
        """Return the name of the shortest range that covers that share of a time; "": none does."""
        overlap_s = np.minimum(self.end_s, end_s) - np.maximum(self.start_s, start_s)
        covering = np.flatnonzero(overlap_s >= least_share * (end_s - start_s))
        if not len(covering):
            return ""
        lengths_s = (self.end_s - self.start_s)[covering]
        return self.names[int(self.name_index[covering[int(lengths_s.argmin())]])]


def build_host_ranges(rows: Iterable[tuple[str, float, float]]) -> HostRanges:
    """Build ranges from their names, starts and ends."""
    names: dict[str, int] = {}
    columns = [(names.setdefault(name, len(names)), start, end) for name, start, end in rows]
    table = np.array(columns, dtype=np.float64).reshape(-1, 3)
    table = table[np.argsort(table[:, 1], kind="stable")]
    return HostRanges(
        names=tuple(map(escape_controls, names)),
        name_index=table[:, 0].astype(np.int64),
        start_s=table[:, 1],
        end_s=table[:, 2],
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """A message that a rank of a CPU's program began to send, or has received, at a time."""

    is_send: bool
    peer: int  # its place in the group
    moment_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveCall:
    """A collective of a CPU's program: when a rank began it, and when it began to wait for it.

    A wait that was not seen is infinite. `gradients_s` is when the gradients that it sums were all
    there; NaN where they are not known, or it sums none.
    """

    group: str
    begin_s: float
    wait_s: float
    gradients_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Capture:
    """A record of one rank's device and host.

    `steps` holds the start and end of each training step seen, in order; () where the tool marked
    none.
    """

    path: Path  # of the file that holds it
    rank: int
    device: str  # as its maker calls it; "" unknown
    memory_bytes: int  # of the device; 0 unknown
    allocated_bytes: int  # most that the allocator gave out; 0 unknown
    reserved_bytes: int  # most that it held; 0 unknown
    kernels: KernelTable
    streams: tuple[str, ...]
    channels: tuple[CommChannel, ...]
    steps: tuple[tuple[float, float], ...]
    first_s: float  # of the tool's clock at its first event, where viewers begin
    syncs: Intervals  # the host waits for the device
    data_waits: Intervals  # the host waits for data
    gc_pauses: Intervals  # the host collects garbage
    grouped_rows: GroupedRows | None = None
    host_ranges: HostRanges | None = None  # None: the tool records none
    trainer_marks: tuple[TrainerMark, ...] = ()
    messages: tuple[Message, ...] = ()
    calls: tuple[CollectiveCall, ...] = ()  # in the order of their begins
    notes: tuple[str, ...] = ()


# Earlier patterns win. Sources: names that NCCL (src/device), RCCL, cuBLAS, CUTLASS, Triton, cuDNN,
# FlashAttention, TransformerEngine, DeepEP and HybridEP give their kernels.
_PATTERNS: tuple[tuple[KernelKind, str], ...] = (
    (
        KernelKind.COMMUNICATION,
        r"^nccl|rccl|^mscclKernel|mscclpp|msccl::|deep_ep|hybrid_ep|nvshmem|_on_stream_kernel|"
        r"userbuffers|symm_mem|multimem_|cross_device_reduce|"
        r"(one|two)_?shot_?all_?reduce|all_?to_?all|"
        r"\b(internode|intranode|internode_ll)::\w*(dispatch|combine|notify|barrier)|"
        r"Ep(Dispatch|Combine)(Intra|Inter)Node|(put|wait)_signal_kernel|"
        r"\ballreduce_fusion_kernel|a2a_?(dispatch|combine)",
    ),
    (KernelKind.COPY, r"^mem(cpy|set)\b|^\[CUDA mem"),
    (KernelKind.ATTENTION, r"flash|fmha|sdpa|mha_|attention|attn_(fwd|bwd)|cudnn.*sdp"),
    (
        KernelKind.GROUPED_GEMM,
        r"group(ed)?_?gemm|groupproblemshape|moe_?gemm|grouped_mm|multi_?gemm|groupedmm",
    ),
    (
        KernelKind.GEMM,
        r"gemm|gemv|nvjet|xmma|cutlass.*kernel|cijk_|wgmma|splitk_?reduce|matmul|_mm_|"
        r"[shi8]cudnn_|winograd|implicit_convolve|conv2d|dgrad|wgrad",
    ),
)
# A trace of generated kernels has 200,000 names, each of which its table and its marks ask for.
_KEPT_NAMES = 1 << 18
_COMPILED = tuple((kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in _PATTERNS)
_OPS: tuple[tuple[str, Collective], ...] = (
    (r"all_?to_?all", Collective.ALL_TO_ALL),
    (r"all_?reduce|allreduce", Collective.ALL_REDUCE),
    (r"reduce_?scatter", Collective.REDUCE_SCATTER),
    (r"all_?gather", Collective.ALL_GATHER),
    (r"broadcast|scatter", Collective.BROADCAST),
    (r"^(nccl:)?(send|recv|isend|irecv)", Collective.P2P),
    (r"reduce", Collective.ALL_REDUCE),
)
# The libraries' namespaces; those that copied DeepEP keep the names below its own.
_LIBRARIES = (
    (r"hybrid_ep", "hybridep"),
    (r"deep_ep|\b(internode|intranode|internode_ll)::", "deepep"),
    (r"Ep(Dispatch|Combine)(Intra|Inter)Node", "mori"),
    (r"userbuffers", "userbuffers"),
    (r"nccl_ep", "nccl-ep"),
    (r"a2a_?(dispatch|combine)", "an all-to-all of experts"),
)


@lru_cache(maxsize=_KEPT_NAMES)
def kernel_kind(name: str) -> KernelKind:
    """Return what a kernel of that name does."""
    matches = (kind for kind, pattern in _COMPILED if pattern.search(name))
    return next(matches, KernelKind.OTHER)


@cache
def collective_in_name(name: str) -> Collective | None:
    """Return the collective in the name of a kernel or an operation.

    It is None for SendRecv, which all-to-all and pipelines share.
    """
    matches = (op for pattern, op in _OPS if re.search(pattern, name, re.IGNORECASE))
    return next(matches, None)


@cache
def comm_library(name: str) -> str:
    """Return the communication library of a kernel, where it is not NCCL."""
    matches = (
        library for pattern, library in _LIBRARIES if re.search(pattern, name, re.IGNORECASE)
    )
    return next(matches, "")


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelRow:
    """A device activity, as a row of a KernelTable; a `kind` of None follows from the name."""

    name: str
    start_s: float
    end_s: float
    stream: str
    launched_s: float = float("nan")
    kind: KernelKind | None = None
    channel_index: int = -1
    payload_bytes: float = 0.0
    flops: float = 0.0
    is_recompute: bool = False
    launch_end_s: float = float("nan")
    correlation: float = float("nan")
    external_id: float = float("nan")


_COLUMNS = 13  # numbers of an event
_KINDS = tuple(KernelKind)
_NUMBER_OF_KIND = {kind: number for number, kind in enumerate(_KINDS)}


class KernelTableBuilder:
    """A builder of a KernelTable from its rows, which may come in any order."""

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._kinds: list[int] = []  # by index of the name
        self._streams: dict[str, int] = {}
        self._channels: dict[CommChannel, int] = {}
        self._values = array("d")  # rows of _COLUMNS numbers

    def __len__(self) -> int:
        return len(self._values) // _COLUMNS

    def kind(self, name: str) -> KernelKind:
        """Return the kind of the kernels of that name; each name is looked up once."""
        return _KINDS[self._kinds[self._name_index(name)]]

    def channel_index(self, channel: CommChannel) -> int:
        """Return the index of a channel, which is added where it is new."""
        return self._channels.setdefault(channel, len(self._channels))

    def add(self, row: KernelRow) -> None:
        """Add a row."""
        name_index = self._name_index(row.name)
        kind_index = self._kinds[name_index]
        if row.kind is not None:
            kind_index = _NUMBER_OF_KIND[row.kind]
        self._values.extend(
            (
                name_index,
                row.start_s,
                row.end_s,
                self._streams.setdefault(row.stream, len(self._streams)),
                row.launched_s,
                kind_index,
                row.channel_index,
                row.payload_bytes,
                row.flops,
                row.is_recompute,
                row.launch_end_s,
                row.correlation,
                row.external_id,
            )
        )

    def _name_index(self, name: str) -> int:
        index = self._names.setdefault(name, len(self._names))
        if index == len(self._kinds):
            self._kinds.append(_NUMBER_OF_KIND[kernel_kind(name)])
        return index

    @property
    def streams(self) -> tuple[str, ...]:
        return tuple(self._streams)

    @property
    def channels(self) -> tuple[CommChannel, ...]:
        return tuple(self._channels)

    def build(self) -> KernelTable:
        """Build the table, its rows in order of start."""
        table = np.frombuffer(self._values, dtype=np.float64).reshape(-1, _COLUMNS)
        table = table[np.argsort(table[:, 1], kind="stable")]
        return KernelTable(
            names=tuple(map(escape_controls, self._names)),
            name_index=table[:, 0].astype(np.int64),
            start_s=table[:, 1],
            end_s=table[:, 2],
            stream_index=table[:, 3].astype(np.int64),
            launched_s=table[:, 4],
            kind_index=table[:, 5].astype(np.int64),
            channel_index=table[:, 6].astype(np.int64),
            payload_bytes=table[:, 7],
            flops=table[:, 8],
            is_recompute=table[:, 9] > 0,
            launch_end_s=table[:, 10],
            correlation=table[:, 11],
            external_id=table[:, 12],
        )
