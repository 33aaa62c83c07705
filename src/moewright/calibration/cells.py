"""Parsers of the cells of a table of measured runs: each returns the noun that a cell spells.

An empty cell is a fact that the source does not state: a parser takes the default, and the caller
lists the column as not stated. docs/tables.md has the words of each column.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from moewright.calibration.columns import OVERLAP_COLUMNS
from moewright.calibration.software_facts import find_device_name
from moewright.intake import catalogue
from moewright.intake.networks import apply_network
from moewright.rules.timetable import stages
from moewright.spec.errors import BadInput, Reason
from moewright.spec.hardware import Device, Fabric, Hardware
from moewright.spec.layout import (
    DEFAULT_LAYOUT,
    CapacityFill,
    CudaGraphScope,
    DispatcherKind,
    Layout,
    Offload,
    Overlap,
    Recompute,
)
from moewright.spec.model import ModelSpec
from moewright.spec.units import GB, GIB, TERA, Sourced, SourceKind
from moewright.spec.workload import Dtype, FineTuningSpec, OptimizerSpec, Task, TensorScaling

VPP_ON = "on"  # virtual stages, of a number that the source does not state
_USABLE_MEMORY = 0.99  # of the printed gigabytes read as GiB, which the runtime shows
_UNITS = {"GB": GB, "GiB": GIB, "MiB": GIB}
_MIB_PER_GIB = 1024
_BITS_PER_BYTE = 8


class PeakKind(StrEnum):
    """What a published peak counts, and on which rank."""

    ALLOCATED = "allocated"
    LAST_RANK = "last_rank"  # allocated, on the last pipeline stage
    RESERVED = "reserved"
    DEVICE = "device"


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredPeak:
    """A measured peak as printed, in units of `unit_bytes` (GB or GiB)."""

    value: float
    unit_bytes: int
    kind: PeakKind


def cell_error(column: str, value: str, rule: str) -> BadInput:
    """Return the error of a cell that cannot be read, for the caller to raise."""
    return BadInput(Reason(field=column, value=value[:60], rule=rule))


def parse_number(column: str, text: str) -> float:
    """Parse a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise cell_error(column, text, "must be a number above 0")
    return value


def parse_whole_number(column: str, text: str) -> int:
    """Parse a whole number above 0."""
    value = parse_number(column, text)
    if value != int(value):
        raise cell_error(column, text, "must be a whole number")
    return int(value)


def parse_hardware(
    text: str, count: int, user_hardware: Sequence[Hardware] = (), *, network: str = ""
) -> Hardware:
    """Return `count` devices of that name: the user's own, or the catalogue's.

    "H100 (96 GB HBM2e, 2.4 TB/s)" is the catalogue's device with this memory, "A100 (4 x 100 Gb/s a
    node)" with this bandwidth of a node to others. `network` names kinds of network in place of the
    device's own.
    """
    for hardware in user_hardware:
        names = (hardware.name.casefold(), hardware.device.name.casefold())
        if text.strip().casefold() in names:
            return apply_network(replace(hardware, count=count), network)
    name, _, inside = text.partition("(")
    alias = find_device_name(name.strip())
    device_name = alias.device if alias else name.strip()
    hardware = catalogue.hardware(f"{count}x{device_name}", network)
    if not inside:
        return hardware
    device = _with_memory(hardware.device, inside, source=text)
    fabric = _with_node_rate(hardware.fabric, inside, source=text)
    return replace(hardware, name=text, device=device, fabric=fabric)


def bound_domain(hardware: Hardware, text: str) -> Hardware:
    """Return hardware whose fast domains have no more devices than a row states; "" leaves them.

    Sites build nodes of four of what a catalogue has eight in a node of.
    """
    if not text:
        return hardware
    fabric = hardware.fabric
    size = min(fabric.domain_size, parse_whole_number("nvlink_domain", text))
    return replace(hardware, fabric=replace(fabric, domain_size=size))


