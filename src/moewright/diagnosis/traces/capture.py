"""Capture: what one rank's device and host did for a while, whichever tool wrote it down."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from moewright.diagnosis.traces.intervals import Intervals
from moewright.spec.hardware import Collective

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class KernelKind(StrEnum):
    """What a kernel does, told by its name."""

    GEMM = "gemm"
    GROUPED_GEMM = "grouped_gemm"
    ATTENTION = "attention"
    OTHER = "other"  # elementwise, norms, permutes, optimizer
    COPY = "copy"  # between host and device, or within it; memset
    COMMUNICATION = "communication"


@dataclass(frozen=True, kw_only=True, slots=True)
class CommChannel:
    """One kind of collective over one group. Tools say more or less: "", () and 0 stand for what
    they left out."""

    op: Collective | None  # None: sends and receives, of an exchange or of a pipeline
    group: str = ""  # name of the process group, a number with most trainers
    description: str = ""  # e.g. "EXPERT_MODEL_PARALLEL_GROUP"
    ranks: tuple[int, ...] = ()
    size: int = 0
    stream: str = ""
    library: str = ""  # "deepep", "hybridep", "userbuffers": not a collective of NCCL
    kernel: str = field(default="", compare=False)  # name of the first kernel seen on it


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelTable:
    """Columns of n device activities in order of start; seconds on the capture's clock."""

    names: tuple[str, ...]
    name_index: Ints  # index into names
    start_s: Floats
    end_s: Floats
    stream_index: Ints  # index into Capture.streams
    launched_s: Floats  # when the host began to launch it; NaN: not recorded
    kind_index: Ints  # index into list(Work)
    channel_index: Ints  # index into Capture.channels; -1: no communication
    payload_bytes: Floats  # handed in to the collective; 0: not recorded
    flops: Floats  # of matrix products whose shapes were recorded; 0: not recorded
    is_recompute: NDArray[
        np.bool_
    ]  # launched inside a checkpoint's backward, before its own backward

    def intervals(self, mask: NDArray[np.bool_]) -> Intervals:
        return np.stack((self.start_s[mask], self.end_s[mask]), axis=1)

    def has_kind(self, *kinds: KernelKind) -> NDArray[np.bool_]:
        return np.isin(self.kind_index, [list(KernelKind).index(work) for work in kinds])


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedRows:
    """Rows of grouped products whose shapes were recorded."""

    rows: float  # of a call, mean
    experts: int  # of a call


@dataclass(frozen=True, kw_only=True, slots=True)
class Capture:
    """`steps` holds the start and end of each training step seen, in order; () where the tool
    marked none."""

    source: str
    rank: int
    device: str  # as its maker calls it; "" unknown
    memory_bytes: int  # of the device; 0 unknown
    allocated_bytes: int  # most that the allocator gave out; 0 unknown
    reserved_bytes: int  # most that it held; 0 unknown
    kernels: KernelTable
    streams: tuple[str, ...]
    channels: tuple[CommChannel, ...]
    steps: tuple[tuple[float, float], ...]
    syncs: Intervals  # the host waits for the device
    data_waits: Intervals  # the host waits for data
    gc_pauses: Intervals  # the host collects garbage
    grouped_rows: GroupedRows | None = None
    notes: tuple[str, ...] = ()


