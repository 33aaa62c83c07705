"""What the cells of a table of measured runs say, as nouns: precision, optimizer, recompute,
graphs, offload, stages.

An empty cell is a fact the source does not state; readers here take the default and the caller
lists the column.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from moewright.intake import catalogue
from moewright.rules import stages
from moewright.spec.errors import BadInput, Reason
from moewright.spec.hardware import Device, Hardware
from moewright.spec.layout import (
    CudaGraphScope,
    DispatcherKind,
    Layout,
    Offload,
    Overlap,
    Recompute,
)
from moewright.spec.model import ModelSpec
from moewright.spec.sourced import Sourced, SourceKind
from moewright.spec.units import GIB, TERA
from moewright.spec.workload import Dtype, OptimizerSpec

# Names of parts that are not in the catalogue, and the part whose compute and wiring they share.
_ALSO_CALLED = (("Hopper 80GB", "H100"),)
_OVERLAPS = (
    ("overlap_grad_reduce", Overlap.GRAD),
    ("overlap_param_gather", Overlap.PARAM),
    ("tp_comm_overlap", Overlap.TP),
    ("overlap_moe_ep_comm", Overlap.EP),
)
OVERLAP_COLUMNS = tuple(column for column, _ in _OVERLAPS)


def cell_error(column: str, value: str, rule: str) -> BadInput:
    """A cell that cannot be read, as what a caller raises."""
    return BadInput(Reason(field=column, value=value[:60], rule=rule))


def parse_number(column: str, text: str) -> float:
    """A finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise cell_error(column, text, "must be a number above 0")
    return value


def parse_whole_number(column: str, text: str) -> int:
    value = parse_number(column, text)
    if value != int(value):
        raise cell_error(column, text, "must be a whole number")
    return int(value)


def parse_hardware(text: str, count: int, user_hardware: Sequence[Hardware] = ()) -> Hardware:
    """`count` parts of that name, one of the user's `own` or the catalogue's.

    "H100 (96 GB HBM2e, 2.4 TB/s)" is the catalogue's part with this memory.
    """
    for part in user_hardware:
        if text.strip().casefold() in (part.name.casefold(), part.device.name.casefold()):
            return replace(part, count=count)
    base, _, inside = text.partition("(")
    name = dict(_ALSO_CALLED).get(base.strip(), base.strip())
    found = catalogue.hardware(f"{count}x{name}")
    size = re.search(r"([\d.]+) GB\b", inside)
    rate = re.search(r"([\d.]+) TB/s", inside)
    device: Device = found.device
    if size:
        # Like the catalogue: the runtime shows 0.99 of the printed figure read as GiB.
        said = Sourced(value=0.99 * float(size[1]) * GIB, kind=SourceKind.DATASHEET, source=text)
        device = replace(device, memory_bytes=said)
    if rate:
        said = Sourced(value=float(rate[1]) * TERA, kind=SourceKind.DATASHEET, source=text)
        device = replace(device, memory_Bps=said)
    return replace(found, name=text, device=device) if inside else found


def parse_precision(text: str) -> Dtype:
    """8-bit recipes are FP8 with a scale a tensor, or MXFP8 with one a block (block-wise, MX);
    4-bit ones NVFP4 alone.

    Raises BadInput for others, for layers of several precisions, and for silence.
    """
    folded = text.casefold()
    if not folded:
        raise cell_error("precision", text, "is not stated")
    if folded == Dtype.NVFP4:
        return Dtype.NVFP4
    if "fp4" in folded:
        raise cell_error(
            "precision", text, "of 4-bit compute, all layers in nvfp4 have measured rates here"
        )
    if "fp8" in folded:
        return Dtype.MXFP8 if "mxfp8" in folded or "block" in folded else Dtype.FP8
    for dtype in (Dtype.BF16, Dtype.FP16, Dtype.FP32):
        if folded.startswith(dtype.value):
            return dtype
    raise cell_error("precision", text, "is no known precision")


def parse_optimizer(text: str) -> tuple[OptimizerSpec, Dtype]:
    """Moment dtype and gradient dtype; "precision-aware" alone is 16-bit moments under fp32
    gradients.

    Muon keeps one fp32 momentum: as many bytes as Adam's two in 16 bits. Its orthogonalisation is
    not priced.
    """
    folded = text.casefold()
    if folded and "adam" not in folded and folded != "muon":
        raise cell_error("optimizer", text, "only Adam and Muon are modelled")
    moments = Dtype.FP32
    halves = "precision-aware" in folded or "bf16 moments" in folded or folded == "muon"
    if halves and "fp32 states" not in folded:
        moments = Dtype.BF16
    grads = Dtype.BF16 if re.search(r"bf16 (main )?grads", folded) else Dtype.FP32
    return OptimizerSpec(moment_dtype=moments), grads


