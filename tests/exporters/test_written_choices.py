"""No choice of a layout is lost on the way to another trainer: an export says it, or refuses it."""

from __future__ import annotations

from dataclasses import replace

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


def test_options_are_options_of_megatron() -> None:
    options = {field.facts.megatron for field in LAYOUT_FIELDS}
    options |= {overlap.facts.megatron for overlap in Overlap}
    assert options - {""} <= option_table().keys()
