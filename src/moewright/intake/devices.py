"""The known devices as Hardware: datasheet figures, measured and first-order rates, constants."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import TypeVar

from moewright.codec import from_data, parse_json
from moewright.intake.networks import (
    check_networks,
    check_new_names,
    complete_fabric,
    read_added_files,
)
from moewright.spec.hardware import (
    Constant,
    Curve,
    Device,
    DeviceKind,
    DtypePeak,
    Fabric,
    Hardware,
    NetworkKind,
    Op,
    OpRate,
)
from moewright.spec.units import GIB, Sourced, SourceKind, mention
from moewright.spec.workload import Dtype

# A rate that approaches its maximum as x / (x + half) is given at these points.
_ATTENTION_SEQ = tuple(2.0**n for n in range(8, 21))
_EXPERT_ROWS = tuple(2.0**n for n in range(17))

_EXPERT_HALF_ROWS = 60  # docs/findings.md: 0 to 200 fit the published rows alike
# The sequence lengths that the attention tables cover; the fitted curve goes on beyond them.
_ATTENTION_MEASURED = (512.0, 16384.0)
_MEMORY_SHARE = 0.8
_BACKWARD_SHARE = 2 * 0.79 / 2.5
_OPTIMIZER_BYTES = 60
_DOMAIN_LATENCY_S = 1e-5
_NETWORK_LATENCY_S = 2e-5

# Words that drivers and vendors add to the name of a chip: its form factor and its memory type.
_FORM_WORDS = frozenset(
    (
        *(
            "NVIDIA",
            "GPU",
            "GPUS",
            "HGX",
            "DGX",
            "NVL72",
            "AC",
            "TENSOR",
            "CORE",
            "GRACE",
            "HOPPER",
        ),
        *("AMD", "INSTINCT", "OAM", "VF", "GOOGLE", "CLOUD", "TPU", "HUAWEI", "ASCEND", "NPU"),
        *("GEFORCE", "BLACKWELL", "SERVER", "WORKSTATION", "EDITION", "GENERATION"),
        *("SXM", "SXM4", "SXM5", "SXM6", "HBM2", "HBM2E", "HBM3", "HBM3E"),
    )
)
_VENDOR = re.compile(r"^(nvidia|amd|google|huawei) +")
_MEMORY_WORD = re.compile(r"([0-9]+)GB?")
# 180 and 192 GB name one device, usable and physical; 80 and 96 GB are two.
_MEMORY_TOLERANCE = 0.1

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class PeakEntry:
    """The peak rate of a number type, and what large GEMMs reach of it."""

    dtype: Dtype
    flops: float  # dense, per second
    gemm_share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionEntry:
    """The forward rate of flash attention at sequence length s: most_flops * s / (s + half_seq)."""

    most_flops: float
    half_seq: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ConstantEntry:
    """A constant of the cost model with a value for this device."""

    name: str
    value: float
    kind: SourceKind
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceEntry:
    """A device as hardware.json has it; the first alias is the short name."""

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
    domain: str = NetworkKind.NVLINK
    network: str = NetworkKind.IB
    kind: DeviceKind = DeviceKind.CUDA
    words: tuple[str, ...] = ()  # words of its name that set it apart from others of its chip

    @property
    def product(self) -> str:
        """The name of the chip: A100 of both A100-40GB and A100, 4090 of RTX 4090."""
        parts = re.split(r"[- ]", self.aliases[0].upper())
        return next((part for part in parts if part not in self.words), parts[0])

    @property
    def cited_source(self) -> str:
        return self.source + mention("; {}", self.notes)


@dataclass(frozen=True, kw_only=True, slots=True)
class _KernelEntry:
    """A curve of measured kernels in kernels.json, and the names of the devices it holds for."""

    parts: tuple[str, ...]
    op: Op
    dtype: Dtype
    kind: SourceKind
    source: str
    points: tuple[tuple[float, float], ...]

    @property
    def curve(self) -> Curve:
        return Curve(points=self.points, kind=self.kind, source=self.source)


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


@dataclass(frozen=True, kw_only=True, slots=True)
class _AddedDevices:
    """The hardware.json of a package: what the devices share is the catalogue's."""

    parts: tuple[DeviceEntry, ...]


@cache
def read_devices() -> tuple[DeviceEntry, ...]:
    """Return every known device, in the order of the file, and then those of installed packages.

    Raises:
        BadInput: the file of a package is at fault.
    """
    devices = _read_device_table().parts
    for where, text in read_added_files("hardware.json"):
        added = from_data(_AddedDevices, parse_json(text, where=where), where=where).parts
        own_names = [name for device in devices for name in (device.name, *device.aliases)]
        names = [name for device in added for name in (device.name, *device.aliases)]
        check_new_names(names, own_names, where=where)
        for device in added:
            check_networks((device.domain, device.network), where=f"{where}: {device.name}")
        devices = (*devices, *added)
    return devices


def device_names() -> tuple[str, ...]:
    """Return the short name of every known device, in the order of the file."""
    return tuple(device.aliases[0] for device in read_devices())


