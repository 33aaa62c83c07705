"""Comparison of a predicted and a counted ledger: what must be equal, and what is only listed."""

from dataclasses import replace

import pytest

from moewright.diagnosis.compare_ledgers import AgreementRule, LineStatus, Section, compare_ledgers
from moewright.spec.errors import BadInput
from moewright.spec.hardware import Collective
from moewright.spec.ledger import (
    CommRow,
    Component,
    FlopOp,
    FlopRow,
    Ledger,
    MemoryRow,
    Module,
    StepPhase,
    TimeRow,
)

LEDGER = Ledger(
    rank=1,
    pp_rank=0,
    memory=(
        MemoryRow(component=Component.WEIGHTS, module=Module.EXPERTS, bytes=4096),
        MemoryRow(component=Component.MOMENTS, module=Module.EXPERTS, bytes=8192),
        MemoryRow(component=Component.ACTIVATIONS, module=Module.ATTENTION, bytes=1000),
        MemoryRow(component=Component.ACTIVATIONS, module=Module.EXPERTS, bytes=2000),
    ),
    comm=(CommRow(op=Collective.ALL_TO_ALL, group="ep", bytes=640, calls=7),),
    flops=(
        FlopRow(op=FlopOp.GEMM, module=Module.ROUTER, flops=10),
        FlopRow(op=FlopOp.GROUPED_GEMM, module=Module.EXPERTS, flops=10**15 + 1),
    ),
    time=(TimeRow(phase=StepPhase.FORWARD, seconds=1.5),),
    notes=("saved softmax is kept twice on this device",),
)


def line(comparison, section, *key):
    (only,) = [entry for entry in comparison.lines_in(section) if entry.key == key]
    return only


def test_a_ledger_equals_itself_line_by_line():
    comparison = compare_ledgers(LEDGER, LEDGER)
    assert comparison.is_exact
    assert comparison.is_within_bound
    assert {entry.status for entry in comparison.lines} == {LineStatus.EQUAL}
    assert all(entry.difference == 0 for entry in comparison.lines)
    assert all(entry.relative_difference == 0 for entry in comparison.lines)
    assert line(comparison, Section.FLOPS, "model FLOPs", "all but router").counted == 10**15 + 1
    assert line(comparison, Section.MEMORY, "saved activations", "total").predicted == 3000


@pytest.mark.parametrize(
    ("change", "section", "key"),
    [
        (
            {"memory": (replace(LEDGER.memory[0], bytes=4097), *LEDGER.memory[1:])},
            "memory",
            ("weights", "experts"),
        ),
        ({"comm": (replace(LEDGER.comm[0], bytes=641),)}, "comm", ("all_to_all", "ep")),
        ({"comm": (replace(LEDGER.comm[0], calls=8),)}, "calls", ("all_to_all", "ep")),
        (
            {"flops": (LEDGER.flops[0], replace(LEDGER.flops[1], flops=10**15))},
            "flops",
            ("grouped_gemm", "experts"),
        ),
    ],
)
def test_one_byte_call_or_flop_breaks_exactness_and_only_there(change, section, key):
    comparison = compare_ledgers(LEDGER, replace(LEDGER, **change))
    assert not comparison.is_exact
    assert comparison.is_within_bound
    changed = line(comparison, Section(section), *key)
    assert changed.rule is AgreementRule.EXACT
    assert changed.status is LineStatus.DIFFERS
    assert abs(changed.difference) == 1
    broken = {entry.key for entry in comparison.lines if not entry.keeps_rule}
    assert broken - {("model FLOPs", "all but router")} == {key}


def activations(attention, experts):
    rows = (replace(LEDGER.memory[2], bytes=attention), replace(LEDGER.memory[3], bytes=experts))
    return replace(LEDGER, memory=(*LEDGER.memory[:2], *rows))


def test_activations_are_bound_in_total_and_only_listed_by_module():
    shifted = compare_ledgers(activations(1200, 1800), LEDGER)  # same total, other modules
    assert shifted.is_exact
    assert shifted.is_within_bound
    module = line(shifted, Section.MEMORY, "activations", "attention")
    assert (module.rule, module.status, module.keeps_rule) == (
        AgreementRule.LISTED,
        LineStatus.DIFFERS,
        True,
    )
    assert module.relative_difference == pytest.approx(0.2)
    within = line(
        compare_ledgers(activations(1090, 2000), LEDGER),
        Section.MEMORY,
        "saved activations",
        "total",
    )
    assert (within.status, within.keeps_rule) == (LineStatus.WITHIN, True)
    beyond = compare_ledgers(activations(1091, 2000), LEDGER)
    assert not beyond.is_within_bound
    assert beyond.is_exact


def test_logits_count_among_the_saved_activations():
    logits = MemoryRow(component=Component.LOGITS, module=Module.HEAD, bytes=3000)
    comparison = compare_ledgers(replace(LEDGER, memory=(*LEDGER.memory, logits)), LEDGER)
    assert not comparison.is_within_bound
    assert line(comparison, Section.MEMORY, "logits", "head").status is LineStatus.ONLY_PREDICTED


def test_rows_of_one_side_are_named_and_have_no_relative_difference():
    bare = replace(LEDGER, comm=())
    missing = line(compare_ledgers(LEDGER, bare), Section.COMM, "all_to_all", "ep")
    assert (missing.status, missing.relative_difference, missing.counted) == (
        LineStatus.ONLY_PREDICTED,
        None,
        0,
    )
    assert (
        line(compare_ledgers(bare, LEDGER), Section.CALLS, "all_to_all", "ep").status
        is LineStatus.ONLY_COUNTED
    )
    assert not compare_ledgers(bare, LEDGER).is_exact


def test_an_unpredictable_allowance_and_time_do_not_break_exactness():
    allowance = MemoryRow(component=Component.FRAGMENTATION, module=Module.OTHER, bytes=512)
    predicted = replace(
        LEDGER,
        memory=(*LEDGER.memory, allowance),
        time=(TimeRow(phase=StepPhase.FORWARD, seconds=1.0),),
        notes=("b", "a"),
    )
    comparison = compare_ledgers(predicted, LEDGER)
    assert comparison.is_exact
    assert comparison.is_within_bound
    assert line(comparison, Section.TIME, "total").relative_difference == pytest.approx(-1 / 3)
    assert comparison.notes == ("b", "a", *LEDGER.notes)


def test_ledgers_of_other_ranks_are_refused():
    with pytest.raises(BadInput, match=r"ledger\.rank=1.*nearest legal value: 0"):
        compare_ledgers(LEDGER, replace(LEDGER, rank=0))
