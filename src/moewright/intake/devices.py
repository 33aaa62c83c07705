"""The devices of the catalogue as Hardware: datasheet figures, measured and first-order rates, own
constants."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources

from moewright.codec import from_data, parse_json
from moewright.spec.errors import BadInput, Reason
from moewright.spec.hardware import (
    Constant,
    Curve,
    Device,
    DeviceKind,
    DtypePeak,
    Fabric,
    Hardware,
    Op,
    OpRate,
)
from moewright.spec.sourced import Sourced, SourceKind
from moewright.spec.units import GIB
from moewright.spec.workload import Dtype

MAX_DEVICES = 1_000_000

# A rate that approaches its most as x / (x + half) is given by these points.
_ATTENTION_SEQ = tuple(2.0**n for n in range(8, 21))
_EXPERT_ROWS = tuple(2.0**n for n in range(17))

_EXPERT_HALF_ROWS = 60
# Where the attention tables reach; the fit goes on beyond.
_ATTENTION_MEASURED = (512.0, 16384.0)
_MEMORY_SHARE = 0.8
_BACKWARD_SHARE = 2 * 0.79 / 2.5
_OPTIMIZER_BYTES = 60
_DOMAIN_LATENCY_S = 1e-5
_NETWORK_LATENCY_S = 2e-5


@dataclass(frozen=True, kw_only=True, slots=True)
class PeakEntry:
    dtype: Dtype
    flops: float  # dense, per second
    gemm_share: float  # of the peak that large GEMMs reach


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionEntry:
    """Forward rate of flash attention at sequence length s: most_flops * s / (s + half_seq)."""

    most_flops: float
    half_seq: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ConstantEntry:
    name: str
    value: float
    kind: SourceKind
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceEntry:
    """One entry of hardware.json."""

    name: str
    aliases: tuple[str, ...]
    source: str
    notes: str
    memory_gb: float
    memory_Bps: float
    peaks: tuple[PeakEntry, ...]
    attention: AttentionEntry
    rates_kind: SourceKind
    domain_size: int
    devices_per_node: int
    domain_Bps: float
    network_Bps: float
    network_kind: SourceKind
    constants: tuple[ConstantEntry, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _KernelEntry:
    """One entry of kernels.json: a curve of measured kernels, and the parts that it holds for."""

    parts: tuple[str, ...]
    op: Op
    dtype: Dtype
    kind: SourceKind
    source: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _KernelTable:
    units: str
    curves: tuple[_KernelEntry, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _DeviceTable:
    units: str
    usable_share: float
    usable_source: str
    rates_source: str
    parts: tuple[DeviceEntry, ...]


def find_device(name: str) -> DeviceEntry | None:
    """The part of that name or alias, letter case aside."""
    folded = name.strip().casefold()
    for part in _load().parts:
        if folded in (part.name.casefold(), *(alias.casefold() for alias in part.aliases)):
            return part
    return None


def find_by_driver_name(device: str) -> DeviceEntry | None:
    """The part that a driver calls so: "NVIDIA H100 80GB HBM3", "NVIDIA GB200",
    "A100-SXM4-80GB"."""
    words = re.split(r"[^A-Z0-9]+", device.upper())
    ours = [part for part in _load().parts if part.aliases[0].partition("-")[0].upper() in words]
    small = [part for part in ours if "40GB" in part.name]
    return next(
        iter(small if "40GB" in words else [part for part in ours if part not in small]), None
    )


def device_names() -> tuple[str, ...]:
    """One short name a part, as in the file."""
    return tuple(part.aliases[0] for part in _load().parts)


def check_hardware(hardware: Hardware, *, where: str) -> None:
    """Refuse a hardware file whose numbers no estimate could stand on. Raises BadInput with one
    Reason a fault."""
    device, fabric = hardware.device, hardware.fabric
    positive = [
        ("device.memory_bytes", device.memory_bytes.value),
        ("device.memory_Bps", device.memory_Bps.value),
        ("fabric.domain_Bps", fabric.domain_Bps.value),
        ("fabric.network_Bps", fabric.network_Bps.value),
        ("fabric.domain_size", fabric.domain_size),
        ("fabric.devices_per_node", fabric.devices_per_node),
        *((f"device.peaks[{i}].rate", peak.rate.value) for i, peak in enumerate(device.peaks)),
        *((f"fabric.links[{i}].Bps", link.Bps.value) for i, link in enumerate(fabric.links)),
    ]
    faults = [
        Reason(field=f"{where}: {field}", value=f"{value:g}", rule="must be above 0", nearest="1")
        for field, value in positive
        if value <= 0
    ]
    if not 1 <= hardware.count <= MAX_DEVICES:
        close = str(min(max(hardware.count, 1), MAX_DEVICES))
        rule = f"must be in 1..{MAX_DEVICES}"
        faults.append(
            Reason(field=f"{where}: count", value=str(hardware.count), rule=rule, nearest=close)
        )
    curves = [
        *((f"device.rates[{i}].curve", rate.curve) for i, rate in enumerate(device.rates)),
        *((f"fabric.times[{i}].curve", time.curve) for i, time in enumerate(fabric.times)),
    ]
    for field, curve in curves:
        xs = [x for x, _ in curve.points]
        if not xs or min(y for _, y in curve.points) <= 0 or xs[0] <= 0 or sorted(set(xs)) != xs:
            rule = "must have points with x above 0 and ascending, and y above 0"
            faults.append(Reason(field=f"{where}: {field}", rule=rule))
    if faults:
        raise BadInput(*faults)


def build_hardware(entry: DeviceEntry, *, count: int) -> Hardware:
    """`count` devices of a part. Memory is what the runtime shows, not what the vendor prints."""
    shared = _load()
    memory = shared.usable_share * entry.memory_gb * GIB
    device = Device(
        name=entry.name,
        kind=DeviceKind.CUDA,
        memory_bytes=Sourced(value=memory, kind=SourceKind.ASSUMED, source=shared.usable_source),
        memory_Bps=_datasheet(entry, entry.memory_Bps),
        peaks=tuple(
            DtypePeak(dtype=dtype, rate=_datasheet(entry, peak.flops))
            for dtype, peak in _dtypes(entry)
        ),
        rates=tuple(_rates(entry, shared.rates_source)),
    )
    fabric = Fabric(
        domain_size=entry.domain_size,
        devices_per_node=entry.devices_per_node,
        domain_Bps=_datasheet(entry, entry.domain_Bps),
        network_Bps=Sourced(value=entry.network_Bps, kind=entry.network_kind, source=_cited(entry)),
        domain_latency_s=_assumed(
            _DOMAIN_LATENCY_S, "launch and hand-shake of a collective inside a domain"
        ),
        network_latency_s=_assumed(
            _NETWORK_LATENCY_S, "launch and hand-shake of a collective over the network"
        ),
    )
    constants = tuple(
        Constant(name=c.name, value=Sourced(value=c.value, kind=c.kind, source=c.source))
        for c in entry.constants
    )
    return Hardware(
        name=entry.aliases[0], count=count, device=device, fabric=fabric, constants=constants
    )


def _dtypes(part: DeviceEntry) -> Iterator[tuple[Dtype, PeakEntry]]:
    """fp16 runs on the same units as bf16 at the same rate."""
    for peak in part.peaks:
        yield peak.dtype, peak
        if peak.dtype is Dtype.BF16:
            yield Dtype.FP16, peak


def _rates(part: DeviceEntry, source: str) -> Iterator[OpRate]:
    """Measured kernels where the tables have them; what they lack from shares of peak and
    bandwidth."""
    memory_Bps, kind = _MEMORY_SHARE * part.memory_Bps, part.rates_kind
    most, half = part.attention.most_flops, part.attention.half_seq
    attention = tuple((s, most * s / (s + half)) for s in _ATTENTION_SEQ)
    backward = tuple((s, y * _BACKWARD_SHARE) for s, y in attention)
    kernels = {(one.op, one.dtype): one for one in _load_kernels().curves if part.name in one.parts}
    blocks = next(
        (
            peak
            for dtype, peak in _dtypes(part)
            if (Op.GEMM, Dtype.MXFP8) in kernels and dtype.is_narrow
        ),
        None,
    )
    for dtype, peak in (*_dtypes(part), *([(Dtype.MXFP8, blocks)] if blocks else [])):
        share = ((1.0, peak.flops * peak.gemm_share),)
        said = Curve(points=share, kind=kind, source=f"{peak.gemm_share:g} of peak; {source}")
        table = Dtype.BF16 if dtype is Dtype.FP16 else dtype
        gemm = _measured(kernels.get((Op.GEMM, table))) or said
        best = gemm.points[-1][1]
        rows = tuple((r, best / (1 + _EXPERT_HALF_ROWS / r)) for r in _EXPERT_ROWS)
        cited = f"best GEMM rate / (1 + {_EXPERT_HALF_ROWS} / rows); {gemm.source}"
        grouped = Curve(points=rows, kind=SourceKind.FITTED, source=cited)
        curves = (
            (Op.GEMM, gemm),
            (Op.GROUPED_GEMM, _measured(kernels.get((Op.GROUPED_GEMM, table))) or grouped),
            # 8-bit recipes keep attention in bf16.
            (Op.ATTENTION, _fitted(attention, f"most * s / (s + {half:g}); {source}", kind)),
            (
                Op.ATTENTION_BACKWARD,
                _fitted(backward, f"2.5 x the forward FLOPs at 0.79 of its rate; {source}", kind),
            ),
            (
                Op.ELEMENTWISE,
                _flat(memory_Bps, f"{_MEMORY_SHARE} of memory bandwidth; {source}", kind),
            ),
            (
                Op.OPTIMIZER,
                _flat(memory_Bps / _OPTIMIZER_BYTES, f"{_OPTIMIZER_BYTES} bytes a parameter", kind),
            ),
        )
        for op, curve in curves:
            yield OpRate(op=op, dtype=dtype, curve=curve)


def _measured(found: _KernelEntry | None) -> Curve | None:
    return Curve(points=found.points, kind=found.kind, source=found.source) if found else None


def _fitted(points: tuple[tuple[float, float], ...], source: str, kind: SourceKind) -> Curve:
    return Curve(points=points, kind=kind, source=source, measured=_ATTENTION_MEASURED)


def _flat(rate: float, source: str, kind: SourceKind) -> Curve:
    return Curve(points=((1.0, rate),), kind=kind, source=source)


def _datasheet(part: DeviceEntry, value: float) -> Sourced:
    return Sourced(value=value, kind=SourceKind.DATASHEET, source=_cited(part))


def _cited(part: DeviceEntry) -> str:
    return f"{part.source}; {part.notes}" if part.notes else part.source


def _assumed(value: float, source: str) -> Sourced:
    return Sourced(value=value, kind=SourceKind.ASSUMED, source=source)


def _load() -> _DeviceTable:
    text = (
        resources.files("moewright.intake")
        .joinpath("data/hardware.json")
        .read_text(encoding="utf-8")
    )
    return from_data(_DeviceTable, parse_json(text, where="hardware.json"), where="hardware.json")


def _load_kernels() -> _KernelTable:
    text = (
        resources.files("moewright.intake")
        .joinpath("data/kernels.json")
        .read_text(encoding="utf-8")
    )
    return from_data(_KernelTable, parse_json(text, where="kernels.json"), where="kernels.json")
