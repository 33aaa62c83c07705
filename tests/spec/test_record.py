"""Copies of records: the same as those of dataclasses.replace."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from moewright.codec import parse_layout
from moewright.spec.layout import Layout
from moewright.spec.record import copy_with

LAYOUTS = ("", "tp2,ep8,pp4,vpp2,mbs2,recompute=select,zero2", "cp2,ep4,dispatcher=deepep,spare=1")


@pytest.mark.parametrize("field", [field.name for field in fields(Layout)])
def test_a_copy_is_what_replace_makes(field: str) -> None:
    layouts = [parse_layout(text, world_size=64) for text in LAYOUTS]
    for layout in layouts:
        before = hash(layout)
        for other in layouts:
            value = getattr(other, field)
            copy = copy_with(layout, **{field: value})
            assert copy == replace(layout, **{field: value})
            assert type(copy) is Layout
        assert hash(layout) == before


def test_a_field_that_a_record_has_not_is_refused() -> None:
    with pytest.raises(KeyError):
        copy_with(Layout(world_size=1), tensor=2)
