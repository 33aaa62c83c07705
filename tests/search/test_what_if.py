"""What would change the best plan is what a search of the changed machine finds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moewright.intake import catalogue
from moewright.search import explain
from moewright.search.search import search
from moewright.search.what_if import NETWORK_SPEEDUP, find_gains
from moewright.spec.hardware import Hardware
from moewright.spec.layout import Overlap
from moewright.spec.units import GIB
from moewright.spec.workload import Workload

WORK = Workload(seq_len=4096, global_batch=256)
PINS = "tp1,cp1,etp1,zero1"


def _changed(hardware: Hardware, *, more_bytes: float = 0.0, network: float = 1.0) -> Hardware:
    memory = hardware.device.memory_bytes
    device = replace(hardware.device, memory_bytes=replace(memory, value=memory.value + more_bytes))
    Bps = hardware.fabric.network_Bps
    fabric = replace(hardware.fabric, network_Bps=replace(Bps, value=network * Bps.value))
    return replace(hardware, device=device, fabric=fabric)


def test_gains_are_what_a_changed_machine_brings() -> None:
    model, hardware = catalogue.model("Qwen3-30B-A3B"), catalogue.hardware("16xH100")
    ranked = search(model, WORK, hardware, fixed=PINS, top=1)
    before = ranked.plans[0].estimate.step_s
    gains = {gain.change: gain for gain in find_gains(ranked, fixed=PINS)}
    changes = {
        "1 GiB more memory a device": _changed(hardware, more_bytes=GIB),
        "8 GiB more memory a device": _changed(hardware, more_bytes=8 * GIB),
        "a network 2 x as fast": _changed(hardware, network=NETWORK_SPEEDUP),
    }
    for change, machine in changes.items():
        after = min(
            candidate.step_s
            for candidate in search(model, WORK, machine, fixed=PINS, top=1).near_best
            if candidate.fits_surely
        )
        expected = gains[change].step_s if change in gains else before
        assert expected == pytest.approx(after, rel=1e-9), change
    assert any(gain.step_s < before for gain in gains.values())


def test_the_other_side_of_overlapped_expert_communication_is_told() -> None:
    model, hardware = catalogue.model("Qwen3-30B-A3B"), catalogue.hardware("32xH100")
    ranked = search(model, WORK, hardware, fixed=f"{PINS},ep16", top=1)
    plan = replace(ranked.plans[0], gains=find_gains(ranked, fixed=f"{PINS},ep16"))
    other = next(gain for gain in plan.gains if "expert communication" in gain.change)
    assert (Overlap.EP in other.layout.overlap) != (Overlap.EP in plan.layout.overlap)
    assert other.step_s > plan.estimate.step_s
    lines = "\n".join(explain.explain_bound(plan))
    assert "slower" in lines
    assert "Times are good to 7%" in lines


def test_memory_binds_where_more_of_it_helps() -> None:
    """Eight devices are short of memory for this model; a much smaller one has room to spare."""
    hardware = catalogue.hardware("8xH100")
    tight = search(catalogue.model("Qwen3-30B-A3B"), WORK, hardware, top=1)
    assert tight.plans
    plan = replace(tight.plans[0], gains=find_gains(tight))
    assert explain.explain_bound(plan)[0].startswith("Bound by memory")
    roomy = search(catalogue.model("OLMoE-1B-7B-0924"), WORK, catalogue.hardware("8xB200"), top=1)
    plan = replace(roomy.plans[0], gains=find_gains(roomy))
    assert "more memory would change nothing" in explain.explain_bound(plan)[0]