def _with_memory(device: Device, text: str, *, source: str) -> Device:
    """Return the device with the memory and the memory bandwidth that the text prints."""
    size = re.search(r"([\d.]+) GB\b", text)
    rate = re.search(r"([\d.]+) TB/s", text)
    if size:
        memory_bytes = _USABLE_MEMORY * float(size[1]) * GIB
        device = replace(device, memory_bytes=_printed(memory_bytes, source))
    if rate:
        device = replace(device, memory_Bps=_printed(float(rate[1]) * TERA, source))
    return device


def _with_node_rate(fabric: Fabric, text: str, *, source: str) -> Fabric:
    """Return the fabric with the rate to other nodes that the text prints, of one direction."""
    rate = re.search(r"(?:(\d+) x )?([\d.]+) Gb/s a node\b", text)
    if not rate:
        return fabric
    node_Bps = int(rate[1] or 1) * float(rate[2]) * GB / _BITS_PER_BYTE
    network_Bps = node_Bps / fabric.devices_per_node
    return replace(fabric, network_Bps=_printed(network_Bps, source))


def _printed(value: float, source: str) -> Sourced:
    return Sourced(value=value, kind=SourceKind.DATASHEET, source=source)


def parse_task(text: str) -> FineTuningSpec:
    """Parse what a run trains for; the update of reinforcement learning is a step of fine-tuning.

    Raises:
        BadInput: another task.
    """
    tasks = {"": Task.PRETRAIN, "rl-train": Task.SFT, **{task.value: task for task in Task}}
    if text not in tasks:
        raise cell_error("task", text, f"must be one of {', '.join(Task)}")
    return FineTuningSpec(task=tasks[text])


def parse_precision(text: str) -> Dtype:
    """Parse the compute precision of a run.

    8-bit recipes are FP8 with a scale a tensor or a block (parse_tensor_scaling), or MXFP8; 4-bit
    ones NVFP4 alone.

    Raises:
        BadInput: another precision, layers of several precisions, or an empty cell.
    """
    folded = text.casefold()
    if not folded:
        raise cell_error("precision", text, "is not stated")
    if folded == Dtype.NVFP4:
        return Dtype.NVFP4
    # Before FP8: a cell that names both is of layers of several precisions.
    if "fp4" in folded:
        raise cell_error(
            "precision", text, "of 4-bit compute, all layers in nvfp4 have measured rates here"
        )
    if "fp8" in folded:
        return Dtype.MXFP8 if "mxfp8" in folded else Dtype.FP8
    for dtype in (Dtype.BF16, Dtype.FP16, Dtype.FP32):
        if folded.startswith(dtype.value):
            return dtype
    raise cell_error("precision", text, "is no known precision")


def parse_tensor_scaling(text: str) -> TensorScaling:
    """Parse where FP8 takes its scales from: the tensor itself unless delayed or by blocks."""
    folded = text.casefold()
    if "block" in folded:
        return TensorScaling.BLOCKWISE
    return TensorScaling.DELAYED if "delayed" in folded else TensorScaling.CURRENT


def parse_capacity_fill(text: str, notes: str) -> CapacityFill:
    """Parse whether experts below capacity are padded to it, which a source may say in its notes.

    Raises:
        BadInput: the cell says neither.
    """
    if text:
        if text not in {*CapacityFill}:
            rule = f"must be {' or '.join(CapacityFill)}"
            raise cell_error("capacity_fill", text, rule)
        return CapacityFill(text)
    return CapacityFill.PADDED if "padding to capacity" in notes else CapacityFill.USED


def parse_optimizer(text: str) -> tuple[OptimizerSpec, Dtype]:
    """Parse the optimizer, whose moments have a dtype, and the dtype of the gradients.

    "precision-aware" alone means 16-bit moments under fp32 gradients. Muon and Lion keep one fp32
    momentum, as many bytes as Adam's two in 16 bits; Muon's orthogonalisation is not priced.
    """
    folded = text.casefold()
    has_one_moment = folded in ("muon", "lion")
    if folded and "adam" not in folded and not has_one_moment:
        raise cell_error("optimizer", text, "only Adam, Muon and Lion are modelled")
    has_small_moments = has_one_moment or "precision-aware" in folded or "bf16 moments" in folded
    moment_dtype = Dtype.FP32
    if has_small_moments and "fp32 states" not in folded:
        moment_dtype = Dtype.BF16
    grad_dtype = Dtype.BF16 if re.search(r"bf16 (main )?grads", folded) else Dtype.FP32
    return OptimizerSpec(moment_dtype=moment_dtype), grad_dtype


