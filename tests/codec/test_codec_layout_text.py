"""Layout text: spellings, refusals, and texts that read back."""

from __future__ import annotations

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moewright.codec import explicit_fields, format_layout, format_layout_changes, parse_layout
from moewright.spec.choices import FieldKind, LayoutField
from moewright.spec.errors import BadInput
from moewright.spec.layout import (
    LAYOUT_FIELDS,
    CpComm,
    Layout,
    Overlap,
    Recompute,
    Schedule,
)


def _members(field: LayoutField) -> st.SearchStrategy[tuple]:
    """Draw a set that text can spell: its whole member stands alone, or beside some."""
    whole = field.facts.whole
    members = [member for member in field.names if member != whole]
    several = st.sets(st.sampled_from(members)).map(lambda chosen: tuple(sorted(chosen)))
    if not whole:
        return several
    beside = st.sets(st.sampled_from([whole, *field.facts.beside_whole])).map(
        lambda chosen: tuple(sorted({whole, *chosen}))
    )
    return st.one_of(several, beside)


def _values(field: LayoutField) -> st.SearchStrategy[object]:
    facts = field.facts
    if field.kind is FieldKind.NUMBER:
        if facts.levels:
            return st.sampled_from(facts.levels)
        return st.integers(min(facts.least, field.default), min(facts.most, 2**40))
    if field.kind is FieldKind.FACTOR:
        if facts.word is not None:
            return st.floats(0, 1, exclude_min=True)
        return st.floats(0, 1e300, allow_nan=False)
    if field.kind is FieldKind.SET:
        return _members(field)
    if field.kind is FieldKind.NAME:
        return st.sampled_from(field.names)
    if field.kind is FieldKind.SWITCH:
        return st.booleans()
    stages = st.lists(st.sampled_from(("E", "t*2", "(t|, )*3", "m", "|", " L")))
    return stages.map("".join).filter(lambda text: text == text.strip())


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Draw every field of a layout; a number behind a word only where the word stands."""
    values = {field.name: draw(_values(field)) for field in LAYOUT_FIELDS}
    spelt = set()
    for field in LAYOUT_FIELDS:
        word = field.facts.word
        if word is None:
            continue
        members = values[word.field]
        stands = bool(members) and (not word.member or word.member in members)
        if not stands or (word.member and word.member in spelt):
            values[field.name] = field.default
        elif values[field.name] != field.default:
            spelt.add(word.member)
    return Layout(world_size=draw(st.integers(1, 2**40)), **values)


@given(layouts())
def test_text_reads_back_to_the_same_layout(layout: Layout) -> None:
    assert parse_layout(format_layout(layout), world_size=layout.world_size) == layout


def test_every_field_but_the_world_has_facts_and_a_spelling_of_its_own() -> None:
    assert {field.name for field in LAYOUT_FIELDS} == {
        field.name for field in fields(Layout) if field.name != "world_size"
    }
    words = [field.facts.word for field in LAYOUT_FIELDS]
    spellings = [
        (word.field, word.word) if word else field.key
        for field, word in zip(LAYOUT_FIELDS, words, strict=True)
    ]
    assert len(set(spellings)) == len(LAYOUT_FIELDS)


def _refusal(text: str) -> str:
    """Return the refusal of `text`; "" when it is a layout, which then reads back to itself."""
    try:
        layout = parse_layout(text, world_size=64)
    except BadInput as refusal:
        return str(refusal)
    assert parse_layout(format_layout(layout), world_size=64) == layout
    return ""


SAMPLE_KEYS = ("tp", "ep", "vpp", "capacity", "recompute", "sp", "layout", "dp")


@given(
    st.one_of(
        st.text(max_size=60),
        st.builds("{}={}".format, st.sampled_from(SAMPLE_KEYS), st.text(max_size=20)),
    )
)
def test_any_text_is_read_or_refused_in_one_line(text: str) -> None:
    assert "\n" not in _refusal(text)


def test_the_contract_example() -> None:
    layout = parse_layout("tp2,ep8,pp32,vpp3,mbs1,recompute=moe_act+layernorm", world_size=256)
    assert layout == Layout(
        world_size=256,
        tp=2,
        sp=True,
        ep=8,
        pp=32,
        vpp=3,
        mbs=1,
        schedule=Schedule.INTERLEAVED,
        recompute=(Recompute.LAYERNORM, Recompute.MOE_ACT),
    )
    assert format_layout(layout) == "tp2,pp32,vpp3,ep8,mbs1,recompute=layernorm+moe_act"


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        (" tp = 2 , EP8 ", "tp", 2),
        ("tp2", "sp", True),
        ("tp2,sp0", "sp", False),
        ("tp2,sp=off", "sp", False),
        ("tp2,sp", "sp", True),
        ("tp1", "sp", False),
        ("vpp2,pp2,schedule=1f1b", "schedule", Schedule.ONE_F_ONE_B),
        ("recompute=select", "recompute", (Recompute.LAYERNORM, Recompute.MOE_ACT)),
        ("recompute=none", "recompute", ()),
        ("recompute=moe + moe_act+moe", "recompute", (Recompute.MOE, Recompute.MOE_ACT)),
        ("recompute=loss+full", "recompute", (Recompute.FULL, Recompute.LOSS)),
        ("cp_comm=a2a+p2p,cp2", "cp_comm", CpComm.A2A_P2P),
        ("capacity1.25", "capacity", 1.25),
        ("capacity=0", "capacity", 0.0),
        ("overlap=tp+ep", "overlap", (Overlap.EP, Overlap.TP)),
        ("offload=moe_act+layers0.25", "offload_layers", 0.25),
        ("offload=optimizer0.5+core_attn+layers0.25", "offload_fraction", 0.5),
        ("offload=core_attn+chunks2", "offload_chunks", 2),
        ("schedule=gis,vpp2", "schedule", Schedule.GIS),
        ("layout='Et*3|(tt|)*29,m|L',pp16", "stages", "Et*3|(tt|)*29,m|L"),
        ('layout = "Ett|ttL"', "stages", "Ett|ttL"),
        ("layout=Ett|ttL", "stages", "Ett|ttL"),
        ("", "mbs", 1),
        ("dp32,tp2", "dp", 32),
    ],
)
def test_spellings(text: str, field: str, value: object) -> None:
    assert getattr(parse_layout(text, world_size=64), field) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tpp2", "nearest legal value: tp"),
        ("recompue=moe", "nearest legal value: recompute"),
        ("edp4", "edp=4: is derived"),
        ("tp2,tp4", "tp=4: is given twice"),
        ("tp0", "tp=0: must be at least 1; nearest legal value: 1"),
        ("tp-2", "tp=-2: must be at least 1"),
        ("tp=-2", "tp=-2: must be at least 1"),
        ("tp=two", "must be a whole number"),
        ("tp=2.5", "must be a whole number"),
        ("tp=" + "9" * 5000, "tp=999999999999999999...: must have 18 digits at most"),
        ("tp=٢", "must be a whole number"),
        ("zero4", "must be 0, 1, 2 or 3; nearest legal value: 3"),
        ("sp=maybe", "sp=maybe: must be 1 or 0"),
        ("dp3,tp2", "nearest legal value: 32"),
        ("dp3,tp7", "= 7, which do not divide"),
        ("schedule=1f2b", "nearest legal value: 1f1b"),
        ("recompute=full+moe", "full cannot be combined with others"),
        ("recompute=moe_axt", "nearest legal value: moe_act"),
        ("recompute=", "must be one of"),
        ("recompute", "needs a value"),
        ("offload=moe_act+layers0", "takes a fraction above 0"),
        ("offload=layers0.5", "must be one of"),
        ("offload=core_attn+chunks0", "must be at least 1"),
        ("dispatcher=deepeep", "nearest legal value: deepep"),
        ("capacity=nan", "must be a factor"),
        ("capacity=-1", "must be a factor"),
        ("layout='Ett|ttL", "is not closed"),
        ("layout='Exx|L'", "`x` is none of E t m L"),
        ("layout=", "spells no stage"),
        ("layout=Et*3|(tt|)*29,m|L", "a value with commas is quoted"),
        ("tp2,,ep2", "empty place between commas"),
    ],
)
def test_refusals(text: str, message: str) -> None:
    with pytest.raises(BadInput) as refusal:
        parse_layout(text, world_size=64)
    assert message in str(refusal.value)


def test_every_fault_is_reported() -> None:
    with pytest.raises(BadInput) as refusal:
        parse_layout("tp0,foo=1,ep=x", world_size=8)
    assert [reason.field for reason in refusal.value.reasons] == ["tp", "foo", "ep"]


def test_explicit_fields_leave_defaults_out() -> None:
    assert explicit_fields("tp2, vpp=2, layout='E|t|L', dp4") == {"tp", "vpp", "stages"}
    assert explicit_fields("") == frozenset()


def test_a_change_of_layout_is_told_by_keys() -> None:
    base = parse_layout("tp2,ep4,pp2,mbs1,recompute=moe_act,layout='Et|tL'", world_size=16)
    other = parse_layout("tp4,ep4,pp2,mbs1,zero3,layout='E|ttL'", world_size=16)
    changes = format_layout_changes(other, base)
    assert changes == "with tp4, zero3, layout='E|ttL', without recompute"
    kept = parse_layout("tp2,ep4,pp2,mbs1,layout='Et|tL'", world_size=16)
    assert format_layout_changes(kept, base) == "without recompute"
    assert format_layout_changes(base, base) == ""