# Earlier patterns win. Sources: names that NCCL (src/device), RCCL, cuBLAS, CUTLASS, Triton, cuDNN,
# FlashAttention,
# TransformerEngine, DeepEP and HybridEP give their kernels.
_WORKS: tuple[tuple[KernelKind, str], ...] = (
    (
        KernelKind.COMMUNICATION,
        r"^nccl|rccl|^mscclKernel|msccl::|deep_ep|hybrid_ep|nvshmem|userbuffers|symm_mem|multimem_|"
        r"(one|two)_shot_all_reduce|cross_device_reduce",
    ),
    (KernelKind.COPY, r"^mem(cpy|set)\b|^\[CUDA mem"),
    (KernelKind.ATTENTION, r"flash|fmha|sdpa|mha_|attention|attn_(fwd|bwd)|cudnn.*sdp"),
    (
        KernelKind.GROUPED_GEMM,
        r"group(ed)?_?gemm|groupproblemshape|moe_?gemm|grouped_mm|multi_?gemm|groupedmm",
    ),
    (
        KernelKind.GEMM,
        r"gemm|gemv|nvjet|xmma|cutlass.*kernel|cijk_|wgmma|splitk_?reduce|matmul|_mm_",
    ),
)
_KNOWN = tuple((work, re.compile(pattern, re.IGNORECASE)) for work, pattern in _WORKS)
_OPS: tuple[tuple[str, Collective], ...] = (
    (r"all_?to_?all", Collective.ALL_TO_ALL),
    (r"all_?reduce|allreduce", Collective.ALL_REDUCE),
    (r"reduce_?scatter", Collective.REDUCE_SCATTER),
    (r"all_?gather", Collective.ALL_GATHER),
    (r"broadcast|scatter", Collective.BROADCAST),
    (r"^(nccl:)?(send|recv|isend|irecv)", Collective.P2P),
    (r"reduce", Collective.ALL_REDUCE),
)
_LIBRARIES = (("deep_ep", "deepep"), ("hybrid_ep", "hybridep"), ("userbuffers", "userbuffers"))


def kernel_kind(name: str) -> KernelKind:
    """What a kernel of that name does."""
    return next((work for work, pattern in _KNOWN if pattern.search(name)), KernelKind.OTHER)


def collective_in_name(name: str) -> Collective | None:
    """The collective in a kernel's or an operation's name; None: SendRecv, which all-to-all and
    pipelines share."""
    return next((op for pattern, op in _OPS if re.search(pattern, name, re.IGNORECASE)), None)


def comm_library(name: str) -> str:
    """The communication library of a kernel, where it is not NCCL."""
    return next((library for mark, library in _LIBRARIES if mark in name.casefold()), "")


class KernelTableBuilder:
    """Rows of Kernels as they are found, in any order."""

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._works: list[int] = []
        self._streams: dict[str, int] = {}
        self._channels: dict[CommChannel, int] = {}
        self._rows: list[tuple[float, ...]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def kind(self, name: str) -> KernelKind:
        """What the kernel of that name does; looked up once a name."""
        return list(KernelKind)[self._works[self._name(name)]]

    def channel_index(self, channel: CommChannel) -> int:
        """Its index."""
        return self._channels.setdefault(channel, len(self._channels))

    def add(
        self,
        *,
        name: str,
        start_s: float,
        end_s: float,
        stream: str,
        launched_s: float = float("nan"),
        kind: KernelKind | None = None,
        channel_index: int = -1,
        payload_bytes: float = 0.0,
        flops: float = 0.0,
        is_recompute: bool = False,
    ) -> None:
        index = self._name(name)
        kind_index = self._works[index] if kind is None else list(KernelKind).index(kind)
        place = self._streams.setdefault(stream, len(self._streams))
        self._rows.append(
            (
                index,
                start_s,
                end_s,
                place,
                launched_s,
                kind_index,
                channel_index,
                payload_bytes,
                flops,
                is_recompute,
            )
        )

    def _name(self, name: str) -> int:
        index = self._names.setdefault(name, len(self._names))
        if index == len(self._works):
            self._works.append(list(KernelKind).index(kernel_kind(name)))
        return index

    @property
    def streams(self) -> tuple[str, ...]:
        return tuple(self._streams)

    @property
    def channels(self) -> tuple[CommChannel, ...]:
        return tuple(self._channels)

    def build(self) -> KernelTable:
        table = np.array(self._rows, dtype=np.float64).reshape(-1, 10)
        table = table[np.argsort(table[:, 1], kind="stable")]
        whole = (
            table.astype(np.int64, copy=True)
            if not np.isnan(table).any()
            else np.nan_to_num(table).astype(np.int64)
        )
        return KernelTable(
            names=tuple(self._names),
            name_index=whole[:, 0],
            start_s=table[:, 1],
            end_s=table[:, 2],
            stream_index=whole[:, 3],
            launched_s=table[:, 4],
            kind_index=whole[:, 5],
            channel_index=whole[:, 6],
            payload_bytes=table[:, 7],
            flops=table[:, 8],
            is_recompute=table[:, 9] > 0,
        )