def parse_recompute(granularity: str, modules: str) -> tuple[Recompute, ...]:
    """Parse Megatron's two columns; selective without a list is its default, core_attn.

    Raises:
        BadInput: a policy of another tool.
    """
    folded = granularity.casefold()
    if folded in ("", "none"):
        return ()
    if folded == "full":
        has_loss = Recompute.LOSS in modules.split()
        return (Recompute.FULL, Recompute.LOSS) if has_loss else (Recompute.FULL,)
    if modules == "(empty list)":
        return ()
    words = re.sub(r"\([^)]*\)", "", modules).replace(",", " ").split()
    policies: set[Recompute] = set()
    for word in words or ["core_attn"]:
        if word not in tuple(Recompute):
            raise cell_error(
                "recompute_modules", modules, "is no policy of modules that is modelled"
            )
        policies.add(Recompute(word))
    return tuple(sorted(policies))


def parse_recompute_layers(granularity: str, modules: str, method: str) -> int | None:
    """Return the layers of full recompute by a method of Megatron's; None where it is another.

    "full block 5" is 5 layers by "block", "uniform, 2 layers" 2 by "uniform".
    """
    if granularity.casefold() != "full":
        return None
    match = re.search(rf"\b{method}\D*(\d+)", modules)
    return int(match[1]) if match else None


def parse_shard_ranks(text: str) -> int:
    """Return over how many ranks "hsdp 8" shards, which other ranks replicate; 0 is all of them."""
    match = re.search(r"\bhsdp (\d+)", text.casefold())
    return int(match[1]) if match else 0


def parse_offload_fraction(text: str) -> float:
    """Return the offloaded share of the optimizer: all of it unless the cell gives a percentage."""
    percent = re.search(r"optimizer[^;]*?([\d.]+) ?%", text)
    return parse_number("offload", percent[1]) / 100 if percent else 1.0


def parse_dispatcher(text: str) -> DispatcherKind:
    """Parse the token dispatcher; an empty cell is Megatron's plain all-to-all."""
    if text and text not in tuple(DispatcherKind):
        raise cell_error("dispatcher", text, f"must be one of {', '.join(DispatcherKind)}")
    return DispatcherKind(text) if text else DEFAULT_LAYOUT.dispatcher


def parse_graphs(text: str, *, has_experts: bool) -> tuple[CudaGraphScope, ...]:
    """Parse the scope of CUDA graphs, which stands behind a colon.

    A graph of the whole layer captures what such graphs can, of a layer without experts its
    attention: the launches of its MLP stay priced.
    """
    _, _, scope = text.partition(":")
    if "iteration" in scope:
        return (CudaGraphScope.FULL,)
    if "whole layer" in scope:
        whole_layer = {CudaGraphScope.ATTN}
        if has_experts:
            whole_layer |= {CudaGraphScope.MOE_ROUTER, CudaGraphScope.MOE_PREPROCESS}
        return tuple(sorted(whole_layer))
    words = scope.split()
    return tuple(sorted(graph for graph in CudaGraphScope if graph.value in words))


def offloads_whole_layers(text: str) -> bool:
    """Return whether the host holds all that some layers keep ("activations of 20 layers").

    No choice of a layout says so. The copies hide beside the layers, and what they save of memory
    is left open.
    """
    return text.startswith("activations of ")


def parse_offload(text: str) -> tuple[Offload, ...]:
    """Parse what lives in host memory.

    Raises:
        BadInput: only a part of something does, or the source does not state what.
    """
    if text in ("", "none") or text.startswith("paged stash") or offloads_whole_layers(text):
        return ()
    offloaded: set[Offload] = set()
    for part in text.split(";"):
        if "optimizer" in part:
            offloaded.add(Offload.OPTIMIZER)
            continue
        if "fused_group_mlp" in part:
            offloaded |= {Offload.EXPERT_FC1, Offload.MOE_ACT}
            continue
        words = part.replace(":", " ").split()
        modules = [module for module in Offload if module.value in words]
        if not modules:
            raise cell_error(
                "offload", text, "the offloaded modules are not stated or not modelled"
            )
        offloaded.update(modules)
    return tuple(sorted(offloaded))


