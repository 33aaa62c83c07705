"""Classification of collectives by the parallelism that they belong to.

The class follows from the groups of the layout, from the trainer's name for the group, or, where
neither is recorded, from the kind of collective, its group and its sizes. Each answer comes with
its evidence.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

import numpy as np

from moewright.diagnosis.traces.capture import (
    Capture,
    CommChannel,
    KernelKind,
    TrainerMark,
    kernel_kind,
)
from moewright.rules.grid import group_ranks
from moewright.spec.finding import Cause
from moewright.spec.hardware import Collective
from moewright.spec.layout import Layout
from moewright.spec.plan import TimePart
from moewright.spec.units import MIB, format_figures

# Names of Megatron-Core, TransformerEngine, DeepEP, vLLM and torch. `permute` and `grouped` alone
# are no evidence: other models permute and group as well.
_MARKS_OF_NAMES: tuple[tuple[TrainerMark, re.Pattern[str]], ...] = (
    (
        TrainerMark.MOE,
        re.compile(
            r"(?<![a-z])moe(?![a-z]{2})|MoE|expert(?!imental)|unpermute|row_id_map|sort_chunks_by|"
            r"token_dispatcher|topk_gating",
        ),
    ),
    (TrainerMark.DDP, re.compile(r"DistributedDataParallel|nn/parallel/distributed\.py")),
    (TrainerMark.FSDP, re.compile(r"FullyShardedDataParallel|FSDP::|fsdp/_fully_shard")),
    (TrainerMark.MEGATRON, re.compile(r"megatron[/._]", re.IGNORECASE)),
    (TrainerMark.GRAPHS, re.compile(r"^(cuda|hip)GraphLaunch|CUDA graph")),
    (TrainerMark.EXCHANGES, re.compile(r"all_?to_?all", re.IGNORECASE)),
    (
        TrainerMark.SENDS,
        re.compile(r"nccl:(send|recv|coalesced)|c10d::(send|recv)|p2p_communication|isend_irecv"),
    ),
    (TrainerMark.FUSED_PERMUTE, re.compile(r"^_?(un)?permute_kernel|moe_permute_(mask|topK)")),
)
_MEGATRON_GROUP = re.compile(r"^[A-Z_]+_PARALLEL_GROUP")
_EXCHANGES = ("deepep", "hybridep", "mori")


def find_trainer_marks(
    names: Iterable[str], channels: Iterable[CommChannel]
) -> tuple[TrainerMark, ...]:
    """Return what the names of kernels and host ranges, and the groups, show of the trainer."""
    marks = {*_marks_of_names(names), *_marks_of_channels(channels)}
    return tuple(mark for mark in TrainerMark if mark in marks)


def _marks_of_names(names: Iterable[str]) -> Iterator[TrainerMark]:
    for name in names:
        for mark, pattern in _MARKS_OF_NAMES:
            if pattern.search(name):
                yield mark
        if kernel_kind(name) is KernelKind.GROUPED_GEMM:
            yield TrainerMark.GROUPED_GEMM


def _marks_of_channels(channels: Iterable[CommChannel]) -> Iterator[TrainerMark]:
    for channel in channels:
        if channel.library in _EXCHANGES:
            yield TrainerMark.MOE
        if channel.library == "deepep":
            yield TrainerMark.DEEPEP
        if _MEGATRON_GROUP.match(channel.description):
            yield TrainerMark.MEGATRON
        if "EXPERT" in channel.description:
            yield TrainerMark.MOE


class CommClass(StrEnum):
    """The parallelism that communication is for."""

    TP = "TP"
    CP = "CP"
    EP = "EP"
    PP = "PP"
    DP = "DP"
    EXCHANGE = "all-to-all"  # without evidence of experts: of what, is not known
    OTHER = "other"

    @property
    def part(self) -> TimePart | None:
        """Return the planner's part of a step for it; None for what is of no known parallelism."""
        if self in (CommClass.EXCHANGE, CommClass.OTHER):
            return None
        return TimePart(f"{self.value.casefold()}_comm")


