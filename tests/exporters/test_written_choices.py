"""No choice of a job is lost on the way to another trainer: an export says it, or refuses it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from enum import StrEnum
from typing import Any, get_args, get_type_hints

import pytest

import moewright as mw
from moewright.codec import format_layout, parse_layout
from moewright.exporters.bridge import render_bridge_recipe
from moewright.exporters.megatron.script import render_megatron_script
from moewright.exporters.torchtitan import render_torchtitan_config
from moewright.intake.megatron.options import option_table
from moewright.rules.job import plan_job
from moewright.rules.limits.legality import check_legality
from moewright.spec.choices import FieldKind, LayoutField
from moewright.spec.errors import BadInput
from moewright.spec.layout import LAYOUT_FIELDS, Layout, Overlap
from moewright.spec.plan import Plan
from moewright.spec.stage_string import StageString
from moewright.spec.workload import Dtype, LrDecay, MatrixUpdate, OptimizerSpec, TensorScaling

EXPORTS = {
    "megatron": render_megatron_script,
    "bridge": render_bridge_recipe,
    "torchtitan": render_torchtitan_config,
}
BASES = (
    "",
    "tp2,ep4,offload=optimizer+core_attn",
    "zero3,cp2,cp_comm=allgather,ep4",
    "zero3,tp2,ep4,recompute=full",
    "pp2,vpp2,ep4,recompute=full,zero3",
    "pp4,ep8,overlap=grad+ep,vpp2,capacity=1.5",
    "ep8,dispatcher=dedup",
    "pp2",
    "pp2,vpp2,offload=core_attn",
    "ep4,capacity=1.5",
)


# What a trainer overlaps whether a plan says so or not.
ALWAYS_OVERLAPPED = {
    "megatron": (Overlap.P2P,),
    "bridge": (Overlap.P2P,),
    "torchtitan": (Overlap.P2P, Overlap.GRAD, Overlap.PARAM),
}


def values(field: LayoutField) -> list[object]:
    """List values of a field, its default among them."""
    if field.kind is FieldKind.NUMBER:
        return [*(field.facts.levels or (0, 1, 2, 3, 4, 8))]
    if field.kind is FieldKind.FACTOR:
        return [0.25, 0.5, 1.25, 4.0]
    if field.kind is FieldKind.SWITCH:
        return [False, True]
    if field.kind is FieldKind.NAME:
        return [*field.names]
    if field.kind is FieldKind.SET:
        return [(), *((name,) for name in field.names), tuple(sorted(field.names)[:2])]
    return [StageString("Et*24|t*24L"), StageString("Et*23|t*25L")]


def orders(plan: Plan, layout: Layout, export: str) -> str:
    """Return what an export tells a trainer, without remarks; "" where it refuses the layout."""
    try:
        text = str(EXPORTS[export](replace(plan, layout=layout)))
    except BadInput:
        return ""
    return "\n".join(line for line in text.splitlines() if not line.startswith("#"))


def is_said(layout: Layout, base: Layout, export: str) -> bool:
    """Whether a layout asks for something else than another, in words that a trainer may know."""
    if layout.shard == layout.dp * layout.cp or layout.offload_chunks == layout.vpp:
        return False  # all of them, as 0 says too
    overlaps = set(layout.overlap) ^ set(base.overlap)
    if overlaps and overlaps <= set(ALWAYS_OVERLAPPED[export]):
        return False
    # A number behind a word says nothing where the word does not stand.
    return format_layout(layout) != format_layout(base)


@pytest.mark.parametrize("export", EXPORTS)
def test_an_export_says_every_choice_or_refuses_it(export: str) -> None:
    plan = mw.estimate("Qwen3-30B-A3B", "", on="16xH100", global_batch=64)
    # torchtitan balances by a bias alone.
    loss = replace(plan.workload.loss, aux_coeff=0.0)
    plan = replace(plan, workload=replace(plan.workload, loss=loss))
    lost = []
    tried = set()
    for text in BASES:
        base = parse_layout(text, world_size=16)
        said = orders(plan, base, export)
        for field in LAYOUT_FIELDS:
            for value in values(field):
                layout = replace(base, **{field.name: value})
                reasons = check_legality(plan_job(replace(plan, layout=layout)))
                if layout == base or reasons or not is_said(layout, base, export):
                    continue
                tried.add(field.name)
                if (words := orders(plan, layout, export)) and words == said:
                    lost.append(f"{text} with {field.name}={value}")
    assert not lost
    # Experts need sequence parallelism beside tp, and placement a measured load.
    assert {field.name for field in LAYOUT_FIELDS} - tried == {"sp", "expert_placement", "spare"}


# Workloads under which a field means something, beside the layout that has room for it.
WORKLOADS = (
    ("ep8,pp2", {}),
    ("ep8,zero3", {"precision": Dtype.FP8, "tensor_scaling": TensorScaling.DELAYED}),
    ("ep8,capacity=1.5", {"optimizer": OptimizerSpec(lr_decay=LrDecay.WSD)}),
    ("zero3,ep8", {"optimizer": OptimizerSpec(lr_decay=LrDecay.LINEAR)}),
    ("ep8,pp2", {"optimizer": OptimizerSpec(matrix_update=MatrixUpdate.MUON)}),
)


def list_other_values(record: Any, names: tuple[str, ...] = ()) -> Iterator[tuple[object, ...]]:
    """Yield the names that lead to each choice by name of a record, and another member."""
    hints = get_type_hints(type(record))
    for field in fields(record):
        value = getattr(record, field.name)
        if is_dataclass(value):
            yield from list_other_values(value, (*names, field.name))
        for kind in (hints[field.name], *get_args(hints[field.name])):
            if isinstance(kind, type) and issubclass(kind, StrEnum):
                choices = [(item,) for item in kind] if isinstance(value, tuple) else kind
                yield from ((*names, field.name, item) for item in choices if item != value)


def put(record: Any, names: Sequence[str], value: object) -> Any:
    """Return a record with another value behind these names."""
    first, *rest = names
    inner = put(getattr(record, first), rest, value) if rest else value
    return replace(record, **{first: inner})


@pytest.mark.parametrize("export", EXPORTS)
def test_every_choice_of_a_workload_is_exported_or_refused(export: str) -> None:
    """What a trainer has no place for is a refusal, and no traceback."""
    written = set()
    for layout, changes in WORKLOADS:
        plan = mw.estimate("Qwen3-30B-A3B", layout, on="16xH100", global_batch=64)
        loss = replace(plan.workload.loss, aux_coeff=0.0)
        plan = replace(plan, workload=replace(plan.workload, loss=loss, **changes))
        for *names, value in list_other_values(plan.workload):
            workload = put(plan.workload, names, value)
            if orders(replace(plan, workload=workload), plan.layout, export):
                written.add(tuple(names))
    assert len(written) > 10


def test_options_are_options_of_megatron() -> None:
    options = {field.facts.megatron for field in LAYOUT_FIELDS}
    options |= {overlap.facts.megatron for overlap in Overlap}
    assert options - {""} <= option_table().keys()
