"""Finer splits of a traced step, by phase and layer, and how two steps differ in them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from moewright.diagnosis.bandwidth import link_share
from moewright.diagnosis.traces.breakdown import Breakdown, StepWindow, break_down_step, find_window
from moewright.diagnosis.traces.capture import Capture, CommChannel, KernelKind
from moewright.diagnosis.traces.comm_classes import CommClass, classify_channels
from moewright.diagnosis.traces.intervals import merge
from moewright.spec.hardware import Collective
from moewright.spec.layout import Layout

_MIN_SHARE = 0.001  # of the step: shorter phases are left out


class LayerPhase(StrEnum):
    """A part of a transformer layer with experts."""

    ATTENTION = "attention"
    ROUTER = "router"
    DISPATCH = "dispatch"
    EXPERTS = "experts"
    COMBINE = "combine"


# Names of kernels and of ranges of the host; earlier patterns win. Sources: Megatron-Core,
# TransformerEngine, DeepEP, HybridEP, torchtitan.
_PHASES: tuple[tuple[LayerPhase, re.Pattern[str]], ...] = (
    (LayerPhase.COMBINE, re.compile(r"combine|unpermut", re.IGNORECASE)),
    (
        LayerPhase.DISPATCH,
        re.compile(r"dispatch|permut|row_id_map|sort_chunks|::notify|cached_notify", re.IGNORECASE),
    ),
    (LayerPhase.ROUTER, re.compile(r"router|top_?k|gating", re.IGNORECASE)),
    (LayerPhase.EXPERTS, re.compile(r"expert(?!imental)|grouped_?(mm|gemm|linear)", re.IGNORECASE)),
    (
        LayerPhase.ATTENTION,
        re.compile(r"flash|fmha|sdpa|attention|attn|rotary|rope", re.IGNORECASE),
    ),
)
# A permutation of a tensor's axes is none of tokens.
_NO_PHASE = re.compile(r"aten::|at::native", re.IGNORECASE)
_LAYER = re.compile(r"(?:layers?|TransformerLayer|DecoderLayer|Block)[._ ](\d+)\b")


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseTime:
    """Seconds a step of a phase of the layers, the union of its kernels."""

    phase: LayerPhase
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerTime:
    """Seconds a step of the kernels that a layer's ranges launched."""

    layer: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveRate:
    """The bandwidth that the collectives of one group and kind achieved, waiting included.

    `bus_Bps` is the median over the calls, as nccl-tests count it; `best_Bps` that of the fastest
    tenth, which wait least.
    """

    comm: CommClass
    op: Collective
    size: int  # ranks
    calls: int
    payload_bytes: float  # median of what a rank hands in
    bus_Bps: float
    best_Bps: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StepDetails:
    """The finer splits of one rank's step; () where the trace does not tell them."""

    phases: tuple[PhaseTime, ...]
    layers: tuple[LayerTime, ...]
    collectives: tuple[CollectiveRate, ...]
    step_lengths_s: tuple[float, ...]  # of every marked step


def detail_step(capture: Capture, layout: Layout | None = None) -> StepDetails:
    """Return the finer splits of a capture's steps."""
    window = find_window(capture)
    return StepDetails(
        phases=tuple(_phase_times(capture, window)),
        layers=tuple(_layer_times(capture, window)),
        collectives=tuple(_collective_rates(capture, layout)),
        step_lengths_s=tuple(end - start for start, end in capture.steps),
    )


def _phase_times(capture: Capture, window: StepWindow) -> Iterator[PhaseTime]:
    kernels = capture.kernels
    phases = list(LayerPhase)
    phase_of_name = np.array([_find_phase(name) for name in kernels.names], dtype=np.int64)
    phase = phase_of_name[kernels.name_index]
    phase[kernels.has_kind(KernelKind.GROUPED_GEMM)] = phases.index(LayerPhase.EXPERTS)
    phase[kernels.has_kind(KernelKind.ATTENTION)] = phases.index(LayerPhase.ATTENTION)
    for number, inside in _inside_ranges(capture):
        phase[(phase < 0) & inside] = number
    step_s = window.mean_s(window.interval)
    for number, name in enumerate(phases):
        seconds = window.mean_s(kernels.intervals(phase == number))
        if seconds > _MIN_SHARE * step_s:
            yield PhaseTime(phase=name, seconds=seconds)


def _find_phase(name: str) -> int:
    """Return the number of the phase that a name tells; -1: none."""
    if _NO_PHASE.search(name):
        return -1
    matches = (phase for phase, pattern in _PHASES if pattern.search(name))
    phase = next(matches, None)
    return list(LayerPhase).index(phase) if phase is not None else -1


def _inside_ranges(capture: Capture) -> Iterator[tuple[int, NDArray[np.bool_]]]:
    """Yield each phase's number, with the mask of the kernels launched in its ranges."""
    ranges = capture.host_ranges
    if ranges is None:
        return
    phase_of_name = np.array([_find_phase(name) for name in ranges.names], dtype=np.int64)
    phase = phase_of_name[ranges.name_index]
    for number in range(len(LayerPhase)):
        spans = np.stack((ranges.start_s, ranges.end_s), axis=1)[phase == number]
        if len(spans):
            yield number, _launched_in(capture, merge(spans))


def _launched_in(capture: Capture, spans: NDArray[np.float64]) -> NDArray[np.bool_]:
    launched_s = capture.kernels.launched_s
    places = np.searchsorted(spans[:, 0], launched_s, side="right") - 1
    inside: NDArray[np.bool_] = (places >= 0) & (launched_s <= spans[np.maximum(places, 0), 1])
    return inside