CAUSE_OF_CLASS: Mapping[CommClass, Cause] = MappingProxyType(
    {
        CommClass.TP: Cause.TP,
        CommClass.CP: Cause.CP,
        CommClass.EP: Cause.EP,
        CommClass.PP: Cause.PP,
        CommClass.DP: Cause.DP,
        CommClass.EXCHANGE: Cause.COLLECTIVES,
        CommClass.OTHER: Cause.COLLECTIVES,
    }
)
# Groups as the engine names them (rules.grid).
CLASS_OF_ENGINE_GROUP: Mapping[str, CommClass] = MappingProxyType(
    {
        **dict.fromkeys(("tp", "etp", "tp_cp"), CommClass.TP),
        **dict.fromkeys(("cp", "cp_a2a", "cp_kv"), CommClass.CP),
        **dict.fromkeys(("ep", "etp_ep"), CommClass.EP),
        "pp": CommClass.PP,
        **dict.fromkeys(("dp", "dp_cp", "edp", "tp_cp_dp", "world"), CommClass.DP),
        **dict.fromkeys(("shard", "edp_shard", "copies", "tp_copies", "edp_copies"), CommClass.DP),
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChannelClass:
    """The class of a channel, with the evidence for it."""

    comm: CommClass
    evidence: str


# Patterns of the group descriptions of Megatron-Core's parallel_state, torch's DeviceMesh and FSDP.
# Earlier patterns win.
_DESCRIPTIONS: tuple[tuple[str, CommClass], ...] = (
    (
        r"expert.*data|edp|efsdp|data_parallel|dp_|_dp\b|fsdp|ddp|distributed_optimizer|\bdp",
        CommClass.DP,
    ),
    (r"expert|\bep\b|_ep\b|moe", CommClass.EP),
    (r"tensor|\btp\b|_tp\b", CommClass.TP),
    (r"context|\bcp\b|_cp\b|ulysses|ring", CommClass.CP),
    (r"pipeline|\bpp\b|_pp\b|embedding", CommClass.PP),
)
# Groups of the layout that a collective of each kind may use, likeliest first.
_LAYOUT_GROUPS: dict[Collective | None, tuple[tuple[str, CommClass], ...]] = {
    Collective.ALL_TO_ALL: (("ep", CommClass.EP), ("cp_a2a", CommClass.CP), ("cp", CommClass.CP)),
    Collective.P2P: (("pp", CommClass.PP), ("cp", CommClass.CP), ("cp_kv", CommClass.CP)),
    None: (("ep", CommClass.EP), ("pp", CommClass.PP), ("cp", CommClass.CP)),
}
_REDUCING_GROUPS = (
    ("tp", CommClass.TP),
    ("cp", CommClass.CP),
    ("etp_ep", CommClass.EP),
    ("ep", CommClass.EP),
    ("etp", CommClass.TP),
    ("dp_cp", CommClass.DP),
    ("edp", CommClass.DP),
    ("dp", CommClass.DP),
    ("tp_cp", CommClass.TP),
)
_FP32_KERNEL = re.compile(r"_f32|float\b", re.IGNORECASE)
# Devices of a usual NVLink domain: a wider group of neighbours is hardly tensor parallel.
_DOMAIN = 8
_BUCKET_BYTES = 32 * MIB  # gradients and weights travel in buckets of about this size or more
_CONTROL_BYTES = MIB / 16
_BUCKETS_A_STEP = 64  # at most
_TP_CALLS_A_STEP = 16  # at least


def classify_channels(capture: Capture, layout: Layout | None) -> tuple[ChannelClass, ...]:
    """Return the class of every channel of the capture.

    A communicator has a stream of its own, so that a channel of which nothing else is recorded
    belongs to what the others on its stream belong to.
    """
    told = [_tell_class(capture, channel, layout) for channel in capture.channels]
    classes_of_stream: dict[str, set[CommClass]] = {}
    for channel, told_class in zip(capture.channels, told, strict=True):
        if told_class is not None and channel.stream:
            classes_of_stream.setdefault(channel.stream, set()).add(told_class.comm)
    return tuple(
        told_class
        or _class_of_stream(channel, classes_of_stream.get(channel.stream, set()))
        or _class_of_wrapper(capture, channel)
        or _guess(capture, index)
        for index, (channel, told_class) in enumerate(zip(capture.channels, told, strict=True))
    )


def _tell_class(
    capture: Capture, channel: CommChannel, layout: Layout | None
) -> ChannelClass | None:
    """Return the class by library, group or description; None where none of them is recorded."""
    if channel.library:
        comm = CommClass.TP if channel.library == "userbuffers" else CommClass.EP
        return ChannelClass(comm=comm, evidence=f"kernels of {channel.library}")
    if channel.group in CLASS_OF_ENGINE_GROUP:
        comm = CLASS_OF_ENGINE_GROUP[channel.group]
        return ChannelClass(comm=comm, evidence=f"the engine's {channel.group} group")
    by_layout = _classify_by_layout(capture, channel, layout) if layout is not None else None
    if by_layout is not None:
        return by_layout
    for pattern, comm in _DESCRIPTIONS:
        if channel.description and re.search(pattern, channel.description, re.IGNORECASE):
            return ChannelClass(comm=comm, evidence=f'group "{channel.description}"')
    return None


def _class_of_stream(channel: CommChannel, classes: set[CommClass]) -> ChannelClass | None:
    if channel.group or channel.ranks or len(classes) != 1:
        return None
    (comm,) = classes
    return ChannelClass(comm=comm, evidence=f"stream {channel.stream}, as others of {comm}")


def _class_of_wrapper(capture: Capture, channel: CommChannel) -> ChannelClass | None:
    """Return DP for what the wrappers of torch send, where no group says otherwise."""
    marks = capture.trainer_marks
    wrapped = {
        TrainerMark.DDP: (Collective.ALL_REDUCE,),
        TrainerMark.FSDP: (Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_REDUCE),
    }
    for mark, ops in wrapped.items():
        if mark in marks and channel.op in ops and TrainerMark.MEGATRON not in marks:
            return ChannelClass(comm=CommClass.DP, evidence=f"{mark} ran (no group is described)")
    return None


def _classify_by_layout(
    capture: Capture, channel: CommChannel, layout: Layout
) -> ChannelClass | None:
    """Return the class by the ranks of the group; None where no group of the layout has them."""
    ranks = tuple(sorted(channel.ranks))
    if len(ranks) < 2 or not 0 <= capture.rank < layout.world_size or capture.rank not in ranks:
        return None
    for group, comm in _LAYOUT_GROUPS.get(channel.op, _REDUCING_GROUPS):
        if tuple(sorted(group_ranks(layout, group, capture.rank))) == ranks:
            return ChannelClass(comm=comm, evidence=f"ranks of the layout's {group} group")
    return None


def _guess(capture: Capture, index: int) -> ChannelClass:
    channel = capture.channels[index]
    if channel.op is Collective.ALL_TO_ALL:
        if TrainerMark.MOE in capture.trainer_marks:
            evidence = "all-to-all next to names of experts (guessed: no group description)"
            return ChannelClass(comm=CommClass.EP, evidence=evidence)
        evidence = "all-to-all, without names of experts or a description of its group"
        return ChannelClass(comm=CommClass.EXCHANGE, evidence=evidence)
    if channel.op is Collective.P2P:
        comm = CommClass.CP if channel.size > 2 else CommClass.PP
        return ChannelClass(comm=comm, evidence="sends and receives (guessed by group size)")
    if channel.op is None:
        return _guess_sends(capture)
    if channel.op is Collective.BROADCAST:
        return ChannelClass(comm=CommClass.OTHER, evidence="broadcast")
    return _guess_reduction(capture, index)


def _guess_sends(capture: Capture) -> ChannelClass:
    """Classify sends and receives by the calls, and the experts, that the capture names."""
    if TrainerMark.MOE in capture.trainer_marks:
        return ChannelClass(
            comm=CommClass.EP, evidence="sends and receives next to names of experts (guessed)"
        )
    marks = capture.trainer_marks
    if TrainerMark.EXCHANGES in marks and TrainerMark.SENDS not in marks:
        evidence = "sends and receives of all-to-all calls, without names of experts"
        return ChannelClass(comm=CommClass.EXCHANGE, evidence=evidence)
    if TrainerMark.SENDS in marks or TrainerMark.MEGATRON in marks:
        evidence = "sends and receives without names of experts (guessed)"
        return ChannelClass(comm=CommClass.PP, evidence=evidence)
    evidence = "sends and receives; what calls them is not recorded"
    return ChannelClass(comm=CommClass.OTHER, evidence=evidence)


def _guess_reduction(capture: Capture, index: int) -> ChannelClass:
    """Classify reductions and gathers by the sizes of their messages, and by how many there are."""
    channel = capture.channels[index]
    kernels = capture.kernels
    steps = max(1, len(capture.steps))
    in_channel = kernels.channel_index == index
    sizes = kernels.payload_bytes[in_channel & (kernels.payload_bytes > 0)]
    if not len(sizes):
        calls = int(in_channel.sum()) / steps
        if _FP32_KERNEL.search(channel.kernel) or calls < _TP_CALLS_A_STEP:
            return ChannelClass(
                comm=CommClass.DP, evidence="fp32 or few calls (guessed: sizes were not recorded)"
            )
        return ChannelClass(
            comm=CommClass.TP,
            evidence="many calls in low precision (guessed: sizes were not recorded)",
        )
    typical_bytes = float(np.median(sizes))
    if typical_bytes < _CONTROL_BYTES:
        return ChannelClass(comm=CommClass.OTHER, evidence="small control messages (guessed)")
    if len(channel.ranks) > 1 and not _are_neighbours(channel.ranks):
        return ChannelClass(comm=CommClass.DP, evidence="ranks that are not neighbours (guessed)")
    are_buckets = typical_bytes >= _BUCKET_BYTES and len(sizes) <= _BUCKETS_A_STEP * steps
    return ChannelClass(
        comm=CommClass.DP if are_buckets else CommClass.TP,
        evidence=f"messages of {format_figures(typical_bytes / MIB)} MiB (guessed)",
    )


def _are_neighbours(ranks: tuple[int, ...]) -> bool:
    """Return whether ranks are consecutive and fit one NVLink domain."""
    return len(ranks) <= _DOMAIN and ranks[-1] - ranks[0] == len(ranks) - 1
