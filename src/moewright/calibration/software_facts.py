"""What published software does that a table of its runs does not print: dtypes of gradients and
moments, fused losses, how natural routing loads an expert rank, and bytes a device holds beyond the
model. Each fact with its source.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from moewright.spec.hardware import Constant
from moewright.spec.layout import Layout, Offload
from moewright.spec.model import AttentionKind, ModelSpec
from moewright.spec.sourced import Sourced, SourceKind
from moewright.spec.units import GB
from moewright.spec.workload import Dtype, Routing, Workload

# Natural routing: hottest rank over the mean is 1 + this / (experts on a rank), where no selection
# bias evens it out.
# From FP8-Flow peaks, selective less full recompute: 1.14, 1.38, 2.39 at 16, 8, 4 experts a rank
# and 1.38, 1.31, 1.58
# at 20, 10, 5; a model with selection bias shows 1.0.
_HEAT = 4.0
# Months since 2000: of the software that a stack's age counts from, and the age at which its host
# work stops growing.
_TODAY, _OLDEST, _MIDDLE_OF_YEAR = 12 * 26 + 6, 24, 6
_BRIDGE = "Megatron-Bridge"
_PAPER = "2603.07685"
_EXPERT_OFFLOAD = (Offload.EXPERT_FC1, Offload.MOE_ACT)
_RECIPES = "moe_recipes"
_RECIPE_LOSS = "Megatron-LM moe_recipes, ARGS: cross_entropy_fusion_impl te"
_RECIPE_WEIGHTS = "Megatron-LM moe_recipes, ARGS: fp8_param_gather, in their MXFP8 recipes"
_FP8_FLOW = "FP8-FLOW"
_FUSED_LOSS = "Megatron-Bridge recipes: cross_entropy_fusion_impl=te works in place on bf16 logits"
_FP8_WEIGHTS = "Megatron-Bridge mixed_precision.py: fp8_param_gather, so 8-bit weights stand for the 16-bit ones"
_FLOW_BYTES = (
    "median of measured less predicted whole-device peaks, FP8-Flow rows with full recompute"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SoftwareFacts:
    """A workload and layout with what their stack is known to do, the stack's constants, and the
    facts in words."""

    workload: Workload
    layout: Layout
    constants: tuple[Constant, ...]
    notes: tuple[str, ...]


def apply_software_facts(
    cells: Mapping[str, str], model: ModelSpec, workload: Workload, layout: Layout
) -> SoftwareFacts:
    """What is known of the row's software beyond its cells. A stated optimizer is not overruled."""
    constants = [
        _constant(
            "stack_age_years", release_age_years(cells["date_release"]), "date of its release"
        )
    ]
    notes: list[str] = []
    if _BRIDGE in cells["source"]:
        constants.append(_constant("logit_bytes", 2.0, _FUSED_LOSS))
        if "blockwise" not in cells["precision"]:
            # Blackwell multiplies tensor-scaled 8-bit weights in either order: no transposed copy.
            once = "current" in cells["precision"] and cells["hardware"].lstrip("G").startswith("B")
            constants.append(
                _constant("fp8_weight_copies_bytes", -1.0 if once else 0.0, _FP8_WEIGHTS)
            )
        if "grads fp32" not in cells["optimizer"]:
            workload = replace(workload, grad_dtype=Dtype.BF16)
            notes.append("bf16 gradients, as Megatron-Bridge's performance recipes reduce them")
        if not cells["optimizer"] and model.attention.kind is AttentionKind.MLA:
            workload = replace(
                workload, optimizer=replace(workload.optimizer, moment_dtype=Dtype.BF16)
            )
            notes.append("bf16 moments, as in Megatron-Bridge's recipes of MLA models")
    if _RECIPES in cells["source"]:
        constants.append(_constant("logit_bytes", 2.0, _RECIPE_LOSS))
        if "mxfp8" in cells["precision"]:
            constants.append(_constant("fp8_weight_copies_bytes", 0.0, _RECIPE_WEIGHTS))
    if _FP8_FLOW in cells["source"]:
        constants.append(_constant("stack_bytes", 7.6 * GB, _FLOW_BYTES))
    if (
        workload.routing is Routing.LEARNED
        and model.moe
        and layout.ep > 1
        and not model.moe.router.selection_bias
    ):
        load = min(1 + _HEAT * layout.ep / model.moe.experts, layout.ep)
        workload = replace(workload, load_factor=load)
        notes.append(f"natural routing: hottest rank taken at {load:.2f} x the mean")
    if (
        _PAPER in cells["source"]
        and not cells["offload"]
        and "Qwen3-235B" in model.name
        and layout.tp == 1
    ):
        layout = replace(layout, offload=_EXPERT_OFFLOAD)
        notes.append(
            "arXiv 2603.07685, table 5: without TP it fits by offloading activations alone; taken as experts'"
        )
    return SoftwareFacts(
        workload=workload, layout=layout, constants=tuple(constants), notes=tuple(notes)
    )


def release_age_years(released: str) -> float:
    """Years from a release ("26.04.01", "2025-11", "2025") to the software that the constants stand
    for, at most 2."""
    found = re.match(r"(?:20)?(\d\d)(?:[.-](\d\d))?", released)
    if not found:
        return 0.0
    months = 12 * int(found[1]) + (int(found[2]) - 1 if found[2] else _MIDDLE_OF_YEAR)
    return min(max(_TODAY - months, 0), _OLDEST) / 12


def _constant(name: str, value: float, source: str) -> Constant:
    return Constant(name=name, value=Sourced(value=value, kind=SourceKind.FITTED, source=source))