def _layer_times(capture: Capture, window: StepWindow) -> Iterator[LayerTime]:
    ranges = capture.host_ranges
    if ranges is None:
        return
    matches = [_LAYER.search(name) for name in ranges.names]
    layer_of_name = np.array([int(match[1]) if match else -1 for match in matches], dtype=np.int64)
    layer = layer_of_name[ranges.name_index] if len(layer_of_name) else layer_of_name
    spans = np.stack((ranges.start_s, ranges.end_s), axis=1)
    for number in np.unique(layer[layer >= 0]).tolist():
        inside = _launched_in(capture, merge(spans[layer == number]))
        seconds = window.mean_s(capture.kernels.intervals(inside))
        yield LayerTime(layer=number, seconds=seconds)


def _collective_rates(capture: Capture, layout: Layout | None) -> Iterator[CollectiveRate]:
    kernels = capture.kernels
    classes = classify_channels(capture, layout)
    lengths_s = kernels.end_s - kernels.start_s
    for index, (channel, told) in enumerate(zip(capture.channels, classes, strict=True)):
        size = channel.size or len(channel.ranks)
        is_rated = (kernels.channel_index == index) & (kernels.payload_bytes > 0) & (lengths_s > 0)
        if channel.op is None or size < 2 or not is_rated.any():
            continue
        rates = _bus_bytes(channel, size, kernels.payload_bytes[is_rated]) / lengths_s[is_rated]
        yield CollectiveRate(
            comm=told.comm,
            op=channel.op,
            size=size,
            calls=int(is_rated.sum()),
            payload_bytes=float(np.median(kernels.payload_bytes[is_rated])),
            bus_Bps=float(np.median(rates)),
            best_Bps=float(np.quantile(rates, 0.9)),
        )


def _bus_bytes(
    channel: CommChannel, size: int, payload_bytes: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the bytes that each rank's link carries, of what a rank hands in."""
    op = channel.op or Collective.P2P
    gathered = size if op is Collective.ALL_GATHER else 1
    return payload_bytes * gathered * link_share(op, size)


def sum_kernels(capture: Capture) -> dict[str, float]:
    """Return the seconds a step of the kernels by name, inside the marked steps."""
    kernels = capture.kernels
    window = find_window(capture)
    return {
        name: window.mean_s(kernels.intervals(kernels.name_index == index))
        for index, name in enumerate(kernels.names)
    }


_SAME_S = 1e-7  # less is no change


class ChangeLevel(StrEnum):
    """How finely a step is split."""

    TIMER = "timer"  # of a log
    PART = "part"
    PHASE = "phase"
    LAYER = "layer"
    KERNEL = "kernel"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepChange:
    """Seconds a step of one item before and after, means over the ranks."""

    level: ChangeLevel
    name: str
    before_s: float
    after_s: float

    @property
    def change_s(self) -> float:
        """Return what it takes more; negative: less."""
        return self.after_s - self.before_s


def compare_traces(before: Sequence[Capture], after: Sequence[Capture]) -> tuple[StepChange, ...]:
    """Return what changed, the step first; within a level the largest change in front.

    Parts of the step sum to it; kernels and phases overlap.
    """
    both = (before, after)
    breakdowns = [[break_down_step(capture) for capture in captures] for captures in both]
    steps_s = [fmean(rank.step_s for rank in ranks) for ranks in breakdowns]
    step = StepChange(level=ChangeLevel.PART, name="step", before_s=steps_s[0], after_s=steps_s[1])
    parts = [_mean_seconds([dict(_parts(rank)) for rank in ranks]) for ranks in breakdowns]
    details = [[detail_step(capture) for capture in captures] for captures in both]
    phases = [_mean_seconds([_phases(rank) for rank in ranks]) for ranks in details]
    layers = [_mean_seconds([_layers(rank) for rank in ranks]) for ranks in details]
    kernels = [_mean_seconds([sum_kernels(capture) for capture in captures]) for captures in both]
    return (
        step,
        *list_changes(ChangeLevel.PART, parts),
        *list_changes(ChangeLevel.PHASE, phases),
        *list_changes(ChangeLevel.LAYER, layers),
        *list_changes(ChangeLevel.KERNEL, kernels),
    )


def _parts(rank: Breakdown) -> Iterator[tuple[str, float]]:
    yield "compute", rank.compute_s
    for time in rank.comm_times:
        yield f"exposed {time.comm}", time.exposed_s
    yield "copies not hidden", rank.copies_s
    for cause, seconds in rank.idle_times:
        yield f"idle: {cause}", seconds


def _phases(rank: StepDetails) -> dict[str, float]:
    return {str(row.phase): row.seconds for row in rank.phases}


def _layers(rank: StepDetails) -> dict[str, float]:
    return {f"layer {row.layer}": row.seconds for row in rank.layers}


def _mean_seconds(ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for rank in ranks for name in rank)
    return {name: fmean(rank.get(name, 0.0) for rank in ranks) for name in names}


def list_changes(level: ChangeLevel, both: Sequence[Mapping[str, float]]) -> list[StepChange]:
    """Return what changed between two tables of seconds, the largest change in front."""
    before, after = both
    changes = [
        StepChange(
            level=level, name=name, before_s=before.get(name, 0.0), after_s=after.get(name, 0.0)
        )
        for name in {**before, **after}
    ]
    changed = [change for change in changes if abs(change.change_s) > _SAME_S]
    return sorted(changed, key=lambda change: -abs(change.change_s))