def parse_recompute(granularity: str, modules: str) -> tuple[Recompute, ...]:
    """Megatron's two columns; selective without a list is its default, core_attn. Raises BadInput
    for other tools' own policies."""
    folded = granularity.casefold()
    if folded in ("", "none"):
        return ()
    if folded == "full":
        return (
            (Recompute.FULL, Recompute.LOSS)
            if Recompute.LOSS in modules.split()
            else (Recompute.FULL,)
        )
    if modules == "(empty list)":
        return ()
    words = re.sub(r"\([^)]*\)", "", modules).replace(",", " ").split()
    found: set[Recompute] = set()
    for word in words or ["core_attn"]:
        known = next((one for one in Recompute if one.value == word), None)
        if known is None:
            raise cell_error(
                "recompute_modules", modules, "is no policy of modules that is modelled"
            )
        found.add(known)
    return tuple(sorted(found))


def parse_recompute_layers(granularity: str, modules: str, method: str) -> int | None:
    """Layers that full recompute takes by a method of Megatron's, "full block 5" or "uniform, 2
    layers"."""
    match = re.search(rf"\b{method}\D*(\d+)", modules) if granularity.casefold() == "full" else None
    return int(match[1]) if match else None


def parse_offload_fraction(text: str) -> float:
    """Share of the optimizer on the host, where it is: all of it unless a percentage stands
    beside."""
    part = re.search(r"optimizer[^;]*?([\d.]+) ?%", text)
    return parse_number("offload", part[1]) / 100 if part else 1.0


def parse_dispatcher(text: str) -> DispatcherKind:
    """Megatron's plain all-to-all when the cell is empty."""
    if text and text not in tuple(DispatcherKind):
        raise cell_error("dispatcher", text, f"must be one of {', '.join(DispatcherKind)}")
    return DispatcherKind(text) if text else DispatcherKind.ALL_TO_ALL


def parse_graphs(text: str) -> tuple[CudaGraphScope, ...]:
    """Scope of CUDA graphs; a Transformer Engine graph of the whole layer captures what such graphs
    can."""
    _, _, scope = text.partition(":")
    if "iteration" in scope:
        return (CudaGraphScope.FULL,)
    if "whole layer" in scope:
        return tuple(
            sorted({CudaGraphScope.ATTN, CudaGraphScope.MOE_ROUTER, CudaGraphScope.MOE_PREPROCESS})
        )
    words = scope.split()
    return tuple(sorted(one for one in CudaGraphScope if one.value in words))


def parse_offload(text: str) -> tuple[Offload, ...]:
    """What lives on the host. Raises BadInput where only a part does, or the source does not say
    what."""
    if text in ("", "none") or text.startswith("paged stash"):
        return ()
    found: set[Offload] = set()
    for piece in text.split(";"):
        if "optimizer" in piece:
            found.add(Offload.OPTIMIZER)
        elif "fused_group_mlp" in piece:
            found |= {Offload.EXPERT_FC1, Offload.MOE_ACT}
        else:
            words = [one for one in Offload if one.value in piece.replace(":", " ").split()]
            if not words:
                raise cell_error(
                    "offload", text, "the offloaded modules are not stated or not modelled"
                )
            found.update(words)
    return tuple(sorted(found))


def parse_overlaps(cells: Mapping[str, str]) -> tuple[Overlap, ...]:
    """The overlaps that are on. A recipe may ask for the gather alone; it needs the buckets of the
    reduction."""
    found = {overlap for column, overlap in _OVERLAPS if cells[column] == "true"}
    return tuple(sorted(found if Overlap.GRAD in found else found - {Overlap.PARAM}))


def parse_stage_text(text: str, model: ModelSpec, pp: int) -> str:
    """A layout string; "uneven: first 2, last 2 layers" is spelt out, the other stages sharing what
    is left evenly.

    "" when the source has none or does not print it.
    """
    if not text.startswith("uneven"):
        return "" if text.startswith("custom") else text
    ends = {
        which: int(count) for which, count in re.findall(r"(first|last) (?:stage )?(\d+)", text)
    }
    middle = pp - len(ends)
    each, rest = divmod(model.layers - sum(ends.values()), middle)
    if rest:
        raise cell_error(
            "pp_layout", text, f"leaves {each * middle + rest} layers for {middle} equal stages"
        )
    counts = [ends.get("first", each), *[each] * (pp - 2), ends.get("last", each)]
    body = "|".join(f"t*{count}" for count in counts)
    return f"E{body}{'m' * model.mtp_layers}L"


def spread_layers(model: ModelSpec, layout: Layout) -> Layout:
    """The layout with the layers spread over its stages where no even split exists and the source
    gives none."""
    if layout.stages or not stages.check_stages(model, layout):
        return layout
    text = stages.even_layout_string(
        model.layers, mtp=model.mtp_layers, stages=layout.pp * layout.vpp
    )
    return replace(layout, stages=text)
