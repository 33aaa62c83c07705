"""What runs beside the expert exchange, and what delayed weight gradients and shared experts
change."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moewright.codec import parse_layout
from moewright.cost.ep_overlap import OverlapWindows
from moewright.cost.estimate import estimate
from moewright.intake import catalogue
from moewright.rules.routing import etp_gathered_rows
from moewright.spec.errors import BadInput
from moewright.spec.hardware import Constant
from moewright.spec.layout import Layout
from moewright.spec.model import ModelSpec
from moewright.spec.plan import Estimate, TimePart, TimeShare
from moewright.spec.sourced import Sourced, SourceKind
from moewright.spec.workload import Routing, Workload

QWEN = catalogue.model("Qwen3-30B-A3B")
WORK = Workload(seq_len=4096, global_batch=512)


def of(model: ModelSpec, text: str, *, devices: str = "16xH100", work: Workload = WORK) -> Estimate:
    hardware = catalogue.hardware(devices)
    return estimate(model, work, hardware, parse_layout(text, world_size=hardware.count))


def exchange_of(found: Estimate) -> TimeShare:
    none = TimeShare(part=TimePart.EP_COMM, seconds=0.0)
    return next((share for share in found.shares if share.part is TimePart.EP_COMM), none)


def test_a_delayed_gradient_makes_room_for_its_dispatch() -> None:
    """Experts 1 forward and 2 back, half of it weight gradients; an exchange of 1.5 each way fits
    where it may leave after the input gradient, and shows half a second where it waits for the
    rest."""
    windows = OverlapWindows(
        before_s=9.0, before_backward_s=9.0, experts_s=1.0, experts_backward_s=2.0
    )
    soon = windows.cover(1.5, 1.5, delayed_s=0.0, delayed_experts_s=0.0)
    later = windows.cover(1.5, 1.5, delayed_s=4.0, delayed_experts_s=1.0)
    assert (soon.forward_s, soon.backward_s) == (3.0, 2.5)
    assert (later.forward_s, later.backward_s) == (3.0, 3.0)


def test_a_gradient_put_off_leaves_its_own_window_shorter() -> None:
    windows = OverlapWindows(
        before_s=1.0, before_backward_s=3.0, experts_s=9.0, experts_backward_s=9.0
    )
    soon = windows.cover(2.0, 2.0, delayed_s=0.0, delayed_experts_s=0.0)
    later = windows.cover(2.0, 2.0, delayed_s=1.5, delayed_experts_s=0.0)
    assert (soon.forward_s, soon.backward_s) == (4.0, 3.0)
    assert (later.forward_s, later.backward_s) == (3.5, 4.0)


def test_delayed_gradients_are_about_neutral_where_they_were_measured() -> None:
    """Qwen3-30B on 16 H100: 31.31 s and, with them, 31.20 s."""
    plain, delayed = (
        of(QWEN, f"ep16,recompute=select,dispatcher=hybridep,overlap={o}")
        for o in ("ep", "ep+wgrad")
    )
    assert 0 <= 1 - delayed.step_s / plain.step_s <= 0.015
    assert delayed.peak_bytes > plain.peak_bytes


def test_delayed_gradients_need_the_overlap_that_they_serve() -> None:
    with pytest.raises(BadInput, match="wgrad needs ep"):
        of(QWEN, "ep8,overlap=wgrad")
    with pytest.raises(BadInput, match="rows of its own for weight gradients"):
        of(QWEN, "ep8,pp2,vpp2,schedule=dualpipev,overlap=ep+wgrad")


def test_shared_experts_hide_no_more_of_the_exchange_than_they_take() -> None:
    assert QWEN.moe is not None
    for width in (768, 128 * 768):
        model = replace(QWEN, moe=replace(QWEN.moe, shared_ffn_size=width))
        apart, beside = (
            exchange_of(of(model, "ep16")),
            exchange_of(of(model, "ep16,overlap=shared")),
        )
        assert beside.seconds + beside.hidden_s == pytest.approx(apart.seconds)
        assert 0 < beside.hidden_s < apart.seconds if width == 768 else beside.seconds == 0


def test_parts_gathered_over_expert_tensor_ranks_are_padded_to_the_widest() -> None:
    layout = Layout(world_size=8, ep=2, etp=4)
    even, drawn = WORK, replace(WORK, routing=Routing.LEARNED, load_factor=1.0)
    assert etp_gathered_rows(even, layout, 4000) == 4000
    padded = etp_gathered_rows(drawn, layout, 4000)
    # The largest of four draws about 1,000 with a deviation of 27: a little above one of them.
    assert 4 * 1020 < padded < 4 * 1040
    assert etp_gathered_rows(drawn, replace(layout, etp=1), 4000) == 4000


def test_copies_of_a_shard_are_summed_in_the_open() -> None:
    """Where all of ZeRO-3's own collectives hide, what shows of a hybrid's is the sum over its
    copies."""
    hardware = catalogue.hardware("16xH100")
    hiding = Constant(
        name="overlapped_dp_share",
        value=Sourced(value=0.0, kind=SourceKind.ASSUMED, source="all of it hides"),
    )
    hardware = replace(hardware, constants=(*hardware.constants, hiding))
    shown = [
        sum(
            share.seconds
            for share in estimate(QWEN, WORK, hardware, layout).shares
            if share.part is TimePart.DP_COMM
        )
        for layout in (
            parse_layout(text, world_size=16) for text in ("ep2,zero3", "ep2,zero3,shard=8")
        )
    ]
    assert shown[0] == 0
    assert shown[1] > 0