def parse_overlaps(cells: Mapping[str, str]) -> tuple[Overlap, ...]:
    """Return the overlaps that are on.

    A recipe may ask for the overlap of the parameter gather alone; it needs the buckets of the
    gradient reduction and a sharded optimizer, and is off without them. Weight gradients are
    delayed under the overlap of experts' exchange alone; shared experts overlap only without it.
    """
    overlaps = {overlap for overlap, column in OVERLAP_COLUMNS.items() if cells[column] == "true"}
    if Overlap.GRAD not in overlaps or cells["zero1"] == "false":
        overlaps.discard(Overlap.PARAM)
    if Overlap.EP in overlaps:
        overlaps.discard(Overlap.SHARED)
    else:
        overlaps.discard(Overlap.WGRAD)
    return tuple(sorted(overlaps))


def parse_stage_text(text: str, model: ModelSpec, pp: int) -> str:
    """Return a layout string; "" when the source has none or does not print it.

    "uneven: first 2, last 2 layers" is spelt out, the other stages sharing what is left evenly.
    """
    if text.startswith("custom"):
        return ""
    if not text.startswith("uneven"):
        return text
    ends = {end: int(count) for end, count in re.findall(r"(first|last) (?:stage )?(\d+)", text)}
    middle_stages = pp - len(ends)
    middle_layers = model.layers - sum(ends.values())
    layers_per_stage, remainder = divmod(middle_layers, middle_stages)
    if remainder:
        rule = f"leaves {middle_layers} layers for {middle_stages} equal stages"
        raise cell_error("pp_layout", text, rule)
    first = ends.get("first", layers_per_stage)
    last = ends.get("last", layers_per_stage)
    # An end that the text does not name is one of the equal stages.
    counts = [first, *[layers_per_stage] * (pp - 2), last]
    body = "|".join(f"t*{count}" for count in counts)
    return f"E{body}{'m' * model.mtp_layers}L"


def spread_layers(model: ModelSpec, layout: Layout) -> Layout:
    """Spread the layers over the stages where no even split exists and the source gives none."""
    if layout.stages or not stages.check_stages(model, layout):
        return layout
    text = stages.even_layout_string(
        model.layers, mtp=model.mtp_layers, stages=layout.pp * layout.vpp
    )
    return replace(layout, stages=text)


def parse_peak(cells: Mapping[str, str]) -> MeasuredPeak | None:
    """Parse the measured peak; None where the row has none.

    Its unit and its kind are told by columns of their own, else by the words of
    `peak_memory_kind` before a parenthesis, else they are GB and allocated.
    """
    if not cells["peak_memory_gb"]:
        return None
    value = parse_number("peak_memory_gb", cells["peak_memory_gb"])
    words = re.findall(r"\w+", cells["peak_memory_kind"].partition("(")[0])
    unit = cells["peak_memory_unit"] or next((word for word in words if word in _UNITS), "GB")
    if unit not in _UNITS:
        raise cell_error("peak_memory_unit", unit, f"must be one of {', '.join(_UNITS)}")
    if unit == "MiB":
        # _UNITS has GiB for it.
        value /= _MIB_PER_GIB
    return MeasuredPeak(value=value, unit_bytes=_UNITS[unit], kind=_parse_peak_kind(cells, words))


def _parse_peak_kind(cells: Mapping[str, str], words: Sequence[str]) -> PeakKind:
    scope = cells["peak_memory_scope"]
    if scope and scope not in tuple(PeakKind):
        raise cell_error("peak_memory_scope", scope, f"must be one of {', '.join(PeakKind)}")
    if scope:
        return PeakKind(scope)
    # The narrower word first: what is allocated on the last rank is printed with both words.
    by_precedence = (PeakKind.LAST_RANK, PeakKind.DEVICE, PeakKind.ALLOCATED, PeakKind.RESERVED)
    return next((kind for kind in by_precedence if kind in words), PeakKind.ALLOCATED)