def find_device(name: str) -> DeviceEntry | None:
    """Return the device of a name as people or drivers write it; None if it is not known.

    Letter case does not matter. "H100", "A100-40GB", "H100-SXM5-80GB", "NVIDIA A100-SXM4-40GB" and
    "NVIDIA H100 80GB HBM3", "AMD Instinct MI300X" and "NVIDIA GeForce RTX 4090" are known. A form
    factor or a memory size that the catalogue does not have is not known: "A100 PCIe".
    """
    folded = name.strip().casefold()
    for spelling in (folded, _VENDOR.sub("", folded)):
        for device in read_devices():
            if spelling in (device.name.casefold(), *map(str.casefold, device.aliases)):
                return device
    words = _split_words(name)
    candidates = [
        device
        for device in read_devices()
        if device.product in words
        and words.issuperset(device.words)
        and not _sets_apart(device, words.difference(device.words, {device.product}))
    ]
    most_words = max((len(device.words) for device in candidates), default=0)
    candidates = [device for device in candidates if len(device.words) == most_words]
    plain = (device for device in candidates if device.aliases[0].upper() == device.product)
    return next(plain, next(iter(candidates), None))


def find_by_driver_name(name: str) -> DeviceEntry | None:
    """Return the device whose chip the driver's name contains, whatever else it contains.

    Such names are "NVIDIA H100 80GB HBM3", "NVIDIA GB200" and "A100-SXM4-80GB".
    """
    words = _split_words(name)
    same_chip = [device for device in read_devices() if device.product in words]
    small = [device for device in same_chip if "40GB" in device.name]
    if "40GB" in words:
        return next(iter(small), None)
    return next((device for device in same_chip if device not in small), None)


def build_hardware(entry: DeviceEntry, *, count: int) -> Hardware:
    """Build the hardware of `count` devices.

    Its memory is what the runtime shows, which is less than what the vendor prints.
    """
    shared = _read_device_table()
    memory = shared.usable_share * entry.memory_gb * GIB
    device = Device(
        name=entry.name,
        kind=entry.kind,
        memory_bytes=Sourced(value=memory, kind=SourceKind.ASSUMED, source=shared.usable_source),
        memory_Bps=_datasheet(entry, entry.memory_Bps),
        peaks=tuple(
            DtypePeak(dtype=dtype, rate=_datasheet(entry, peak.flops))
            for dtype, peak in _peaks_by_dtype(entry)
        ),
        rates=tuple(_op_rates(entry, shared.rates_source)),
    )
    constants = tuple(
        Constant(name=c.name, value=Sourced(value=c.value, kind=c.kind, source=c.source))
        for c in entry.constants
    )
    return complete_fabric(
        Hardware(
            name=entry.aliases[0],
            count=count,
            device=device,
            fabric=_build_fabric(entry),
            constants=constants,
        )
    )


def find_memory_gb(hardware: Hardware) -> float:
    """Return the memory of a device as its vendor prints it, which is more than what is usable."""
    return round(hardware.device.memory_bytes.value / (_read_device_table().usable_share * GIB), 1)


def give_memory(hardware: Hardware, memory_gb: float) -> Hardware:
    """Return hardware whose devices have another memory, by the vendor's number, and its name."""
    value = _read_device_table().usable_share * memory_gb * GIB
    memory = Sourced(value=value, kind=SourceKind.ASSUMED, source=f"stated: {memory_gb:g} GB")
    name = f"{hardware.device.name} with {memory_gb:g}GB"
    return replace(hardware, device=replace(hardware.device, name=name, memory_bytes=memory))


def _split_words(name: str) -> frozenset[str]:
    joined = re.sub(r"([0-9]) +(GB?)\b", r"\1\2", name.upper())  # 80 GB
    return frozenset(word for word in re.split(r"[^A-Z0-9]+", joined) if word)


def _sets_apart(device: DeviceEntry, words: Iterable[str]) -> bool:
    """Whether one of the words beside the chip's name says that it is another device."""
    for word in words:
        memory = _MEMORY_WORD.fullmatch(word)
        if memory is None:
            if word not in _FORM_WORDS:
                return True
        elif abs(int(memory[1]) - device.memory_gb) > _MEMORY_TOLERANCE * device.memory_gb:
            return True
    return False


def _build_fabric(entry: DeviceEntry) -> Fabric:
    return Fabric(
        domain_size=entry.domain_size,
        devices_per_node=entry.devices_per_node,
        domain_Bps=_datasheet(entry, entry.domain_Bps),
        network_Bps=Sourced(
            value=entry.network_Bps, kind=entry.network_kind, source=entry.cited_source
        ),
        domain_latency_s=_assumed(
            _DOMAIN_LATENCY_S, "launch and hand-shake of a collective inside a domain"
        ),
        network_latency_s=_assumed(
            _NETWORK_LATENCY_S, "launch and hand-shake of a collective over the network"
        ),
        domain=entry.domain,
        network=entry.network,
    )


def _peaks_by_dtype(entry: DeviceEntry) -> Iterator[tuple[Dtype, PeakEntry]]:
    """Yield every type's peak; fp16 runs on the same units as bf16, at the same rate."""
    for peak in entry.peaks:
        yield peak.dtype, peak
        if peak.dtype is Dtype.BF16:
            yield Dtype.FP16, peak


