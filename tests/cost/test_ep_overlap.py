"""What the expert exchange overlaps with, and what delayed weight gradients change."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moewright.codec import parse_layout
from moewright.cost.estimate import estimate
from moewright.cost.time.layer_collectives import OverlapWindows
from moewright.intake import catalogue
from moewright.rules.routing import etp_gathered_rows
from moewright.spec.errors import BadInput
from moewright.spec.hardware import Constant
from moewright.spec.layout import Layout
from moewright.spec.model import ModelSpec
from moewright.spec.plan import Estimate, TimePart, TimeShare
from moewright.spec.units import Sourced, SourceKind
from moewright.spec.workload import Routing, Workload

QWEN = catalogue.model("Qwen3-30B-A3B")
WORK = Workload(routing=Routing.BALANCED, seq_len=4096, global_batch=512)


def estimate_layout(
    model: ModelSpec, text: str, *, devices: str = "16xH100", work: Workload = WORK
) -> Estimate:
    hardware = catalogue.hardware(devices)
    return estimate(model, work, hardware, parse_layout(text, world_size=hardware.count))


def exchange_share(result: Estimate) -> TimeShare:
    none = TimeShare(part=TimePart.EP_COMM, seconds=0.0)
    return next((share for share in result.shares if share.part is TimePart.EP_COMM), none)


def test_a_delayed_gradient_makes_room_for_its_dispatch() -> None:
    """Show half a second of an exchange that waits for weight gradients, and nothing without.

    Experts take 1 s forward and 2 s backward, half of that for weight gradients; the exchange takes
    1.5 s each way.
    """
    windows = OverlapWindows(
        before_s=9.0, before_backward_s=9.0, experts_s=1.0, experts_backward_s=2.0
    )
    at_once = windows.cover(1.5, 1.5, delayed_s=0.0, delayed_experts_s=0.0)
    delayed = windows.cover(1.5, 1.5, delayed_s=4.0, delayed_experts_s=1.0)
    assert (at_once.forward_s, at_once.backward_s) == (3.0, 2.5)
    assert (delayed.forward_s, delayed.backward_s) == (3.0, 3.0)


def test_a_gradient_put_off_leaves_its_own_window_shorter() -> None:
    windows = OverlapWindows(
        before_s=1.0, before_backward_s=3.0, experts_s=9.0, experts_backward_s=9.0
    )
    at_once = windows.cover(2.0, 2.0, delayed_s=0.0, delayed_experts_s=0.0)
    delayed = windows.cover(2.0, 2.0, delayed_s=1.5, delayed_experts_s=0.0)
    assert (at_once.forward_s, at_once.backward_s) == (4.0, 3.0)
    assert (delayed.forward_s, delayed.backward_s) == (3.5, 4.0)


def test_delayed_gradients_are_about_neutral_where_they_were_measured() -> None:
    """Compare with Qwen3-30B on 16 H100: 31.31 s, and 31.20 s with delayed gradients."""
    plain, delayed = (
        estimate_layout(QWEN, f"ep16,recompute=select,dispatcher=hybridep,overlap={overlap}")
        for overlap in ("ep", "ep+wgrad")
    )
    assert 0 <= 1 - delayed.step_s / plain.step_s <= 0.015
    assert delayed.peak_bytes >= plain.peak_bytes  # equal: the head, where nothing is delayed
    plain, delayed = (
        estimate_layout(QWEN, f"ep16,recompute=select+loss,dispatcher=hybridep,overlap={overlap}")
        for overlap in ("ep", "ep+wgrad")
    )
    assert delayed.peak_bytes > plain.peak_bytes


def test_delayed_gradients_need_the_overlap_that_they_serve() -> None:
    with pytest.raises(BadInput, match="wgrad needs ep"):
        estimate_layout(QWEN, "ep8,overlap=wgrad")
    with pytest.raises(BadInput, match="rows of its own for weight gradients"):
        estimate_layout(QWEN, "ep8,pp2,vpp2,schedule=dualpipev,overlap=ep+wgrad")


def test_shared_experts_hide_no_more_of_the_exchange_than_they_take() -> None:
    assert QWEN.moe is not None
    for width in (768, 128 * 768):
        model = replace(QWEN, moe=replace(QWEN.moe, shared_ffn_size=width))
        exposed = exchange_share(estimate_layout(model, "ep16"))
        overlapped = exchange_share(estimate_layout(model, "ep16,overlap=shared"))
        assert overlapped.seconds + overlapped.hidden_s == pytest.approx(exposed.seconds)
        assert (
            0 < overlapped.hidden_s < exposed.seconds if width == 768 else overlapped.seconds == 0
        )


def test_parts_gathered_over_expert_tensor_ranks_are_padded_to_the_widest() -> None:
    layout = Layout(world_size=8, ep=2, etp=4)
    drawn = replace(WORK, routing=Routing.LEARNED, load_factor=1.0)
    assert etp_gathered_rows(WORK, layout, 4000) == 4000
    padded = etp_gathered_rows(drawn, layout, 4000)
    # The largest of four draws about 1,000 with a deviation of 27: a little above one of them.
    assert 4 * 1020 < padded < 4 * 1040
    assert etp_gathered_rows(drawn, replace(layout, etp=1), 4000) == 4000


def test_copies_of_a_shard_are_summed_in_the_open() -> None:
    """Hide all of ZeRO-3's own collectives: a hybrid shard still shows the sum over its copies.

    What stays otherwise is that each micro-batch adds its shard, which is twice as large there.
    """
    hardware = catalogue.hardware("16xH100")
    nothing = Sourced(value=0.0, kind=SourceKind.ASSUMED, source="all hides, nothing is copied")
    hiding = tuple(
        Constant(name=name, value=nothing) for name in ("overlapped_dp_share", "zero3_copies")
    )
    hardware = replace(hardware, constants=(*hardware.constants, *hiding))
    exposed = [
        sum(
            share.seconds
            for share in estimate(QWEN, WORK, hardware, layout).shares
            if share.part is TimePart.DP_COMM
        )
        for layout in (
            parse_layout(text, world_size=16) for text in ("ep2,zero3", "ep2,zero3,shard=8")
        )
    ]
    assert exposed[0] > 0
    assert exposed[1] > 2.1 * exposed[0]
