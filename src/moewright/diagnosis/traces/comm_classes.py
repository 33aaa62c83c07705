"""Which parallelism a collective belongs to: by the groups of the layout, by what the trainer calls
its group, or, where neither is written down, by the kind of collective, its group and its sizes.
Each answer says how it was found.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

import numpy as np

from moewright.diagnosis.traces.capture import Capture, CommChannel
from moewright.rules.grid import group_ranks
from moewright.spec.finding import Cause
from moewright.spec.hardware import Collective
from moewright.spec.layout import Layout
from moewright.spec.plan import TimePart
from moewright.spec.units import MIB


class CommClass(StrEnum):
    TP = "TP"
    CP = "CP"
    EP = "EP"
    PP = "PP"
    DP = "DP"
    OTHER = "other"

    @property
    def part(self) -> TimePart | None:
        """The planner's name for it."""
        return None if self is CommClass.OTHER else TimePart(f"{self.value.casefold()}_comm")


CAUSE_OF_CLASS: Mapping[CommClass, Cause] = MappingProxyType(
    {
        CommClass.TP: Cause.TP,
        CommClass.CP: Cause.CP,
        CommClass.EP: Cause.EP,
        CommClass.PP: Cause.PP,
        CommClass.DP: Cause.DP,
        CommClass.OTHER: Cause.STRAGGLER,
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
    comm: CommClass
    evidence: str


# Earlier patterns win; descriptions of Megatron-Core's parallel_state, of torch's DeviceMesh and of
# FSDP.
_DESCRIBED: tuple[tuple[str, CommClass], ...] = (
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
_GROUPS: dict[Collective | None, tuple[tuple[str, CommClass], ...]] = {
    Collective.ALL_TO_ALL: (("ep", CommClass.EP), ("cp_a2a", CommClass.CP), ("cp", CommClass.CP)),
    Collective.P2P: (("pp", CommClass.PP), ("cp", CommClass.CP), ("cp_kv", CommClass.CP)),
    None: (("ep", CommClass.EP), ("pp", CommClass.PP), ("cp", CommClass.CP)),
}
_REDUCING = (
    *(("tp", CommClass.TP), ("cp", CommClass.CP), ("etp_ep", CommClass.EP), ("ep", CommClass.EP)),
    *(("etp", CommClass.TP), ("dp_cp", CommClass.DP), ("edp", CommClass.DP), ("dp", CommClass.DP)),
    ("tp_cp", CommClass.TP),
)
_ROUTED = re.compile(r"permute|topk|top_k|moe|expert|grouped", re.IGNORECASE)
_DOMAIN = (
    8  # devices of a usual NVLink domain: a wider group of neighbours is hardly tensor parallel
)
_BUCKET_BYTES = 32 * MIB  # gradients and weights travel in buckets of about this size or more


def classify_channels(capture: Capture, layout: Layout | None) -> tuple[ChannelClass, ...]:
    """The class of every channel of the capture."""
    return tuple(_classed(capture, place, layout) for place in range(len(capture.channels)))


def _classed(capture: Capture, place: int, layout: Layout | None) -> ChannelClass:
    channel = capture.channels[place]
    if channel.library:
        found = CommClass.TP if channel.library == "userbuffers" else CommClass.EP
        return ChannelClass(comm=found, evidence=f"kernels of {channel.library}")
    if channel.group in CLASS_OF_ENGINE_GROUP:
        return ChannelClass(
            comm=CLASS_OF_ENGINE_GROUP[channel.group],
            evidence=f"the engine's {channel.group} group",
        )
    by_layout = _by_layout(capture, channel, layout) if layout is not None else None
    if by_layout is not None:
        return by_layout
    for pattern, found in _DESCRIBED:
        if channel.description and re.search(pattern, channel.description, re.IGNORECASE):
            return ChannelClass(comm=found, evidence=f'group "{channel.description}"')
    return _guessed(capture, place)


def _by_layout(capture: Capture, channel: CommChannel, layout: Layout) -> ChannelClass | None:
    """By the ranks of its group, where the trace tells them and the world is the layout's."""
    ranks = tuple(sorted(channel.ranks))
    if len(ranks) < 2 or not 0 <= capture.rank < layout.world_size or capture.rank not in ranks:
        return None
    for group, found in _GROUPS.get(channel.op, _REDUCING):
        if tuple(sorted(group_ranks(layout, group, capture.rank))) == ranks:
            return ChannelClass(comm=found, evidence=f"ranks of the layout's {group} group")
    return None


def _guessed(capture: Capture, place: int) -> ChannelClass:
    channel, kernels = capture.channels[place], capture.kernels
    mine = kernels.channel_index == place
    if channel.op is Collective.ALL_TO_ALL:
        return ChannelClass(
            comm=CommClass.EP, evidence="all-to-all (guessed: no group description)"
        )
    if channel.op is Collective.P2P:
        wide = channel.size > 2
        return ChannelClass(
            comm=CommClass.CP if wide else CommClass.PP,
            evidence="sends and receives (guessed by group size)",
        )
    if channel.op is None:
        routed = any(_ROUTED.search(name) for name in kernels.names)
        return ChannelClass(
            comm=CommClass.EP if routed else CommClass.PP,
            evidence=f"sends and receives beside {'expert' if routed else 'no expert'} kernels (guessed)",
        )
    if channel.op is Collective.BROADCAST:
        return ChannelClass(comm=CommClass.OTHER, evidence="broadcast")
    sizes = kernels.payload_bytes[mine & (kernels.payload_bytes > 0)]
    ranks = channel.ranks
    near = len(ranks) > 1 and ranks[-1] - ranks[0] == len(ranks) - 1 and len(ranks) <= _DOMAIN
    if len(sizes):
        typical = float(np.median(sizes))
        if typical < MIB / 16:
            return ChannelClass(comm=CommClass.OTHER, evidence="small control messages (guessed)")
        if not near and len(ranks) > 1:
            return ChannelClass(
                comm=CommClass.DP, evidence="ranks that are not neighbours (guessed)"
            )
        found = (
            CommClass.DP
            if typical >= _BUCKET_BYTES and len(sizes) <= 64 * max(1, len(capture.steps))
            else CommClass.TP
        )
        return ChannelClass(comm=found, evidence=f"messages of {typical / MIB:.3g} MiB (guessed)")
    in_fp32 = re.search(r"_f32|float\b", channel.kernel, re.IGNORECASE)
    calls = int(mine.sum()) / max(1, len(capture.steps))
    if in_fp32 or calls < 16:
        return ChannelClass(
            comm=CommClass.DP, evidence="fp32 or few calls (guessed: sizes were not recorded)"
        )
    return ChannelClass(
        comm=CommClass.TP, evidence="many calls in low precision (guessed: sizes were not recorded)"
    )