def _op_rates(entry: DeviceEntry, source: str) -> Iterator[OpRate]:
    """Yield measured kernels where the tables have them, else shares of peak and bandwidth."""
    kernels = {
        (kernel.op, kernel.dtype): kernel
        for kernel in _read_kernel_table().curves
        if entry.name in kernel.parts
    }
    shared_curves = tuple(_curves_of_any_dtype(entry, source))
    for dtype, peak in _computed_dtypes(entry, has_block_scales=(Op.GEMM, Dtype.MXFP8) in kernels):
        for op, curve in (*_gemm_curves(entry, dtype, peak, kernels, source), *shared_curves):
            yield OpRate(op=op, dtype=dtype, curve=curve)


def _computed_dtypes(
    entry: DeviceEntry, *, has_block_scales: bool
) -> Iterator[tuple[Dtype, PeakEntry]]:
    """Yield the types that the device has kernels for.

    On Hopper, a GEMM with a scale a block is a kernel of its own on the 8-bit units.
    """
    peaks = dict(_peaks_by_dtype(entry))
    yield from peaks.items()
    narrow = peaks.get(Dtype.FP8)
    if has_block_scales and narrow is not None and Dtype.MXFP8 not in peaks:
        yield Dtype.MXFP8, narrow


def _gemm_curves(
    entry: DeviceEntry,
    dtype: Dtype,
    peak: PeakEntry,
    kernels: Mapping[tuple[Op, Dtype], _KernelEntry],
    source: str,
) -> Iterator[tuple[Op, Curve]]:
    """Yield the rates of plain and grouped GEMMs in one type."""
    table_dtype = Dtype.BF16 if dtype is Dtype.FP16 else dtype
    gemm_kernel = kernels.get((Op.GEMM, table_dtype))
    if gemm_kernel is None and dtype is Dtype.MXFP8:
        gemm_kernel = kernels.get((Op.GEMM, Dtype.FP8))
    if gemm_kernel is not None:
        gemm = gemm_kernel.curve
    else:
        gemm = Curve(
            points=((1.0, peak.flops * peak.gemm_share),),
            kind=entry.rates_kind,
            source=f"{peak.gemm_share:g} of peak; {source}",
        )
    yield Op.GEMM, gemm
    best = gemm.points[-1][1]
    points = tuple((rows, best / (1 + _EXPERT_HALF_ROWS / rows)) for rows in _EXPERT_ROWS)
    cited = f"best GEMM rate / (1 + {_EXPERT_HALF_ROWS} / rows); {gemm.source}"
    yield Op.GROUPED_GEMM, Curve(points=points, kind=SourceKind.FITTED, source=cited)


def _curves_of_any_dtype(entry: DeviceEntry, source: str) -> Iterator[tuple[Op, Curve]]:
    """Yield the rates that do not depend on the type; 8-bit recipes keep attention in bf16."""
    kind = entry.rates_kind
    most = entry.attention.most_flops
    half = entry.attention.half_seq
    forward = tuple((s, most * s / (s + half)) for s in _ATTENTION_SEQ)
    backward = tuple((s, y * _BACKWARD_SHARE) for s, y in forward)
    memory_Bps = _MEMORY_SHARE * entry.memory_Bps
    yield (
        Op.ATTENTION,
        Curve(
            points=forward,
            kind=kind,
            source=f"most * s / (s + {half:g}); {source}",
            measured=_ATTENTION_MEASURED,
        ),
    )
    yield (
        Op.ATTENTION_BACKWARD,
        Curve(
            points=backward,
            kind=kind,
            source=f"2.5 x the forward FLOPs at 0.79 of its rate; {source}",
            measured=_ATTENTION_MEASURED,
        ),
    )
    yield (
        Op.ELEMENTWISE,
        _flat_curve(memory_Bps, f"{_MEMORY_SHARE} of memory bandwidth; {source}", kind),
    )
    yield (
        Op.OPTIMIZER,
        _flat_curve(memory_Bps / _OPTIMIZER_BYTES, f"{_OPTIMIZER_BYTES} bytes a parameter", kind),
    )


def _flat_curve(rate: float, source: str, kind: SourceKind) -> Curve:
    return Curve(points=((1.0, rate),), kind=kind, source=source)


def _datasheet(entry: DeviceEntry, value: float) -> Sourced:
    return Sourced(value=value, kind=SourceKind.DATASHEET, source=entry.cited_source)


def _assumed(value: float, source: str) -> Sourced:
    return Sourced(value=value, kind=SourceKind.ASSUMED, source=source)


@cache
def _read_device_table() -> _DeviceTable:
    return _read_data_file(_DeviceTable, "hardware.json")


@cache
def _read_kernel_table() -> _KernelTable:
    return _read_data_file(_KernelTable, "kernels.json")


def _read_data_file(record: type[T], name: str) -> T:
    text = resources.files("moewright.intake").joinpath("data", name).read_text(encoding="utf-8")
    return from_data(record, parse_json(text, where=name), where=name)
