"""The card of a plan: well-formed, whole, and safe with names that strangers chose."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

import pytest

import moewright as mw
from moewright.view.card import render_card

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("layout", ["tp2,ep8,mbs1", "tp1,pp4,ep4,mbs1,recompute=full"])
def test_a_card_shows_the_figures_of_its_plan_inside_its_frame(layout: str) -> None:
    plan = mw.estimate("Qwen3-30B-A3B", layout, on="16xH100")
    root = ElementTree.fromstring(render_card(plan))
    texts = [node.text or "" for node in root.iter(f"{SVG}text")]
    assert f"{plan.estimate.mfu:.1%}" in texts
    assert "Qwen3-30B-A3B on 16 x H100 SXM" in texts
    ranks = [node for node in root.iter(f"{SVG}rect") if node.get("class") == "rank"]
    assert len(ranks) == 16
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for node in (*ranks, *root.iter(f"{SVG}text")):
        assert 0 < float(node.attrib["x"]) < width
        assert 0 < float(node.attrib["y"]) < height


def test_a_hostile_name_is_text() -> None:
    plan = mw.estimate("Qwen3-30B-A3B", "ep8", on="16xH100")
    hostile = replace(plan, model=replace(plan.model, name="<script>alert(1)</script>"))
    root = ElementTree.fromstring(render_card(hostile))
    assert not list(root.iter(f"{SVG}script"))
